"""Writes a JSON line for each item of a long run as it happens, so that a process killed at any moment loses nothing.

An item has a line when it begins and one when it ends. A process that continues such a file skips the items in it,
including one that a crash interrupted, so that it can be restarted until all items have a result.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

START_AGAIN = 75  # exit status of a process that must be replaced by a new one
BAD = ("failed", "crashed", "hung")  # states of an item, besides begun, passed and skipped
Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """Lines of the file, without one that was cut off while it was written."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def results(lines: list[Line]) -> dict[str, Line]:
    """Last line of each item, by name. An item that never ended has the state "begun"."""
    return {line["item"]: line for line in lines}


def first_lines(error: BaseException) -> str:
    text = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return " | ".join(text[:3])[:500]


class Lines:
    def __init__(self, path: Path, patience: float) -> None:
        """
        Args:
            path: The file, appended to.
            patience: Seconds after which an item counts as hung and ends the process.
        """
        self.path, self.patience = path, patience
        self.known = results(read(path))
        with path.open("a") as file:
            file.write("\n")  # ends a line that an earlier process was writing when it was killed
        for item, line in self.known.items():
            if line["state"] == "begun":
                self.write(item, "crashed", why="the process ended while it ran")

    def write(self, item: str, state: str, **more: Any) -> None:
        self.known[item] = {"item": item, "state": state} | more
        with self.path.open("a") as file:
            file.write(json.dumps(self.known[item]) + "\n")

    @contextmanager
    def begun(self, item: str) -> Iterator[None]:
        """Writes that the item has begun, and ends the process if it takes longer than `patience`."""
        self.write(item, "begun")
        watch = threading.Timer(self.patience, self._give_up, [item])
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def _give_up(self, item: str) -> None:
        self.write(item, "hung", seconds=self.patience, why=f"still running after {self.patience:g} s")
        os._exit(START_AGAIN)  # a kernel that never ends blocks every thread of the process


def device_error() -> str:
    """Sticky error of this process's GPU, or "". Synchronises."""
    if not torch.cuda.is_available():
        return ""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
    except Exception as error:  # torch.AcceleratorError and its predecessors
        return first_lines(error)
    return ""
