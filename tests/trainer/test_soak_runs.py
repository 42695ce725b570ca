"""The soak of the trainer sees what it is there to see: a file that differs, a fault that nobody noticed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

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
    (same / "metrics.jsonl").write_text('{"loss": 0.5, "time')
    assert runs.differences(expected, same).startswith("cannot be read")


def test_children_report_errors_kills_and_hanging() -> None:
    assert runs.Child(lambda: None).wait().status == 0
    failed = runs.Child(lambda: json.loads("{")).wait()
    assert failed.status != 0 and failed.error.startswith("JSONDecodeError: ")
    assert runs.Child(lambda: os.kill(os.getpid(), signal.SIGKILL)).wait().was_killed
    assert runs.Child(lambda: time.sleep(60)).wait(0.2).error == "still running after 0.2 s"


def test_a_fault_that_is_not_noticed_or_not_named_is_a_failure(tmp_path: Path) -> None:
    unnoticed = runs.Child(lambda: None).wait()
    assert faults.mended(tmp_path, "disk", unnoticed, "full", {}) == "disk: the run did not notice"
    unnamed = runs.Child(lambda: json.loads("{")).wait()
    assert "expected 'full', got 'JSONDecodeError" in faults.mended(tmp_path, "disk", unnamed, "full", {})


def test_every_damage_changes_the_file(tmp_path: Path) -> None:
    chance = random.Random(0)
    for kind in faults.DAMAGES:
        path = tmp_path / "file"
        path.write_bytes(b"a few bytes")
        faults.damage(path, kind, chance)
        assert not path.exists() or path.read_bytes() != b"a few bytes", kind


def test_the_moment_of_a_kill_is_told_from_what_is_left(tmp_path: Path) -> None:
    nothing = (0, 0)
    assert kills.doing(tmp_path, nothing) == "before the run has started or is resumed"
    run_folder(tmp_path, 0.5, 1.0)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "phase": "sft"}\n{"kind": "eval", "phase": "sft"}\n')
    assert kills.doing(tmp_path, nothing) == "in SFT"
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "phase": "sft"}\n{"kin')
    assert kills.doing(tmp_path, nothing) == "while a line of a log is written"
    (tmp_path / "checkpoints" / ".new-rl-3").mkdir()
    assert kills.doing(tmp_path, nothing) == "while a checkpoint is written"
