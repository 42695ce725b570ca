"""Paired comparison of two evaluations on the same prompts, and the intervals of all reports.

A bootstrap interval resamples prompts, so it covers other prompts of the same kind, but not another training seed. If
few prompts differ, it is too narrow, because no resample contains what was never observed; the p-value is still valid,
so a claim needs both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from grpo_trainer.report.run_folder import Evaluated

RESAMPLES = 10_000
_FIRST = ("reward", "exact", "sampled_reward", "sampled_exact")

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of means over the prompts with a value on both sides; NaN if there are none."""

    before: float
    after: float
    change: float
    interval: Interval  # 95 % interval of the change
    p_value: float
    higher: int  # number of prompts with a higher value after than before
    lower: int
    equal: int

    @property
    def prompts(self) -> int:
        return self.higher + self.lower + self.equal


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Differences by the name of the measure, with notes on what was excluded."""

    measures: dict[str, Difference]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        measures = {name: dataclasses.asdict(difference) for name, difference in self.measures.items()}
        return {"measures": measures, "resamples": RESAMPLES, "notes": self.notes}

    def rows(self) -> list[list[str]]:
        """Cells of a table, titles first."""
        rows = [["measure", "before", "after", "change", "95 % interval", "p", "higher", "lower", "equal"]]
        for name, d in self.measures.items():
            values = [f"{d.before:.4f}", f"{d.after:.4f}", f"{d.change:+.4f}"]
            interval = "none" if math.isnan(d.interval[0]) else "{:+.4f} to {:+.4f}".format(*d.interval)
            rows.append([name, *values, interval, f"{d.p_value:.4f}", str(d.higher), str(d.lower), str(d.equal)])
        return rows

    def table(self) -> str:
        """Text table with a line per measure."""
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([*lines, *self.notes])


def compare(before: Mapping[str, Any], after: Mapping[str, Any], solved: float = 1.0) -> Comparison:
    """Compares two evaluations by the measures that both have for each prompt.

    Args:
        before: the JSON of an evaluation's result.
        after: that of another one on the same prompts, in any order.
        solved: reward from which a response counts as correct, where the evaluations do not report correctness.

    Raises:
        ValueError: if one has a prompt that the other lacks.
    """
    evaluations = [Evaluated(content, solved) for content in (before, after)]
    pairs = paired(*evaluations)
    known = set.intersection(*(set(e.metrics) & set(e.table) for e in evaluations)) | {"reward", "exact"}
    measures = {name: difference(pairs["before", name], pairs["after", name]) for name in in_order(known)}
    excluded = len(pairs) - measures["reward"].prompts
    note = f"{excluded} of {len(pairs)} prompts have no reward on one side and are excluded."
    return Comparison(measures, [note] if excluded else [])


def paired(before: Evaluated, after: Evaluated) -> pd.DataFrame:
    """Measures of each prompt in both evaluations; repeated prompts are paired in order."""
    sides = ("before", before.table), ("after", after.table)
    for (name, table), (other, expected) in zip(sides, reversed(sides), strict=True):
        missing = expected.index.difference(table.index)
        if len(missing):
            raise ValueError(f"compare: {name} must have each prompt of {other}, got no {missing[0][0][:200]!r}")
    return pd.concat({"before": before.table, "after": after.table.reindex(before.table.index)}, axis=1)


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts names of measures: rewards first, and pass@5 before pass@10."""

    def place(name: str) -> tuple[int, str, int]:
        stem, _, k = name.partition("@")
        return _FIRST.index(name) if name in _FIRST else len(_FIRST), stem, int(k) if k.isdigit() else 0

    return sorted(set(names) - {"prompts", "skipped"}, key=place)


def difference(before: pd.Series, after: pd.Series) -> Difference:
    """Summarises pairs in any order; those without a value on one side are excluded."""
    pairs = sorted_pairs(before, after)
    changes = pairs["change"]
    counts = [int(mask.sum()) for mask in (changes > 0, changes < 0, changes == 0)]
    means = float(pairs["before"].mean()), float(pairs["after"].mean()), float(changes.mean())
    return Difference(*means, bootstrap_interval(changes), sign_flip_p(changes), *counts)


def sorted_pairs(before: pd.Series, after: pd.Series) -> pd.DataFrame:
    """Pairs and their changes, in an order with which every page resamples the same."""
    pairs = pd.DataFrame({"before": before.to_numpy(), "after": after.to_numpy()}).dropna()
    return pairs.sort_values(["before", "after"]).assign(change=lambda table: table["after"] - table["before"])


def bootstrap_interval(values: Iterable[float]) -> Interval:
    """95 % percentile bootstrap interval of the mean of the finite values; NaN below two."""
    from scipy import stats

    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return math.nan, math.nan
    low, high = stats.bootstrap((known,), np.mean, method="percentile", **_resampling()).confidence_interval
    return float(low), float(high)


def sign_flip_p(changes: Iterable[float]) -> float:
    """Two-sided p-value of the sign-flip permutation test on the mean; NaN without changes."""
    from scipy import stats

    known = list(changes)
    nonzero = [change for change in known if change != 0]  # zeros change no sum, but prevent the exact test
    if len(nonzero) < 2:
        return 1.0 if known else math.nan
    return float(stats.permutation_test((nonzero,), np.mean, permutation_type="samples", **_resampling()).pvalue)


def _resampling() -> dict[str, Any]:
    """Settings of scipy; the same evaluations always give the same page, and batches bound the memory."""
    return {"n_resamples": RESAMPLES, "batch": 1_000, "rng": np.random.default_rng(0)}


def t_interval(values: Iterable[float]) -> Interval:
    """Student's 95 % interval of the mean of the finite values; NaN below two."""
    from scipy import stats

    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return math.nan, math.nan
    reach = stats.t.ppf(0.975, len(known) - 1) * stats.sem(known)
    return float(np.mean(known) - reach), float(np.mean(known) + reach)
