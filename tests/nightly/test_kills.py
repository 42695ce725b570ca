"""Runs killed with SIGKILL at random moments and resumed until they end.

Every file must equal that of the undisturbed run: weights, optimizer, logs, samples and evaluations. Half of the
moments are drawn over the whole run, the others within a checkpoint that is being written: from the moment its
temporary folder appears. A resumed run is sometimes killed again. A run of two processes loses one of them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from grpo_trainer.train import train

from tests.nightly import runs

KILLS, KILLS_OF_TWO = 50, 5
AGAIN = 0.4  # share of resumed runs that are killed again
NOTICE = 60.0  # seconds that a process has to notice that the other one died


def test_killed_runs_end_as_the_undisturbed_one(tmp_path: Path, chance: random.Random) -> None:
    expected, seconds = runs.undisturbed(tmp_path)
    moments: Counter[str] = Counter()
    while sum(moments.values()) < KILLS:
        folder, history = tmp_path / "run", list[str]()
        shutil.rmtree(folder, ignore_errors=True)
        while True:
            child = runs.start(folder)
            moment = kill_at_random(child, folder, seconds, chance)
            if moment is None:
                break  # it ended before the moment came
            moments[moment] += 1
            history.append(moment)
            if sum(moments.values()) >= KILLS or chance.random() > AGAIN:
                break
        problem = runs.finish_and_compare(folder, expected)
        assert not problem, f"killed {', then '.join(history) or 'never'}: {problem}"
    print(dict(moments))


def kill_at_random(child: runs.Child, folder: Path, seconds: float, chance: random.Random) -> str | None:
    """Kills a run at a random moment and says what it was doing; None if it ended first."""
    before = marks(folder)
    if chance.random() < 0.5:
        number, delay = chance.randint(1, 4), chance.random() * 0.02
        await_checkpoints(child, folder / "checkpoints", number, delay)
    else:
        time.sleep(chance.random() * seconds)
    if child.poll():
        assert child.status == 0, f"the run must not end by itself with an error, got {child.error}"
        return None
    child.kill()
    child.wait()
    return doing(folder, before) if child.was_killed else None


def await_checkpoints(child: runs.Child, folder: Path, number: int, delay: float) -> None:
    """Waits for the temporary folder of the n-th checkpoint from now, and a little longer."""
    seen: set[str] = set()
    give_up = time.monotonic() + runs.PATIENCE
    while not child.poll():
        if time.monotonic() > give_up:
            raise RuntimeError(f"the run must write a checkpoint within {runs.PATIENCE:g} s; it hangs, or is too slow")
        seen |= {path.name for path in folder.glob(".new-*")}
        if len(seen) >= number:
            time.sleep(delay)
            return
        time.sleep(0.0002)


def marks(folder: Path) -> tuple[int, int]:
    """Lengths of the run's metrics and events."""
    paths = (folder / "metrics.jsonl", folder / "events.jsonl")
    metrics, events = (path.stat().st_size if path.exists() else 0 for path in paths)
    return metrics, events


def doing(folder: Path, before: tuple[int, int]) -> str:
    """Activity of a run when it was killed, inferred from the files that it left."""
    if any((folder / "checkpoints").glob(".new-*")):
        return "while a checkpoint is written"
    if any(folder.rglob(".new-*")):
        return "while a log is replaced"
    if not (folder / "recipe.yaml").exists() or marks(folder)[1] <= before[1]:
        return "before the run has started or is resumed"
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            return "while a line of a log is written"
        if entry["kind"] == "train":
            return {"sft": "in SFT", "rl": "in RL"}[entry["phase"]]
    return "in the first step or evaluation"


# Two processes


def test_one_of_two_processes_is_killed(tmp_path: Path, chance: random.Random) -> None:
    """The other one must end, and the run must resume."""
    runs.warm_up()
    began = time.monotonic()
    assert not (error := finish_pair(start_pair(tmp_path / "pair"))), error
    seconds = time.monotonic() - began
    expected = runs.contents(tmp_path / "pair")
    for number in range(KILLS_OF_TWO):
        folder = tmp_path / f"pair-{number}"
        pair = start_pair(folder)
        time.sleep(seconds * chance.uniform(0.2, 0.95))
        victim = chance.randrange(2)
        pair[victim].kill()
        assert "still running" not in pair[1 - victim].wait(NOTICE).error, "the other process hangs"
        pair[victim].wait()
        assert not (error := finish_pair(start_pair(folder))), f"process {victim} killed, the resumed run: {error}"
        assert not (wrong := runs.differences(expected, folder)), f"process {victim} killed: differs in {wrong}"


def start_pair(folder: Path) -> list[runs.Child]:
    """The two processes of a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    resume = (folder / "recipe.yaml").exists()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    return [
        runs.Child(
            lambda: train(runs.recipe(folder), resume=resume), shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]


def finish_pair(pair: list[runs.Child]) -> str:
    """Waits for both processes and returns what they raised."""
    return "; ".join(child.error.strip() for child in pair if child.wait().status != 0)


# The tests above see a file that differs, and what a child came to


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
