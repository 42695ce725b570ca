"""Paired comparisons: results by hand, coverage of the interval, independence of order, refusals."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_trainer.evaluate import Result, pass_at_k
from grpo_trainer.report.compare import bootstrap_interval, compare, compare_files, difference, sign_flip_p


def evaluation(rewards: list[float | None], samples: list[list[float]] | None = None) -> dict[str, Any]:
    lines: list[dict[str, Any]] = [{"prompt": f"p{i}", "reward": reward} for i, reward in enumerate(rewards)]
    for line, of_line in zip(lines, samples or [], strict=False):
        line["rewards"] = of_line
    return {"metrics": {}, "prompts": lines}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def test_counts_and_means_by_hand() -> None:
    comparison = compare(evaluation([0.0, 1.0, 0.5, 0.5]), evaluation([1.0, 0.5, 0.5, 1.0]))
    stats = comparison.to_json()["comparison_stats"]
    assert stats["original_mean_reward"] == 0.5
    assert stats["trained_mean_reward"] == 0.75
    assert stats["improvement"] == 0.25
    assert stats["improvement_percentage"] == 50
    assert (stats["problems_improved"], stats["problems_worse"], stats["problems_equal"]) == (2, 1, 1)
    assert (stats["share_improved"], stats["share_worse"], stats["share_equal"]) == (0.5, 0.25, 0.25)
    assert stats["total_problems"] == 4
    assert (comparison.exact.before, comparison.exact.after) == (0.25, 0.5)
    assert (comparison.exact.improved, comparison.exact.worse) == (2, 1)
    assert comparison.notes == []


def test_solved_decides_correctness() -> None:
    comparison = compare(evaluation([0.2, 0.6]), evaluation([0.6, 0.7]), solved=0.6)
    assert (comparison.exact.before, comparison.exact.after) == (0.5, 1.0)


def test_interval_equals_that_of_all_resamples_of_three() -> None:
    values = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    means = sorted(sum(drawn) / 3 for drawn in itertools.product(values.tolist(), repeat=3))
    low, high = bootstrap_interval(values, 40_000, seed=1, level=0.8)
    # 27 equally likely outcomes: the 10 % quantiles are the third from either end
    assert (low, high) == pytest.approx((means[2], means[-3]))


def test_interval_agrees_with_a_plain_bootstrap() -> None:
    chosen = random.Random(4)
    values = [chosen.gauss(0.3, 1) for _ in range(60)]
    means = sorted(sum(chosen.choices(values, k=60)) / 60 for _ in range(20_000))
    interval = bootstrap_interval(torch.tensor(values, dtype=torch.float64), 20_000, seed=0)
    assert interval == pytest.approx((means[499], means[-500]), abs=0.012)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """200 experiments with 80 prompts each, of which 40 % are solved before and 55 % after."""
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(200):
        before = (torch.rand(80, generator=generator) < 0.4).double()
        after = (torch.rand(80, generator=generator) < 0.55).double()
        low, high = bootstrap_interval(after - before, 400, seed)
        covered += low <= 0.15 <= high
    # 190 are 95 %; the standard deviation of the count is 3.1
    assert 190 - 9 <= covered <= 190 + 9


def test_chunk_sizes_do_not_change_the_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_trainer.report import compare as module

    values = torch.randn(50, dtype=torch.float64)
    interval, p = bootstrap_interval(values, 1_000, 3), sign_flip_p(values, 1_000, 3)
    monkeypatch.setattr(module, "_AT_ONCE", 700)
    assert bootstrap_interval(values, 1_000, 3) == pytest.approx(interval)
    assert sign_flip_p(values, 1_000, 3) == p


def test_p_value_goes_through_all_signs_of_few() -> None:
    # of eight sums, only 1 + 2 + 4 and its negative are as large
    assert sign_flip_p(torch.tensor([1.0, 2.0, 4.0, 0.0]), 10_000, 0) == pytest.approx(2 / 8)
    # 5 and 7, with either sign, are at least -1 + 2 + 4 = 5
    assert sign_flip_p(torch.tensor([-1.0, 2.0, 4.0]), 10_000, 0) == pytest.approx(4 / 8)
    assert sign_flip_p(torch.zeros(5), 10_000, 0) == 1
    assert sign_flip_p(torch.tensor([0.1, 0.2, -0.3]), 10_000, 0) == 1


def test_p_value_of_many_equals_the_binomial_one() -> None:
    # 26 better and 14 worse by the same amount: a difference of 12 or more among 40 fair coins
    values = torch.tensor([1.0] * 26 + [-1.0] * 14)
    exact = 2 * sum(math.comb(40, k) for k in range(26, 41)) / 2**40
    assert sign_flip_p(values, 100_000, 0) == pytest.approx(exact, abs=0.004)
    assert sign_flip_p(torch.ones(100), 1_000, 0) == 1 / 1_001


def test_order_of_prompts_does_not_matter() -> None:
    chosen = random.Random(0)
    before = evaluation([chosen.random() for _ in range(30)], [[float(chosen.random() < 0.5)] * 4 for _ in range(30)])
    after = evaluation([chosen.random() for _ in range(30)], [[float(chosen.random() < 0.7)] * 4 for _ in range(30)])
    expected = compare(before, after, resamples=500).to_json()
    for _ in range(3):
        chosen.shuffle(before["prompts"])
        chosen.shuffle(after["prompts"])
        assert same(compare(before, after, resamples=500).to_json(), expected)


def test_repeated_prompts_are_paired_in_order() -> None:
    before, after = evaluation([0.0, 1.0]), evaluation([0.0, 1.0])
    for side in (before, after):
        side["prompts"][1]["prompt"] = "p0"
    assert compare(before, after).reward.equal == 2


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (["a", "b", "c"], ["a", "x", "y"], "prompt 2 before has no counterpart after: 'b'"),
        (["a"], ["a", "x", "y"], "prompt 2 after has no counterpart before: 'x'"),
        (["a", "a"], ["a", "b"], "prompt 2 before has no counterpart after: 'a'"),
        (["a", "b"], ["b", "b"], "prompt 1 before has no counterpart after: 'a'"),
        (["a", "b"], ["b", "a", "b"], "prompt 3 after has no counterpart before: 'b'"),
    ],
)
def test_different_prompts_are_refused_by_name(before: list[str], after: list[str], message: str) -> None:
    sides = [{"prompts": [{"prompt": prompt, "reward": 0.0} for prompt in side]} for side in (before, after)]
    with pytest.raises(ValueError, match=message):
        compare(*sides)


def test_other_files_than_evaluations_are_refused() -> None:
    with pytest.raises(ValueError, match="after must be an evaluation"):
        compare(evaluation([1.0]), {"metrics": {}})
    with pytest.raises(ValueError, match="resamples must be positive, got 0"):
        compare(evaluation([1.0]), evaluation([1.0]), resamples=0)


def test_missing_rewards_are_excluded_and_counted() -> None:
    comparison = compare(evaluation([None, 0.5, 0.5, math.nan]), evaluation([1.0, 1.0, 0.0, math.nan]))
    assert comparison.reward.prompts == comparison.exact.prompts == 2
    assert (comparison.reward.before, comparison.reward.after) == (0.5, 0.5)
    assert comparison.notes == ["2 of 4 prompts have no reward on one side and are excluded"]


def test_nothing_is_divided_by_zero() -> None:
    comparison = compare(evaluation([0.0, 0.0]), evaluation([1.0, 0.0]))
    assert math.isnan(comparison.to_json()["comparison_stats"]["improvement_percentage"])
    assert any("the mean reward before is 0" in note for note in comparison.notes)
    nothing = compare(evaluation([]), evaluation([]))
    assert math.isnan(nothing.reward.improvement)
    assert math.isnan(nothing.to_json()["comparison_stats"]["share_improved"])
    assert nothing.notes == ["no prompt has a reward on both sides: there is nothing to compare"]
    alone = compare(evaluation([0.5]), evaluation([1.0]))
    assert all(math.isnan(end) for end in alone.reward.interval)
    assert alone.notes == ["a single prompt has no interval"]
    assert compare(evaluation([-0.5, -0.5]), evaluation([0.0, 0.0])).improvement_percentage == 100


def test_pass_at_k_of_both_sides_is_unbiased() -> None:
    before = evaluation([0.0, 0.0], [[1.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 5])
    after = evaluation([0.0, 0.0], [[1.0, 1.0, 0.0, 0.0, 0.0], [1.0] + [0.0] * 4])
    comparison = compare(before, after)
    assert list(comparison.pass_at) == [1, 2, 4, 5]
    assert comparison.pass_at[2].before == pytest.approx((1 - math.comb(4, 2) / math.comb(5, 2)) / 2)
    assert comparison.pass_at[2].after == pytest.approx((pass_at_k(5, 2, 2) + pass_at_k(5, 1, 2)) / 2)
    assert comparison.to_json()["pass_at_k"]["4"]["problems_improved"] == 2
    assert compare(evaluation([0.0]), evaluation([0.0])).pass_at == {}


def test_files_results_and_the_table_say_the_same(tmp_path: Path) -> None:
    before, after = evaluation([0.0, 1.0, 0.0], [[0.0, 1.0]] * 3), evaluation([1.0, 1.0, 0.0], [[1.0, 1.0]] * 3)
    for name, side in (("a", before), ("b", after)):
        (tmp_path / f"{name}.json").write_text(json.dumps(side))
    of_files = compare_files(tmp_path / "a.json", tmp_path / "b.json")
    of_results = compare(Result({}, before["prompts"]), Result({}, after["prompts"]))
    assert same(of_files.to_json(), of_results.to_json())
    low, high = of_files.reward.interval
    table = of_files.table().splitlines()
    assert [line.split()[0] for line in table] == ["before", "reward", "exact", "pass@1", "pass@2"]
    assert f"+0.3333  [{low:+.4f}, {high:+.4f}]" in table[1]
    assert len({len(line) for line in table}) == 1


def test_difference_with_the_same_seed_is_the_same() -> None:
    values = [(0.0, math.sqrt(i)) for i in range(40)]
    assert difference(values, seed=5) == difference(values, seed=5)
    assert difference(values, seed=5).interval != difference(values, seed=6).interval


def test_correctness_is_read_from_the_evaluation() -> None:
    """With a share for format, a correct response may have a reward of 0.9."""

    def line(prompt: str, correct: float, right: list[float]) -> dict[str, object]:
        return {"prompt": prompt, "reward": 0.9, "rewards": [0.9, 0.9], "correct": correct, "right": right}

    before = {"prompts": [line("a", 0.0, [0.0, 0.0]), line("b", 1.0, [1.0, 0.0])]}
    after = {"prompts": [line("a", 1.0, [1.0, 1.0]), line("b", 1.0, [1.0, 1.0])]}
    comparison = compare(before, after)
    assert (comparison.exact.before, comparison.exact.after) == (0.5, 1.0)
    assert (comparison.pass_at[1].before, comparison.pass_at[1].after) == (0.25, 1.0)
    assert comparison.reward.improvement == 0
