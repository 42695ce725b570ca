"""Paired comparisons and intervals by hand, independence of order, and what is left out or refused."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest
from grpo_trainer.report.compare import bootstrap_interval, compare, sign_flip_p, t_interval


def evaluation(rewards: list[float | None], samples: list[list[float]] | None = None) -> dict[str, Any]:
    """An evaluation with a prompt for each reward, and its samples."""
    lines: list[dict[str, Any]] = [{"prompt": f"p{i}", "reward": reward} for i, reward in enumerate(rewards)]
    for line, of_line in zip(lines, samples or [], strict=False):
        line["rewards"] = of_line
    metrics = {"pass@1": 0.0, "pass@2": 0.0, "pass@4": 0.0, "length": 5.0} if samples else {}
    return {"metrics": metrics, "prompts": lines}


def test_counts_means_and_pass_at_k_by_hand() -> None:
    samples = [[[1.0, 0, 0, 0, 0], [0.0] * 5], [[1.0, 1, 0, 0, 0], [1.0, 0, 0, 0, 0]]]
    comparison = compare(evaluation([0.0, 1.0, 0.5, 0.5]), evaluation([1.0, 0.5, 0.5, 1.0]))
    reward, exact = comparison.measures["reward"], comparison.measures["exact"]
    assert (reward.before, reward.after, reward.change) == (0.5, 0.75, 0.25)
    assert (reward.higher, reward.lower, reward.equal, reward.prompts) == (2, 1, 1, 4)
    assert (exact.before, exact.after, exact.higher, exact.lower) == (0.25, 0.5, 2, 1)
    assert json.loads(json.dumps(comparison.to_json()))["measures"]["reward"]["change"] == 0.25
    table = comparison.table().splitlines()
    assert [line.split()[0] for line in table] == ["measure", "reward", "exact"] and comparison.notes == []
    shown = "0.5000  0.7500  +0.2500  {:+.4f} to {:+.4f}".format(*reward.interval)
    assert shown in table[1] and len({*map(len, table)}) == 1
    measures = compare(*(evaluation([0.0, 0.0], of) for of in samples)).measures
    # length is no mean over what was written of each prompt
    assert list(measures) == ["reward", "exact", "pass@1", "pass@2", "pass@4"]
    assert measures["pass@2"].before == pytest.approx((1 - math.comb(4, 2) / math.comb(5, 2)) / 2)
    assert measures["pass@2"].after == pytest.approx((1 - 3 / 10 + 1 - 6 / 10) / 2) and measures["pass@4"].higher == 2


def test_solved_decides_correctness_unless_the_evaluation_says_it() -> None:
    sides = evaluation([0.2, 0.6], [[0.2, 0.6]] * 2), evaluation([0.6, 0.7], [[0.6, 0.7]] * 2)

    def shares(solved: float) -> list[tuple[float, float]]:
        measures = compare(*sides, solved=solved).measures
        return [(measures[name].before, measures[name].after) for name in ("exact", "pass@1")]

    assert shares(1.0) == [(0, 0), (0, 0)] and shares(0.6) == [(0.5, 1), (0.5, 1)]
    for side, correct in zip(sides, (1.0, 0.0), strict=True):
        side["prompts"] = [line | {"correct": correct, "right": [correct, 0.0]} for line in side["prompts"]]
    assert shares(0.6) == [(1, 0), (0.5, 0)]


def test_intervals_and_p_values_by_hand() -> None:
    values = [0.0, 1.0, 4.0, math.nan]
    means = sorted(sum(drawn) / 3 for drawn in itertools.product(values[:3], repeat=3))
    # of 27 equally likely outcomes the 2.5 and 97.5 % quantiles are the first and the last
    assert bootstrap_interval(values) == pytest.approx((means[0], means[-1]))
    # mean 2, deviation 1, and the table's 4.303 for two degrees of freedom
    reach = 4.302652730 / math.sqrt(3)
    assert t_interval([1.0, 2.0, math.nan, 3.0]) == pytest.approx((2 - reach, 2 + reach))
    assert all(map(math.isnan, [*t_interval([1.0]), *bootstrap_interval([1.0, math.nan]), *t_interval([])]))
    # of eight sums, only 1 + 2 + 4 and its negative are as large; 5 and 7, with either sign, are at least -1 + 2 + 4
    assert sign_flip_p([1.0, 2.0, 4.0, 0.0]) == pytest.approx(2 / 8)
    assert sign_flip_p([-1.0, 2.0, 4.0]) == pytest.approx(4 / 8)
    assert sign_flip_p([0.0] * 5) == sign_flip_p([1.0, 0.0]) == 1 and math.isnan(sign_flip_p([]))
    # too many for all signs; 26 better and 14 worse: a difference of 12 or more among 40 fair coins
    exact = 2 * sum(math.comb(40, k) for k in range(26, 41)) / 2**40
    assert sign_flip_p([1.0] * 26 + [-1.0] * 14) == pytest.approx(exact, abs=0.01)


def test_prompts_are_paired_whatever_their_order() -> None:
    """Prompts differ by more than the two sides do, which pairing removes."""
    chosen = random.Random(0)
    rewards = [chosen.random() for _ in range(30)]
    before, after = evaluation([*rewards]), evaluation([r + 0.05 + chosen.random() / 20 for r in rewards])
    expected = compare(before, after)
    low, high = expected.measures["reward"].interval
    assert 0.05 < low < high < 0.1 and expected.measures["reward"].higher == 30
    for side in (before, after):
        chosen.shuffle(side["prompts"])
    assert compare(before, after) == expected
    twice = {"metrics": {}, "prompts": [{"prompt": "p", "reward": reward} for reward in (0.0, 1.0)]}
    assert compare(twice, twice).measures["reward"].equal == 2


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("abc", "axy", "before must have each prompt of after, got no 'x'"),
        ("aa", "a", "after must have each prompt of before, got no 'a'"),
        ("ab", "bb", "before must have each prompt of after, got no 'b'"),
    ],
)
def test_other_prompts_are_refused(before: str, after: str, message: str) -> None:
    sides = [
        {"metrics": {}, "prompts": [{"prompt": prompt, "reward": 0.0} for prompt in side]} for side in (before, after)
    ]
    with pytest.raises(ValueError, match=f"^compare: {message}"):
        compare(*sides)


def test_missing_rewards_are_excluded_and_counted() -> None:
    comparison = compare(evaluation([None, 0.5, 0.5, math.nan]), evaluation([1.0, 1.0, 0.0, math.nan]))
    reward = comparison.measures["reward"]
    assert reward.prompts == comparison.measures["exact"].prompts == 2
    assert (reward.before, reward.after) == (0.5, 0.5)
    assert comparison.notes == ["2 of 4 prompts have no reward on one side and are excluded."]
    nothing = compare(evaluation([]), evaluation([])).measures["reward"]
    assert nothing.prompts == 0 and all(map(math.isnan, [nothing.change, nothing.p_value, *nothing.interval]))
