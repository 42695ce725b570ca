"""Runs of the trainer in forked processes that can be killed, and their comparison bit by bit.

Importing the trainer takes longer than a small run, so this process imports it once and forks a child for each run. It
never uses a second thread, as a forked child could not use the parent's.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from grpo_trainer import distributed
from grpo_trainer.recipe import Recipe
from grpo_trainer.train import train
from tqdm import tqdm

from tests.trainer import small

KEPT = Path(__file__).parent.parent.parent / "build" / "nightly" / "kept"  # runs that ended otherwise than they must
REWARD = "tests.nightly.runs:moody"
PATIENCE = 120.0  # seconds until a run counts as hanging
FORK = multiprocessing.get_context("fork")

# Supervised and reinforcement steps with similarity groups; a checkpoint after each step, a reference, samples and
# evaluations with maps: every kind of file that a run writes.
OVERRIDES = (
    "sft={steps: 2, batch: 8, micro_batch: 8, optimizer: {lr: 0.01}}",
    "rl={steps: 4, minibatches: 2, micro_batch: 16, optimizer: {lr: 0.001}, "
    "rollout: {prompts: 4, num_generations: 4, max_completion_length: 8}, "
    f"rewards: [{{name: '{REWARD}'}}], "
    "algorithm: {name: similarity_group_grpo, beta: 0.01, similarity: {embedder: hashed}}}",
    "checkpoints.every=1",
    f"evaluation={{every: 2, batch: 8, samples: 2, embedder: hashed, rewards: [{{name: '{REWARD}'}}]}}",
    "logging.samples=2",
    "data.options={demonstrations: 32, train: 12, validation: 4, test: 4, boxes: 0.0}",
)


def recipe(folder: Path, *overrides: str) -> Recipe:
    return small.recipe(folder, *OVERRIDES, *overrides)


# The reward's mood, the call in which it has it, and a file that says so. Every process has its own.
_mood: tuple[str, int, Path | None] = ("good", 0, None)
_calls = 0


def set_mood(mood: str, call: int, sign: Path | None = None) -> None:
    """Lets the reward of this process misbehave in the n-th call."""
    global _mood, _calls
    _mood, _calls = (mood, call, sign), 0  # the parent has called it, too


def moody(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """The reward of the runs."""
    global _calls
    _calls += 1
    values = small.digits(prompts, completions)
    mood, call, sign = _mood
    if mood == "good" or _calls != call:
        return values
    if sign is not None:
        sign.write_text("")
    if mood == "raise":
        raise KeyError("no such thing")
    if mood == "hang":
        time.sleep(3600)
    if mood == "exit":
        sys.exit("bye")
    if mood == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return values[1:] if mood == "few" else [float(mood)] * len(values)


def warm_up() -> None:
    """Imports everything that a run needs, by running one. Without it each child takes ten times as long."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread beside the main one, as a fork copies what others hold locked
    with tempfile.TemporaryDirectory() as folder:
        train(recipe(Path(folder)))


class Child:
    """A forked process that runs `work`.

    Args:
        work: its exception becomes the text of `error`.
        environment: variables that the process gets in addition.
    """

    def __init__(self, work: Callable[[], object], environment: Mapping[str, str] | None = None) -> None:
        self._reader, writer = FORK.Pipe(duplex=False)
        self.began, self.error = time.monotonic(), ""
        self.process = FORK.Process(target=_run_and_exit, args=(work, writer, environment or {}))
        self.process.start()
        writer.close()

    @property
    def status(self) -> int | None:
        return self.process.exitcode

    @property
    def was_killed(self) -> bool:
        return self.status == -signal.SIGKILL

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; a process that has ended already is left alone."""
        if self.status is None:
            os.kill(self.process.pid or 0, number)

    def wait(self, seconds: float = PATIENCE) -> Child:
        """Waits for the end; a process that takes longer is killed and reported as hanging."""
        self.process.join(seconds)
        if self.status is None:
            self.process.kill()
            self.process.join()
            self.error = f"still running after {seconds:g} s"
        self.seconds = time.monotonic() - self.began
        with contextlib.suppress(EOFError):  # the process ended without a word
            self.error += self._reader.recv()
        if self.status is not None and self.status < 0 and not self.was_killed:
            self.error += f"ended by signal {-self.status}"
        return self


def _run_and_exit(work: Callable[[], object], writer: Connection, environment: Mapping[str, str]) -> None:
    """The forked side: never returns."""
    status = 1
    try:
        os.environ.update(environment)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started us in the background
        # tqdm's own lock is shared with all forked processes, and a killed one would hold it forever
        tqdm.set_lock(threading.RLock())
        torch.set_num_threads(1)
        work()
        distributed.destroy_process_group()
        status = 0
    except BaseException as error:
        writer.send(f"{type(error).__name__}: {error}\n")
    finally:
        os._exit(status)


def start(folder: Path, *overrides: str, before: Callable[[], object] | None = None) -> Child:
    """Starts or resumes a run in a child.

    Args:
        folder: the run's folder.
        overrides: changes to the recipe.
        before: called in the child first, to plant a fault.
    """

    def work() -> None:
        if before is not None:
            before()
        train(recipe(folder, *overrides), resume=(folder / "recipe.yaml").exists())

    return Child(work)


# Comparison


def contents(folder: Path) -> dict[str, Any]:
    """All files of a finished run by name, without what may differ: times, the folder's own path, and events."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or name == "events.jsonl":
            continue
        if path.suffix == ".jsonl":
            found[name] = [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
        elif name == "recipe.yaml":
            found[name] = re.sub("^output: .*$", "", path.read_text(), flags=re.MULTILINE)
        else:
            found[name] = path.read_bytes()
    return found


def _timeless(entry: dict[str, Any]) -> str:
    """A line without its times, as text, in which NaN equals NaN."""
    return json.dumps({name: v for name, v in entry.items() if not name.startswith(("time", "speed/"))})


def differences(expected: dict[str, Any], folder: Path) -> str:
    """Names of the files that differ from those of the undisturbed run, and where a copy of this one is kept; empty if
    none does."""
    try:
        actual = contents(folder)
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    wrong = [
        name + _how(expected.get(name), actual.get(name))
        for name in sorted(expected.keys() | actual.keys())
        if expected.get(name) != actual.get(name)
    ]
    if not wrong:
        return ""
    kept = KEPT / f"{time.time_ns()}"  # as a difference may not come up again
    shutil.copytree(folder, kept)
    return f"{', '.join(wrong)}; kept in {kept}"


def _how(a: Any, b: Any) -> str:
    if not isinstance(a, bytes) or not isinstance(b, bytes) or len(a) != len(b):
        return ""
    places = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    return f" ({len(places)} of {len(a)} bytes, from {places[0]} to {places[-1]})"


def finish_and_compare(folder: Path, expected: dict[str, Any], *overrides: str) -> str:
    """Resumes a run to its end and returns how it differs from the undisturbed one; empty if it does not."""
    child = start(folder, *overrides).wait()
    if child.status != 0:
        return f"the resumed run ended with: {child.error.strip()}"
    wrong = differences(expected, folder)
    return f"differs in {wrong}" if wrong else ""


def undisturbed(top: Path) -> tuple[dict[str, Any], float]:
    """The files of the undisturbed run, and its seconds. Two runs, as they must agree before anything is compared."""
    warm_up()
    children = [start(top / name).wait() for name in ("first", "second")]
    assert [child.status for child in children] == [0, 0], [child.error for child in children]
    expected = contents(top / "first")
    assert not (wrong := differences(expected, top / "second")), f"two undisturbed runs differ in {wrong}"
    return expected, children[1].seconds
