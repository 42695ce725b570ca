"""Comparisons: pairs and intervals by hand, what is left out or refused, and the page of several runs.

Faults they are there for: an interval of unpaired prompts or seeds; a prompt, a seed or a run that is left out without
a word; a measure that is compared although it is no mean over prompts.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_trainer.report.compare import bootstrap_interval, compare, sign_flip_p, t_interval
from grpo_trainer.report.comparison import differences, select, write_comparison, write_evaluation
from grpo_trainer.report.run_folder import Evaluated

from tests.trainer import run_folders
from tests.trainer.run_folders import change, change_recipe, keep
from tests.trainer.test_report import Reader


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


def test_other_prompts_are_refused_and_missing_rewards_counted() -> None:
    for before, after, message in (
        ("abc", "axy", "before must have each prompt of after, got no 'x'"),
        ("aa", "a", "after must have each prompt of before, got no 'a'"),
        ("ab", "bb", "before must have each prompt of after, got no 'b'"),
    ):
        sides = [
            {"metrics": {}, "prompts": [{"prompt": prompt, "reward": 0.0} for prompt in of]} for of in (before, after)
        ]
        with pytest.raises(ValueError, match=f"^compare: {message}"):
            compare(*sides)
    comparison = compare(evaluation([None, 0.5, 0.5, math.nan]), evaluation([1.0, 1.0, 0.0, math.nan]))
    reward = comparison.measures["reward"]
    assert reward.prompts == comparison.measures["exact"].prompts == 2
    assert (reward.before, reward.after) == (0.5, 0.5)
    assert comparison.notes == ["2 of 4 prompts have no reward on one side and are excluded."]
    nothing = compare(evaluation([]), evaluation([])).measures["reward"]
    assert nothing.prompts == 0 and all(map(math.isnan, [nothing.change, nothing.p_value, *nothing.interval]))


# Pages of several runs


def final(quality: float, diversity: float) -> dict[str, Any]:
    """An evaluation whose prompts have rewards and diversity around the given values, and one correct sample of ten."""
    lines = []
    for i in range(20):
        value = quality + (i - 9.5) / 100
        line = {"prompt": f"p{i}", "rewards": [value] * 10, "right": [1.0] + [0.0] * 9, "correct": 1.0, "reward": value}
        lines.append(line | {"measures": {"semantic_diversity": diversity + (i - 9.5) / 200}})
    names = {"sampled_reward": quality, "reward": quality, "semantic_diversity": diversity, "length": 7.0}
    return {"metrics": names | {"pass@10": 1.0, "pass@5": 0.5, "exact": 1.0, "prompts": 20.0}, "prompts": lines}


def run(folder: Path, name: str, seed: int = 0, quality: float = 0.5, diversity: float = 0.5, **more: Any) -> Path:
    run_folders.write(folder, name=name, seed=seed, rich=False, **{"steps": 6, **more})
    change(folder, lambda e: e.update(final(quality, diversity)))
    return folder


def test_seeds_of_a_recipe_are_one_row_and_differences_are_paired(tmp_path: Path) -> None:
    """Seeds differ by more than the recipes do, which pairing removes."""
    qualities = (0.2, 0.5, 0.8)
    for seed, quality in enumerate(qualities):
        run(tmp_path / f"a{seed}", "a", seed, quality)
        # in another order, as a pair is of equal seeds
        run(tmp_path / f"b{2 - seed}", "b", seed, quality + 0.02 + 0.001 * seed, diversity=0.5 + 0.1 * (seed - 1))
    run(tmp_path / "c0", "c", 0, 0.3)
    run(tmp_path / "d9", "d", 9)
    rows, left_out = select(sorted(tmp_path.glob("*[0-9]")))
    a, b, c, d = rows
    assert [(row.label, list(row.evaluated)) for row in (a, d)] == [("1 a", [0, 1, 2]), ("4 d", [9])] and not left_out
    name = "sampled_reward"
    assert a.estimate(name) == (pytest.approx(0.5), *map(pytest.approx, t_interval(qualities)), "3 seeds")
    # values 0.205 to 0.395 in steps of 0.01: a normal interval is close to the bootstrap
    single, deviation = c.estimate(name), float(torch.tensor([(i - 9.5) / 100 for i in range(20)]).std())
    assert single.mean == pytest.approx(0.3) and single.units == "20 prompts"
    assert single.high - single.low == pytest.approx(2 * 1.96 * deviation / math.sqrt(20), rel=0.1)
    # no mean over what was written of each prompt
    assert c.estimate("length").cell() == "7.000" and c.estimate("other").cell() == "none"
    better, unclear = b.minus(a, name), b.minus(a, "semantic_diversity")
    assert better == (pytest.approx(0.021), *map(pytest.approx, t_interval([0.02, 0.021, 0.022])), "3 seeds")
    assert unclear.low < 0 < unclear.high
    # one seed in common: every prompt differs by as much
    assert c.minus(a, name) == (*[pytest.approx(0.1)] * 3, "20 prompts") and d.minus(a, name).cell() == "none"


def test_what_is_left_out_is_named_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        run(tmp_path / name, "a", seed) for seed, name in enumerate(("good", "data", "prompts", "count", "split"))
    ]
    change_recipe(folders[1], "data.task", "gsm8k")
    for key, value in (("seed", 0), ("name", "b")):
        change_recipe(folders[2], key, value)
    change(folders[2], lambda e: e["prompts"][0].update(prompt="another"))
    change(folders[3], lambda e: e["prompts"].pop())
    keep(folders[4], lambda e: e["split"] != "test")
    folders += [run(tmp_path / "unfinished", "a", 7, finished=False), run(tmp_path / "twin", "a", 0), tmp_path / "none"]
    reasons = [
        "other data: data.task is 'gsm8k', not 'arithmetic' as in 1 a",
        "other data: prompts of seed 0 is ['another', ",
        "other data: prompts, number of is 19, not 20",
        "other data: split is 'validation', not 'test'",
        "no evaluation after its last step",
        "another run has its recipe and its seed, 0",
        "folder must have a recipe.yaml",
    ]
    rows, left_out = select(folders)
    assert [row.runs[0].path for row in rows] == folders[:1] and [*left_out] == folders[1:]
    text = Reader(write_comparison(folders, tmp_path / "out")).text
    printed = capsys.readouterr().err
    for folder, reason in zip(folders[1:], reasons, strict=True):
        assert reason in left_out[folder] and reason in text and f"left out {folder}: " in printed
    with pytest.raises(ValueError, match=r"^write_comparison: folders must have a run with a final evaluation, got "):
        write_comparison(folders[7:], tmp_path / "out")


def test_settings_that_differ_between_evaluations_are_named(tmp_path: Path) -> None:
    folders = [run(tmp_path / name, name) for name in "ab"]
    change_recipe(folders[1], "evaluation.temperature", 0.7)
    change_recipe(folders[1], "rl.rewards", [{"name": "judge"}])
    change(folders[1], lambda e: e.update(embedder="minilm"))
    named = differences(select(folders)[0])
    assert named[0] == "2 b: evaluation.temperature is 0.7, not None as in 1 a."
    assert [text.split()[2] for text in named] == ["evaluation.temperature", "evaluation.rewards", "embedder"]
    for folder in folders:
        change_recipe(folder, "evaluation.rewards", [{"name": "exact"}])
    assert len(differences(select(folders)[0])) == 2


def test_page_and_front(tmp_path: Path) -> None:
    values = {"best": (0.9, 0.2), "poor": (0.5, 0.1), "wide": (0.3, 0.8), "<b>{{7*7}}": (0.2, 0.7)}
    folders = [run(tmp_path / f"r{i}", name, 0, *value, steps=25) for i, (name, value) in enumerate(values.items())]
    validation = {0: 0.9, 20: 0.5, 25: 0.4}
    change(
        folders[2],
        lambda e: e["metrics"].update(semantic_diversity=0.8 if e["split"] == "test" else validation[e["step"]]),
    )
    reader = Reader(write_comparison(folders, tmp_path / "out"))
    for text in (
        "Comparison 4 runs of 4 recipes, evaluated on 20 test prompts of arithmetic.",
        "on the Pareto front yes no yes no",
        "aside: 1 best, 3 wide.",
        "collapse of semantic_diversity none none 25 none",
        "<b>{{7*7}}",
    ):
        assert text in reader.text
    assert reader.text.index("pass@5") < reader.text.index("pass@10") < reader.text.index("semantic_diversity")
    points = "1 at 0.2, 0.9; 2 at 0.1, 0.5; 3 at 0.8, 0.3; 4 at 0.7, 0.2"
    assert f"sampled_reward over semantic_diversity: {points}" in reader.labels
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert content["front"] == ["1 best", "3 wide"] and content["measures"]["1 best"]["sampled_reward"]["mean"] == 0.9


def test_figures_are_means_over_seeds(tmp_path: Path) -> None:
    folders = [run(tmp_path / f"{name}{seed}", name, seed) for name in "ab" for seed in (0, 1)]
    change(folders[3], lambda e: [line.update(right=[1.0] * 5 + [0.0] * 5) for line in e["prompts"]])
    for folder, reward in zip(folders[2:], (0.0, 1.0), strict=True):
        change(
            folder, lambda line, r=reward: line.update({"rewards/mean": r} if line["phase"] == "rl" else {}), "metrics"
        )
    labels = Reader(write_comparison(folders, tmp_path / "out")).labels
    assert "pass@k by the number of samples: 1 a from 0.1 to 1; 2 b from 0.3 to 1" in labels
    # at k = 2 the first seeds have 0.2 / (2 * 0.1), the last one 1 - C(5, 2) / C(10, 2) = 7 / 9 over 2 * 0.5
    assert f"DER@k = pass@k / (k pass@1): 1 a from 1 to 1; 2 b from {(1 + 7 / 9) / 2:.3g} to 0.6" in labels
    assert any(label.startswith("rewards/mean, rl") and label.endswith("2 b from 0.5 to 0.5") for label in labels)


def test_evaluated_models_stand_beside_each_other(tmp_path: Path) -> None:
    recipe: Any = SimpleNamespace(name="mine")
    results = {"base": final(0.4, 0.5), "trained": final(0.5, 0.5)}
    text = Reader(write_evaluation(results, recipe, "test", tmp_path / "out")).text
    assert "20 prompts of the test split, evaluated with the recipe mine." in text and "Learning curves" not in text
    assert "semantic_diversity sampled_reward not told apart by 2 trained \u2212 1 base +0.000" in text
    assert "2 trained \u2212 1 base +0.000 +0.000 to +0.000 +0.100 +0.100 to +0.100 semantic_diversity" in text
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert content["measures"]["2 trained"]["reward"]["mean"] == 0.5


def test_measures_of_a_prompt() -> None:
    line = {"reward": 0.5, "correct": 1.0, "rewards": [0.0, 1.0, None], "right": [1.0, 0, 0], "measures": {"vendi": 2}}
    row = Evaluated({"metrics": {}, "prompts": [line | {"prompt": "p"}]}).table.iloc[0]
    expected = {"reward": 0.5, "exact": 1.0, "sampled_reward": 0.5, "sampled_exact": 1 / 3, "vendi": 2.0}
    assert row.to_dict() == pytest.approx(expected | {"pass@1": 1 / 3, "pass@2": 2 / 3, "pass@3": 1.0})
