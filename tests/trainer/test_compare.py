"""Paired comparisons: results by hand, coverage of the interval, independence of order, refusals."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("scipy")

from grpo_trainer.report.compare import bootstrap_interval, compare, difference, sign_flip_p, t_interval


def evaluation(rewards: list[float | None], samples: list[list[float]] | None = None) -> dict[str, Any]:
    """An evaluation with a prompt for each reward, and its samples."""
    lines: list[dict[str, Any]] = [{"prompt": f"p{i}", "reward": reward} for i, reward in enumerate(rewards)]
    for line, of_line in zip(lines, samples or [], strict=False):
        line["rewards"] = of_line
    metrics = {"pass@1": 0.0, "pass@2": 0.0, "pass@4": 0.0, "length": 5.0} if samples else {}
    return {"metrics": metrics, "prompts": lines}


def test_counts_and_means_by_hand() -> None:
    comparison = compare(evaluation([0.0, 1.0, 0.5, 0.5]), evaluation([1.0, 0.5, 0.5, 1.0]))
    reward, exact = comparison.measures["reward"], comparison.measures["exact"]
    assert (reward.before, reward.after, reward.change) == (0.5, 0.75, 0.25)
    assert (reward.higher, reward.lower, reward.equal, reward.prompts) == (2, 1, 1, 4)
    assert (exact.before, exact.after, exact.higher, exact.lower) == (0.25, 0.5, 2, 1)
    assert list(comparison.measures) == ["reward", "exact"] and comparison.notes == []
    content = json.loads(json.dumps(comparison.to_json()))
    assert content["measures"]["reward"]["change"] == 0.25
    low, high = reward.interval
    table = comparison.table().splitlines()
    assert [line.split()[0] for line in table] == ["measure", "reward", "exact"]
    assert f"0.5000  0.7500  +0.2500  {low:+.4f} to {high:+.4f}" in table[1] and len({*map(len, table)}) == 1


def test_solved_decides_correctness_unless_the_evaluation_says_it() -> None:
    sides = evaluation([0.2, 0.6], [[0.2, 0.6]] * 2), evaluation([0.6, 0.7], [[0.6, 0.7]] * 2)
    assert compare(*sides).measures["exact"].after == 0
    comparison = compare(*sides, solved=0.6)
    assert [(m.before, m.after) for m in map(comparison.measures.get, ("exact", "pass@1")) if m] == [(0.5, 1)] * 2
    for side, correct in zip(sides, (1.0, 0.0), strict=True):
        side["prompts"] = [line | {"correct": correct, "right": [correct, 0.0]} for line in side["prompts"]]
    comparison = compare(*sides, solved=0.6)
    assert [(m.before, m.after) for m in map(comparison.measures.get, ("exact", "pass@1")) if m] == [(1, 0), (0.5, 0)]


def test_pass_at_k_is_unbiased_and_in_order() -> None:
    before = evaluation([0.0, 0.0], [[1.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 5])
    after = evaluation([0.0, 0.0], [[1.0, 1.0, 0.0, 0.0, 0.0], [1.0] + [0.0] * 4])
    measures = compare(before, after).measures
    # length is no mean over what was written of each prompt
    assert list(measures) == ["reward", "exact", "pass@1", "pass@2", "pass@4"]
    assert measures["pass@2"].before == pytest.approx((1 - math.comb(4, 2) / math.comb(5, 2)) / 2)
    assert measures["pass@2"].after == pytest.approx((1 - 3 / 10 + 1 - 6 / 10) / 2) and measures["pass@4"].higher == 2


def test_interval_equals_that_of_all_resamples_of_three() -> None:
    values = [0.0, 1.0, 4.0]
    means = sorted(sum(drawn) / 3 for drawn in itertools.product(values, repeat=3))
    # of 27 equally likely outcomes the 2.5 and 97.5 % quantiles are the first and the last
    assert bootstrap_interval(values) == pytest.approx((means[0], means[-1]))


def test_interval_agrees_with_a_plain_bootstrap() -> None:
    chosen = random.Random(4)
    values = [chosen.gauss(0.3, 1) for _ in range(60)]
    means = sorted(sum(chosen.choices(values, k=60)) / 60 for _ in range(20_000))
    assert bootstrap_interval(values) == pytest.approx((means[499], means[-500]), abs=0.012)
    assert bootstrap_interval([*values, math.nan]) == bootstrap_interval(values)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """100 experiments with 80 prompts each, of which 40 % are solved before and 55 % after."""
    chosen, covered = random.Random(0), 0
    for _ in range(100):
        sides = [pd.Series([float(chosen.random() < p) for _ in range(80)]) for p in (0.4, 0.55)]
        low, high = difference(*sides).interval
        covered += low <= 0.15 <= high
    # 95 are 95 %; the standard deviation of the count is 2.2
    assert 95 - 5 <= covered <= 99


def test_t_interval_by_hand() -> None:
    # mean 2, deviation 1, and the table's 4.303 for two degrees of freedom
    reach = 4.302652730 / math.sqrt(3)
    assert t_interval([1.0, 2.0, math.nan, 3.0]) == pytest.approx((2 - reach, 2 + reach))
    assert t_interval([0.5, 0.5]) == (0.5, 0.5)
    assert all(map(math.isnan, [*t_interval([1.0]), *bootstrap_interval([1.0, math.nan]), *t_interval([])]))


def test_p_value_goes_through_all_signs_of_few() -> None:
    # of eight sums, only 1 + 2 + 4 and its negative are as large
    assert sign_flip_p([1.0, 2.0, 4.0, 0.0]) == pytest.approx(2 / 8)
    # 5 and 7, with either sign, are at least -1 + 2 + 4 = 5
    assert sign_flip_p([-1.0, 2.0, 4.0]) == pytest.approx(4 / 8)
    assert sign_flip_p([0.0] * 5) == sign_flip_p([0.1, 0.2, -0.3]) == sign_flip_p([1.0, 0.0]) == 1
    assert math.isnan(sign_flip_p([]))


def test_p_value_of_many_equals_the_binomial_one() -> None:
    # 26 better and 14 worse by the same amount: a difference of 12 or more among 40 fair coins
    exact = 2 * sum(math.comb(40, k) for k in range(26, 41)) / 2**40
    assert sign_flip_p([1.0] * 26 + [-1.0] * 14) == pytest.approx(exact, abs=0.01)
    assert 0 < sign_flip_p([1.0] * 100) < 0.001


def test_prompts_are_paired_whatever_their_order() -> None:
    """Prompts differ by more than the two sides do, which pairing removes."""
    chosen = random.Random(0)
    rewards = [chosen.random() for _ in range(30)]
    before = evaluation([*rewards], [[float(chosen.random() < 0.5)] * 4 for _ in range(30)])
    after = evaluation([r + 0.05 + chosen.random() / 20 for r in rewards], [[1.0] * 4] * 30)
    expected = compare(before, after)
    low, high = expected.measures["reward"].interval
    assert 0.05 < low < high < 0.1 and expected.measures["reward"].higher == 30
    for _ in range(3):
        chosen.shuffle(before["prompts"])
        chosen.shuffle(after["prompts"])
        assert compare(before, after) == expected
    for side in (before, after):
        side["prompts"] = [line | {"prompt": "p"} for line in side["prompts"][:2]]
        side["prompts"][1]["reward"] = side["prompts"][0]["reward"] + 1
    assert compare(before, before).measures["reward"].equal == 2


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("abc", "axy", "before must have each prompt of after, got no 'x'"),
        ("a", "ax", "before must have each prompt of after, got no 'x'"),
        ("aa", "a", "after must have each prompt of before, got no 'a'"),
        ("ab", "bb", "before must have each prompt of after, got no 'b'"),
        (None, "a", "before must be an evaluation with a list of prompts, got {'prompts': None}"),
    ],
)
def test_what_does_not_compare_is_refused(before: Any, after: Any, message: str) -> None:
    sides = [{"prompts": side and [{"prompt": prompt, "reward": 0.0} for prompt in side]} for side in (before, after)]
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
