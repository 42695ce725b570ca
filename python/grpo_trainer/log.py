"""Logs of a run: JSON lines, trackers and a progress bar."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_trainer import strict_json
from grpo_trainer.recipe import Recipe
from grpo_trainer.trackers import TRACKERS, Histogram, Tracker


class Log:
    """Writes the run's JSON lines.

    metrics.jsonl holds the metrics of each step, samples.jsonl responses, maps.jsonl maps of one prompt's responses,
    and events.jsonl what was skipped, saved and resumed.
    """

    def __init__(self, recipe: Recipe, is_main: bool = True) -> None:
        self.settings, self.folder, self.is_main = recipe.logging, recipe.folder, is_main
        steps = [phase.sft.steps if phase.sft else phase.rl.steps if phase.rl else 0 for phase in recipe.phases]
        self.steps_before = [sum(steps[:number]) for number in range(len(steps) + 1)]  # of earlier phases
        self.start = time.time()
        self.bar: Any = None
        self.trackers: list[Tracker] = []
        self.open_trackers: list[Tracker] = []
        if is_main:
            self.trackers = [TRACKERS[kind](recipe) for kind in self.settings.to]

    def open(self) -> None:
        """Starts or resumes a run in each tracker."""
        for tracker in self.trackers:
            tracker.open()
            self.open_trackers.append(tracker)

    def metrics(self, kind: str, phase: int, step: int, values: dict[str, float]) -> None:
        if not self.is_main or (step % self.settings.every and kind != "eval"):
            return
        header = {"phase": kind, "number": phase, "step": step, "time": round(time.time() - self.start, 3)}
        self._write("metrics", header | values)
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        for tracker in self.trackers:
            tracker.log(known, self.steps_before[phase] + step)

    def samples(self, phase: int, step: int, samples: list[dict[str, Any]]) -> None:
        shown = samples[: self.settings.samples] if self.is_main else []
        for sample in shown:
            self._write("samples", {"number": phase, "step": step} | sample)
        if shown and step % self.settings.every == 0:
            rows = [[_as_text(value) for value in sample.values()] for sample in shown]
            for tracker in self.trackers:
                tracker.table("samples", list(shown[0]), rows, self.steps_before[phase] + step)

    def histograms(self, phase: int, step: int, values: Mapping[str, Tensor]) -> None:
        """Sends the distributions of tensors to the trackers."""
        if not (self.is_main and self.trackers):
            return
        known = {name: of for name, tensor in values.items() if (of := Histogram.of(tensor)) is not None}
        for tracker in self.trackers:
            tracker.histograms(known, self.steps_before[phase] + step)

    def map(self, phase: int, line: dict[str, Any]) -> None:
        if self.is_main:
            self._write("maps", {"number": phase} | line)

    def event(self, kind: str, **facts: Any) -> None:
        if self.is_main:
            self._write("events", {"event": kind, "time": round(time.time() - self.start, 3)} | facts)

    def progress(self, title: str, done: int, total: int, shown: dict[str, float]) -> None:
        if not (self.is_main and self.settings.progress):
            return
        text = "  ".join(f"{name} {value:,.{0 if abs(value) >= 100 else 3}f}" for name, value in shown.items())
        if not sys.stderr.isatty():
            if done == total or done % max(1, total // 10) == 0:
                print(f"{title} {done}/{total}  {text}", file=sys.stderr, flush=True)
            return
        if self.bar is None or self.bar[0] != title:
            self.close_progress()
            self.bar = (title, *_bar(title, total))
        self.bar[1].update(self.bar[2], completed=done, text=text)

    def line(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        if not (self.is_main and self.settings.progress):
            return
        if self.bar is not None:
            self.bar[1].console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close_progress(self) -> None:
        if self.bar is not None:
            self.bar[1].stop()
            self.bar = None

    def close(self) -> None:
        self.close_progress()
        while self.open_trackers:
            self.open_trackers.pop().close()

    def truncate(self, phase: int, step: int) -> None:
        """Removes the lines after a checkpoint, and those of the evaluation at it, which a resumed run repeats."""
        for name in ("metrics", "samples", "maps") if self.is_main else ():
            path = self.folder / f"{name}.jsonl"
            if not path.exists():
                continue
            kept = []
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue  # cut off when the run was killed
                position = (entry["number"], entry["step"])
                is_evaluation = name == "maps" or entry.get("phase") == "eval"
                if position < (phase, step) or (position == (phase, step) and not is_evaluation):
                    kept.append(line)
            temporary = path.with_name(f".new-{path.name}")
            temporary.write_text("".join(line + "\n" for line in kept))
            temporary.replace(path)

    def _write(self, name: str, entry: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(strict_json.to_text(entry) + "\n")


def _as_text(value: Any) -> Any:
    """A value for a cell of a table: lists, such as chat messages, as JSON."""
    return value if isinstance(value, str | int | float) else json.dumps(value, ensure_ascii=False)


def _bar(title: str, total: int) -> tuple[Any, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    title_column, text_column = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
    bar = Progress(title_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text_column)
    bar.start()
    return bar, bar.add_task(title, total=total, text="")
