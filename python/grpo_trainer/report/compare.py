"""Paired comparison of two evaluations on the same prompts: differences, confidence intervals, p-values.

The bootstrap resamples prompts, so the interval covers other prompts of the same kind, but not another training seed.
If few prompts differ, the interval is too narrow, because no resample contains what was never observed; the p-value is
still valid, so a claim needs both.
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

from grpo_trainer.evaluate import Result, estimate_pass_at_k

Line = Mapping[str, Any]
Pair = tuple[Line, Line]

_AT_ONCE = 4_000_000  # numbers drawn at a time, to bound memory


@dataclasses.dataclass
class Difference:
    """Difference of means over the prompts with a value on both sides; NaN if there are none."""

    before: float
    after: float
    interval: tuple[float, float]  # 95 % interval of after - before
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
    notes: list[str]  # reasons for NaN, and what was excluded

    @property
    def improvement_percentage(self) -> float:
        before = self.reward.before
        return 100 * self.reward.improvement / abs(before) if before else math.nan

    def to_json(self) -> dict[str, Any]:
        stats = _as_json(self.reward) | {"improvement_percentage": self.improvement_percentage}
        return {
            "comparison_stats": stats,
            "exact": _as_json(self.exact),
            "pass_at_k": {str(k): _as_json(pass_k) for k, pass_k in self.pass_at.items()},
            "confidence": 0.95,
            "resamples": self.resamples,
            "seed": self.seed,
            "notes": self.notes,
        }

    def table(self) -> str:
        """Text table with a line per measure."""
        titles = ("", "before", "after", "change", "95 % interval", "p", "better", "worse", "equal")
        rows = [titles, _row("reward", self.reward), _row("exact", self.exact)]
        rows += [_row(f"pass@{k}", pass_k) for k, pass_k in self.pass_at.items()]
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
    """Compares two evaluations.

    Args:
        before: result of `evaluate`, or its JSON.
        after: another one on the same prompts, in any order.
        solved: reward from which a response counts as correct, where the evaluations do not report correctness.
        resamples: number of bootstrap resamples, and of sign flips if there are too many to enumerate.
        seed: seed of the resamples.
    """
    if resamples < 1:
        raise ValueError(f"compare: resamples must be positive, got {resamples}")
    pairs = paired(_lines(before, "before"), _lines(after, "after"))

    def compare_values(value: Callable[[Line], float]) -> Difference:
        return difference([(value(a), value(b)) for a, b in pairs], resamples, seed)

    def pass_at(k: int) -> Callable[[Line], float]:
        return lambda line: estimate_pass_at_k(_correct_samples(line, solved), k)

    def correct(line: Line) -> float:
        return _number(line["correct"]) if "correct" in line else infer_correct(_number(line["reward"]), solved)

    reward = compare_values(lambda line: _number(line["reward"]))
    counts = [len(line.get("rewards", ())) for pair in pairs for line in pair]
    ks = _ks(before, after, min(counts, default=0))
    return Comparison(
        reward,
        compare_values(correct),
        {k: compare_values(pass_at(k)) for k in ks},
        resamples,
        seed,
        _notes(reward, len(pairs)),
    )


def _ks(before: Result | Mapping[str, Any], after: Result | Mapping[str, Any], samples: int) -> list[int]:
    """Values of k that both evaluations measured, or else powers of 2 and the number of samples."""
    metrics = [r.metrics if isinstance(r, Result) else r.get("metrics") or {} for r in (before, after)]
    measured = set.intersection(*({name for name in of_one if name.startswith("pass@")} for of_one in metrics))
    ks = {int(name[5:]) for name in measured if name[5:].isdigit()}
    return sorted(k for k in ks or {2**i for i in range(20)} | {samples} if 0 < k <= samples)


def infer_correct(reward: float, solved: float) -> float:
    """Correctness inferred from the reward when no field reports it."""
    return math.nan if math.isnan(reward) else float(reward >= solved)


def compare_files(before: Path, after: Path, **settings: Any) -> Comparison:
    """Compares two files evaluations/*.json of a run."""
    return compare(json.loads(before.read_text()), json.loads(after.read_text()), **settings)


def paired(before: Sequence[Line], after: Sequence[Line]) -> list[Pair]:
    """Pairs lines with equal prompts; repeated prompts are paired in order."""
    waiting: dict[str, list[Line]] = defaultdict(list)
    for line in reversed(after):
        waiting[str(line["prompt"])].append(line)
    pairs = []
    for number, line in enumerate(before, 1):
        if not waiting[str(line["prompt"])]:
            raise ValueError(f"compare: prompt {number} before has no counterpart after: {str(line['prompt'])[:200]!r}")
        pairs.append((line, waiting[str(line["prompt"])].pop()))
    unpaired = {id(line) for lines in waiting.values() for line in lines}
    for number, line in enumerate(after, 1):
        if id(line) in unpaired:
            raise ValueError(f"compare: prompt {number} after has no counterpart before: {str(line['prompt'])[:200]!r}")
    return pairs


def difference(values: Sequence[tuple[float, float]], resamples: int = 10_000, seed: int = 0) -> Difference:
    """Summarises pairs (before, after), in any order; pairs that are not finite are excluded."""
    nan = math.nan
    known = sorted(pair for pair in values if all(map(math.isfinite, pair)))
    if not known:
        return Difference(nan, nan, (nan, nan), nan, 0, 0, 0)
    before, after = torch.tensor(known, dtype=torch.float64).T
    change = after - before
    counts = [int(mask.sum()) for mask in (change > 0, change < 0, change == 0)]
    return Difference(
        float(before.mean()),
        float(after.mean()),
        bootstrap_interval(change, resamples, seed),
        sign_flip_p(change, resamples, seed),
        *counts,
    )


def bootstrap_interval(values: Tensor, resamples: int, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; NaN below two values."""
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
    """Two-sided p-value of the sign-flip permutation test on the sum of differences; 1 if all are 0."""
    nonzero = values[values != 0].abs()
    count = len(nonzero)
    observed = float(values.sum().abs()) - 1e-12 * float(nonzero.sum())  # rounding must not break ties
    if 2**count <= resamples:
        bits = torch.arange(2**count)[:, None] >> torch.arange(count) & 1
        return float((_abs_signed_sum(bits, nonzero) >= observed).double().mean())
    generator = torch.Generator().manual_seed(seed)
    as_large = 0
    for done in range(0, resamples, at_once := max(1, _AT_ONCE // count)):
        bits = torch.randint(2, (min(at_once, resamples - done), count), generator=generator)
        as_large += int((_abs_signed_sum(bits, nonzero) >= observed).sum())
    # the observed signs count as one of the draws, so p is never 0
    return (1 + as_large) / (1 + resamples)


def _abs_signed_sum(bits: Tensor, values: Tensor) -> Tensor:
    return ((2 * bits - 1).to(values) @ values).abs()


def _lines(result: Result | Mapping[str, Any], name: str) -> list[Any]:
    lines = result.lines if isinstance(result, Result) else result.get("prompts")
    if not isinstance(lines, list) or not all(
        isinstance(line, Mapping) and {"prompt", "reward"} <= set(line) for line in lines
    ):
        raise ValueError(f"compare: {name} must be an evaluation, with a prompt and a reward in each of its 'prompts'")
    return lines


def _correct_samples(line: Line, solved: float) -> list[float]:
    if "right" in line:
        return [_number(value) for value in line["right"]]
    return [infer_correct(_number(reward), solved) for reward in line["rewards"]]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _notes(reward: Difference, pairs: int) -> list[str]:
    notes = []
    if reward.prompts < pairs:
        notes.append(f"{pairs - reward.prompts} of {pairs} prompts have no reward on one side and are excluded")
    if reward.prompts == 0:
        notes.append("no prompt has a reward on both sides: there is nothing to compare")
    elif reward.prompts == 1:
        notes.append("a single prompt has no interval")
    if reward.before == 0:
        notes.append("the mean reward before is 0: the improvement in percent is undefined")
    return notes


def _as_json(difference: Difference) -> dict[str, Any]:
    return {
        "original_mean_reward": difference.before,
        "trained_mean_reward": difference.after,
        "improvement": difference.improvement,
        "improvement_interval": list(difference.interval),
        "p_value": difference.p_value,
        "problems_improved": difference.improved,
        "problems_worse": difference.worse,
        "problems_equal": difference.equal,
        "share_improved": difference.improved / difference.prompts if difference.prompts else math.nan,
        "share_worse": difference.worse / difference.prompts if difference.prompts else math.nan,
        "share_equal": difference.equal / difference.prompts if difference.prompts else math.nan,
        "total_problems": difference.prompts,
    }


def _row(name: str, difference: Difference) -> tuple[str, ...]:
    low, high = difference.interval
    numbers = (
        f"{difference.before:.4f}",
        f"{difference.after:.4f}",
        f"{difference.improvement:+.4f}",
        f"[{low:+.4f}, {high:+.4f}]",
    )
    return (
        name,
        *numbers,
        f"{difference.p_value:.4f}",
        str(difference.improved),
        str(difference.worse),
        str(difference.equal),
    )
