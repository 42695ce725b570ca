"""Recipes: everything a run depends on. Each key is documented by its help text and changes something."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from grpo_trainer import recipe_checks
from grpo_trainer.settings import build, key, override, read_text, read_yaml

EMBEDDERS = "grpo_trainer.recipe_checks:EMBEDDERS"


@dataclasses.dataclass(frozen=True)
class Tiny:
    architecture: Literal["causal", "seq2seq"] = key("causal", "decoder-only (Llama) or encoder-decoder (T5)")
    hidden: int = key(128, "hidden size")
    layers: int = key(2, "number of layers; of the encoder and of the decoder for seq2seq")
    heads: int = key(4, "number of attention heads")
    intermediate: int = key(256, "hidden size of the feed-forward layers")
    vocabulary: int = key(160, "vocabulary size of the tokenizer, which is trained on the demonstrations")


@dataclasses.dataclass(frozen=True)
class Lora:
    rank: int = key(8, "rank of the adapters")
    alpha: int = key(16, "the adapters are scaled by alpha / rank")
    dropout: float = key(0.0, "dropout on the adapters' inputs")
    targets: list[str] | None = key(None, "names of the adapted layers; null: all linear layers except the head")


@dataclasses.dataclass(frozen=True)
class Model:
    path: str = key(
        "tiny",
        "folder, hub name or GGUF file, which may be package:file.gguf of an installed package; tiny: created locally "
        "without a download",
    )
    tiny: Tiny = key(Tiny, "size of the model for path: tiny")
    dtype: Literal["float32", "bfloat16", "float16"] = key("float32", "dtype of the weights")
    mixed_precision: Literal["no", "bf16", "fp16"] = key("no", "dtype of the forward pass, with float32 weights")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "auto", "attention implementation; auto: the fastest that transformers provides for the model"
    )
    trust_remote_code: bool = key(False, "allow code that comes with a model to run")
    lora: Lora | None = key(None, "train low-rank adapters instead of the weights")
    four_bit: bool = key(False, "load the weights in 4 bits (bitsandbytes; needs lora)")
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass")
    chat_template: bool = key(False, "apply the tokenizer's chat template to prompts")
    chat_template_options: dict[str, Any] = key(
        {}, "variables of the chat template, such as {enable_thinking: false} for Qwen3"
    )
    banned: list[int | str] = key(
        [], "ids, or tokens as the tokenizer spells them, with probability 0 in sampling and in the update"
    )
    max_prompt_tokens: int = key(512, "longer prompts are dropped; their number is logged")
    reference_model_path: str | None = key(None, "reference of the KL term; null: the policy at the start of the phase")


@dataclasses.dataclass(frozen=True)
class Data:
    task: str | None = key(
        "arithmetic", "bundled task that generates its own data; null: read files", names="grpo_trainer.tasks:TASKS"
    )
    options: dict[str, Any] = key({}, "arguments of the bundled task")
    train: str | None = key(None, "JSONL file with one prompt per line for RL; its demonstrations are for SFT")
    sft: str | None = key(None, "JSONL file of demonstrations; null: those in train")
    validation: str | None = key(None, "JSONL file evaluated during training")
    test: str | None = key(None, "JSONL file evaluated before and after RL")
    prompt: str = key("prompt", "column of the prompt")
    template: str | None = key(None, "text of the prompt with columns in braces, such as 'Q: {question}'; null: prompt")
    demonstration: str = key("demonstration", "column of the demonstrated response, or of a list of them")
    demonstration_template: str | None = key(
        None, "text of the demonstrated response with columns in braces; one with a list makes one response of each"
    )
    limit: int | None = key(None, "largest number of lines to train on, of each of sft and train")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    lr: float = key(1e-5, "learning rate after the warm-up")
    betas: list[float] = key([0.9, 0.95], "betas of AdamW")
    eps: float = key(1e-8, "epsilon of AdamW")
    weight_decay: float = key(0.0, "weight decay of AdamW, applied to matrices only")
    warmup: int = key(0, "steps over which the learning rate rises from 0")
    schedule: Literal["constant", "linear", "cosine"] = key("linear", "decay after the warm-up")
    final: float = key(0.1, "fraction of the learning rate at the end of the decay")
    grad_clip: float = key(1.0, "largest gradient norm; 0: no clipping")


@dataclasses.dataclass(frozen=True)
class Polychromic:
    weight: float = key(1.0, "0: all demonstrations count equally; 1: similar ones share their weight")
    embedder: str = key("auto", "embedder that measures similarity; names as in similarity", names=EMBEDDERS)
    among: Literal["prompt", "batch"] = key(
        "prompt", "compare the demonstrations of a prompt, or of a step whatever their prompts"
    )


@dataclasses.dataclass(frozen=True)
class Sft:
    steps: int = key(600, "number of optimizer steps")
    batch: int = key(64, "demonstrations per step")
    micro_batch: int = key(64, "demonstrations per forward pass")
    optimizer: Optimizer = key(Optimizer, "optimizer of this phase")
    polychromic: Polychromic | None = key(None, "give rare demonstrations more weight")


@dataclasses.dataclass(frozen=True)
class Vllm:
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "dtype of the engine's weights; auto: that of model.mixed_precision, or else model.dtype"
    )
    max_model_len: int | None = key(
        None, "longest prompt and response together; null: model.max_prompt_tokens and max_new_tokens"
    )
    gpu_memory_utilization: float = key(0.3, "fraction of a GPU's memory for the engine's weights and cache")
    cache_gib: float | None = key(
        None, "memory for keys and values, in GiB; null: what gpu_memory_utilization leaves, on the CPU 1"
    )
    tensor_parallel_size: int = key(1, "GPUs, or processes on the CPU, that share the engine's weights")
    enforce_eager: bool | None = key(None, "run without CUDA graphs and compilation; null: on the CPU")
    sleep: bool = key(True, "on a GPU, free the engine's memory during the update")


LOADING_KEYS = ("path", "tiny", "dtype", "attention", "trust_remote_code", "four_bit")  # of model
MEMORY_KEYS = ("gpu_memory_utilization", "cache_gib", "sleep")  # of vllm; they do not change what is sampled


@dataclasses.dataclass(frozen=True)
class Rollout:
    prompts: int = key(64, "prompts per step")
    group_size: int = key(8, "responses per prompt")
    temperature: float = key(1.0, "sampling temperature; log-probs are those of the tempered policy everywhere")
    top_p: float = key(1.0, "sample from the most probable tokens with this total probability")
    top_k: int = key(0, "sample from this many most probable tokens; 0: from all")
    keep_support: bool = key(False, "take log-probs and the update over the tokens that top_p and top_k kept")
    max_new_tokens: int = key(32, "longer responses are cut off and count as truncated")
    min_new_tokens: int = key(0, "number of tokens before the end may be sampled")
    batch: int = key(512, "responses sampled together, in all processes; transformers: of prompts sorted by length")
    truncated: Literal["vote", "leave_out"] = key(
        "vote",
        "vote: truncated responses take part with their rewards; leave_out: neither in the loss nor in baselines",
    )
    engine: Literal["transformers", "vllm"] = key("transformers", "sample with the policy itself, or with vLLM")
    vllm: Vllm = key(Vllm, "settings of engine: vllm")


@dataclasses.dataclass(frozen=True)
class Reward:
    name: str = key(
        "exact", "a bundled reward, or module:function from importable code", names="grpo_trainer.rewards:NAMES"
    )
    weight: float = key(1.0, "weight in the sum of rewards")
    options: dict[str, Any] = key({}, "arguments of a bundled reward")
    on_error: Literal["raise", "skip"] = key("raise", "if the reward fails or is NaN: stop, or skip the response")
    timeout: float | None = key(None, "seconds after which a call of the reward counts as failed; null: no limit")


@dataclasses.dataclass(frozen=True)
class Similarity:
    embedder: str = key(
        "auto", "hashed, minilm, or a sentence-transformers name or folder; auto: minilm if installed", names=EMBEDDERS
    )
    text: Literal["answer", "whole"] = key("answer", "text to embed: what follows the last </think>, or everything")
    unfinished: Literal["exclude", "whole", "tail"] = key(
        "exclude", "text to embed for text: answer if the response has an unclosed <think>"
    )
    tail: int = key(256, "number of characters for unfinished: tail")
    cache: int = key(4096, "number of cached embeddings")
    batch_tokens: int | None = key(
        None, "tokens of a batch of texts to embed, padding included; null: 256, on a GPU 16384; 1: one by one"
    )
    workers: int = key(0, "number of Ray actors that compute embeddings; 0: computed by the trainer")
    gpus_per_worker: float = key(0.0, "GPUs per Ray actor; may be a fraction")
    config: dict[str, Any] = key({}, "fields of SimilarityConfig", "SimilarityConfig")
    sharing: float = key(0.0, "power with which rewards above the prompt's lowest are divided within a cluster")
    within: float = key(1.0, "weight of advantages computed within clusters")
    between: float = key(0.0, "weight of advantages computed over all responses to the prompt")


@dataclasses.dataclass(frozen=True)
class Critic:
    separate: bool = key(
        False, "train a copy of the policy for values alone, instead of a value head on the policy's hidden states"
    )
    lr: float = key(1e-3, "learning rate of the value head and of a separate critic")
    coef: float = key(0.5, "weight of the squared error of the values")
    clip: float | None = key(None, "clip range of a value around the one at sampling; null: no clipping")
    warmup: int = key(0, "number of first steps that train the critic alone")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    name: str = key("grpo", "sets some of the keys below, as --list shows", names="grpo_trainer.algorithm:ALGORITHMS")
    advantage: dict[str, Any] = key({}, "fields of AdvantageConfig, over those of name", "AdvantageConfig")
    loss: dict[str, Any] = key({}, "fields of LossConfig, over those of name", "LossConfig")
    similarity: Similarity | None = key(None, "group similar responses to a prompt")
    segments: dict[str, Any] = key(
        {}, "fields of SegmentConfig, for ppo and group_ppo; the names of `group_params` work, too", "SegmentConfig"
    )
    sparse: bool = key(False, "group_ppo: restrict the loss to endpoints, like the original; biased")
    critic: Critic | None = key(None, "critic of ppo and group_ppo")
    top_k_ratio: float = key(1.0, "fraction of each group with the largest absolute advantages that enters the loss")
    drop_flat: bool = key(
        True, "exclude groups without any advantage from the loss and its divisors; not with a critic"
    )
    set_size: int = key(0, "polychromic: responses per set; 0: half of the group")
    correction: dict[str, Any] = key(
        {},
        "fields of CorrectionConfig, for the mismatch between the engine that sampled and the policy, instead of all "
        "of {weights: token, weight_max: 2.0} (weights: sequence with ratio: segment); needs rollout.engine: vllm",
        "CorrectionConfig",
    )


@dataclasses.dataclass(frozen=True)
class Rl:
    steps: int = key(80, "number of rollouts")
    epochs: int = key(2, "passes over each rollout")
    minibatches: int = key(2, "optimizer steps per pass")
    micro_batch: int = key(128, "responses per forward pass")
    optimizer: Optimizer = key(Optimizer, "optimizer of this phase")
    rollout: Rollout = key(Rollout, "sampling of responses")
    rewards: list[Reward] = key([], "rewards; empty: that of the task, or exact for files")
    algorithm: Algorithm = key(Algorithm, "advantages and loss")
    share_prompts: bool = key(
        True, "compute each prompt once for all its responses in the update; off with gradient_checkpointing"
    )
    dropout: bool = key(False, "apply dropout in the update")


@dataclasses.dataclass(frozen=True)
class Phase:
    """Either a supervised or a reinforcement phase."""

    sft: Sft | None = key(None, "supervised phase")
    rl: Rl | None = key(None, "reinforcement phase")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    every: int = key(20, "RL steps between evaluations on the validation split; 0: only before and after")
    prompts: int | None = key(None, "largest number of validation prompts; null: all")
    test_prompts: int | None = key(None, "largest number of test prompts; null: all")
    batch: int = key(512, "responses sampled together")
    samples: int = key(0, "sampled responses per prompt, for pass@k and diversity; 0: greedy responses only")
    temperature: float = key(1.0, "sampling temperature")
    pass_k: list[int] = key([1, 4, 8], "values of k for pass@k; those above samples are skipped")
    embedder: str = key("auto", "embedder of the diversity measures; names as in similarity", names=EMBEDDERS)
    rewards: list[Reward] = key(
        [], "rewards of evaluations; empty: those of the first RL phase, or else that of the task, or exact"
    )
    max_new_tokens: int | None = key(
        None, "longest response; null: that of the first RL phase, or 64 tokens without such a phase"
    )
    solved: float = key(1.0, "reward from which a response counts as correct, unless a reward reports correctness")
    solved_quantile: float | None = key(
        None,
        "in place of solved, this quantile of the rewards of the validation split's demonstrations; computed once",
    )
    tracked: int = key(4, "number of prompts whose responses the report shows before and after training")


@dataclasses.dataclass(frozen=True)
class Logging:
    to: list[Literal["wandb", "tensorboard", "trackio"]] = key([], "trackers, in addition to metrics.jsonl")
    project: str = key("grpo-kernels", "project name for wandb and trackio")
    every: int = key(1, "steps between logged lines")
    summary: int = key(10, "ppo, group_ppo: steps between lines about the token groups on the console; 0: none")
    progress: bool = key(True, "show a progress bar with reward, KL and remaining time")
    samples: int = key(2, "responses per step written to samples.jsonl, and to the trackers as a table")
    watch: int = key(
        0,
        "steps between histograms of the trained weights and their gradients in the trackers; 0: none; not with fsdp2",
    )


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    every: int = key(0, "steps between checkpoints; 0: only at the end of each phase")
    keep: int = key(2, "number of most recent checkpoints to keep")


@dataclasses.dataclass(frozen=True)
class Recipe:
    name: str = key("run", "name of the run")
    seed: int = key(0, "seed of weights, data order and sampling")
    output: str = key("runs/{name}", "folder of logs, checkpoints and report; {name} and {seed} are replaced")
    threads: int | None = key(None, "CPU threads; null: one per idle core")
    backend: Literal["auto", "kernel", "reference"] = key(
        "auto", "kernel: refuse what no kernel runs; auto: the kernel where there is one; reference: plain torch"
    )
    distributed: Literal["ddp", "fsdp2"] = key(
        "ddp", "weights in several processes: replicated (ddp) or sharded (fsdp2)"
    )
    model: Model = key(Model, "the policy")
    data: Data = key(Data, "prompts, answers and demonstrations")
    phases: list[Phase] = key([], "phases, in order")
    evaluation: Evaluation = key(Evaluation, "evaluation on held-out splits")
    logging: Logging = key(Logging, "logs and trackers")
    checkpoints: Checkpoints = key(Checkpoints, "checkpoints to resume from")

    def __post_init__(self) -> None:
        recipe_checks.check(self)

    @property
    def folder(self) -> Path:
        return Path(self.output.format(name=self.name, seed=self.seed))


def load(path: str | Path, overrides: list[str] | None = None, smoke: bool = False) -> Recipe:
    """Reads a recipe.

    Args:
        path: YAML file, or name of a bundled recipe. A `base` in it, likewise, is read first.
        overrides: assignments "a.b=value".
        smoke: reduce all sizes to a run of seconds that only shows that everything works.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"load: path must be a YAML file or the name of a recipe, got {type(path).__name__} {path!r}")
    values = _read(_find(path))
    if smoke:
        values = _merge(values, _smoke_sizes(values))
        # keeps the folder of the full run free
        values["output"] = f"{values.get('output', Recipe.output)}-smoke"
    for assignment in overrides or []:
        if assignment.startswith("base="):
            raise ValueError(f"base: must be in a recipe's file, which overrides change, got {assignment!r}")
        override(values, assignment)
    if isinstance(values.get("phases"), list):
        values["phases"] = [phase for phase in values["phases"] if phase is not None]  # as null in a file removes one
    return build(Recipe, values)


def bundled() -> dict[str, Path]:
    """Bundled recipes by name."""
    package = Path(__file__).parent
    # in an installation, or in a checkout
    folders = [package / "recipes", package.parent.parent / "recipes"]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def description(path: Path) -> str:
    """The first clause of the comment that a recipe begins with."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return re.split(r"[.;:]?$|[.;] ", " ".join(line.lstrip("# ") for line in comment), maxsplit=1)[0]


def _find(path: str | Path) -> Path:
    if Path(path).is_file():
        return Path(path)
    names = bundled()
    if str(path) not in names:
        files = [str(file) for file in Path(path).parent.glob("*.y*ml")]
        near = difflib.get_close_matches(str(path), [*names, *files], 1)
        nearest = f"the nearest is {near[0]!r}, and " if near else ""
        raise FileNotFoundError(f"recipe: no file {str(path)!r}; {nearest}the bundled ones are {', '.join(names)}")
    return names[str(path)]


def _smoke_sizes(values: dict[str, Any]) -> dict[str, Any]:
    rl = {
        "steps": 2,
        "micro_batch": 8,
        "minibatches": 2,
        "rollout": {"prompts": 4, "group_size": 4, "max_new_tokens": 12, "batch": 16},
        "algorithm": {"set_size": 0},
    }
    sft = {"steps": 4, "batch": 16, "micro_batch": 8}
    phases = [{name: rl if name == "rl" else sft for name in phase} for phase in values.get("phases", [])]
    options = {"demonstrations": 96, "train": 32, "validation": 6, "test": 6}
    is_bundled_task = values.get("data", {}).get("task", "arithmetic") is not None
    samples = min(values.get("evaluation", {}).get("samples", 0), 4)
    return {
        "phases": phases,
        "data": {"options": options} if is_bundled_task else {"limit": 32},
        "evaluation": {"every": 1, "prompts": 6, "test_prompts": 6, "samples": samples, "tracked": 2},
    }


def _read(path: Path, readers: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file merged into its base; `readers` are the files whose base it is."""
    if path.resolve() in readers:
        raise ValueError(f"base: must not lead back to a file that it is the base of, got {str(path)!r}")
    values = read_yaml(read_text(path), str(path))
    if not isinstance(values, dict):
        got = "an empty file" if values is None else f"{type(values).__name__} {values!r:.80}"
        raise TypeError(f"{path}: must be a mapping of a recipe's keys, got {got}; grpo-train --keys lists them")
    base = values.pop("base", None)
    if base is None:
        return values
    beside = path.parent / str(base)
    other = beside if beside.is_file() else _find(str(base))
    return _merge(_read(other, (*readers, path.resolve())), values)


def _merge(base: Any, changes: Any) -> Any:
    """Merges mappings key by key and phases one by one; null removes a mapping or phase, other values are replaced."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    merged = dict(base)
    for name, value in changes.items():
        is_phases = name == "phases" and isinstance(value, list) and isinstance(base.get(name), list)
        if value is None and isinstance(base.get(name), dict):
            del merged[name]
        else:
            merged[name] = _merge_phases(base[name], value) if is_phases else _merge(base.get(name), value)
    return merged


def _merge_phases(base: list[Any], changes: list[Any]) -> list[Any]:
    pairs: Iterable[tuple[Any, Any]] = itertools.zip_longest(base, changes, fillvalue={})
    merged = []
    for number, (phase, change) in enumerate(pairs):
        if change is not None:
            merged.append(_merge(phase, change))
            are_mappings = isinstance(phase, dict) and isinstance(change, dict)
            if are_mappings and len(phase) == 1 and merged[-1].keys() == {"sft", "rl"}:
                kind = next(iter(phase))
                raise ValueError(
                    f"phases.{number}: must be {kind} as in the base, whose phases are changed one by one, got "
                    f"{list(change)}; {kind}: null in it removes what the base has"
                )
    return merged
