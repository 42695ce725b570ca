"""What a recipe must hold beyond the types of its keys. Each rule names the key, and the value that breaks it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_trainer.recipe import Algorithm, Optimizer, Recipe, Rl, Sft

Rule = tuple[str, Any, bool, str]  # the key, its value, whether it holds, what must hold


def check(recipe: Recipe) -> None:
    for rule in _rules(recipe):
        key, value, holds, must = rule
        if not holds:
            raise ValueError(f"{key}: {must}, got {value!r}")


def _rules(recipe: Recipe) -> Iterator[Rule]:
    yield _output(recipe.output)
    yield from _positive("", recipe, "threads")
    yield from _of_model(recipe)
    yield from _of_data(recipe)
    yield from _of_shards(recipe)
    for i, phase in enumerate(recipe.phases):
        if phase.sft is not None:
            yield from _of_sft(f"phases.{i}.sft", phase.sft)
        if phase.rl is not None:
            yield from _of_rl(f"phases.{i}.rl", phase.rl)
    evaluation = recipe.evaluation
    yield from _positive("evaluation.", evaluation, "prompts", "test_prompts", "batch", "temperature")
    yield from _not_negative("evaluation.", evaluation, "every", "samples", "tracked")
    yield "evaluation.pass_k", evaluation.pass_k, min(evaluation.pass_k, default=1) > 0, "must be positive"
    yield from _positive("logging.", recipe.logging, "every")
    yield from _not_negative("logging.", recipe.logging, "samples")
    yield from _positive("checkpoints.", recipe.checkpoints, "keep")
    yield from _not_negative("checkpoints.", recipe.checkpoints, "every")


def _of_model(recipe: Recipe) -> Iterator[Rule]:
    model, is_tiny = recipe.model, recipe.model.path == "tiny"
    yield "model.four_bit", model.four_bit, not model.four_bit or model.lora is not None, "goes with lora only"
    yield "model.four_bit", model.four_bit, not (model.four_bit and is_tiny), "does not go with path: tiny"
    mixed = model.mixed_precision
    yield "model.mixed_precision", mixed, mixed == "no" or model.dtype == "float32", "goes with dtype: float32 only"
    yield from _positive("model.", model, "max_prompt_tokens")
    yield from _positive("model.tiny.", model.tiny, "hidden", "layers", "heads", "intermediate", "vocabulary")
    divides = model.tiny.hidden % max(model.tiny.heads, 1) == 0
    yield "model.tiny.heads", model.tiny.heads, divides, f"must divide hidden, {model.tiny.hidden}"
    if model.lora is not None:
        yield from _positive("model.lora.", model.lora, "rank", "alpha")
        yield "model.lora.dropout", model.lora.dropout, 0 <= model.lora.dropout < 1, "must be in [0, 1)"


def _of_shards(recipe: Recipe) -> Iterator[Rule]:
    if recipe.distributed != "fsdp2":
        return
    must = "does not go with distributed: fsdp2"
    yield "model.lora", recipe.model.lora, recipe.model.lora is None, must
    yield "model.mixed_precision", recipe.model.mixed_precision, recipe.model.mixed_precision != "fp16", must
    for i, phase in enumerate(recipe.phases):
        if phase.rl is not None and phase.rl.algorithm.critic is not None:
            is_separate = phase.rl.algorithm.critic.separate
            yield f"phases.{i}.rl.algorithm.critic.separate", is_separate, not is_separate, must


def _of_data(recipe: Recipe) -> Iterator[Rule]:
    data = recipe.data
    if data.task is None:
        yield "data.train", data.train, data.train is not None, "must be given without a task"
        yield "data.options", data.options, not data.options, "are of a bundled task"
    else:
        for name in ("train", "sft", "validation", "test"):
            path = getattr(data, name)
            yield f"data.{name}", path, path is None, f"goes with task: null, which is {data.task!r}"
    yield from _positive("data.", data, "limit")


def _of_sft(at: str, sft: Sft) -> Iterator[Rule]:
    yield from _positive(f"{at}.", sft, "steps", "batch", "micro_batch")
    yield from _of_optimizer(f"{at}.optimizer", sft.optimizer)
    if sft.polychromic is not None:
        weight = sft.polychromic.weight
        yield f"{at}.polychromic.weight", weight, 0 <= weight <= 1, "must be in [0, 1]"


def _of_optimizer(at: str, optimizer: Optimizer) -> Iterator[Rule]:
    yield f"{at}.lr", optimizer.lr, 0 < optimizer.lr < math.inf, "must be positive"
    betas = optimizer.betas
    yield f"{at}.betas", betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "must be two in [0, 1)"
    yield from _not_negative(f"{at}.", optimizer, "eps", "weight_decay", "warmup", "final", "grad_clip")


def _of_rl(at: str, rl: Rl) -> Iterator[Rule]:
    rollout, rows = rl.rollout, rl.rollout.prompts * rl.rollout.group_size
    yield from _positive(f"{at}.", rl, "steps", "epochs", "micro_batch")
    yield from _of_optimizer(f"{at}.optimizer", rl.optimizer)
    yield from _positive(f"{at}.rollout.", rollout, "prompts", "group_size", "temperature", "max_new_tokens", "batch")
    yield from _not_negative(f"{at}.rollout.", rollout, "top_k", "min_new_tokens")
    yield f"{at}.rollout", rows, rows > 1, "must have more than one response"
    yield f"{at}.rollout.top_p", rollout.top_p, 0 < rollout.top_p <= 1, "must be in (0, 1]"
    least = rollout.min_new_tokens
    yield f"{at}.rollout.min_new_tokens", least, least <= rollout.max_new_tokens, "must not exceed max_new_tokens"
    minibatches = rl.minibatches
    yield f"{at}.minibatches", minibatches, 0 < minibatches <= rollout.prompts, "must be 1 to rollout.prompts"
    yield from _of_algorithm(f"{at}.algorithm", rl.algorithm, rollout.group_size)


def _of_algorithm(at: str, algorithm: Algorithm, group_size: int) -> Iterator[Rule]:
    ratio, size = algorithm.top_k_ratio, algorithm.set_size
    yield f"{at}.top_k_ratio", ratio, 0 < ratio <= 1, "must be in (0, 1]"
    fits = size == 0 or 2 <= size < group_size
    yield (f"{at}.set_size", size, fits,
           "must be 0, or 2 to less than the group size, as a set of all is worth the same to each")  # fmt: skip
    if algorithm.similarity is not None:
        yield from _positive(f"{at}.similarity.", algorithm.similarity, "tail")
        yield from _not_negative(
            f"{at}.similarity.", algorithm.similarity, "cache", "workers", "gpus_per_worker", "sharing", "within",
            "between",
        )  # fmt: skip
        gpus, has_workers = algorithm.similarity.gpus_per_worker, algorithm.similarity.workers > 0
        yield f"{at}.similarity.gpus_per_worker", gpus, gpus == 0 or has_workers, "goes with workers"
    if algorithm.critic is not None:
        yield from _positive(f"{at}.critic.", algorithm.critic, "lr", "clip")
        yield from _not_negative(f"{at}.critic.", algorithm.critic, "coef", "warmup")


def _positive(at: str, holder: Any, *names: str) -> Iterator[Rule]:
    for name in names:
        value = getattr(holder, name)
        yield f"{at}{name}", value, value is None or value > 0, "must be positive"


def _not_negative(at: str, holder: Any, *names: str) -> Iterator[Rule]:
    for name in names:
        value = getattr(holder, name)
        yield f"{at}{name}", value, value >= 0, "must not be negative"


def _output(output: str) -> Rule:
    must = "may have {name} and {seed} in braces and nothing else"
    try:
        output.format(name="", seed=0)
    except (KeyError, IndexError, ValueError):
        return "output", output, False, must
    return "output", output, True, must
