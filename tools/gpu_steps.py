"""Runs commands until a deadline, and restarts those that a crash interrupted."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks import gpu_lines

MOST_STARTS = 30  # of one step


@dataclass(frozen=True)
class Step:
    part: str
    name: str
    command: list[str]
    environment: dict[str, str]
    folder: Path  # working directory
    lines: Path | None = None  # its file of results, with which a process that ended early is restarted
    expects: str = ""  # a pattern that its output must match, besides an exit status of 0
    refused: str = ""  # a pattern in the output of a tool that this machine does not permit
    missing: str = ""  # reason why it cannot run here
    is_optional: bool = False  # whether it may be left out if something is missing
    fills_time: bool = False  # whether it uses all available time, so that a stop is no failure


class Row(NamedTuple):
    part: str
    step: str
    state: str  # ok, stopped, refused, left out, FAILED
    seconds: float
    why: str = ""


@dataclass
class Running:
    step: Step
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    starts: int = 1
    results: int = 0  # number of result lines at the last start


def log_of(step: Step, out: Path) -> Path:
    return out / f"{step.part}_{re.sub('[^0-9A-Za-z]+', '_', step.name)}.log"


def start(step: Step, log: Path) -> subprocess.Popen[bytes]:
    step.folder.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            step.command,
            cwd=step.folder,
            env=os.environ | step.environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and everything that it started."""
    with contextlib.suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def begin_again(running: Running) -> bool:
    """Restarts a step that ended before the last of its items, unless the last start made no progress."""
    step = running.step
    if step.lines is None or running.process.returncode in (0, 1) or running.starts >= MOST_STARTS:
        return False
    results = len(gpu_lines.read(step.lines))
    if results <= running.results:
        return False
    stop(running.process)
    running.process, running.starts, running.results = start(step, running.log), running.starts + 1, results
    return True


def finish(running: Running) -> Row:
    """Row of a step that has ended or run out of time; stops all of its processes."""
    step, process = running.step, running.process
    seconds, state, why = time.monotonic() - running.began, "ok", ""
    if process.poll() is None:
        state, why = ("stopped" if step.fills_time else "FAILED"), f"stopped after {seconds:.0f} s"
    elif process.returncode != 0:
        state, why = "FAILED", f"exit status {process.returncode}"
    stop(process)
    output = running.log.read_text(errors="replace")
    if state == "ok" and not re.search(step.expects, output):
        state, why = "FAILED", f"its output does not match {step.expects}"
    if state == "FAILED" and step.refused and (match := re.search(step.refused, output)):
        state, why = "refused", match.group(0).strip()
    if state == "FAILED":
        print(f"--- {step.part}, {step.name}: {why}; the end of its log:")
        print(*output.splitlines()[-12:], sep="\n", flush=True)
    if running.starts > 1:
        why = f"{why}, started {running.starts} times".removeprefix(", ")
    return Row(step.part, step.name, state, round(seconds, 1), why)


def run(steps: list[Step], deadline: float, out: Path, together: int, ended: Callable[[Row], None]) -> None:
    """Runs the steps, up to `together` at a time, and passes the row of each to `ended`."""
    waiting, running = list(steps), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < together:
                step = waiting.pop(0)
                if step.missing:
                    ended(Row(step.part, step.name, "left out" if step.is_optional else "FAILED", 0.0, step.missing))
                elif time.monotonic() >= deadline:
                    state = "stopped" if step.fills_time else "FAILED"
                    ended(Row(step.part, step.name, state, 0.0, "no time was left for it"))
                else:
                    log = log_of(step, out)
                    running.append(Running(step, log, start(step, log)))
            for active in list(running):
                is_late = time.monotonic() >= deadline
                if active.process.poll() is None and not is_late:
                    continue
                if is_late or not begin_again(active):
                    running.remove(active)
                    ended(finish(active))
            time.sleep(0.02)
    finally:  # also when interrupted
        for active in running:
            stop(active.process)
