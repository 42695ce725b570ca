"""Runs measurements one after the other; an exception, crash, hang or deadline loses none of the earlier ones."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import gpu_lines

Result = dict[str, Any]
_PATIENCE = 90  # seconds until a measurement counts as hung, if there is a file


def add_options(parser: argparse.ArgumentParser) -> None:
    late = "seconds after which no further case starts; the first case of each op runs first, and omissions are listed"
    parser.add_argument("--budget", type=float, default=math.inf, help=late)
    parser.add_argument("--lines", type=Path, help="a file that gets a line per case; cases in it are not repeated")


class Items:
    def __init__(self, lines: Path | None, budget: float) -> None:
        """
        Args:
            lines: A file with a line per measurement, including those of earlier processes; None for no file.
            budget: Seconds after which no measurement starts.
        """
        self.stop = time.monotonic() + budget
        self.folder = tempfile.TemporaryDirectory()
        self.lines = gpu_lines.Lines(lines or Path(self.folder.name) / "lines", _PATIENCE if lines else 1e6)
        self.results = [line["found"] for line in self.lines.known.values() if line["state"] == "passed"]
        self.left_out: list[str] = []
        self.error = ""

    def run(self, items: dict[str, Callable[[], Result]]) -> Iterator[Result]:
        """Yields each new result. Ends early if the GPU reports an error, which it would do in every later call."""
        for name, measure in items.items():
            if name in self.lines.known:
                continue
            if time.monotonic() > self.stop:
                self.left_out.append(name)
                continue
            try:
                with self.lines.begun(name):
                    result = measure()
            except Exception as error:  # the others continue, and the exit status reports the failure
                traceback.print_exc()
                self.lines.write(name, "failed", why=gpu_lines.first_lines(error))
                self.error = gpu_lines.device_error()
                if self.error:
                    return
                continue
            self.lines.write(name, "passed", found=result)
            self.results.append(result)
            yield result

    def lost(self) -> dict[str, list[str]]:
        """Names of the measurements that were left out and that failed."""
        failed = [f"{name}: {line['why']}" for name, line in self.lines.known.items() if line["state"] in gpu_lines.BAD]
        return {key: names for key, names in (("left_out", self.left_out), ("failed", failed)) if names}

    def end(self) -> int:
        """Prints the missing measurements, and returns the exit status of the process."""
        for what, names in self.lost().items():
            for name in names:
                print(f"{what.replace('_', ' ')}: {name}")
        if self.error:
            print(f"the GPU reports an error in every further call of this process: {self.error}")
            return gpu_lines.START_AGAIN
        return int("failed" in self.lost())
