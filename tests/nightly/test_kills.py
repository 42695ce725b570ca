"""Runs killed with SIGKILL at random moments and resumed until they end.

Every file must equal that of the undisturbed run: weights, optimizer, logs, samples and evaluations. Half of the
moments are drawn over the whole run, the others within a checkpoint that is being written: from the moment its
temporary folder appears. A resumed run is sometimes killed again. A run of two processes loses one of them.
"""

from __future__ import annotations

import random
import shutil
import socket
import time
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
    folder, kills = tmp_path / "run", 0
    while kills < KILLS:
        shutil.rmtree(folder, ignore_errors=True)
        before = kills
        while kill_at_random(runs.start(folder), folder, seconds, chance):
            kills += 1
            if kills >= KILLS or chance.random() > AGAIN:
                break
        problem = runs.finish_and_compare(folder, expected)
        assert not problem, f"killed {kills - before} times: {problem}"


def kill_at_random(child: runs.Child, folder: Path, seconds: float, chance: random.Random) -> bool:
    """Kills a run at a random moment; whether it was killed, as it may have ended first."""
    if chance.random() < 0.5:
        number, delay = chance.randint(1, 4), chance.random() * 0.02
        await_checkpoints(child, folder / "checkpoints", number, delay)
    else:
        time.sleep(chance.random() * seconds)
    child.kill()
    assert child.wait().status == 0 or child.was_killed, f"the run must not end by itself, got {child.error}"
    return child.was_killed


def await_checkpoints(child: runs.Child, folder: Path, number: int, delay: float) -> None:
    """Waits for the temporary folder of the n-th checkpoint from now, and a little longer."""
    seen: set[str] = set()
    give_up = time.monotonic() + runs.PATIENCE
    while child.status is None:
        if time.monotonic() > give_up:
            raise RuntimeError(f"the run must write a checkpoint within {runs.PATIENCE:g} s; it hangs, or is too slow")
        seen |= {path.name for path in folder.glob(".new-*")}
        if len(seen) >= number:
            time.sleep(delay)
            return
        time.sleep(0.0002)


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
