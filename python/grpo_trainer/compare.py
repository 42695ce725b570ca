"""Two evaluations on the same prompts, prompt by prompt: what is better, by how much, and how sure that is.

Prompts are what is drawn again: the interval says what other prompts of the same kind would have shown. How another
seed would have trained is beyond it. Where few prompts differ the interval is too narrow, as no resample shows what was
never seen; p is not, so a claim needs both.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.evaluate import Result, pass_at_k_of

Line = Mapping[str, Any]
Pair = tuple[Line, Line]

_AT_ONCE = 4_000_000  # numbers drawn together, so that memory does not grow with the prompts


@dataclasses.dataclass
class Difference:
    """Of means over the prompts that both sides have a value for; NaN where there is none."""

    before: float
    after: float
    interval: tuple[float, float]  # 95 %, of after - before
    p_value: float
    improved: int
    worse: int
    equal: int

    @property
    def improvement(self) -> float:
        return self.after - self.before

    @property
    def prompts(self) -> int:
        return self.improved + self.worse + self.equal


@dataclasses.dataclass
class Comparison:
    reward: Difference
    exact: Difference
    pass_at: dict[int, Difference]
    resamples: int
    seed: int
    notes: list[str]  # why a figure is NaN, or what was left out

    @property
    def improvement_percentage(self) -> float:
        before = self.reward.before
        return 100 * self.reward.improvement / abs(before) if before else math.nan

    def to_json(self) -> dict[str, Any]:
        stats = _as_json(self.reward) | {"improvement_percentage": self.improvement_percentage}
        return {
            "comparison_stats": stats,
            "exact": _as_json(self.exact),
            "pass_at_k": {str(k): _as_json(found) for k, found in self.pass_at.items()},
            "confidence": 0.95,
            "resamples": self.resamples,
            "seed": self.seed,
            "notes": self.notes,
        }

    def table(self) -> str:
        """As text, a line for each measure."""
        titles = ("", "before", "after", "change", "95 % interval", "p", "better", "worse", "equal")
        rows = [titles, _row("reward", self.reward), _row("exact", self.exact)]
        rows += [_row(f"pass@{k}", found) for k, found in self.pass_at.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([*lines, *self.notes])


def compare(
    before: Result | Mapping[str, Any],
    after: Result | Mapping[str, Any],
    *,
    solved: float = 1.0,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """before, after  as `evaluate` gives them or as their JSON says; the prompts may be in different orders
    solved         a response with a reward of at least this is right, where the evaluations do not say which are
    resamples      of the bootstrap, and sign flips where there are too many to go through all
    """
    if resamples < 1:
        raise ValueError(f"compare: resamples must be positive, got {resamples}")
    pairs = paired(_lines(before, "before"), _lines(after, "after"))

    def among(value: Callable[[Line], float]) -> Difference:
        return difference([(value(a), value(b)) for a, b in pairs], resamples, seed)

    def passes(k: int) -> Callable[[Line], float]:
        return lambda line: pass_at_k_of(_right_samples(line, solved), k)

    def right(line: Line) -> float:
        return _number(line["correct"]) if "correct" in line else right_by_reward(_number(line["reward"]), solved)

    reward = among(lambda line: _number(line["reward"]))
    counts = [len(line.get("rewards", ())) for pair in pairs for line in pair]
    known = sorted({2**i for i in range(20) if 2**i <= min(counts)} | {min(counts)} - {0}) if counts else []
    return Comparison(
        reward,
        among(right),
        {k: among(passes(k)) for k in known},
        resamples,
        seed,
        _notes(reward, len(pairs)),
    )


def right_by_reward(reward: float, solved: float) -> float:
    """Of an answer that nothing else says it of."""
    return math.nan if math.isnan(reward) else float(reward >= solved)


def compare_files(before: Path, after: Path, **settings: Any) -> Comparison:
    """Of evaluations that a run wrote, evaluations/*.json."""
    return compare(json.loads(before.read_text()), json.loads(after.read_text()), **settings)


def paired(before: Sequence[Line], after: Sequence[Line]) -> list[Pair]:
    """Lines of the same prompt; where a prompt occurs several times, in their order."""
    waiting: dict[str, list[Line]] = defaultdict(list)
    for line in reversed(after):
        waiting[str(line["prompt"])].append(line)
    pairs = []
    for number, line in enumerate(before, 1):
        if not waiting[str(line["prompt"])]:
            raise ValueError(f"compare: prompt {number} before has no counterpart after: {str(line['prompt'])[:200]!r}")
        pairs.append((line, waiting[str(line["prompt"])].pop()))
    left = {id(line) for lines in waiting.values() for line in lines}
    for number, line in enumerate(after, 1):
        if id(line) in left:
            raise ValueError(f"compare: prompt {number} after has no counterpart before: {str(line['prompt'])[:200]!r}")
    return pairs


def difference(values: Sequence[tuple[float, float]], resamples: int = 10_000, seed: int = 0) -> Difference:
    """Of pairs before and after; those that are not both numbers are left out. The order does not matter."""
    nan = math.nan
    known = sorted(pair for pair in values if all(map(math.isfinite, pair)))
    if not known:
        return Difference(nan, nan, (nan, nan), nan, 0, 0, 0)
    before, after = torch.tensor(known, dtype=torch.float64).T
    apart = after - before
    counts = [int(some.sum()) for some in (apart > 0, apart < 0, apart == 0)]
    return Difference(
        float(before.mean()), float(after.mean()), bootstrap_interval(apart, resamples, seed),
        sign_flip_p(apart, resamples, seed), *counts,
    )  # fmt: skip


def bootstrap_interval(values: Tensor, resamples: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentiles of the mean of values that are drawn again with replacement. NaN below two values."""
    count = len(values)
    if count < 2:
        return math.nan, math.nan
    generator = torch.Generator().manual_seed(seed)
    means = []
    for done in range(0, resamples, at_once := max(1, _AT_ONCE // count)):
        drawn = torch.randint(count, (min(at_once, resamples - done), count), generator=generator)
        means.append(values[drawn].mean(1))
    tail = (1 - level) / 2
    low, high = torch.cat(means).quantile(torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high


def sign_flip_p(values: Tensor, resamples: int, seed: int) -> float:
    """How often differences with signs at random are as far from 0 in sum; two-sided. Without any difference, 1."""
    moved = values[values != 0].abs()
    count = len(moved)
    seen = float(values.sum().abs()) - 1e-12 * float(moved.sum())  # what is equal but for rounding is as far
    if 2**count <= resamples:
        bits = torch.arange(2**count)[:, None] >> torch.arange(count) & 1
        return float((_signed(bits, moved) >= seen).double().mean())
    generator = torch.Generator().manual_seed(seed)
    as_far = 0
    for done in range(0, resamples, at_once := max(1, _AT_ONCE // count)):
        bits = torch.randint(2, (min(at_once, resamples - done), count), generator=generator)
        as_far += int((_signed(bits, moved) >= seen).sum())
    # the signs that were seen are one of the draws, so that p is never 0
    return (1 + as_far) / (1 + resamples)


def _signed(bits: Tensor, moved: Tensor) -> Tensor:
    return ((2 * bits - 1).to(moved) @ moved).abs()


def _lines(result: Result | Mapping[str, Any], name: str) -> list[Any]:
    lines = result.lines if isinstance(result, Result) else result.get("prompts")
    if not isinstance(lines, list) or not all(
        isinstance(line, Mapping) and {"prompt", "reward"} <= set(line) for line in lines
    ):
        raise ValueError(f"compare: {name} must be an evaluation, with a prompt and a reward in each of its 'prompts'")
    return lines


def _right_samples(line: Line, solved: float) -> list[float]:
    if "right" in line:
        return [_number(each) for each in line["right"]]
    return [right_by_reward(_number(reward), solved) for reward in line["rewards"]]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _notes(reward: Difference, pairs: int) -> list[str]:
    notes = []
    if reward.prompts < pairs:
        notes.append(f"{pairs - reward.prompts} of {pairs} prompts have no reward on one side, and are left out")
    if reward.prompts == 0:
        notes.append("no prompt has a reward on both sides: there is nothing to compare")
    elif reward.prompts == 1:
        notes.append("one prompt has no interval")
    if reward.before == 0:
        notes.append("the mean reward before is 0: an improvement in percent of it has no value")
    return notes


def _as_json(found: Difference) -> dict[str, Any]:
    return {
        "original_mean_reward": found.before,
        "trained_mean_reward": found.after,
        "improvement": found.improvement,
        "improvement_interval": list(found.interval),
        "p_value": found.p_value,
        "problems_improved": found.improved,
        "problems_worse": found.worse,
        "problems_equal": found.equal,
        "share_improved": found.improved / found.prompts if found.prompts else math.nan,
        "share_worse": found.worse / found.prompts if found.prompts else math.nan,
        "share_equal": found.equal / found.prompts if found.prompts else math.nan,
        "total_problems": found.prompts,
    }


def _row(name: str, found: Difference) -> tuple[str, ...]:
    low, high = found.interval
    numbers = (f"{found.before:.4f}", f"{found.after:.4f}", f"{found.improvement:+.4f}", f"[{low:+.4f}, {high:+.4f}]")
    return (name, *numbers, f"{found.p_value:.4f}", str(found.improved), str(found.worse), str(found.equal))
