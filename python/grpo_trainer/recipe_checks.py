"""Checks of a recipe's values, beyond the types of its keys.

`recipe` imports this module, so the parts of a recipe are read here by the names of their keys.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from grpo_kernels import SimilarityConfig
from grpo_trainer.settings import refuse, refuse_misspelt
from grpo_trainer.tasks import TASKS

EMBEDDERS = ("auto", "hashed", "minilm", "name or folder of sentence-transformers")
Rule = tuple[str, Any, bool, str]  # key, value, whether the rule is met, the rule


def check(recipe: Any) -> None:
    """Raises ValueError with the key, the rule and the value of every rule that a recipe does not meet."""
    refuse_misspelt("model.path", recipe.model.path, ("tiny", "a folder, a GGUF file or a hub name"))
    for key, name in _embedders(recipe):
        refuse_misspelt(key, name, EMBEDDERS)
    refuse(
        [
            ValueError(f"{name}: {rule}, got {_shown(value)}")
            for name, value, is_met, rule in _rules(recipe)
            if not is_met
        ]
    )


def check_lengths(recipe: Any, context: int | None) -> None:
    """Raises if a response may be as long as the model's context, which has no place for a prompt then."""
    longest = {"evaluation.max_new_tokens": recipe.evaluation.max_new_tokens}
    for number, phase in enumerate(recipe.phases):
        if phase.rl is not None:
            longest[f"phases.{number}.rl.rollout.max_new_tokens"] = phase.rl.rollout.max_new_tokens
    for key, length in longest.items():
        if context is not None and length is not None and length >= context:
            raise ValueError(f"{key}: must be less than the model's context, {context}, got {length}")


def _shown(value: Any) -> str:
    """A value as it is written in a recipe: of a mapping, the keys that are not left at their defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return str({name: set_to for name, set_to in fields.items() if set_to != getattr(type(value), name, None)})


def used_embedders(recipe: Any) -> Iterator[tuple[str, str]]:
    """Names of the embedders that a run loads, by their keys."""
    for key, name in _embedders(recipe):
        if recipe.evaluation.samples or key != "evaluation.embedder":
            yield key, name


def _embedders(recipe: Any) -> Iterator[tuple[str, str]]:
    """Names of embedders by their keys."""
    for i, phase in enumerate(recipe.phases):
        if phase.sft is not None and phase.sft.polychromic is not None:
            yield f"phases.{i}.sft.polychromic.embedder", phase.sft.polychromic.embedder
        if phase.rl is not None and phase.rl.algorithm.similarity is not None:
            yield f"phases.{i}.rl.algorithm.similarity.embedder", phase.rl.algorithm.similarity.embedder
    yield "evaluation.embedder", recipe.evaluation.embedder


def _rules(recipe: Any) -> Iterator[Rule]:
    yield _output(recipe.output)
    yield from _positive("", recipe, "threads")
    yield from _model(recipe.model)
    yield from _data(recipe.data)
    yield from _sharding(recipe)
    for i, phase in enumerate(recipe.phases):
        kinds = [kind for kind in ("sft", "rl") if getattr(phase, kind) is not None]
        yield f"phases.{i}", kinds, len(kinds) == 1, "must have either sft or rl"
        if phase.sft is not None:
            yield from _sft(f"phases.{i}.sft", phase.sft)
        if phase.rl is not None:
            yield from _rl(f"phases.{i}.rl", phase.rl)
            yield from _engine(f"phases.{i}.rl", phase.rl, recipe.model)
    yield from _evaluation(recipe.evaluation)
    yield from _positive("logging.", recipe.logging, "every")
    yield from _not_negative("logging.", recipe.logging, "samples", "watch", "summary")
    watch, has_tracker = recipe.logging.watch, bool(recipe.logging.to)
    yield "logging.watch", watch, watch == 0 or has_tracker, "requires a tracker in logging.to"
    yield from _positive("checkpoints.", recipe.checkpoints, "keep")
    yield from _not_negative("checkpoints.", recipe.checkpoints, "every")


def _evaluation(evaluation: Any) -> Iterator[Rule]:
    names = ("prompts", "test_prompts", "batch", "temperature", "max_new_tokens")
    yield from _positive("evaluation.", evaluation, *names)
    yield from _not_negative("evaluation.", evaluation, "every", "samples", "tracked")
    for i, reward in enumerate(evaluation.rewards):
        yield from _positive(f"evaluation.rewards.{i}.", reward, "timeout")
    yield "evaluation.pass_k", evaluation.pass_k, min(evaluation.pass_k, default=1) > 0, "must be positive"
    quantile, solved = evaluation.solved_quantile, evaluation.solved
    is_share = quantile is None or 0 <= quantile <= 1
    yield "evaluation.solved_quantile", quantile, is_share, "must be in [0, 1]"
    is_alone = quantile is None or solved == type(evaluation).solved
    yield "evaluation.solved", solved, is_alone, "cannot be combined with solved_quantile; set one of them"


def _model(model: Any) -> Iterator[Rule]:
    four_bit, is_tiny = model.four_bit, model.path == "tiny"
    rule = "requires lora, such as lora: {rank: 8}, as weights in 4 bits are not trained"
    yield "model.four_bit", four_bit, not four_bit or model.lora is not None, rule
    rule = "cannot be combined with path: tiny, which makes a model; name a folder or a model of the hub"
    yield "model.four_bit", four_bit, not (four_bit and is_tiny), rule
    is_gguf = model.path.endswith(".gguf")
    rule = "cannot be combined with a GGUF file; name a folder or a model of the hub"
    yield "model.four_bit", four_bit, not (four_bit and is_gguf), rule
    mixed = model.mixed_precision
    yield "model.mixed_precision", mixed, mixed == "no" or model.dtype == "float32", "requires dtype: float32"
    yield from _positive("model.", model, "max_prompt_tokens")
    yield from _positive("model.tiny.", model.tiny, "hidden", "layers", "heads", "intermediate", "vocabulary")
    divides = model.tiny.hidden % max(model.tiny.heads, 1) == 0
    yield "model.tiny.heads", model.tiny.heads, divides, f"must divide hidden, {model.tiny.hidden}"
    if model.lora is not None:
        yield from _positive("model.lora.", model.lora, "rank", "alpha")
        yield "model.lora.dropout", model.lora.dropout, 0 <= model.lora.dropout < 1, "must be in [0, 1)"


def _sharding(recipe: Any) -> Iterator[Rule]:
    if recipe.distributed != "fsdp2":
        return
    rule = "cannot be combined with distributed: fsdp2"
    yield "logging.watch", recipe.logging.watch, recipe.logging.watch == 0, rule
    yield "model.lora", recipe.model.lora, recipe.model.lora is None, rule
    yield "model.mixed_precision", recipe.model.mixed_precision, recipe.model.mixed_precision != "fp16", rule


def _data(data: Any) -> Iterator[Rule]:
    if data.task is None:
        yield "data.train", data.train, data.train is not None, "must be given without a task"
        yield "data.options", data.options, not data.options, "requires a bundled task"
    elif data.task in TASKS:  # another name is refused as the data are made
        for name in ("train", "sft", "validation", "test"):
            path = getattr(data, name)
            yield f"data.{name}", path, path is None, f"requires task: null, which is {data.task!r}"
    for name in ("prompt", "demonstration"):
        template = "template" if name == "prompt" else "demonstration_template"
        column, is_one = getattr(data, name), getattr(data, name) == name or getattr(data, template) is None
        yield f"data.{name}", column, is_one, f"cannot be combined with {template}, which names its columns itself"
    yield from _positive("data.", data, "limit")


def _sft(at: str, sft: Any) -> Iterator[Rule]:
    yield from _positive(f"{at}.", sft, "steps", "batch", "micro_batch")
    yield from _optimizer(f"{at}.optimizer", sft.optimizer)
    if sft.polychromic is not None:
        weight = sft.polychromic.weight
        yield f"{at}.polychromic.weight", weight, 0 <= weight <= 1, "must be in [0, 1]"
        is_small = sft.polychromic.among == "prompt" or 2 <= sft.batch <= SimilarityConfig.max_rows
        rule = f"must be in [2, {SimilarityConfig.max_rows}] with polychromic.among: batch, which compares all of them"
        yield f"{at}.batch", sft.batch, is_small, rule


def _optimizer(at: str, optimizer: Any) -> Iterator[Rule]:
    yield f"{at}.lr", optimizer.lr, 0 < optimizer.lr < math.inf, "must be positive"
    betas = optimizer.betas
    is_pair = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    yield f"{at}.betas", betas, is_pair, "must be two numbers in [0, 1)"
    yield from _not_negative(f"{at}.", optimizer, "eps", "weight_decay", "warmup", "final", "grad_clip")


def _rl(at: str, rl: Any) -> Iterator[Rule]:
    rollout, rows = rl.rollout, rl.rollout.prompts * rl.rollout.group_size
    yield from _positive(f"{at}.", rl, "steps", "epochs", "micro_batch")
    yield from _optimizer(f"{at}.optimizer", rl.optimizer)
    yield from _positive(f"{at}.rollout.", rollout, "prompts", "group_size", "temperature", "max_new_tokens", "batch")
    yield from _not_negative(f"{at}.rollout.", rollout, "top_k", "min_new_tokens")
    yield f"{at}.rollout", rows, rows > 1, "must have more than one response"
    yield f"{at}.rollout.top_p", rollout.top_p, 0 < rollout.top_p <= 1, "must be in (0, 1]"
    keeps, is_filtered = rollout.keep_support, rollout.top_p < 1 or rollout.top_k > 0
    yield f"{at}.rollout.keep_support", keeps, is_filtered or not keeps, "must be false without top_p or top_k"
    shortest, is_shorter = rollout.min_new_tokens, rollout.min_new_tokens <= rollout.max_new_tokens
    yield f"{at}.rollout.min_new_tokens", shortest, is_shorter, "must not exceed max_new_tokens"
    minibatches = rl.minibatches
    yield f"{at}.minibatches", minibatches, 0 < minibatches <= rollout.prompts, "must be in [1, rollout.prompts]"
    for i, reward in enumerate(rl.rewards):
        yield from _positive(f"{at}.rewards.{i}.", reward, "timeout")
    yield from _algorithm(f"{at}.algorithm", rl.algorithm, rollout.group_size)


def _engine(at: str, rl: Any, model: Any) -> Iterator[Rule]:
    rollout, settings, correction = rl.rollout, rl.rollout.vllm, rl.algorithm.correction
    if rollout.engine != "vllm":
        is_default = all(getattr(settings, field.name) == field.default for field in dataclasses.fields(settings))
        yield f"{at}.rollout.vllm", settings, is_default, "requires rollout.engine: vllm"
        yield f"{at}.algorithm.correction", correction, not correction, "requires rollout.engine: vllm"
        return
    is_seq2seq = model.path == "tiny" and model.tiny.architecture == "seq2seq"
    rule = "must be causal with rollout.engine: vllm; change it, or use engine: transformers"
    yield "model.tiny.architecture", model.tiny.architecture, not is_seq2seq, rule
    rule = "must be false with rollout.engine: vllm; change it, or use engine: transformers"
    yield "model.four_bit", model.four_bit, not model.four_bit, rule
    rule = "must be false with rollout.engine: vllm, whose kept tokens are not read; use engine: transformers"
    yield f"{at}.rollout.keep_support", rollout.keep_support, not rollout.keep_support, rule
    rule = "must be in [0.01, 2] with rollout.engine: vllm, which changes or refuses others; use engine: transformers"
    yield f"{at}.rollout.temperature", rollout.temperature, 0.01 <= rollout.temperature <= 2, rule
    yield from _positive(f"{at}.rollout.vllm.", settings, "max_model_len", "cache_gib", "tensor_parallel_size")
    share = settings.gpu_memory_utilization
    yield f"{at}.rollout.vllm.gpu_memory_utilization", share, 0 < share <= 1, "must be in (0, 1]"
    length, needed = settings.max_model_len, model.max_prompt_tokens + rollout.max_new_tokens
    rule = f"must be at least model.max_prompt_tokens + rollout.max_new_tokens, {needed}; raise it or lower these"
    yield f"{at}.rollout.vllm.max_model_len", length, length is None or length >= needed, rule


def _algorithm(at: str, algorithm: Any, group_size: int) -> Iterator[Rule]:
    ratio, set_size = algorithm.top_k_ratio, algorithm.set_size
    yield f"{at}.top_k_ratio", ratio, 0 < ratio <= 1, "must be in (0, 1]"
    is_subset = set_size == 0 or 2 <= set_size < group_size
    rule = "must be 0, or at least 2 and less than the group size, as a set of all credits all alike"
    yield f"{at}.set_size", set_size, is_subset, rule
    similarity, critic = algorithm.similarity, algorithm.critic
    if similarity is not None:
        yield from _positive(f"{at}.similarity.", similarity, "tail", "batch_tokens")
        yield from _not_negative(f"{at}.similarity.", similarity, "cache", "workers", "gpus_per_worker")
        yield from _not_negative(f"{at}.similarity.", similarity, "sharing", "within", "between")
        batch, is_model = similarity.batch_tokens, similarity.embedder != "hashed"
        yield f"{at}.similarity.batch_tokens", batch, batch is None or is_model, "has no effect on embedder: hashed"
        gpus, has_workers = similarity.gpus_per_worker, similarity.workers > 0
        yield f"{at}.similarity.gpus_per_worker", gpus, gpus == 0 or has_workers, "requires workers"
    if critic is not None:
        yield from _positive(f"{at}.critic.", critic, "lr", "clip")
        yield from _not_negative(f"{at}.critic.", critic, "coef", "warmup")


def _positive(at: str, settings: Any, *names: str) -> Iterator[Rule]:
    for name in names:
        value = getattr(settings, name)
        yield f"{at}{name}", value, value is None or value > 0, "must be positive"


def _not_negative(at: str, settings: Any, *names: str) -> Iterator[Rule]:
    for name in names:
        value = getattr(settings, name)
        yield f"{at}{name}", value, value >= 0, "must not be negative"


def _output(output: str) -> Rule:
    rule = "may contain {name} and {seed} in braces and nothing else"
    try:
        output.format(name="", seed=0)
    except (KeyError, IndexError, ValueError):
        return "output", output, False, rule
    return "output", output, True, rule
