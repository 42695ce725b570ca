"""What responses are worth: functions with TRL's signature, `prompts, completions, **columns -> list[float | None]`.

None: this reward has nothing to say about the response. A bundled reward is made by a function of its options; any
other is named `module:function`, the only code that a recipe can run.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_trainer import processes
from grpo_trainer.model import prompt_text
from grpo_trainer.recipe import Reward
from grpo_trainer.rollout import Rollout
from grpo_trainer.settings import unknown

Prompt = str | list[dict[str, str]]
RewardFunction = Callable[..., Sequence[float | None]]
BUNDLED = {
    "exact": "grpo_trainer.rewards.exact:make",
    "gsm8k": "grpo_trainer.rewards.gsm8k:make",
    "reply": "grpo_trainer.rewards.reply:make",
    "dialogue": "grpo_trainer.rewards.dialogue:make",
    "diversity": "grpo_trainer.rewards.diversity:make",
}


class RewardError(Exception):
    """A reward function failed; the message names it."""


def load_reward(settings: Reward) -> RewardFunction:
    if settings.name in BUNDLED:
        make = _named(BUNDLED[settings.name])
        accepted = inspect.signature(make).parameters
        if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in accepted.values()):
            for option in settings.options:
                if option not in accepted:
                    raise ValueError(unknown("rewards.options", option, list(accepted)))
        made: RewardFunction = make(**settings.options)
        return made
    if ":" not in settings.name:
        raise ValueError(unknown("rewards.name", settings.name, [*BUNDLED, "module:function"]))
    if settings.options:
        raise ValueError(f"rewards.options: are of bundled rewards, got {settings.options!r} with {settings.name!r}")
    return _named(settings.name)


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RewardError(f"rewards.name: cannot load {path!r}: {error}") from error


def score(settings: Sequence[Reward], functions: Sequence[RewardFunction], rollout: Rollout) -> tuple[Tensor, int]:
    """Rewards [N, R] in float64, NaN where there is none; and how many were left out because a function failed. Each
    process scores its share of the prompts, all responses to them."""
    prompts, columns = _columns(rollout)
    some, size = processes.share(len(rollout.items)), rollout.group_size
    mine = slice(some.start * size, some.stop * size)
    prompts, texts = prompts[mine], rollout.texts[mine]
    columns = {name: values[mine] for name, values in columns.items()}
    found, skipped = [], 0
    with processes.together():
        for setting, function in zip(settings, functions, strict=True):
            values, failed = _values(setting, function, prompts, texts, columns) if prompts else ([], 0)
            found.append(values)
            skipped += failed
    scores = torch.tensor(found, dtype=torch.float64).T.contiguous()
    rows = range(mine.start, mine.stop)
    return processes.whole(scores, rows, len(rollout.texts)), int(processes.total(torch.tensor(skipped)))


def components(function: RewardFunction, rollout: Rollout) -> dict[str, list[float]]:
    """What a reward is made of, of each response; nothing if it does not say."""
    if not hasattr(function, "components"):
        return {}
    prompts, columns = _columns(rollout)
    texts = [prompt_text(prompt) for prompt in prompts]
    found: dict[str, list[float]] = function.components(prompts=texts, completions=rollout.texts, **columns)
    return found


def _columns(rollout: Rollout) -> tuple[list[Prompt], dict[str, list[Any]]]:
    """The prompt of each response, and the data's other columns."""
    items = [item for item in rollout.items for _ in range(rollout.group_size)]
    names = sorted({name for item in rollout.items for name in item} - {"prompt", "prompt_ids"})
    columns = {name: [item.get(name) for item in items] for name in names}
    return [item["prompt"] for item in items], columns | {"truncated": rollout.truncated.tolist()}


def _as_texts(prompts: list[Prompt], texts: list[str]) -> dict[str, list[Any]]:
    return {"prompts": [prompt_text(prompt) for prompt in prompts], "completions": texts}


def _as_trl(prompts: list[Prompt], texts: list[str]) -> dict[str, list[Any]]:
    """A prompt of messages is answered by messages."""
    answers = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    return {"prompts": prompts, "completions": answers}


def _values(
    setting: Reward, function: RewardFunction, prompts: list[Prompt], texts: list[str], columns: dict[str, list[Any]]
) -> tuple[list[float], int]:
    where = f"reward {setting.name!r}"
    may_skip = setting.on_error == "skip"
    given = _as_texts(prompts, texts) if setting.name in BUNDLED else _as_trl(prompts, texts)
    try:
        values = list(function(**given, **columns))
    except Exception as error:
        if not may_skip:
            raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
        return [math.nan] * len(texts), len(texts)
    if len(values) != len(texts):
        raise RewardError(f"{where} must give one value for each of {len(texts)} responses, got {len(values)}")
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
