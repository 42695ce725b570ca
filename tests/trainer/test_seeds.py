"""The tool that runs recipes on several seeds: phases that it shares, and its tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from grpo_trainer import recipe as recipes
from grpo_trainer.recipe import Recipe
from grpo_trainer.report.paradigms import select

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
    for change in ("seed=1", "evaluation.samples=2", "phases.0.sft.steps=2"):
        assert seeds.longest_start(load("reply", change), finished) is None
    whole = load("reply")
    third = dataclasses.replace(whole, name="third", phases=[*whole.phases, whole.phases[1]])
    assert seeds.longest_start(third, [whole, *finished]) is whole


def test_tables(tmp_path: Path) -> None:
    for seed in (0, 1):
        run(tmp_path / f"a{seed}", "a", seed, 0.4 + 0.2 * seed)
        run(tmp_path / f"b{seed}", "b", seed, 0.5 + 0.2 * seed, diversity=0.3 + 0.2 * seed)
    rows, _ = select(sorted(tmp_path.iterdir()))
    # t of one degree of freedom is 12.706, and the deviation 0.2 / sqrt(2)
    assert seeds.side_by_side(rows, ("sampled_reward", "length")).splitlines() == [
        "|  | sampled_reward | length |",
        "| --- | --- | --- |",
        "| a | 0.500 ± 1.271 | 7.000 ± 0.000 |",
        "| b | 0.600 ± 1.271 | 7.000 ± 0.000 |",
    ]
    line = seeds.differences(rows, ("sampled_reward", "semantic_diversity")).splitlines()[-1]
    assert line == "| b - a | **+0.100 (+0.100 to +0.100)** | -0.100 (-1.371 to +1.171) |"
