"""The page of several runs: rows, intervals, what is left out, and the front."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

from grpo_trainer.report import write_comparison, write_evaluation
from grpo_trainer.report.compare import t_interval
from grpo_trainer.report.comparison import differences, select
from grpo_trainer.report.run_folder import Evaluated

from tests.trainer import run_folders
from tests.trainer.run_folders import change, change_recipe
from tests.trainer.test_report import Reader, keep


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


def test_seeds_of_a_recipe_are_one_row(tmp_path: Path) -> None:
    qualities = [0.4, 0.5, 0.9]
    folders = [run(tmp_path / f"a{i}", "a", i, quality) for i, quality in enumerate(qualities)]
    folders.insert(1, run(tmp_path / "b", "b", 0, 0.7))
    rows, left_out = select(folders)
    assert [(row.label, list(row.evaluated)) for row in rows] == [("1 a", [0, 1, 2]), ("2 b", [0])] and left_out == {}
    several, single = (row.estimate("sampled_reward") for row in rows)
    assert several == (pytest.approx(0.6), *map(pytest.approx, t_interval(qualities)), "3 seeds")
    # values 0.605 to 0.795 in steps of 0.01: a normal interval is close to the bootstrap
    deviation = float(torch.tensor([0.7 + (i - 9.5) / 100 for i in range(20)]).std())
    assert single.mean == pytest.approx(0.7) and single.units == "20 prompts"
    assert single.high - single.low == pytest.approx(2 * 1.96 * deviation / math.sqrt(20), rel=0.1)
    # no mean over what was written of each prompt
    assert rows[1].estimate("length").cell() == "7.000" and rows[1].estimate("other").cell() == "none"


def test_differences_are_paired(tmp_path: Path) -> None:
    """Seeds differ by more than the recipes do, which pairing removes."""
    for seed, quality in enumerate((0.2, 0.5, 0.8)):
        run(tmp_path / f"a{seed}", "a", seed, quality)
        # in another order, as a pair is of equal seeds
        run(tmp_path / f"b{2 - seed}", "b", seed, quality + 0.02 + 0.001 * seed, diversity=0.5 + 0.1 * (seed - 1))
    run(tmp_path / "c0", "c", 0, 0.3)
    run(tmp_path / "d9", "d", 9)
    a, b, c, d = select(sorted(tmp_path.glob("*[0-9]")))[0]
    better, unclear = b.minus(a, "sampled_reward"), b.minus(a, "semantic_diversity")
    assert better == (pytest.approx(0.021), *map(pytest.approx, t_interval([0.02, 0.021, 0.022])), "3 seeds")
    assert a.minus(b, "sampled_reward").high == pytest.approx(-better.low)
    assert unclear.low < 0 < unclear.high
    # one seed in common: every prompt differs by as much
    assert c.minus(a, "sampled_reward") == (*[pytest.approx(0.1)] * 3, "20 prompts")
    assert d.minus(a, "sampled_reward").cell() == "none"
    text = Reader(write_comparison(sorted(tmp_path.glob("[ab][0-9]")), tmp_path / "out")).text
    assert "semantic_diversity sampled_reward not told apart by 2 b \u2212 1 a " in text
    assert "+0.021 +0.019 to +0.023 semantic_diversity " in text


def test_what_is_left_out_is_named_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        run(tmp_path / name, "a", seed) for seed, name in enumerate(("good", "data", "prompts", "count", "split"))
    ]
    change_recipe(folders[1], "data.task", "gsm8k")
    for key, value in (("seed", 0), ("name", "b")):
        change_recipe(folders[2], key, value)
    change(folders[2], lambda e: e["prompts"][0].update(prompt="another"))
    change(folders[3], lambda e: e["prompts"].pop())
    keep(lambda e: e["split"] != "test")(folders[4])
    folders += [run(tmp_path / "unfinished", "a", 7, finished=False), run(tmp_path / "twin", "a", 0), tmp_path / "none"]
    reasons = {
        folders[1]: "other data: data.task is 'gsm8k', not 'arithmetic' as in 1 a",
        folders[2]: "other data: prompts of seed 0 is ['another', ",
        folders[3]: "other data: prompts, number of is 19, not 20",
        folders[4]: "other data: split is 'validation', not 'test'",
        folders[5]: "no evaluation after its last step",
        folders[6]: "another run has its recipe and its seed, 0",
        folders[7]: "folder must have a recipe.yaml",
    }
    rows, left_out = select(folders)
    assert [row.runs[0].path for row in rows] == folders[:1] and left_out.keys() == reasons.keys()
    text = Reader(write_comparison(folders, tmp_path / "out")).text
    printed = capsys.readouterr().err
    for folder, reason in reasons.items():
        assert reason in left_out[folder] and reason in text and f"left out {folder}: " in printed
    with pytest.raises(
        ValueError, match=r"^write_comparison: folders must have a run with a final evaluation, got .*none"
    ):
        write_comparison(folders[7:], tmp_path / "out")
    assert [row.label for row in select(folders[4:5])[0]] == ["1 a"]


def test_settings_that_differ_between_evaluations_are_named(tmp_path: Path) -> None:
    folders = [run(tmp_path / name, name) for name in "ab"]
    change_recipe(folders[1], "evaluation.temperature", 0.7)
    change_recipe(folders[1], "rl.rewards", [{"name": "judge"}])
    change(folders[1], lambda e: e.update(embedder="minilm"))
    assert differences(select(folders)[0]) == [
        "2 b: evaluation.temperature is 0.7, not None as in 1 a.",
        "2 b: evaluation.rewards is [{'name': 'judge'}], not None as in 1 a.",
        "2 b: embedder is 'minilm', not None as in 1 a.",
    ]
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
    assert reader.text.startswith(
        "Comparison Comparison 4 runs of 4 recipes, evaluated on 20 test prompts of arithmetic."
    )
    assert "on the Pareto front yes no yes no" in reader.text and "aside: 1 best, 3 wide." in reader.text
    assert "collapse of semantic_diversity none none 25 none" in reader.text
    assert reader.text.index("pass@5") < reader.text.index("pass@10") < reader.text.index("semantic_diversity")
    assert (
        "sampled_reward over semantic_diversity: 1 at 0.2, 0.9; 2 at 0.1, 0.5; 3 at 0.8, 0.3; 4 at 0.7, 0.2"
        in reader.labels
    )
    assert any(label.startswith("train/kl_mean, rl: 1 best from") for label in reader.labels)
    assert "<b>{{7*7}}" in reader.text
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert content["front"] == ["1 best", "3 wide"] and content["measures"]["1 best"]["sampled_reward"]["mean"] == 0.9


def test_more_samples_and_learning_curves_are_means_over_seeds(tmp_path: Path) -> None:
    folders = [run(tmp_path / f"{name}{seed}", name, seed) for name in "ab" for seed in (0, 1)]
    change(folders[3], lambda e: [line.update(right=[1.0] * 5 + [0.0] * 5) for line in e["prompts"]])
    change(folders[3], lambda line: line.update({"rewards/mean": 1.0} if line["phase"] == "rl" else {}), "metrics")
    change(folders[2], lambda line: line.update({"rewards/mean": 0.0} if line["phase"] == "rl" else {}), "metrics")
    labels = Reader(write_comparison(folders, tmp_path / "out")).labels
    assert "pass@k by the number of samples: 1 a from 0.1 to 1; 2 b from 0.3 to 1" in labels
    # at k = 2 the first seeds have 0.2 / (2 * 0.1), the last one 1 - C(5, 2) / C(10, 2) = 7 / 9 over 2 * 0.5
    assert f"DER@k = pass@k / (k pass@1): 1 a from 1 to 1; 2 b from {(1 + 7 / 9) / 2:.3g} to 0.6" in labels
    (reward,) = (label for label in labels if label.startswith("rewards/mean, rl"))
    assert reward.endswith("2 b from 0.5 to 0.5")


def test_evaluated_models_stand_beside_each_other(tmp_path: Path) -> None:
    results = {
        name: SimpleNamespace(to_json=lambda q=q: final(q, 0.5)) for name, q in (("base", 0.4), ("trained", 0.5))
    }
    recipe: Any = SimpleNamespace(name="mine")
    text = Reader(write_evaluation(results, recipe, "test", tmp_path / "out")).text
    assert "20 prompts of the test split, evaluated with the recipe mine." in text and "Learning curves" not in text
    assert "2 trained \u2212 1 base +0.000 +0.000 to +0.000 +0.100 +0.100 to +0.100 semantic_diversity" in text
    assert (
        json.loads((tmp_path / "out" / "evaluation.json").read_text())["measures"]["2 trained"]["reward"]["mean"] == 0.5
    )


def test_measures_of_a_prompt() -> None:
    line = {"reward": 0.5, "correct": 1.0, "rewards": [0.0, 1.0, None], "right": [1.0, 0, 0], "measures": {"vendi": 2}}
    row = Evaluated({"prompts": [line]}).table.iloc[0]
    expected = {"reward": 0.5, "exact": 1.0, "sampled_reward": 0.5, "sampled_exact": 1 / 3, "vendi": 2.0}
    assert row.to_dict() == pytest.approx(expected | {"pass@1": 1 / 3, "pass@2": 2 / 3, "pass@3": 1.0})
    unknown = Evaluated({"prompts": [{}, {"reward": None}]}).table
    assert list(unknown) == ["reward", "exact"] and unknown.isna().all(axis=None)
