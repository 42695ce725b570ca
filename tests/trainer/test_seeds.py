"""The tool that runs recipes on several seeds: phases that it shares, and its tables."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from grpo_trainer import recipe as recipes
from grpo_trainer.recipe import Recipe
from grpo_trainer.report.paradigms import select

from tests.trainer import small
from tests.trainer.test_comparison import run
from tools import seeds


def load(name: str, *overrides: str) -> Recipe:
    return recipes.load(name, [f"output=runs/{name}", *overrides])


def test_shared_phases_are_found() -> None:
    finished = [load(f"reply-{name}") for name in ("base", "sft", "sft-polychromic", "sft-conservative")]
    starts = {name: seeds.longest_start(load(name), finished) for name in recipes.bundled() if name.startswith("reply")}
    found = {name: start.name for name, start in starts.items() if start is not None}
    assert found == {
        "reply": "reply-sft",
        "reply-grpo-polychromic": "reply-sft-polychromic",
        "reply-polychromic": "reply-sft-polychromic",
    }
    for change in ("seed=1", "evaluation.samples=2", "sft.steps=2"):
        assert seeds.longest_start(load("reply", change), finished) is None
    whole = load("reply")
    third = dataclasses.replace(whole, name="third", phases=[*whole.phases, whole.phases[1]])
    assert seeds.longest_start(third, [whole, *finished]) is whole


def test_tables(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(tmp_path / f"a{seed}", "a", seed, 0.4 + 0.2 * seed)
        run(tmp_path / f"b{seed}", "b", seed, 0.5 + 0.2 * seed, diversity=0.3 + 0.4 * seed)
    run(tmp_path / "c1", "c", 1, 0.3)
    rows, _ = select(sorted(tmp_path.iterdir()))
    assert seeds.side_by_side(rows[1:], ("sampled_reward", "length")).splitlines() == [
        "|  | seed | sampled_reward | length |",
        "| --- | --- | --- | --- |",
        "| b | 0 | 0.500 | 7.000 |",
        "| b | 1 | 0.700 | 7.000 |",
        "| b | mean | 0.600 | 7.000 |",
        "| c | 1 | 0.300 | 7.000 |",
    ]
    # the signs of the diversity differ
    assert seeds.differences(rows, ("sampled_reward", "semantic_diversity")).splitlines()[2:] == [
        "| b - a | 0, 1 | **+0.100, +0.100** | -0.200, +0.200 |",
        "| c - a | 1 | **-0.300** | +0.000 |",
        "| c - b | 1 | **-0.400** | **-0.200** |",
    ]


def test_own_rewards_are_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = small.values(tmp_path / "unused")
    values["phases"][0]["sft"]["steps"] = values["phases"][1]["rl"]["steps"] = 1
    values["phases"][1]["rl"]["rewards"] = [{"name": "reward_of_seeds:ones"}]
    (tmp_path / "own.yaml").write_text(json.dumps(values))
    (tmp_path / "reward_of_seeds.py").write_text("def ones(completions, **_):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["seeds.py", "own.yaml", "--seeds", "0", "--folder", "made"])
    seeds.main()
    assert "| small | 0 | exact | 1.000 | 1.000 |" in capsys.readouterr().out
