"""Rewards: functions with TRL's signature, `prompts, completions, **columns -> list[float | None]`.

None means that a reward has no opinion of a response. A bundled reward is created by the `make` function of its module;
any other is named `module:function`, the only code outside the package that a recipe runs.
"""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ConfigDict, ValidationError, validate_call
from torch import Tensor

from grpo_trainer import distributed
from grpo_trainer.data import Prompt, prompt_text
from grpo_trainer.deadline import call_within
from grpo_trainer.messages import known_columns, nearest, unknown_name
from grpo_trainer.recipe import Reward
from grpo_trainer.recipes import explain
from grpo_trainer.rewards.weighted import WeightedReward
from grpo_trainer.rollout import Rollout

RewardFunction = Callable[..., Sequence[float | None]]
BUNDLED = ("exact", "gsm8k", "reply", "dialogue", "diversity", "judge", "reward_model")
NAMES = (*BUNDLED, "module:function")


class RewardError(Exception):
    """A reward function failed; the message names it."""


class LoadedReward(NamedTuple):
    settings: Reward
    function: RewardFunction


def load_reward(settings: Reward, where: str = "rewards") -> LoadedReward:
    """Creates a bundled reward or imports `module:function`; errors name the key `where`."""
    return LoadedReward(settings, _load_function(settings, where))


def _load_function(settings: Reward, where: str) -> RewardFunction:
    if settings.name in BUNDLED:
        make = _import(f"grpo_trainer.rewards.{settings.name}:make", where)
        try:
            function: RewardFunction = validate_call(config=ConfigDict(strict=True))(make)(**settings.options)
        except ValidationError as error:
            known = list(inspect.signature(make).parameters)
            raise ValueError(explain(error, f"{where}.options", lambda _: known)) from None
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError  # some of their kinds take no text
            raise kind(f"{where}.options: {error}") from error
        return function
    if ":" not in settings.name:
        raise ValueError(unknown_name(f"{where}.name", settings.name, NAMES))
    if settings.options:
        raise ValueError(f"{where}.options: requires a bundled reward, got {settings.options!r} with {settings.name!r}")
    function = _import(settings.name, where)
    if not callable(function) or isinstance(function, type):
        way_out = "; name an instance of the class" if isinstance(function, type) else ""
        raise TypeError(
            f"{where}.name: must name a function, got {settings.name!r}, {type(function).__name__}{way_out}"
        )
    imported: RewardFunction = function
    return imported


def _import(path: str, where: str) -> Any:
    module, _, name = path.partition(":")
    try:
        loaded = importlib.import_module(module)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise RewardError(f"{where}.name: cannot load {path!r}: {error}") from error
    if not hasattr(loaded, name):
        functions = [other for other, value in vars(loaded).items() if callable(value)]
        raise RewardError(f"{where}.name: cannot load {path!r}: {module} has no {name!r}{nearest(name, functions)}")
    return getattr(loaded, name)


def require_columns(reward: LoadedReward, where: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """Raises if a reward needs a column that no line has, before anything is computed.

    Args:
        reward: the reward; one whose failures are skipped may lack columns.
        where: its key, for errors.
        lines: the lines that it will score.
    """
    settings, function = reward
    columns = {name for line in lines for name in line} - {"prompt", "prompt_ids"}
    for name in ("prompts", "completions", "truncated"):
        if name in columns:
            raise ValueError(f"{where}: the data must not have the column {name!r}, which rewards get as an argument")
    if settings.on_error == "skip" or not lines:
        return
    known = sorted(columns | {"truncated"})
    for names in _needs(function):
        if not any(name in known for name in names):
            needed = " or ".join(map(repr, names))
            way_out = f"; set {where.rpartition('.')[0]} for others"
            columns_there = known_columns(names[0], known)
            raise ValueError(f"{where}: {settings.name!r} needs the column {needed}{columns_there}{way_out}")
    if not _is_bundled(function):
        _refuse_arguments(settings, function, where, known)


def gaps(reward: LoadedReward, where: str, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a sentence for each column that a reward takes by name and that some lines lack."""
    settings, function = reward
    for names in _needs(function):
        lacking = sum(all(line.get(name) is None for name in names) for line in lines)
        if 0 < lacking < len(lines) and "truncated" not in names:
            needed = " or ".join(map(repr, names))
            yield f"{where}: {settings.name!r} gets None for {needed}, which {lacking} of {len(lines)} lines lack"


def _refuse_arguments(setting: Reward, function: RewardFunction, where: str, columns: Sequence[str]) -> None:
    """Raises if a reward cannot be called with the columns of the data."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not every callable has a signature
        return
    try:
        signature.bind(**dict.fromkeys(["prompts", "completions", *columns]))
    except TypeError as error:
        raise ValueError(
            f"{where}: {setting.name!r} must take prompts, completions and the columns of the data, such as (prompts, "
            f"completions, **columns), {error}"
        ) from None


def _needs(function: RewardFunction) -> list[tuple[str, ...]]:
    """Alternatives for each column without which a reward cannot be called."""
    if _is_bundled(function) and hasattr(function, "needs"):
        needs: list[tuple[str, ...]] = function.needs
        return needs
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not every callable has a signature
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in parameters if p.kind in by_name and p.default is inspect.Parameter.empty]
    return [(name,) for name in required if name not in ("prompts", "completions")]


class Scores(NamedTuple):
    """Rewards of N responses."""

    values: Tensor  # [N, R] in float64, NaN where a response was not scored
    skipped: int  # number of scores that were skipped because a function failed, or counted as "failed" by it
    components: list[dict[str, Tensor]]  # of each reward, [N] by name before weights; NaN where it was not scored


def score(loaded: Sequence[LoadedReward], rollout: Rollout) -> Scores:
    """Scores a rollout; each process scores whole prompts, its part of them."""
    prompts, columns = _columns(rollout)
    local, size = distributed.local_range(len(rollout.items)), rollout.group_size
    rows = slice(local.start * size, local.stop * size)
    prompts, texts = prompts[rows], rollout.texts[rows]
    columns = {name: values[rows] for name, values in columns.items()}
    rewards, components, skipped = [], [], 0
    with distributed.fail_together():
        for setting, function in loaded:
            counters = _counters(function)
            counters.update(dict.fromkeys(counters, 0))
            values, parts, failed = _values(setting, function, prompts, texts, columns) if prompts else ([], {}, 0)
            failed += _counters(function).get("failed", 0)  # read again: the call may have replaced the dict
            rewards.append(values)
            components.append(parts)
            skipped += failed

    def gathered(local_rows: list[list[float]]) -> Tensor:
        scores = torch.tensor(local_rows, dtype=torch.float64).T.contiguous()
        return distributed.all_gather_rows(scores, range(rows.start, rows.stop), len(rollout.texts))

    # a process without a prompt, or whose function failed, does not know the names
    known = distributed.all_gather_objects([list(parts) for parts in components])
    names = [list(dict.fromkeys(name for of in known for name in of[i])) for i in range(len(loaded))]
    flat = [
        parts.get(name, [math.nan] * len(texts)) for parts, of in zip(components, names, strict=True) for name in of
    ]
    columns_of = iter(gathered(flat).unbind(1) if flat else [])
    by_name = [{name: next(columns_of) for name in of} for of in names]
    return Scores(gathered(rewards), int(distributed.all_reduce_sum(torch.tensor(skipped))), by_name)


def component_means(loaded: Sequence[LoadedReward], components: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Means of the components over the scored responses; named after their reward, too, if several report some."""
    names = [reward.settings.name for reward in loaded]
    is_one = sum(map(bool, components)) <= 1
    means = {}
    for i, parts in enumerate(components):
        number = f".{i}" if names.count(names[i]) > 1 else ""
        for name, values in parts.items():
            means[name if is_one else f"{names[i]}{number}.{name}"] = float(values.nanmean())
    return means


def _counters(function: RewardFunction) -> dict[str, int]:
    """Counters of the bundled rewards that keep some; a user's attribute of this name is the user's own."""
    counters: dict[str, int] = getattr(function, "counters", {}) if _is_bundled(function) else {}
    return counters


def _is_bundled(function: RewardFunction) -> bool:
    return type(function).__module__.startswith("grpo_trainer.")


def sum_counters(loaded: Sequence[LoadedReward]) -> list[dict[str, float]]:
    """Counters of the rewards in the last call of `score`, over all processes; empty where a function has none."""
    sums = []
    for reward in loaded:
        counters = _counters(reward.function)
        totals = distributed.all_reduce_sum(torch.tensor(list(counters.values()), dtype=torch.float64)).tolist()
        sums.append(dict(zip(counters, totals, strict=True)))
    return sums


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
) -> tuple[list[float], dict[str, list[float]], int]:
    """Values of one reward, NaN for None; its components; and the number of skipped scores."""
    where = f"reward {setting.name!r}"
    may_skip = setting.on_error == "skip"
    try:
        values, components = call_within(
            setting.timeout, lambda: _call(setting, function, prompts, texts, columns), "rewards.timeout"
        )
    except RewardError:  # a reward's own limit on failures
        raise
    except (Exception, SystemExit) as error:
        if not may_skip:
            given = (
                f"; the data has the columns {', '.join(columns)}" if isinstance(error, TypeError) and columns else ""
            )
            place = _place(error, function)
            raise RewardError(f"{where} raised {type(error).__name__}: {error}{place}{given}") from error
        return [math.nan] * len(texts), {}, len(texts)
    for name, part in components.items():
        if len(part) != len(texts):
            raise RewardError(
                f"{where}: component {name!r} must have one value for each of {len(texts)} responses, got {len(part)}"
            )
    if len(values) != len(texts):
        raise RewardError(f"{where} must return one value for each of {len(texts)} responses, got {len(values)}")
    failed = 0
    numbers = []
    for i, value in enumerate(values):
        number = math.nan if value is None else _number(value)
        if value is not None and not math.isfinite(number):
            if not may_skip:
                raise RewardError(
                    f"{where} must be a finite number or None, got {value!r} for response {i}, {texts[i][:80]!r}"
                )
            failed, number = failed + 1, math.nan
        numbers.append(number)
    return numbers, components, failed


def _place(error: BaseException, function: RewardFunction) -> str:
    """The last line of the reward's own file that led to the error."""
    called = inspect.unwrap(function)
    code = getattr(called, "__code__", None) or getattr(type(called).__call__, "__code__", None)
    file = getattr(code, "co_filename", "")
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}, line {own[-1]}; GRPO_TRACEBACK=1 shows the rest)" if own else ""


def _call(
    setting: Reward, function: RewardFunction, prompts: list[Prompt], texts: list[str], columns: dict[str, list[Any]]
) -> tuple[list[float | None], dict[str, list[float]]]:
    """Values that a reward returns, and the components that it reports, if any."""
    as_texts = _as_texts(prompts, texts)
    if isinstance(function, WeightedReward):
        return function.graded(**as_texts, **columns)
    returned = function(**(as_texts if setting.name in BUNDLED else _as_trl(prompts, texts)), **columns)
    if inspect.iscoroutine(returned):
        returned.close()  # or Python warns that nothing awaited it
        raise RewardError(
            f"reward {setting.name!r} must be a function that is not async, got a coroutine; call asyncio.run in it"
        )
    if not isinstance(returned, Iterable):
        raise RewardError(
            f"reward {setting.name!r} must return one value for each of {len(texts)} responses, got "
            f"{type(returned).__name__} {returned!r}"
        )
    values = list(returned)
    report = getattr(function, "components", None)
    parts: dict[str, Sequence[Any]] = {} if report is None else report(**as_texts, **columns)
    return values, {name: [math.nan if v is None else _number(v) for v in part] for name, part in parts.items()}


def _number(value: object) -> float:
    if isinstance(value, str):  # "1" would be a number to float
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
