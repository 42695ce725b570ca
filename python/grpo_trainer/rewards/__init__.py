"""Rewards: functions with TRL's signature, `prompts, completions, **columns -> list[float | None]`.

None means that a reward has no opinion of a response. A bundled reward is a class, whose fields are its options; any
other is named `module:function`, the only code outside the package that a recipe runs.
"""

from __future__ import annotations

import importlib
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_trainer import distributed
from grpo_trainer.data import Prompt, prompt_text
from grpo_trainer.messages import known_columns, nearest, unknown_name
from grpo_trainer.recipe import Reward
from grpo_trainer.recipes import validated
from grpo_trainer.rewards.base import BundledReward, WeightedReward
from grpo_trainer.rollout import Rollout

RewardFunction = Callable[..., Sequence[float | None]]
T = TypeVar("T")
BUNDLED = {  # class in the module of each
    "exact": "Exact",
    "gsm8k": "Gsm8k",
    "reply": "Reply",
    "dialogue": "Dialogue",
    "diversity": "Diversity",
    "judge": "Judge",
    "reward_model": "RewardModel",
}
NAMES = (*BUNDLED, "module:function")


class RewardError(Exception):
    """A reward function failed; the message names it."""


class LoadedReward(NamedTuple):
    settings: Reward
    function: RewardFunction


def load_reward(settings: Reward, where: str = "rewards") -> LoadedReward:
    """Creates a bundled reward or imports `module:function`; errors name the key `where`."""
    name, options = settings.name, settings.options
    if name in BUNDLED:
        return LoadedReward(settings, validated(load_class(name), options, f"{where}.options"))
    if ":" not in name:
        raise ValueError(unknown_name(f"{where}.name", name, NAMES))
    if options:
        raise ValueError(f"{where}.options: requires a bundled reward, got {options!r} with {name!r}")
    function = _import(name, where)
    if not callable(function) or isinstance(function, type):
        way_out = "; name an instance of the class" if isinstance(function, type) else ""
        raise TypeError(f"{where}.name: must name a function, got {name!r}, {type(function).__name__}{way_out}")
    return LoadedReward(settings, function)


def load_class(name: str) -> Any:
    """The class of a bundled reward."""
    return _import(f"grpo_trainer.rewards.{name}:{BUNDLED[name]}", "rewards")


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
    signature = None if isinstance(function, BundledReward) else _signature(function)
    try:
        if signature is not None:
            signature.bind(**dict.fromkeys(["prompts", "completions", *known]))
    except TypeError as error:
        raise ValueError(
            f"{where}: {settings.name!r} must take prompts, completions and the columns of the data, such as (prompts, "
            f"completions, **columns), {error}"
        ) from None


def gaps(reward: LoadedReward, where: str, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a sentence for each column that a reward takes by name and that some lines lack."""
    settings, function = reward
    for names in _needs(function):
        lacking = sum(all(line.get(name) is None for name in names) for line in lines)
        if 0 < lacking < len(lines) and "truncated" not in names:
            needed = " or ".join(map(repr, names))
            yield f"{where}: {settings.name!r} gets None for {needed}, which {lacking} of {len(lines)} lines lack"


def _signature(function: RewardFunction) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):  # not every callable has one
        return None


def _needs(function: RewardFunction) -> Sequence[tuple[str, ...]]:
    """Alternatives for each column without which a reward cannot be called."""
    if isinstance(function, BundledReward):
        return function.needs
    signature = _signature(function)
    parameters = [] if signature is None else signature.parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in parameters if p.kind in by_name and p.default is inspect.Parameter.empty]
    return [(name,) for name in required if name not in ("prompts", "completions")]


class Scores(NamedTuple):
    """Rewards of N responses."""

    values: Tensor  # [N, R] in float64, NaN where a response was not scored
    skipped: int  # number of scores that were skipped because a function failed, or counted as "failed" by it
    components: list[dict[str, Tensor]]  # of each reward, [N] by name before weights; NaN where it was not scored


class Graded(NamedTuple):
    """Values of one reward in one process, NaN for None."""

    values: list[float]
    components: dict[str, list[float]]
    skipped: int


def score(loaded: Sequence[LoadedReward], rollout: Rollout) -> Scores:
    """Scores a rollout; each process scores whole prompts, its part of them."""
    local, size = distributed.local_range(len(rollout.items)), rollout.group_size
    rows = slice(local.start * size, local.stop * size)
    items = [item for item in rollout.items[local.start : local.stop] for _ in range(size)]
    names = sorted({name for item in rollout.items for name in item} - {"prompt", "prompt_ids"})
    columns = {name: [item.get(name) for item in items] for name in names}
    columns["truncated"] = rollout.truncated[rows].tolist()
    with distributed.fail_together():
        prompts, texts = [item["prompt"] for item in items], rollout.texts[rows]
        graded = [_grade(reward, prompts, texts, columns) for reward in loaded]
    parts = distributed.all_gather_objects(graded)  # of consecutive rows
    values = [[value for part in parts for value in part[i].values] for i in range(len(loaded))]
    components = []
    for of_reward in zip(*parts, strict=True):
        # a process without a prompt, or whose function failed, does not know the names
        names = list(dict.fromkeys(name for part in of_reward for name in part.components))
        columns_of = {
            name: [v for part in of_reward for v in part.components.get(name, [math.nan] * len(part.values))]
            for name in names
        }
        components.append({name: torch.tensor(column, dtype=torch.float64) for name, column in columns_of.items()})
    skipped = sum(one.skipped for part in parts for one in part)
    return Scores(torch.tensor(values, dtype=torch.float64).T.contiguous(), skipped, components)


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
    return function.counters if isinstance(function, BundledReward) else {}


def sum_counters(loaded: Sequence[LoadedReward]) -> list[dict[str, float]]:
    """Counters of the rewards in the last call of `score`, over all processes; empty where a function has none."""
    sums = []
    for reward in loaded:
        counters = _counters(reward.function)
        totals = distributed.all_reduce_sum(torch.tensor(list(counters.values()), dtype=torch.float64)).tolist()
        sums.append(dict(zip(counters, totals, strict=True)))
    return sums


def _grade(reward: LoadedReward, prompts: list[Prompt], texts: list[str], columns: dict[str, list[Any]]) -> Graded:
    """Values and components of one reward; failures are counted where they may be skipped."""
    settings, function = reward
    where, may_skip = f"reward {settings.name!r}", settings.on_error == "skip"
    counters = _counters(function)
    counters.update(dict.fromkeys(counters, 0))
    if not texts:
        return Graded([], {}, 0)
    try:
        values, components = _within(settings.timeout, lambda: _call(reward, prompts, texts, columns))
    except RewardError:  # a reward's own limit on failures
        raise
    except (Exception, SystemExit) as error:
        is_slow = isinstance(error, TimeoutError)  # a limit on the whole call
        if may_skip and len(texts) > 1 and not is_slow and scores_rows_alone(function):
            return _joined([_grade(reward, [p], [t], row) for p, t, row in _rows(prompts, texts, columns)])
        if may_skip:
            return Graded([math.nan] * len(texts), {}, len(texts))
        given = f"; the data has the columns {', '.join(columns)}" if isinstance(error, TypeError) else ""
        raise RewardError(f"{where} raised {type(error).__name__}: {error}{_place(error, function)}{given}") from error
    for name, part in components.items():
        if len(part) != len(texts):
            rule = f"must have one value for each of {len(texts)} responses, got {len(part)}"
            raise RewardError(f"{where}: component {name!r} {rule}")
    if len(values) != len(texts):
        raise RewardError(f"{where} must return one value for each of {len(texts)} responses, got {len(values)}")
    numbers = [math.nan if value is None else _number(value) for value in values]
    bad = [i for i, value in enumerate(values) if value is not None and not math.isfinite(numbers[i])]
    if bad and not may_skip:
        shown = f"{values[bad[0]]!r} for response {bad[0]}, {texts[bad[0]][:80]!r}"
        raise RewardError(f"{where} must be a finite number or None, got {shown}")
    for i in bad:
        numbers[i] = math.nan
    return Graded(numbers, components, len(bad) + _counters(function).get("failed", 0))


def scores_rows_alone(function: RewardFunction) -> bool:
    """Whether a reward scores each response by itself, so that one that fails concerns no other."""
    return isinstance(function, WeightedReward) and type(function).rows is WeightedReward.rows


def _rows(
    prompts: list[Prompt], texts: list[str], columns: dict[str, list[Any]]
) -> Iterator[tuple[Prompt, str, dict[str, list[Any]]]]:
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        yield prompt, text, {name: values[i : i + 1] for name, values in columns.items()}


def _joined(rows: Sequence[Graded]) -> Graded:
    names = dict.fromkeys(name for row in rows for name in row.components)
    components = {name: [v for row in rows for v in row.components.get(name, [math.nan])] for name in names}
    return Graded([row.values[0] for row in rows], components, sum(row.skipped for row in rows))


def _within(seconds: float | None, call: Callable[[], T]) -> T:
    """Result of a call, or TimeoutError if it takes longer than `rewards.timeout`.

    Python cannot end a thread, so a call that hangs is left behind; it does not keep the process from ending.
    """
    if seconds is None:
        return call()
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result.done():
        raise TimeoutError(f"no result within {seconds:g} s (rewards.timeout)")
    return result.result()


def _place(error: BaseException, function: RewardFunction) -> str:
    """The last line of the reward's own file that led to the error."""
    called = inspect.unwrap(function)
    code = getattr(called, "__code__", None) or getattr(type(called).__call__, "__code__", None)
    file = getattr(code, "co_filename", "")
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}, line {own[-1]}; GRPO_TRACEBACK=1 shows the rest)" if own else ""


def _call(
    reward: LoadedReward, prompts: list[Prompt], texts: list[str], columns: dict[str, list[Any]]
) -> tuple[Sequence[Any], dict[str, list[float]]]:
    """Values that a reward returns, and the components that it reports, if any."""
    settings, function = reward
    as_texts: dict[str, Any] = {"prompts": [prompt_text(prompt) for prompt in prompts], "completions": texts}
    if isinstance(function, WeightedReward):
        return function.graded(**as_texts, **columns)
    completions: list[Any] = texts
    if not isinstance(function, BundledReward):  # TRL's arguments: prompts of messages are answered by messages
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
    values: Any = function(prompts=prompts, completions=completions, **columns)
    if inspect.iscoroutine(values):
        values.close()  # or Python warns that nothing awaited it
        rule = "must be a function that is not async, got a coroutine; call asyncio.run in it"
        raise RewardError(f"reward {settings.name!r} {rule}")
    if not isinstance(values, Iterable) or isinstance(values, Mapping | Set):  # whose keys would be the rewards
        got = f"{type(values).__name__} {values!r}"
        raise RewardError(
            f"reward {settings.name!r} must return one value for each of {len(texts)} responses, got {got}"
        )
    report = getattr(function, "components", None)
    parts: dict[str, Sequence[Any]] = {} if report is None else report(**as_texts, **columns)
    components = {name: [math.nan if v is None else _number(v) for v in part] for name, part in parts.items()}
    return list(values), components


def _number(value: object) -> float:
    if isinstance(value, str):  # "1" would be a number to float
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
