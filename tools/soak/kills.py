"""Runs killed with SIGKILL at random moments and resumed until they end.

Every file must equal that of the undisturbed run: weights, optimizer, logs, samples and evaluations.

Half of the moments are drawn over the whole run, the others within a checkpoint that is being written: from the moment
its temporary folder appears. A resumed run is sometimes killed again. A run of two processes loses one of them.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_trainer.train import train

from tools.soak import runs
from tools.soak.outcome import Outcome

AGAIN = 0.4  # share of resumed runs that are killed again
NOTICE = 60.0  # seconds that a process has to notice that the other one died


def run(options: argparse.Namespace) -> Iterator[Outcome]:
    chance = random.Random(options.seed)
    with runs.scratch("kills") as top:
        expected, seconds = undisturbed(top)
        yield from kill_single(top, expected, seconds, options.kills, chance)
        yield kill_one_of_two(top, max(1, options.kills // 10), chance)


def undisturbed(top: Path) -> tuple[dict[str, Any], float]:
    """The files of the undisturbed run, and its seconds. Two runs, as they must agree before anything is compared."""
    runs.warm_up()
    children = [runs.start(top / name).wait() for name in ("first", "second")]
    for child in children:
        if child.status != 0:
            raise RuntimeError(f"the undisturbed run must end well, got {child.error}")
    expected = runs.contents(top / "first")
    if wrong := runs.differences(expected, top / "second"):
        raise RuntimeError(f"two undisturbed runs must be equal, they differ in {wrong}")
    return expected, children[1].seconds


def kill_single(
    top: Path, expected: dict[str, Any], seconds: float, kills: int, chance: random.Random
) -> list[Outcome]:
    """Runs of one process. Returns a row for each kind of moment, and one for the comparisons."""
    moments: Counter[str] = Counter()
    compared = Outcome(
        "kills", "killed runs, resumed until they end", 0, "every file is the undisturbed run's, bit by bit"
    )  # fmt: skip
    while sum(moments.values()) < kills:
        folder, history = top / "run", []
        shutil.rmtree(folder, ignore_errors=True)
        while True:
            child = runs.start(folder)
            moment = kill_at_random(child, folder, seconds, chance)
            if moment is None:
                break  # it ended before the moment came
            moments[moment] += 1
            history.append(moment)
            print(f"           {sum(moments.values())}: killed {moment}", flush=True)
            if sum(moments.values()) >= kills or chance.random() > AGAIN:
                break
        problem = runs.finish_and_compare(folder, expected)
        compared.check(not problem, f"killed {', then '.join(history) or 'never'}: {problem}")
    rows = [
        Outcome("kills", f"SIGKILL {moment}", count, "the run resumes") for moment, count in sorted(moments.items())
    ]
    compared.note = f"{sum(moments.values())} moments"
    return [*rows, compared]


def kill_at_random(child: runs.Child, folder: Path, seconds: float, chance: random.Random) -> str | None:
    """Kills a run at a random moment and says what it was doing; None if it ended first."""
    before = marks(folder)
    if chance.random() < 0.5:
        number, delay = chance.randint(1, 4), chance.random() * 0.02
        await_checkpoints(child, folder / "checkpoints", number, delay)
    else:
        time.sleep(chance.random() * seconds)
    if child.poll():
        if child.status != 0:
            raise RuntimeError(f"the run must not end by itself with an error, got {child.error}")
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


def kill_one_of_two(top: Path, kills: int, chance: random.Random) -> Outcome:
    """Kills one of two processes; the other one must end, and the run must resume."""
    outcome = Outcome(
        "kills", "SIGKILL of one of two processes", 0, f"the other ends within {NOTICE:g} s; resumed bit by bit"
    )  # fmt: skip
    began = time.monotonic()
    error = finish_pair(start_pair(top / "pair"))
    seconds = time.monotonic() - began
    if error:
        raise RuntimeError(f"the undisturbed run of two processes must end well, got {error}")
    expected = runs.contents(top / "pair")
    for number in range(kills):
        folder = top / f"pair-{number}"
        pair = start_pair(folder)
        time.sleep(seconds * chance.uniform(0.2, 0.95))
        victim = chance.randrange(2)
        pair[victim].kill()
        other = pair[1 - victim].wait(NOTICE)
        problem = "the other process hung" if "still running" in other.error else ""
        pair[victim].wait()
        error = finish_pair(start_pair(folder))
        wrong = f"the resumed run ended with: {error}" if error else runs.differences(expected, folder)
        problem = problem or (wrong and f"process {victim} killed: {wrong}")
        outcome.check(not problem, problem)
        shutil.rmtree(folder)
    return outcome


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
