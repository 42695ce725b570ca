"""The page of several runs: rows, intervals, what is left out, and the front."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from grpo_trainer import cli
from grpo_trainer.report import paradigms, plots
from grpo_trainer.report.comparison import _cell, write_comparison
from grpo_trainer.report.paradigms import Estimate, final_evaluation, select, t_interval, t_quantile, value_of
from grpo_trainer.report.run_folder import RunFolder

from tests.trainer import run_folders
from tests.trainer.test_report import HOSTILE, read


def change(file: Path, edit: Any) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def run(
    folder: Path, name: str, seed: int = 0, quality: float = 0.5, diversity: float = 0.5, finished: bool = True
) -> Path:
    """A run whose final evaluation has rewards and diversity around the given values."""
    run_folders.write(folder, name=name, steps=6, finished=finished)
    change(folder / "recipe.json", lambda recipe: recipe.update(seed=seed))
    for file in folder.glob("evaluations/*.json"):

        def edit(content: Any) -> None:
            for i, line in enumerate(content["prompts"]):
                value = quality + (i - 9.5) / 100
                line |= {"rewards": [value] * 10, "right": [1.0] + [0.0] * 9, "correct": 1.0, "reward": value}
                line["measures"] = {"semantic_diversity": diversity + (i - 9.5) / 200}
            names = {"sampled_reward": quality, "reward": quality, "semantic_diversity": diversity}
            names |= {"pass@10": 1.0, "pass@5": 0.5}
            content["metrics"] = {"prompts": 20.0, "length": 7.0} | names

        change(file, edit)
    return folder


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 10, 31])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_quantiles_of_student_are_scipys(freedom: int, level: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert t_quantile(level, freedom) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=1e-9)


def test_t_interval_by_hand() -> None:
    # mean 2, deviation 1, and the table's 4.303 for two degrees of freedom
    low, high = t_interval([1.0, 2.0, 3.0])
    reach = 4.302652730 / math.sqrt(3)
    assert (low, high) == pytest.approx((2 - reach, 2 + reach))
    assert t_interval([1.0, math.nan, 2.0, 3.0]) == (low, high)
    assert all(map(math.isnan, t_interval([1.0]))) and all(map(math.isnan, t_interval([])))


def test_seeds_of_a_recipe_are_one_row(tmp_path: Path) -> None:
    qualities = [0.4, 0.5, 0.9]
    folders = [run(tmp_path / f"a{i}", "a", i, quality) for i, quality in enumerate(qualities)]
    folders.insert(1, run(tmp_path / "b", "b", 0, 0.7))
    rows, left_out = select(folders)
    assert [(row.label, row.seeds) for row in rows] == [("1 a", [0, 1, 2]), ("2 b", [0])] and left_out == []
    several, single = (row.estimate("sampled_reward") for row in rows)
    assert several.mean == pytest.approx(0.6) and several[1:3] == pytest.approx(t_interval(qualities))
    assert several.kind == "t, 3 seeds"
    # values 0.605 to 0.795 in steps of 0.01: a normal interval is close to the bootstrap
    deviation = float(torch.tensor([0.7 + (i - 9.5) / 100 for i in range(20)]).std())
    assert single.mean == pytest.approx(0.7) and single.kind == "bootstrap, 20 prompts"
    assert single.high - single.low == pytest.approx(2 * 1.96 * deviation / math.sqrt(20), rel=0.1)
    # not a mean over prompts of what was written
    assert rows[1].estimate("length").kind == "" and rows[1].estimate("length").mean == 7


def test_differences_are_paired(tmp_path: Path) -> None:
    """Seeds differ by more than the recipes do, which pairing removes."""
    for seed, quality in enumerate((0.2, 0.5, 0.8)):
        run(tmp_path / f"a{seed}", "a", seed, quality)
        run(tmp_path / f"b{seed}", "b", seed, quality + 0.02 + 0.001 * seed, diversity=0.5 + 0.1 * (seed - 1))
    run(tmp_path / "c0", "c", 0, 0.3)
    run(tmp_path / "d9", "d", 9)
    a, b, c, d = select(sorted(tmp_path.glob("*[0-9]")))[0]
    better, unclear = b.minus(a, "sampled_reward"), b.minus(a, "semantic_diversity")
    assert better.mean == pytest.approx(0.021) and better[1:3] == pytest.approx(t_interval([0.02, 0.021, 0.022]))
    assert better.kind == "t, 3 seeds" and better.excludes_0 and not a.estimate("sampled_reward").excludes_0
    assert a.minus(b, "sampled_reward").high == pytest.approx(-better.low) and a.minus(b, "sampled_reward").excludes_0
    assert unclear.mean == pytest.approx(0) and unclear.low < 0 < unclear.high and not unclear.excludes_0
    # one seed in common: every prompt differs by as much
    single = c.minus(a, "sampled_reward")
    assert single[:3] == pytest.approx((0.1, 0.1, 0.1)) and single.kind == "bootstrap, 20 prompts" and single.excludes_0
    assert math.isnan(d.minus(a, "sampled_reward").mean) and not d.minus(a, "sampled_reward").excludes_0
    text = read(write_comparison(sorted(tmp_path.glob("[ab][0-9]")), tmp_path / "out")).text
    assert "Differences semantic diversity sampled reward not told apart by 2 b \u2212 1 a " in text
    assert "+0.021 +0.019 to +0.023 semantic diversity " in text


def test_values_of_prompts() -> None:
    line = {"reward": 0.5, "correct": 1.0, "rewards": [0.0, 1.0, None], "right": [1.0, 0, 0], "measures": {"vendi": 2}}
    names = ("reward", "exact", "sampled_reward", "sampled_exact", "pass@1", "pass@3", "vendi", "other", "length")
    values = [value_of(line, name) for name in names]
    assert values[:7] == pytest.approx([0.5, 1.0, 0.5, 1 / 3, 1 / 3, 1.0, 2.0]) and all(map(math.isnan, values[7:]))
    assert all(math.isnan(value_of({}, name)) for name in names)


def test_what_is_left_out_is_named_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [run(tmp_path / name, "a", seed) for seed, name in enumerate(("good", "data", "prompts", "count"))]
    change(folders[1] / "recipe.json", lambda recipe: recipe["data"].update(task="gsm8k"))
    change(folders[2] / "recipe.json", lambda recipe: recipe.update(seed=0, name="b"))
    final = "evaluations/test-2-000000.json"
    change(folders[2] / final, lambda content: content["prompts"][0].update(prompt="another"))
    change(folders[3] / final, lambda content: content["prompts"].pop())
    folders += [run(tmp_path / "unfinished", "a", 7, finished=False), run(tmp_path / "twin", "a", 0), tmp_path / "none"]
    rows, left_out = select(folders)
    assert [row.runs[0].path for row in rows] == folders[:1]
    reasons = dict(left_out)
    assert list(reasons) == folders[1:]
    for folder, reason in zip(
        folders[1:],
        (
            "of another data set: data.task is 'gsm8k', not 'arithmetic'",
            "evaluated on other prompts",
            "evaluated on 19 prompts, not on 20",
            "no evaluation after its last phase",
            "has the recipe and the seed, 0, of",
            "contains no run",
        ),
        strict=True,
    ):
        assert reason in reasons[folder]
    text = read(write_comparison(folders, tmp_path / "out")).text
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in printed] == [f"left out {folder}" for folder in folders[1:]]
    assert all(str(folder) in text and reason.split(":")[0] in text for folder, reason in reasons.items())
    with pytest.raises(ValueError, match=r"^compare: needs a run with a final evaluation, got none: .*no evaluation"):
        write_comparison(folders[4:5], tmp_path / "out")


def test_a_validation_split_stands_in_for_a_test_split(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", "a")
    (folder / "evaluations" / "test-2-000000.json").unlink()
    evaluated = final_evaluation(RunFolder.read(folder))
    assert evaluated is not None and (evaluated.split, evaluated.phase, evaluated.step) == ("validation", 1, 6)
    assert "evaluated on the validation split" in select([run(tmp_path / "b", "b"), folder])[1][0][1]
    (folder / "evaluations" / "validation-1-000006.json").unlink()
    assert final_evaluation(RunFolder.read(folder)) is None


def test_page_and_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    real = plots.draw_scatter

    def noted(folder: Path, name: str, marks: Any, front: Any, titles: Any) -> Any:
        drawn.update(marks=marks, front=front, titles=titles)
        return real(folder, name, marks, front, titles)

    monkeypatch.setattr("grpo_trainer.report.comparison.draw_scatter", noted)
    values = {"best": (0.9, 0.2), "poor": (0.5, 0.1), "wide": (0.3, 0.8), HOSTILE: (0.2, 0.7)}
    folders = [run(tmp_path / f"r{i}", name, 0, *value) for i, (name, value) in enumerate(values.items())]
    for file in folders[2].glob("evaluations/validation-1-*"):
        change(file, lambda content: content["metrics"].update(semantic_diversity=0.9))
    for step, value in ((6, 0.4), (20, 0.3)):
        file = folders[2] / "evaluations" / f"validation-1-{step:06d}.json"
        change(file, lambda content, value=value: content["metrics"].update(semantic_diversity=value))
    target = write_comparison(folders, tmp_path / "out")
    text = read(target).text
    assert drawn["front"] == [(0.2, 0.9), (0.8, 0.3)] and drawn["titles"] == ("semantic diversity", "sampled reward")
    assert [mark.label for mark in drawn["marks"]] == ["1", "2", "3", "4"]
    assert "in the other: 1 best, 3 wide." in text and "on the Pareto front yes no yes no" in text
    assert text.index("pass@5") < text.index("pass@10") < text.index("semantic_diversity")
    for title in ("KL from the reference", "Reward", "Length of responses", "Entropy", "Semantic diversity"):
        assert title in text
    assert "4 runs of 4 recipes, evaluated on 20 prompts of the test split of arithmetic" in text
    assert "bootstrap, 20 prompts" in text and "<script" not in target.read_text()
    # 0.9 at the start of RL, then 0.4 at step 6 and 0.3 at step 20
    assert "collapse of semantic_diversity, RL step none none 6 none" in text
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert content["front"] == ["1 best", "3 wide"]
    assert content["rows"][0]["metrics"]["sampled_reward"]["mean"] == 0.9
    assert len(list((tmp_path / "out" / "plots").glob("*.png"))) >= 2 * 7


@pytest.mark.full
def test_more_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    real = plots.draw_panels

    def noted(folder: Path, name: str, panels: Any, xlabel: str) -> Any:
        drawn[name] = panels
        return real(folder, name, panels, xlabel)

    monkeypatch.setattr("grpo_trainer.report.comparison.draw_panels", noted)
    folders = [run(tmp_path / name, name) for name in "abc"]
    # one of ten samples is correct, a fifth of the prompts has five, and none in the last run
    for folder, marks in ((folders[1], [1.0] * 5 + [0.0] * 5), (folders[2], [0.0] * 10)):

        def edit(content: Any, marks: list[float] = marks) -> None:
            for line in content["prompts"][:4] if marks[0] else content["prompts"]:
                line["right"] = marks

        change(folder / "evaluations" / "test-2-000000.json", edit)
    text = read(write_comparison(folders, tmp_path / "out")).text
    passed, efficiency = drawn["samples"]
    ks = list(range(1, 11))
    assert [list(curve.x) for curve in passed.curves] == [ks] * 3
    assert list(passed.curves[0].y) == pytest.approx([k / 10 for k in ks])
    several = [0.8 * k / 10 + 0.2 * (1 - math.comb(5, k) / math.comb(10, k)) for k in ks]
    assert list(passed.curves[1].y) == pytest.approx(several) and set(passed.curves[2].y) == {0.0}
    assert list(efficiency.curves[0].y) == pytest.approx([math.nan] + [1.0] * 9, nan_ok=True)
    expected = [math.nan, *(value / (k * several[0]) for k, value in zip(ks[1:], several[1:], strict=True))]
    assert list(efficiency.curves[1].y) == pytest.approx(expected, nan_ok=True)
    assert all(map(math.isnan, efficiency.curves[2].y)) and "pass@k and DER@k" in text


def test_intervals_of_shares_end_where_shares_do() -> None:
    wide = Estimate(0.14, -0.06, 1.2, "seeds")
    assert "0.0 to 100.0" in _cell("exact", wide) and "\u22126.0 to +120.0" in _cell("exact", wide, "+")
    assert "\u22120.060 to 1.200" in _cell("reward", wide)
    same = _cell("exact", Estimate(0.5, 0.5, 0.5, "seeds"))
    assert "50.0 %" in same and "no spread" in same


def test_settings_that_differ_between_evaluations_are_named(tmp_path: Path) -> None:
    folders = [run(tmp_path / name, name) for name in "ab"]
    change(folders[1] / "recipe.json", lambda recipe: recipe["evaluation"].update(temperature=0.7))
    change(folders[1] / "evaluations" / "test-2-000000.json", lambda content: content.update(embedder="minilm"))
    notes = paradigms.differences(select(folders)[0])
    assert notes == [
        "2 b: evaluation.temperature is 0.7, not None as in 1 a",
        "2 b: its embeddings are by minilm, not by hashed as in 1 a",
    ]


@pytest.mark.full
def test_rewards_that_differ_are_named(tmp_path: Path) -> None:
    """Each run's evaluations have the rewards of its own RL phase, and stand in one column."""
    folders = [run(tmp_path / name, name) for name in "abc"]
    rewards = [{"name": "exact", "weight": 1.0}, {"name": "judge", "weight": 0.5, "options": {"model": "m"}}]
    for folder, own in zip(folders, ([], rewards[:1], rewards), strict=True):
        change(folder / "recipe.json", lambda recipe, own=own: recipe["phases"][1]["rl"].update(rewards=own))
    scored = "its responses are scored by {}, not by the reward of its task as in 1 a; evaluation.rewards can name the "
    notes = paradigms.differences(select(folders)[0])
    assert [note.removesuffix("same for both") for note in notes] == [
        "2 b: " + scored.format("exact"),
        "3 c: " + scored.format('exact + 0.5 judge{"model": "m"}'),
    ]
    write_comparison(folders, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["differences"] == notes
    for folder in folders:
        change(folder / "recipe.json", lambda recipe: recipe["evaluation"].update(rewards=rewards[:1]))
    assert paradigms.differences(select(folders)[0]) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "a", "a")
    assert cli.report(["--compare", str(folder), "--output", str(tmp_path / "out")]) == 0
    assert "comparison.html" in capsys.readouterr().out
    for wrong in ([], [str(folder), "--compare", str(folder)], ["--beside", "x", "--compare", "y"]):
        with pytest.raises(SystemExit, match="2"):
            cli.report(wrong)
    with pytest.raises(SystemExit, match="2"):
        cli.report([str(folder), "--output", "x"])
    with pytest.raises(SystemExit, match="2"):
        cli.report(["one", "other"])
    assert "a page is of one run; for several: grpo report --compare one other\n" in capsys.readouterr().err
