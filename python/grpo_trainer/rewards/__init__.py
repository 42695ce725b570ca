"""Rewards: functions with TRL's signature, `prompts, completions, **columns -> list[float | None]`.

None means that a reward has no opinion of a response. A bundled reward is created by the `make` function of its module;
any other is named `module:function`, the only code outside the package that a recipe runs.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import distributed
from grpo_trainer.data import Prompt, prompt_text
from grpo_trainer.recipe import Reward
from grpo_trainer.rollout import Rollout
from grpo_trainer.settings import unknown_key

RewardFunction = Callable[..., Sequence[float | None]]
BUNDLED = ("exact", "gsm8k", "reply", "dialogue", "diversity")


class RewardError(Exception):
    """A reward function failed; the message names it."""


def load_reward(settings: Reward) -> RewardFunction:
    """Creates a bundled reward or imports `module:function`."""
    if settings.name in BUNDLED:
        make = _import(f"grpo_trainer.rewards.{settings.name}:make")
        accepted = inspect.signature(make).parameters
        if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
            for option in settings.options:
                if option not in accepted:
                    raise ValueError(unknown_key("rewards.options", option, list(accepted)))
        function: RewardFunction = make(**settings.options)
        return function
    if ":" not in settings.name:
        raise ValueError(unknown_key("rewards.name", settings.name, [*BUNDLED, "module:function"]))
    if settings.options:
        raise ValueError(f"rewards.options: requires a bundled reward, got {settings.options!r} with {settings.name!r}")
    return _import(settings.name)


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"rewards.name: cannot load {path!r}: {error}") from error


def score(settings: Sequence[Reward], functions: Sequence[RewardFunction], rollout: Rollout) -> tuple[Tensor, int]:
    """Scores a rollout; each process scores whole prompts, its part of them.

    Returns:
        Rewards [N, R] in float64, NaN where a response was not scored; and the number of scores that were skipped
        because a function failed.
    """
    prompts, columns = _columns(rollout)
    local, size = distributed.local_range(len(rollout.items)), rollout.group_size
    rows = slice(local.start * size, local.stop * size)
    prompts, texts = prompts[rows], rollout.texts[rows]
    columns = {name: values[rows] for name, values in columns.items()}
    rewards, skipped = [], 0
    with distributed.fail_together():
        for setting, function in zip(settings, functions, strict=True):
            values, failed = _values(setting, function, prompts, texts, columns) if prompts else ([], 0)
            rewards.append(values)
            skipped += failed
    scores = torch.tensor(rewards, dtype=torch.float64).T.contiguous()
    gathered = distributed.all_gather_rows(scores, range(rows.start, rows.stop), len(rollout.texts))
    return gathered, int(distributed.all_reduce_sum(torch.tensor(skipped)))


def components(function: RewardFunction, rollout: Rollout) -> dict[str, list[float]]:
    """Components of a reward for each response, by name; empty if it does not report any."""
    if not hasattr(function, "components"):
        return {}
    prompts, columns = _columns(rollout)
    texts = [prompt_text(prompt) for prompt in prompts]
    values: dict[str, list[float]] = function.components(prompts=texts, completions=rollout.texts, **columns)
    return values


def _columns(rollout: Rollout) -> tuple[list[Prompt], dict[str, list[Any]]]:
    """Prompt of each response, and the other columns of the data."""
    items = [item for item in rollout.items for _ in range(rollout.group_size)]
    names = sorted({name for item in rollout.items for name in item} - {"prompt", "prompt_ids"})
    columns = {name: [item.get(name) for item in items] for name in names}
    return [item["prompt"] for item in items], columns | {"truncated": rollout.truncated.tolist()}


def _as_texts(prompts: list[Prompt], texts: list[str]) -> dict[str, list[Any]]:
    return {"prompts": [prompt_text(prompt) for prompt in prompts], "completions": texts}


def _as_trl(prompts: list[Prompt], texts: list[str]) -> dict[str, list[Any]]:
    """TRL's arguments: prompts of messages are answered by messages."""
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return {"prompts": prompts, "completions": completions}


def _values(
    setting: Reward, function: RewardFunction, prompts: list[Prompt], texts: list[str], columns: dict[str, list[Any]]
) -> tuple[list[float], int]:
    """Values of one reward, NaN for None, and the number of skipped scores."""
    where = f"reward {setting.name!r}"
    may_skip = setting.on_error == "skip"
    arguments = _as_texts(prompts, texts) if setting.name in BUNDLED else _as_trl(prompts, texts)
    try:
        values = list(function(**arguments, **columns))
    except Exception as error:
        if not may_skip:
            raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
        return [math.nan] * len(texts), len(texts)
    if len(values) != len(texts):
        raise RewardError(f"{where} must return one value for each of {len(texts)} responses, got {len(values)}")
    failed = 0
    numbers = []
    for i, value in enumerate(values):
        number = math.nan if value is None else _number(value)
        if value is not None and not math.isfinite(number):
            if not may_skip:
                raise RewardError(f"{where} must be finite or None, got {value!r} for response {i}, {texts[i][:80]!r}")
            failed, number = failed + 1, math.nan
        numbers.append(number)
    return numbers, failed


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
