"""Requirements of a recipe before it starts: files, packages, devices, memory. Nothing is trained or
written, and of a model only its configuration and its tokenizer are read."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from grpo_trainer import checkpoint, engine, memory
from grpo_trainer.data import encode_demonstration, encode_prompt
from grpo_trainer.embed import require_embedder
from grpo_trainer.loading import check_four_bit
from grpo_trainer.policy import context_length
from grpo_trainer.pretrained import is_gguf, load_tokenizer, loading
from grpo_trainer.ray_pool import check_ray
from grpo_trainer.recipe import Model, Recipe, Reward, Rl
from grpo_trainer.recipe_checks import check_lengths, used_embedders
from grpo_trainer.references import check_reference
from grpo_trainer.rewards import gaps, load_reward, require_columns
from grpo_trainer.splits import corpus_of, load_splits, missing_files, no_usable_line, require_lines
from grpo_trainer.tasks.base import Item, Splits
from grpo_trainer.tiny import make_tiny, train_tokenizer
from grpo_trainer.trackers import TRACKERS
from grpo_trainer.train import check_backend, default_rewards, plan_of, rewards_or_default
from grpo_trainer.vocabulary import banned_ids, refuse_banned

Check = Callable[[], Any]
MakeTokenizer = Callable[[], Any]  # made once, when something first needs it


def dry_run(
    recipe: Recipe, processes: int = 1, resume: bool = False, fresh: bool = False
) -> tuple[list[str], list[str]]:
    """Examines a recipe.

    Args:
        recipe: the recipe.
        processes: devices that the run would have.
        resume: the run would continue the one in its folder, which must be of the same recipe.
        fresh: the run would replace the one in its folder.

    Returns:
        Lines that describe the run, and the problems that keep it from starting.
    """
    splits = _readable(recipe)
    tokenizer = functools.cache(lambda: _tokenizer(recipe, splits or load_splits(recipe.data, recipe.seed)))
    found = [problem for check in _checks(recipe, splits, resume, fresh) if (problem := _problem(check))]
    problems = list(dict.fromkeys(found))
    phases = ", ".join(_described(recipe)) or "no phases"
    lines = [f"{recipe.name}: {phases}; {processes} process{'es' if processes > 1 else ''}"]
    lines += [*_algorithms(recipe), *_reward_notes(recipe, splits)]
    if recipe.model.path == "tiny" and any(problem.startswith("data.") for problem in problems):
        return lines, problems  # its vocabulary comes from the data
    try:
        model = _skeleton(recipe, tokenizer)
        estimates = memory.estimate(recipe, model, processes)
    except Exception as error:
        # a wrong algorithm is among the problems already
        reason = str(error).partition("\n")[0].removeprefix("model.path: ")
        if not any(reason in problem for problem in problems):
            unknown = f"model.path: {recipe.model.path!r} cannot be examined, so memory is not estimated: {reason}"
            problems.append(reason if reason.startswith("model.") else unknown)
        return lines, problems
    if problem := _problem(lambda: check_lengths(recipe, context_length(model.lm.config))):
        problems.append(problem)
    if splits is not None and (problem := _problem(lambda: _check_tokens(recipe, splits, tokenizer, model.lm))):
        problems.append(problem)
    counts = f"{model.count / 1e6:,.2f} million weights, {model.trained / 1e6:,.2f} of them trained"
    lines.append(f"{recipe.model.path}: {counts}")
    for estimate in estimates:
        lines += ["", *_table(estimate)]
    needed, (available, device) = max((e.total for e in estimates), default=0.0), _available()
    if needed > available:
        problems.append(
            f"memory: about {_gib(needed)} per device are needed, and this {device} has {_gib(available)}; lower "
            "micro_batch, rollout.batch or max_new_tokens, use model.lora, model.gradient_checkpointing or more "
            "processes with distributed: fsdp2"
        )
    return lines, problems


def _problem(check: Check) -> str | None:
    """The error that a check raises."""
    try:
        check()
    except Exception as error:  # whatever keeps the run from starting is reported, the next problem with it
        return str(error).strip() or type(error).__name__
    return None


def _checks(recipe: Recipe, splits: Splits | None, resume: bool, fresh: bool) -> Iterator[Check]:
    yield lambda: checkpoint.refuse_used_folder(recipe.folder, may_hold_run=resume or fresh)
    if resume:
        yield lambda: checkpoint.load_last(recipe)
    yield lambda: check_backend(recipe.backend)
    yield from _data_checks(recipe, splits)
    yield from _model_checks(recipe.model)
    for kind in recipe.logging.to:
        yield lambda kind=kind: TRACKERS[kind](recipe)  # type: ignore[misc]
    for number, phase in enumerate(recipe.phases):
        if phase.rl is not None:
            yield lambda number=number, rl=phase.rl: plan_of(number, rl)  # type: ignore[misc]
            yield from _rl_checks(f"phases.{number}.rl", phase.rl)
            yield from _reward_checks(f"phases.{number}.rl", phase.rl.rewards, splits, "train")
    if recipe.evaluation.rewards or all(phase.rl is None for phase in recipe.phases):
        for split in ("test", "validation") if recipe.evaluation.every else ("test",):
            yield from _reward_checks("evaluation", recipe.evaluation.rewards, splits, split)
    for key, name in used_embedders(recipe):
        yield functools.partial(require_embedder, key, name)


def _readable(recipe: Recipe) -> Splits | None:
    """The data; None where it cannot be read, which is a problem of its own."""
    try:
        return load_splits(recipe.data, recipe.seed)
    except Exception:
        return None


def _reward_checks(key: str, rewards: list[Reward], splits: Splits | None, split: str) -> Iterator[Check]:
    for i, reward in enumerate(rewards if splits is None else rewards_or_default(rewards, splits)):
        yield functools.partial(_check_reward, reward, f"{key}.rewards.{i}", getattr(splits, split, []))


def _reward_notes(recipe: Recipe, splits: Splits | None) -> Iterator[str]:
    if splits is None:
        return
    yield from default_rewards(recipe, splits)
    for number, phase in enumerate(recipe.phases):
        if phase.rl is None:
            continue
        for i, reward in enumerate(rewards_or_default(phase.rl.rewards, splits)):
            where = f"phases.{number}.rl.rewards.{i}"
            with contextlib.suppress(Exception):  # is among the problems
                yield from gaps(reward, load_reward(reward, where), where, splits.train)


def _check_reward(reward: Reward, where: str, lines: list[Item]) -> None:
    require_columns(reward, load_reward(reward, where), where, lines)


def _data_checks(recipe: Recipe, splits: Splits | None) -> Iterator[Check]:
    data = recipe.data
    if data.task is not None:
        if splits is None:
            yield lambda: load_splits(data, recipe.seed)  # says why
        return
    missing = missing_files(data)
    for problem in missing:
        yield _raising(problem)
    if not missing:
        yield lambda: require_lines(recipe, splits or load_splits(data, recipe.seed))


def _model_checks(model: Model) -> Iterator[Check]:
    packages = {
        "model.lora": ("peft", "grpo-kernels[trainer]", model.lora is not None),
        "model.attention": ("flash_attn", "flash-attn, built for this torch", model.attention == "flash_attention_2"),
    }
    for key, (package, install, is_needed) in packages.items():
        if is_needed and importlib.util.find_spec(package) is None:
            yield _raising(f"{key}: needs the package {package}, which is not installed: pip install {install}")
    if model.four_bit:
        yield check_four_bit
    needs_gpu = {
        "model.attention: flash_attention_2": model.attention == "flash_attention_2",
        "model.mixed_precision: fp16": model.mixed_precision == "fp16",
    }
    for key, is_needed in needs_gpu.items():
        if is_needed and not torch.cuda.is_available():
            yield _raising(f"{key} needs a GPU, and there is none")


def _check_tokens(recipe: Recipe, splits: Splits, tokenizer: MakeTokenizer, lm: Any) -> None:
    """Raises if the reference reads other tokens, or no prompt of a phase fits the model.

    Prompts are encoded up to one that fits.
    """
    model, folder = recipe.model, Path(recipe.model.path)
    if folder.is_dir() and all(path.name == "config.json" for path in folder.iterdir()):
        return  # a configuration alone, for an estimate of the memory
    check_reference(model, tokenizer(), lm)
    if model.banned:
        _check_banned(recipe, splits, tokenizer(), lm)
    chat = (model.chat_template, model.chat_template_options)
    for number, phase in enumerate(recipe.phases):
        kind, lines = ("rl", splits.train) if phase.rl is not None else ("sft", splits.sft)
        lengths = (len(encode_prompt(tokenizer(), line[recipe.data.prompt], *chat)) for line in lines)
        if lines and not any(0 < length <= model.max_prompt_tokens for length in lengths):
            left_out = f"{len(lines)} by model.max_prompt_tokens, {model.max_prompt_tokens}"
            raise ValueError(no_usable_line(f"phase {number} ({kind})", [left_out]))


def _check_banned(recipe: Recipe, splits: Splits, tokenizer: Any, lm: Any) -> None:
    """Raises if a banned token is unknown or ends responses, or if a demonstration has one."""
    from transformers import GenerationConfig

    path = recipe.model.path
    if path != "tiny" and not is_gguf(path):
        with contextlib.suppress(OSError, ValueError), loading("model.path", path):  # a model may have none
            lm.generation_config = GenerationConfig.from_pretrained(path)
    banned = banned_ids(recipe.model.banned, lm, tokenizer)
    if any(phase.sft is not None for phase in recipe.phases):
        for line in splits.sft:
            refuse_banned(banned, tokenizer, encode_demonstration(tokenizer, line["demonstration"]))
    if any(phase.rl is not None and phase.rl.rollout.engine == "vllm" for phase in recipe.phases):
        engine.check_banned(banned)


def _tokenizer(recipe: Recipe, splits: Splits) -> Any:
    model, tiny = recipe.model, recipe.model.tiny
    if model.path != "tiny":
        return load_tokenizer(model.path, model.trust_remote_code)
    return train_tokenizer(corpus_of(recipe.data, splits), tiny.vocabulary, tiny.architecture == "seq2seq")


def _rl_checks(key: str, rl: Rl) -> Iterator[Check]:
    if rl.rollout.engine == "vllm":
        yield lambda: engine.check_installed(f"{key}.rollout", rl.rollout)
    similarity = rl.algorithm.similarity
    if similarity is not None and similarity.workers:
        yield lambda: check_ray(f"{key}.algorithm.similarity.workers")


def _raising(message: str) -> Check:
    def check() -> None:
        raise ValueError(message)

    return check


def _described(recipe: Recipe) -> Iterator[str]:
    for phase in recipe.phases:
        if phase.sft is not None:
            yield f"{phase.sft.steps} supervised steps of {phase.sft.batch} demonstrations"
        if phase.rl is not None:
            rollout = phase.rl.rollout
            yield (
                f"{phase.rl.steps} steps of {phase.rl.algorithm.name} with {rollout.prompts} x {rollout.group_size} "
                f"responses of at most {rollout.max_new_tokens} tokens"
            )


def _algorithms(recipe: Recipe) -> Iterator[str]:
    for number, phase in enumerate(recipe.phases):
        with contextlib.suppress(TypeError, ValueError):  # is among the problems
            if phase.rl is not None:
                yield f"phase {number}, {phase.rl.algorithm.name}: {plan_of(number, phase.rl).described()}"


def _skeleton(recipe: Recipe, tokenizer: MakeTokenizer) -> memory.Skeleton:
    if recipe.model.path != "tiny":
        return memory.load_skeleton(recipe.model)
    tiny = recipe.model.tiny
    return memory.make_skeleton(recipe.model, lambda attention: make_tiny(tiny, tokenizer(), attention))


def _table(estimate: memory.Estimate) -> Iterator[str]:
    yield f"phase {estimate.phase} ({estimate.kind}): memory per device, at most"
    for title, parts in (("", estimate.held), ("sampling: ", estimate.sampling), ("update: ", estimate.update)):
        for name, size in parts.items():
            yield f"  {title + name:<44} {_gib(size):>12}"
    yield f"  {'total, of which sampling or update':<44} {_gib(estimate.total):>12}"
    if estimate.unheld:
        yield f"  {'logits of a micro-batch, which are not held':<44} {_gib(estimate.unheld):>12}"


def _gib(size: float) -> str:
    return f"{size / memory.GIB:,.2f} GiB" if size >= 0.1 * memory.GIB else f"{size / memory.GIB * 1024:,.2f} MiB"


def _available() -> tuple[float, str]:
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory), "GPU"
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), "machine"
