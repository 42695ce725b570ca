"""The tool that trains recipes on several seeds: its runs, tables and page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.trainer import small
from tools import experiments


def test_recipes_and_variants_on_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = small.values(tmp_path / "unused")
    values["sft"]["steps"] = values["rl"]["steps"] = 1
    values["rl"]["rewards"] = [{"name": "reward_of_experiments:rising"}]
    (tmp_path / "own.yaml").write_text(json.dumps(values | {"name": "own"}))
    (tmp_path / "other.yaml").write_text("base: own.yaml\nname: other\nrl: {optimizer: {lr: 0.1}}\n")
    # greedy responses of a model without training are the same for all seeds
    code = "calls = []\n\ndef rising(completions, **_):\n    calls.extend(completions)\n"
    code += "    return [len(calls) / 99] * len(completions)\n"
    (tmp_path / "reward_of_experiments.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["experiments.py", "own.yaml", "other.yaml", "--seeds", "0", "1", "--folder", "made"]
    monkeypatch.setattr(sys, "argv", command)
    experiments.main()
    printed = capsys.readouterr().out
    table = [line.split(" | ") for line in printed.splitlines() if line.startswith("| own.yaml")]
    assert [line[1] for line in table][:3] == ["0", "1", "mean"] and "| own.yaml, seed 0 | reward |" in printed
    first, second, of_both = (float(line[2].rstrip(" |")) for line in table[:3])
    assert of_both == pytest.approx((first + second) / 2, abs=1e-3) and abs(first - second) > 0.01
    assert "page: made/comparison/comparison.html" in printed
    before = {path: path.stat().st_mtime for path in Path("made").rglob("*.safetensors")}
    experiments.main()  # finished runs are read
    assert before == {path: path.stat().st_mtime for path in Path("made").rglob("*.safetensors")}
    # variants continue from one SFT
    variants = {"plain": [], "doctor": ["rl.algorithm.name=dr_grpo"]}
    experiment = experiments.Experiment("own.yaml", variants, lambda _: {"one": 1.0})
    monkeypatch.setitem(experiments.EXPERIMENTS, "mine", experiment)
    runs = experiments.run_experiment("mine", 3, tmp_path / "variants", [])
    model = str(next((runs["SFT"].path / "checkpoints").glob("sft-1/model")))
    assert {name: run.setting("model.path") for name, run in runs.items()} == {
        "SFT": "tiny",
        "plain": model,
        "doctor": model,
    }
    assert runs["doctor"].setting("rl.algorithm.name") == "dr_grpo" and runs["plain"].setting("seed") == 3
    assert experiments.figures(runs["plain"], experiment.measure)["one"] == 1.0
