"""A recipe: everything a run depends on. Each key is explained by its `help`, and changes something."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from grpo_trainer.settings import build, key, override, read_yaml


@dataclasses.dataclass(frozen=True)
class Tiny:
    architecture: Literal["causal", "seq2seq"] = key("causal", "a decoder (Llama), or an encoder and a decoder (T5)")
    hidden: int = key(128, "size of the hidden states")
    layers: int = key(2, "of each of encoder and decoder")
    heads: int = key(4, "attention heads")
    intermediate: int = key(256, "size within the feed-forward layers")
    vocabulary: int = key(160, "tokens of the tokenizer that is trained on the recipe's demonstrations")


@dataclasses.dataclass(frozen=True)
class Lora:
    rank: int = key(8, "of the adapters")
    alpha: int = key(16, "their scale is alpha / rank")
    dropout: float = key(0.0, "on the adapters' inputs, in training")
    targets: list[str] | None = key(None, "names of the layers that get one; nothing: all linear layers but the head")


@dataclasses.dataclass(frozen=True)
class Model:
    path: str = key("tiny", "a folder or a name on the hub; tiny: made here, nothing is downloaded")
    tiny: Tiny = key(Tiny, "of path: tiny")
    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "of the weights")
    mixed_precision: Literal["no", "bf16", "fp16"] = key("no", "of the forward pass, with weights in float32")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "auto", "implementation of attention; auto: the fastest of transformers' own that the model has"
    )
    trust_remote_code: bool = key(False, "whether code that comes with a model may run")
    lora: Lora | None = key(None, "train low-rank adapters in place of the weights")
    four_bit: bool = key(False, "load the weights in 4 bits (bitsandbytes, a GPU), for lora")
    gradient_checkpointing: bool = key(False, "compute activations again in the backward pass")
    chat_template: bool = key(False, "put prompts through the tokenizer's chat template")
    max_prompt_tokens: int = key(512, "longer prompts are left out, counted and logged")
    reference_model_path: str | None = key(None, "the policy that KL is measured from; nothing: where RL starts from")


@dataclasses.dataclass(frozen=True)
class Data:
    task: str | None = key("arithmetic", "bundled task that makes its own data; nothing: files")
    options: dict[str, Any] = key({}, "arguments of the bundled task")
    train: str | None = key(None, "JSONL with a prompt a line, for RL; with demonstrations also for SFT")
    sft: str | None = key(None, "JSONL of demonstrations; nothing: train")
    validation: str | None = key(None, "JSONL to tune on")
    test: str | None = key(None, "JSONL of the last evaluation")
    prompt: str = key("prompt", "column of the prompt")
    demonstration: str = key("demonstration", "column of the demonstrated response")
    limit: int | None = key(None, "at most so many lines to train on, of each file")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    lr: float = key(1e-5, "learning rate after the warm-up")
    betas: list[float] = key([0.9, 0.95], "of AdamW")
    eps: float = key(1e-8, "of AdamW")
    weight_decay: float = key(0.0, "of AdamW, on matrices")
    warmup: int = key(0, "steps over which the learning rate rises from 0")
    schedule: Literal["constant", "linear", "cosine"] = key("linear", "what it does then")
    final: float = key(0.1, "share of the learning rate that is left at the end")
    grad_clip: float = key(1.0, "largest norm of a gradient; 0: none")


@dataclasses.dataclass(frozen=True)
class Polychromic:
    weight: float = key(1.0, "0: demonstrations of a prompt count alike; 1: less the more the others resemble them")
    embedder: str = key("auto", "that tells how alike they are; names as in similarity")


@dataclasses.dataclass(frozen=True)
class Sft:
    steps: int = key(600, "optimizer steps")
    batch: int = key(64, "demonstrations a step")
    micro_batch: int = key(64, "demonstrations a forward pass")
    optimizer: Optimizer = key(Optimizer, "of this phase")
    polychromic: Polychromic | None = key(None, "what is rare among the demonstrations of a prompt counts for more")


@dataclasses.dataclass(frozen=True)
class Rollout:
    prompts: int = key(64, "prompts a step")
    group_size: int = key(8, "responses to each prompt")
    temperature: float = key(1.0, "of sampling; log-probs are those of the tempered policy throughout")
    top_p: float = key(1.0, "sample from the most probable tokens that together have so much probability")
    top_k: int = key(0, "sample from so many most probable tokens; 0: from all")
    max_new_tokens: int = key(32, "longer responses are cut off, and count as truncated")
    min_new_tokens: int = key(0, "the end is not sampled before")
    batch: int = key(512, "responses that are sampled together, of prompts of similar length")
    mask_truncated: bool = key(False, "leave truncated responses out of the loss")


@dataclasses.dataclass(frozen=True)
class Reward:
    name: str = key("exact", "a bundled reward, or module:function, which is code that the recipe runs")
    weight: float = key(1.0, "in the sum of rewards")
    options: dict[str, Any] = key({}, "arguments of a bundled reward")
    on_error: Literal["raise", "skip"] = key("raise", "a reward that fails or is NaN: end, or leave the response out")


@dataclasses.dataclass(frozen=True)
class Similarity:
    embedder: str = key("auto", "hashed, minilm, a sentence-transformers name or folder; auto: minilm if it is there")
    text: Literal["answer", "whole"] = key("answer", "what is embedded: what follows the last </think>, or all")
    unfinished: Literal["exclude", "whole", "tail"] = key(
        "exclude", "with answer, of a response whose thought does not end"
    )
    tail: int = key(256, "characters of unfinished: tail")
    cache: int = key(4096, "texts whose embeddings are kept")
    workers: int = key(0, "actors of a Ray cluster that embed; 0: the trainer itself does")
    gpus_per_worker: float = key(0.0, "of each, which may be a fraction of one")
    config: dict[str, Any] = key({}, "fields of SimilarityConfig", "SimilarityConfig")
    sharing: float = key(0.0, "divide what rewards are above the prompt's lowest among their cluster, to this power")
    within: float = key(1.0, "weight of the advantages within clusters")
    between: float = key(0.0, "weight of the advantages within the prompt, whatever the cluster")


@dataclasses.dataclass(frozen=True)
class Critic:
    separate: bool = key(
        False, "a copy of the policy, trained for values alone; else a head on the policy's own states"
    )
    lr: float = key(1e-3, "learning rate of the value head, and of the separate critic")
    coef: float = key(0.5, "weight of its squared error")
    clip: float | None = key(None, "how far a value may move from the one at sampling before its error is flat")
    warmup: int = key(0, "first steps that train the critic alone")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    name: str = key("grpo", "names a set of defaults for what follows; --list names them")
    advantage: dict[str, Any] = key({}, "fields of AdvantageConfig", "AdvantageConfig")
    loss: dict[str, Any] = key({}, "fields of LossConfig", "LossConfig")
    similarity: Similarity | None = key(None, "similarity sub-groups")
    segments: dict[str, Any] = key(
        {}, "fields of SegmentConfig, for group_ppo; also under `group_params`' names", "SegmentConfig"
    )
    sparse: bool = key(False, "group_ppo: the loss at endpoints alone, as the original has it; biased")
    critic: Critic | None = key(None, "what a response is going to be worth, for ppo and group_ppo")
    top_k_ratio: float = key(1.0, "share of each group, the largest advantages in magnitude, that enters the loss")
    drop_flat: bool = key(
        True, "leave groups without any advantage out of the loss and its divisors; not with a critic"
    )
    set_size: int = key(0, "polychromic: responses in a set; 0: half of the group")


@dataclasses.dataclass(frozen=True)
class Rl:
    steps: int = key(80, "rollouts")
    epochs: int = key(2, "passes over each rollout")
    minibatches: int = key(2, "optimizer steps a pass")
    micro_batch: int = key(128, "responses a forward pass")
    optimizer: Optimizer = key(Optimizer, "of this phase")
    rollout: Rollout = key(Rollout, "how responses are sampled")
    rewards: list[Reward] = key([], "what responses are worth; none: that of the task")
    algorithm: Algorithm = key(Algorithm, "from rewards to the loss")
    share_prompts: bool = key(True, "compute a prompt once for all its responses in the update; not with checkpointing")
    dropout: bool = key(False, "keep dropout on in the update")


@dataclasses.dataclass(frozen=True)
class Phase:
    """One of the two."""

    sft: Sft | None = key(None, "supervised phase")
    rl: Rl | None = key(None, "reinforcement phase")

    def __post_init__(self) -> None:
        if (self.sft is None) == (self.rl is None):
            raise ValueError("phases: each must have either sft or rl")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    every: int = key(20, "RL steps between evaluations on the validation split; 0: only before and after")
    prompts: int | None = key(None, "at most so many prompts of the validation split; nothing: all")
    test_prompts: int | None = key(None, "at most so many prompts of the test split; nothing: all")
    batch: int = key(512, "prompts that are answered together")
    samples: int = key(0, "sampled responses a prompt, for pass@k and diversity; 0: greedy only")
    temperature: float = key(1.0, "of those samples")
    pass_k: list[int] = key([1, 4, 8], "of pass@k; those beyond `samples` are left out")
    embedder: str = key("auto", "for measures of diversity; names as in similarity")
    solved: float = key(1.0, "with this reward a response is right, unless a reward says which are: exact, pass@k")
    tracked: int = key(4, "prompts whose responses are shown before and after in the report")


@dataclasses.dataclass(frozen=True)
class Logging:
    to: list[Literal["wandb", "tensorboard", "trackio"]] = key([], "besides metrics.jsonl, which is always written")
    project: str = key("grpo-kernels", "of wandb and trackio")
    every: int = key(1, "steps between lines")
    progress: bool = key(True, "a progress bar with reward, KL and the time left")
    samples: int = key(2, "responses a step that go to samples.jsonl")


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    every: int = key(0, "steps between checkpoints; 0: one at the end of each phase")
    keep: int = key(2, "how many are kept, the last ones")


@dataclasses.dataclass(frozen=True)
class Recipe:
    name: str = key("run", "of the run")
    seed: int = key(0, "of weights, data order and sampling")
    output: str = key("runs/{name}", "folder of logs, checkpoints and the report; {name} and {seed} are filled in")
    threads: int | None = key(None, "of the CPU; nothing: as many as cores that are free")
    backend: Literal["auto", "reference", "cpu", "triton", "cuda"] = key("auto", "of grpo_kernels")
    distributed: Literal["ddp", "fsdp2"] = key(
        "ddp", "of several processes each has all weights, or each a part of them (fsdp2)"
    )
    model: Model = key(Model, "the policy")
    data: Data = key(Data, "prompts, answers and demonstrations")
    phases: list[Phase] = key([], "in this order")
    evaluation: Evaluation = key(Evaluation, "on splits that are not trained on")
    logging: Logging = key(Logging, "what is written down")
    checkpoints: Checkpoints = key(Checkpoints, "what a run can go on from")

    def __post_init__(self) -> None:
        from grpo_trainer.rules import check

        check(self)

    @property
    def folder(self) -> Path:
        return Path(self.output.format(name=self.name, seed=self.seed))


def load(path: str | Path, overrides: list[str] | None = None, smoke: bool = False) -> Recipe:
    """The recipe of a YAML file, or a bundled one by name. `base: other.yaml` in it is read first.

    smoke  a size that runs in seconds and shows only that everything works
    """
    values = _read(_find(path))
    if smoke:
        values = _merge(values, _smoke(values))
        # not where the whole run is to go
        values["output"] = f"{values.get('output', Recipe.output)}-smoke"
    for assignment in overrides or []:
        override(values, assignment)
    return build(Recipe, values)


def bundled() -> dict[str, Path]:
    here = Path(__file__).parent
    # installed, or in a checkout
    folders = [here / "recipes", here.parent.parent / "recipes"]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def _find(path: str | Path) -> Path:
    if Path(path).is_file():
        return Path(path)
    found = bundled().get(str(path))
    if found is None:
        raise FileNotFoundError(f"recipe: no file {str(path)!r}, and the bundled ones are {', '.join(bundled())}")
    return found


def _smoke(values: dict[str, Any]) -> dict[str, Any]:
    rl = {
        "steps": 2, "micro_batch": 8, "minibatches": 2,
        "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 12, "batch": 16},
        "algorithm": {"set_size": 0},
    }  # fmt: skip
    sft = {"steps": 4, "batch": 16, "micro_batch": 8}
    phases = [{name: rl if name == "rl" else sft for name in phase} for phase in values.get("phases", [])]
    few = {"demonstrations": 96, "train": 32, "validation": 6, "test": 6}
    is_made = values.get("data", {}).get("task", "arithmetic") is not None
    samples = min(values.get("evaluation", {}).get("samples", 0), 4)
    return {
        "phases": phases,
        "data": {"options": few} if is_made else {"limit": 32},
        "evaluation": {"every": 1, "prompts": 6, "test_prompts": 6, "samples": samples, "tracked": 2},
    }


def _read(path: Path) -> dict[str, Any]:
    values = read_yaml(path.read_text()) or {}
    if not isinstance(values, dict):
        raise TypeError(f"{path}: must be a mapping, got {type(values).__name__}")
    base = values.pop("base", None)
    return values if base is None else _merge(_read(path.parent / base), values)


def _merge(below: Any, above: Any) -> Any:
    """Mappings key by key (null: as if the base had none), phases one by one (null: without it), anything else
    replaced."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = dict(below)
    for name, value in above.items():
        is_phases = name == "phases" and isinstance(value, list) and isinstance(below.get(name), list)
        if value is None and isinstance(below.get(name), dict):
            del merged[name]
        else:
            merged[name] = _phases(below[name], value) if is_phases else _merge(below.get(name), value)
    return merged


def _phases(below: list[Any], above: list[Any]) -> list[Any]:
    pairs: Iterable[tuple[Any, Any]] = itertools.zip_longest(below, above, fillvalue={})
    return [_merge(a, b) for a, b in pairs if b is not None]
