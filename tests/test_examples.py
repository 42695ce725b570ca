"""Every example runs at toy size and reaches its stated result."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

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


def test_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    from tests.integrations import tiny_verl  # replaces servers that verl imports

    assert tiny_verl
    metrics = run("verl_grpo", monkeypatch)
    assert {"actor/pg_loss", "actor/entropy_loss", "kl_loss"} <= metrics.keys() and metrics["kl_loss"] > 0


def test_all_examples_are_short_and_tested() -> None:
    text = Path(__file__).read_text()
    for path in EXAMPLES:
        assert f'"{path.stem}"' in text, path.name
        limit = 170 if path.stem == "grpo" else 80
        assert len(path.read_text().splitlines()) < limit, path.name
