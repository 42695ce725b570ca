"""The soak of the trainer sees what it is there to see: a file that differs, a fault that nobody noticed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tools.soak import faults, kills, runs


def run_folder(folder: Path, loss: float, seconds: float) -> Path:
    (folder / "checkpoints" / "rl-2").mkdir(parents=True)
    (folder / "checkpoints" / "rl-2" / "weights").write_bytes(b"weights")
    (folder / "recipe.yaml").write_text(f"output: {folder}\nseed: 1\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"loss": loss, "time/step": seconds}) + "\n")
    (folder / "events.jsonl").write_text(f"{seconds}\n")
    return folder


def test_every_difference_but_times_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "KEPT", tmp_path / "kept")
    expected = runs.contents(run_folder(tmp_path / "a", 0.5, 1.0))
    same = run_folder(tmp_path / "b", 0.5, 2.0)
    assert runs.differences(expected, same) == "" and not runs.KEPT.exists()
    (same / "checkpoints" / "rl-2" / "weights").write_bytes(b"Weights")
    (same / "more").write_text("")
    found, _, kept = runs.differences(expected, same).partition("; kept in ")
    assert found == "checkpoints/rl-2/weights (1 of 7 bytes, from 0 to 0), more (new)"
    assert (Path(kept) / "checkpoints" / "rl-2" / "weights").read_bytes() == b"Weights"
    assert runs.differences(expected, run_folder(tmp_path / "c", 0.25, 1.0)).startswith("metrics.jsonl; kept in ")


def test_children_report_errors_and_unnoticed_faults_are_failures(tmp_path: Path) -> None:
    unnoticed, failed = runs.Child(lambda: None).wait(), runs.Child(lambda: json.loads("{")).wait()
    assert unnoticed.status == 0 and failed.status != 0 and failed.error.startswith("JSONDecodeError: ")
    assert runs.Child(lambda: os.kill(os.getpid(), signal.SIGKILL)).wait().was_killed
    assert runs.Child(lambda: time.sleep(60)).wait(0.2).error == "still running after 0.2 s"
    assert faults.mended(tmp_path, "disk", unnoticed, "full", {}) == "disk: the run did not notice"
    assert "expected 'full', got 'JSONDecodeError" in faults.mended(tmp_path, "disk", failed, "full", {})
    for kind in faults.DAMAGES:
        (tmp_path / "file").write_bytes(b"a few bytes")
        faults.damage(tmp_path / "file", kind, random.Random(0))
        assert not (tmp_path / "file").exists() or (tmp_path / "file").read_bytes() != b"a few bytes", kind


def test_the_moment_of_a_kill_is_told_from_what_is_left(tmp_path: Path) -> None:
    assert kills.doing(tmp_path, (0, 0)) == "before the run has started or is resumed"
    run_folder(tmp_path, 0.5, 1.0)
    for text, said in (
        ('{"kind": "train", "phase": "sft"}\n{"kind": "eval", "phase": "sft"}\n', "in SFT"),
        ('{"kind": "train", "phase": "sft"}\n{"kin', "while a line of a log is written"),
    ):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert kills.doing(tmp_path, (0, 0)) == said
    (tmp_path / "checkpoints" / ".new-rl-3").mkdir()
    assert kills.doing(tmp_path, (0, 0)) == "while a checkpoint is written"
