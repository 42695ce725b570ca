"""A dry run: what keeps a recipe from starting, without loading a model's weights or writing anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from grpo_trainer import checkpoint
from grpo_trainer.data import encode_prompt
from grpo_trainer.pretrained import find_reference, load_tokenizer
from grpo_trainer.recipe import Model, Recipe
from grpo_trainer.setup import check_backend, check_packages, load_rewards
from grpo_trainer.splits import corpus_of, load_splits, no_usable_line, require_lines
from grpo_trainer.tasks import Splits
from grpo_trainer.tiny import train_tokenizer
from grpo_trainer.trackers import TRACKERS


def dry_run(recipe: Recipe, may_hold_run: bool = False) -> tuple[list[str], list[str]]:
    """Lines that describe the run, and the problems that keep it from starting."""
    lines, problems = [f"{recipe.name}: {', '.join(_described(recipe)) or 'an evaluation only'}"], []
    for check in _checks(recipe, may_hold_run):
        try:
            result = check()
            lines += [result] if isinstance(result, str) else result if isinstance(result, list) else []
        except Exception as error:  # whatever keeps the run from starting is reported, the next problem with it
            problems.append(str(error).strip() or type(error).__name__)
    return lines, list(dict.fromkeys(problems))


def _checks(recipe: Recipe, may_hold_run: bool) -> Iterator[Callable[[], Any]]:
    """Yields checks that raise a problem or return what the user may want to know."""
    splits = functools.cache(lambda: load_splits(recipe.data, recipe.seed))

    def described_algorithm() -> str | None:
        plan = check_packages(recipe)
        return None if plan is None else f"{plan.settings.name}: {plan.described()}"

    def noted_run() -> str | None:
        note = None if may_hold_run else checkpoint.found_run(recipe)
        return note and f"note: {note}"

    yield lambda: checkpoint.refuse_used_folder(recipe, may_hold_run=True)
    yield noted_run
    yield lambda: check_backend(recipe.backend)
    yield lambda: require_lines(recipe, splits())
    yield described_algorithm
    yield lambda: load_rewards(recipe, splits())[2]
    yield lambda: _first_batch(recipe, splits())
    yield lambda: find_reference(recipe.model)
    for kind in recipe.logging.to:
        yield functools.partial(TRACKERS[kind], recipe)
    yield lambda: _check_gpu(recipe.model)


def _check_gpu(model: Model) -> None:
    for key in ("attention", "mixed_precision"):
        if getattr(model, key) in ("flash_attention_2", "fp16") and not torch.cuda.is_available():
            raise ValueError(f"model.{key}: must be another without a GPU, got {getattr(model, key)!r}")


def _first_batch(recipe: Recipe, splits: Splits) -> list[str]:
    """Encodes the prompts of the first step, and says how long they are."""
    model, lines = recipe.model, []
    if model.path == "tiny":
        is_seq2seq = model.tiny.architecture == "seq2seq"
        tokenizer = train_tokenizer(corpus_of(recipe.data, splits), model.tiny.vocabulary, is_seq2seq)
    else:
        tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    for name, items, count in (
        ("sft", splits.sft, 0 if recipe.sft is None else recipe.sft.batch),
        ("rl", splits.train, 0 if recipe.rl is None else recipe.rl.rollout.prompts),
    ):
        prompts = [item[recipe.data.prompt if recipe.data.template is None else "prompt"] for item in items[:count]]
        options = model.chat_template_options
        lengths = [len(encode_prompt(tokenizer, prompt, model.chat_template, options)) for prompt in prompts]
        if lengths and min(lengths) > model.max_prompt_length:
            left_out = f"the first {len(lengths)} by model.max_prompt_length, {model.max_prompt_length}"
            raise ValueError(no_usable_line(name, [left_out]))
        if lengths:
            lines.append(f"{name}: {len(items)} lines; the first prompts have {min(lengths)} to {max(lengths)} tokens")
    return lines


def _described(recipe: Recipe) -> Iterator[str]:
    if recipe.sft is not None:
        yield f"{recipe.sft.steps} supervised steps of {recipe.sft.batch} demonstrations"
    if recipe.rl is not None:
        rollout = recipe.rl.rollout
        yield (
            f"{recipe.rl.steps} steps of {recipe.rl.algorithm.name} with {rollout.prompts} x {rollout.num_generations} "
            f"responses of at most {rollout.max_completion_length} tokens"
        )
