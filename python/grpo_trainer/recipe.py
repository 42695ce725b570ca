"""Recipes: everything a run depends on. The text below a key is its description, which `grpo train --keys` prints."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from grpo_kernels import SimilarityConfig
from grpo_trainer.section import PathText, Rule, Section, Share, embedder_rule

EVALUATED_TOKENS = 64  # longest response of an evaluation without RL


class Tiny(Section):
    architecture: Literal["causal", "seq2seq"] = "causal"
    """decoder-only (Llama) or encoder-decoder (T5)"""
    hidden: PositiveInt = 128
    """hidden size"""
    layers: PositiveInt = 2
    """number of layers; of the encoder and of the decoder for seq2seq"""
    heads: PositiveInt = 4
    """number of attention heads"""
    intermediate: PositiveInt = 256
    """hidden size of the feed-forward layers"""
    vocabulary: PositiveInt = 160
    """vocabulary size of the tokenizer, which is trained on the demonstrations"""

    def rules(self) -> Iterator[Rule]:
        yield "heads", self.hidden % self.heads == 0, f"must divide hidden, {self.hidden}"


class Lora(Section):
    rank: PositiveInt = 8
    """rank of the adapters"""
    alpha: PositiveInt = 16
    """the adapters are scaled by alpha / rank"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """dropout on the adapters' inputs"""
    targets: list[str] | None = None
    """names of the adapted layers; null: all linear layers except the head"""


def _no(value: Any) -> Any:
    return "no" if value is False else value  # as YAML reads it


class Model(Section):
    path: PathText = "tiny"
    """folder, hub name or GGUF file, which may be package:file.gguf of an installed package; tiny: created locally
    without a download"""
    tiny: Tiny = Tiny()
    """size of the model for path: tiny"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of the weights; half precision rounds small updates away: mixed_precision does not, nor do adapters"""
    mixed_precision: Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(_no)] = "no"
    """dtype of the forward pass, with float32 weights"""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """attention implementation; auto: the fastest that transformers provides for the model"""
    trust_remote_code: bool = False
    """allow code that comes with a model to run"""
    lora: Lora | None = None
    """train low-rank adapters instead of the weights"""
    four_bit: bool = False
    """load the weights in 4 bits (bitsandbytes; needs lora)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    chat_template: bool = False
    """apply the tokenizer's chat template to prompts"""
    chat_template_options: dict[str, Any] = {}
    """variables of the chat template, such as {enable_thinking: false} for Qwen3"""
    banned: list[int | str] = []
    """ids, or tokens as the tokenizer spells them, with probability 0 in sampling and in the update"""
    max_prompt_length: PositiveInt = 512
    """longer prompts, in tokens, are dropped; their number is logged"""
    reference_model_path: PathText | None = None
    """reference of the KL term; null: the policy at the start of RL"""

    def rules(self) -> Iterator[Rule]:
        near = difflib.get_close_matches(self.path, ["tiny"], 1, 0.75)
        is_own = self.path == "tiny" or "/" in self.path or Path(self.path).exists()
        yield "path", is_own or not near, "must be 'tiny', a folder, a GGUF file or a hub name; the nearest is 'tiny'"
        four_bit = self.four_bit
        yield "lora", not four_bit or self.lora is not None, "must be set, such as {rank: 8}, with four_bit: true"
        is_file = self.path == "tiny" or self.path.endswith(".gguf")
        yield "path", not (four_bit and is_file), "must be a folder or a model of the hub with four_bit: true"
        is_wide = self.mixed_precision == "no" or self.dtype == "float32"
        yield "dtype", is_wide, f"must be float32 with mixed_precision: {self.mixed_precision}"


class Data(Section):
    task: str | None = "arithmetic"
    """bundled task that generates its own data: arithmetic, strategies, gsm8k, word_problems, dialogue or reply; null:
    read files"""
    options: dict[str, Any] = {}
    """arguments of the bundled task"""
    train: PathText | None = None
    """data for RL, one prompt a line: a JSONL, JSON, CSV or parquet file, or a hub name such as
    openai/gsm8k:main:train; its demonstrations are for SFT"""
    sft: PathText | None = None
    """demonstrations; null: those in train"""
    validation: PathText | None = None
    """data evaluated during training"""
    test: PathText | None = None
    """data evaluated before and after RL"""
    prompt: str = "prompt"
    """column of the prompt"""
    template: str | None = None
    """text of the prompt with columns in braces, such as 'Q: {question}'; null: prompt"""
    demonstration: str = "demonstration"
    """column of the demonstrated response, or of a list of them"""
    demonstration_template: str | None = None
    """text of the demonstrated response with columns in braces; one with a list makes one response of each"""
    limit: PositiveInt | None = None
    """largest number of lines to train on, of each of sft and train"""

    def rules(self) -> Iterator[Rule]:
        yield "train", self.task is not None or self.train is not None, "must be given with task: null"
        yield "options", self.task is not None or not self.options, "must be empty with task: null"
        for name in ("train", "sft", "validation", "test") if self.task is not None else ():
            yield (
                name,
                getattr(self, name) is None,
                f"must be null with task: {self.task}; set task: null to read files",
            )
        for name, template in (("prompt", "template"), ("demonstration", "demonstration_template")):
            is_one = getattr(self, name) == name or getattr(self, template) is None
            yield name, is_one, f"must be left out with {template}, which names its columns itself"


class Optimizer(Section):
    lr: PositiveFloat = 1e-05
    """learning rate after the warm-up"""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """betas of AdamW"""
    eps: NonNegativeFloat = 1e-08
    """epsilon of AdamW"""
    weight_decay: NonNegativeFloat = 0.0
    """weight decay of AdamW, applied to matrices only"""
    warmup: NonNegativeInt = 0
    """steps over which the learning rate rises from 0"""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """decay after the warm-up"""
    final: NonNegativeFloat = 0.1
    """fraction of the learning rate at the end of the decay"""
    grad_clip: NonNegativeFloat = 1.0
    """largest gradient norm; 0: no clipping"""


class Polychromic(Section):
    weight: Share = 1.0
    """0: all demonstrations count equally; 1: similar ones share their weight"""
    embedder: PathText = "auto"
    """embedder that measures similarity; names as in rl.algorithm.similarity"""
    among: Literal["prompt", "batch"] = "prompt"
    """compare the demonstrations of a prompt, or of a step whatever their prompts"""

    def rules(self) -> Iterator[Rule]:
        yield embedder_rule(self.embedder)


class Sft(Section):
    steps: PositiveInt = 600
    """number of optimizer steps"""
    batch: PositiveInt = 64
    """demonstrations per step"""
    micro_batch: PositiveInt = 64
    """demonstrations per forward pass"""
    optimizer: Optimizer = Optimizer()
    """optimizer of SFT"""
    polychromic: Polychromic | None = None
    """give rare demonstrations more weight"""

    def rules(self) -> Iterator[Rule]:
        most = SimilarityConfig.max_rows
        is_compared = self.polychromic is not None and self.polychromic.among == "batch"
        rule = f"must be from 2 to {most} with polychromic.among: batch, which compares all of them"
        yield "batch", not is_compared or 2 <= self.batch <= most, rule


class Vllm(Section):
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of the engine's weights; auto: that of model.mixed_precision, or else model.dtype"""
    max_model_len: PositiveInt | None = None
    """longest prompt and response together; null: model.max_prompt_length and max_completion_length"""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """fraction of a GPU's memory for the engine's weights and cache"""
    cache_gib: PositiveFloat | None = None
    """memory for keys and values, in GiB; null: what gpu_memory_utilization leaves, on the CPU 1"""
    tensor_parallel_size: PositiveInt = 1
    """GPUs, or processes on the CPU, that share the engine's weights"""
    enforce_eager: bool | None = None
    """run without CUDA graphs and compilation; null: on the CPU"""
    sleep: bool = True
    """on a GPU, free the engine's memory during the update"""


LOADING_KEYS = ("path", "tiny", "dtype", "attention", "trust_remote_code", "four_bit")  # of model
MEMORY_KEYS = ("gpu_memory_utilization", "cache_gib", "sleep")  # of vllm; they do not change what is sampled


class Rollout(Section):
    prompts: PositiveInt = 64
    """prompts per step"""
    num_generations: PositiveInt = 8
    """responses per prompt, which form a group"""
    temperature: PositiveFloat = 1.0
    """sampling temperature; log-probs are those of the tempered policy everywhere"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """sample from the most probable tokens with this total probability"""
    top_k: NonNegativeInt = 0
    """sample from this many most probable tokens; 0: from all"""
    keep_support: bool = False
    """take log-probs and the update over the tokens that top_p and top_k kept"""
    max_completion_length: PositiveInt = 32
    """longer responses, in tokens, are cut off and count as truncated"""
    min_completion_length: NonNegativeInt = 0
    """number of tokens before the end may be sampled"""
    batch: PositiveInt = 512
    """responses sampled together, in all processes; transformers: of prompts sorted by length"""
    truncated: Literal["vote", "leave_out"] = "vote"
    """vote: truncated responses take part with their rewards; leave_out: neither in the loss nor in baselines"""
    engine: Literal["transformers", "vllm"] = "transformers"
    """sample with the policy itself, or with vLLM"""
    vllm: Vllm = Vllm()
    """settings of engine: vllm"""

    def rules(self) -> Iterator[Rule]:
        rows = self.prompts * self.num_generations
        yield "num_generations", rows > 1, "must be at least 2 with prompts: 1"
        is_filtered = self.top_p < 1 or self.top_k > 0
        yield "keep_support", is_filtered or not self.keep_support, "must be false without top_p or top_k"
        is_shorter = self.min_completion_length <= self.max_completion_length
        rule = f"must not exceed max_completion_length, {self.max_completion_length}"
        yield "min_completion_length", is_shorter, rule
        if self.engine == "transformers":
            yield "vllm", self.vllm == Vllm(), "must be left out with engine: transformers"
            return
        rule = "must be false with engine: vllm, whose kept tokens are not read; use engine: transformers"
        yield "keep_support", not self.keep_support, rule
        rule = "must be in [0.01, 2] with engine: vllm, which changes or refuses others; use engine: transformers"
        yield "temperature", 0.01 <= self.temperature <= 2, rule


class Reward(Section):
    name: str = "exact"
    """exact, gsm8k, reply, dialogue, diversity, judge, reward_model, or module:function from importable code"""
    weight: float = 1.0
    """weight in the sum of rewards"""
    options: dict[str, Any] = {}
    """arguments of a bundled reward"""
    on_error: Literal["raise", "skip"] = "raise"
    """if the reward fails or is NaN: stop, or skip the response"""
    timeout: PositiveFloat | None = None
    """seconds after which a call of the reward counts as failed; null: no limit"""


class Similarity(Section):
    embedder: PathText = "auto"
    """hashed, minilm, or a sentence-transformers name or folder; auto: minilm if installed"""
    text: Literal["answer", "whole"] = "answer"
    """text to embed: what follows the last </think>, or everything"""
    unfinished: Literal["exclude", "whole", "tail"] = "exclude"
    """text to embed for text: answer if the response has an unclosed <think>"""
    tail: PositiveInt = 256
    """number of characters for unfinished: tail"""
    batch_size: PositiveInt = 32
    """texts per forward pass of the embedder"""
    workers: NonNegativeInt = 0
    """number of Ray actors that compute embeddings; 0: computed by the trainer"""
    gpus_per_worker: NonNegativeFloat = 0.0
    """GPUs per Ray actor; may be a fraction"""
    config: dict[str, Any] = {}
    """fields of grpo_kernels.SimilarityConfig"""
    sharing: NonNegativeFloat = 0.0
    """power with which rewards above the prompt's lowest are divided within a cluster"""
    within: NonNegativeFloat = 1.0
    """weight of advantages computed within clusters"""
    between: NonNegativeFloat = 0.0
    """weight of advantages computed over all responses to the prompt"""

    def rules(self) -> Iterator[Rule]:
        yield embedder_rule(self.embedder)
        has_batches = self.embedder != "hashed" or self.batch_size == type(self).model_fields["batch_size"].default
        yield "batch_size", has_batches, "must be left out with embedder: hashed"
        yield "gpus_per_worker", self.gpus_per_worker == 0 or self.workers > 0, "must be 0 without workers"


class Critic(Section):
    separate: bool = False
    """train a copy of the policy for values alone, instead of a value head on the policy's hidden states"""
    lr: PositiveFloat = 0.001
    """learning rate of the value head and of a separate critic"""
    coef: NonNegativeFloat = 0.5
    """weight of the squared error of the values"""
    clip: PositiveFloat | None = None
    """clip range of a value around the one at sampling; null: no clipping"""
    warmup: NonNegativeInt = 0
    """number of first steps that train the critic alone"""


class Algorithm(Section):
    name: str = "grpo"
    """sets some of the keys below, as grpo train --list shows"""
    beta: NonNegativeFloat | None = None
    """coefficient of the KL term, 0: none, or one that is measured only with loss.kl; null: that of name"""
    epsilon: NonNegativeFloat | None = None
    """clip range below the ratio 1, and above it too unless epsilon_high is given; null: of name"""
    epsilon_high: NonNegativeFloat | None = None
    """clip range above the ratio 1, with cispo the largest ratio; null: epsilon, or that of name"""
    advantage: dict[str, Any] = {}
    """fields of grpo_kernels.AdvantageConfig, over those of name"""
    loss: dict[str, Any] = {}
    """fields of grpo_kernels.LossConfig, over those of name"""
    similarity: Similarity | None = None
    """group similar responses to a prompt"""
    segments: dict[str, Any] = {}
    """fields of grpo_kernels.SegmentConfig, for ppo and group_ppo; the names of `group_params` work, too"""
    sparse: bool = False
    """group_ppo: restrict the loss to endpoints, like the original; biased"""
    critic: Critic | None = None
    """critic of ppo and group_ppo"""
    top_k_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """fraction of each group with the largest absolute advantages in the loss"""
    drop_flat: bool = True
    """exclude groups without any advantage from the loss and its divisors; not with a critic"""
    set_size: NonNegativeInt = 0
    """polychromic: responses per set; 0: half of the group"""
    correction: dict[str, Any] = {}
    """fields of grpo_kernels.CorrectionConfig, for the mismatch between the engine that sampled and the policy,
    instead of all of {weights: token, weight_max: 2.0} (weights: sequence with a ratio of segments); needs
    rollout.engine: vllm"""


class Rl(Section):
    steps: PositiveInt = 80
    """number of rollouts"""
    num_iterations: PositiveInt = 2
    """passes over each rollout"""
    minibatches: PositiveInt = 2
    """optimizer steps per pass"""
    micro_batch: PositiveInt = 128
    """responses per forward pass"""
    optimizer: Optimizer = Optimizer()
    """optimizer of RL"""
    rollout: Rollout = Rollout()
    """sampling of responses"""
    rewards: list[Reward] = []
    """rewards; empty: that of the task, or exact for files"""
    algorithm: Algorithm = Algorithm()
    """advantages and loss"""
    share_prompts: bool = True
    """compute each prompt once for all its responses in the update; off with gradient_checkpointing"""
    dropout: bool = False
    """apply dropout in the update"""

    def rules(self) -> Iterator[Rule]:
        prompts, size, set_size = self.rollout.prompts, self.rollout.num_generations, self.algorithm.set_size
        yield "minibatches", self.minibatches <= prompts, f"must not exceed rollout.prompts, {prompts}"
        rule = f"must be 0, or at least 2 and less than the {size} of a group, as a set of all credits all alike"
        yield "algorithm.set_size", set_size == 0 or 2 <= set_size < size, rule
        has_engine = self.rollout.engine != "transformers"
        yield "algorithm.correction", has_engine or not self.algorithm.correction, "must be left out without an engine"


class Evaluation(Section):
    every: NonNegativeInt = 20
    """RL steps between evaluations on the validation split; 0: only before and after"""
    prompts: PositiveInt | None = None
    """largest number of validation prompts; null: all"""
    test_prompts: PositiveInt | None = None
    """largest number of test prompts; null: all"""
    batch: PositiveInt = 512
    """responses sampled together"""
    samples: NonNegativeInt = 0
    """sampled responses per prompt, for pass@k and diversity; 0: greedy responses only"""
    temperature: PositiveFloat = 1.0
    """sampling temperature"""
    pass_k: list[PositiveInt] = [1, 4, 8]
    """values of k for pass@k; those above samples are skipped"""
    embedder: PathText = "auto"
    """embedder of the diversity measures; names as in rl.algorithm.similarity"""
    rewards: list[Reward] = []
    """rewards of evaluations; empty: those of RL, or else of the task"""
    max_completion_length: PositiveInt | None = None
    """longest response, in tokens; null: that of RL, or 64 without RL"""
    solved: float = 1.0
    """reward from which a response counts as correct, unless a reward reports correctness"""
    solved_quantile: Share | None = None
    """in place of solved, this quantile of the rewards of the validation split's demonstrations"""

    def rules(self) -> Iterator[Rule]:
        yield embedder_rule(self.embedder)
        is_alone = self.solved_quantile is None or self.solved == type(self).model_fields["solved"].default
        yield "solved", is_alone, "must be left out with solved_quantile"


class Logging(Section):
    to: list[Literal["wandb", "tensorboard", "trackio"]] = []
    """trackers, in addition to metrics.jsonl"""
    project: str = "grpo-kernels"
    """project name for wandb and trackio"""
    every: PositiveInt = 1
    """steps between logged lines"""
    progress: bool = True
    """show a progress line with reward, tokens a second and remaining time"""
    samples: NonNegativeInt = 2
    """responses per step written to samples.jsonl, and to the trackers as a table"""


class Checkpoints(Section):
    every: NonNegativeInt = 0
    """steps between checkpoints; 0: only at the end of SFT and of RL"""
    keep: PositiveInt = 2
    """number of most recent checkpoints to keep"""


class Recipe(Section):
    name: str = "run"
    """name of the run"""
    seed: int = 0
    """seed of weights, data order and sampling"""
    output: PathText = "runs/{name}-{seed}"
    """folder of logs, checkpoints and report; {name} and {seed} are replaced"""
    threads: PositiveInt | None = None
    """CPU threads; null: one per idle core"""
    backend: Literal["auto", "kernel", "reference"] = "auto"
    """kernel: refuse what no kernel runs; auto: the kernel where there is one; reference: plain torch"""
    distributed: Literal["ddp", "fsdp2"] = "ddp"
    """weights in several processes: replicated (ddp) or sharded (fsdp2)"""
    model: Model = Model()
    """the policy"""
    data: Data = Data()
    """prompts, answers and demonstrations"""
    sft: Sft | None = None
    """supervised fine-tuning; null: none"""
    rl: Rl | None = None
    """reinforcement learning, after sft; null: none"""
    evaluation: Evaluation = Evaluation()
    """evaluation on held-out splits"""
    logging: Logging = Logging()
    """logs and trackers"""
    checkpoints: Checkpoints = Checkpoints()
    """checkpoints to resume from"""

    def rules(self) -> Iterator[Rule]:
        others = re.sub(r"\{(name|seed)\}", "", self.output)
        yield "output", not {"{", "}"} & {*others}, "must have no other braces than {name} and {seed}"
        if self.distributed == "fsdp2":
            rule = "with distributed: fsdp2"
            yield "model.lora", self.model.lora is None, f"must be null {rule}"
            yield "model.mixed_precision", self.model.mixed_precision != "fp16", f"must be no or bf16 {rule}"
        if self.rl is None:
            return
        is_separate = self.rl.algorithm.critic is not None and self.rl.algorithm.critic.separate
        rule = "must be false with rl.algorithm.critic.separate, a copy of the weights that would not be restored"
        yield "model.four_bit", not (self.model.four_bit and is_separate), rule
        if self.rl.rollout.engine == "transformers":
            return
        rule = "with rl.rollout.engine: vllm; change it, or use engine: transformers"
        is_seq2seq = self.model.path == "tiny" and self.model.tiny.architecture == "seq2seq"
        yield "model.tiny.architecture", not is_seq2seq, f"must be causal {rule}"
        yield "model.four_bit", not self.model.four_bit, f"must be false {rule}"
        needed = self.model.max_prompt_length + self.rl.rollout.max_completion_length
        length = self.rl.rollout.vllm.max_model_len
        rule = f"must be at least model.max_prompt_length + rl.rollout.max_completion_length, {needed}"
        yield "rl.rollout.vllm.max_model_len", length is None or length >= needed, rule

    @property
    def folder(self) -> Path:
        return Path(self.output.format(name=self.name, seed=self.seed))

    def seed_of(self, *parts: object) -> int:
        """Seed for one purpose."""
        text = " ".join(str(part) for part in (self.seed, *parts))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    @property
    def max_completion_length(self) -> int:
        """Longest response in evaluations."""
        of_rl = EVALUATED_TOKENS if self.rl is None else self.rl.rollout.max_completion_length
        return self.evaluation.max_completion_length or of_rl
