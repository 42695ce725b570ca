"""What a run writes down: one JSON object a line, always; trackers when asked; a progress bar when somebody looks."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Any

from grpo_trainer.recipe import Recipe
from grpo_trainer.trackers import TRACKERS, Tracker


class Log:
    """metrics.jsonl: numbers of a step. samples.jsonl: responses. events.jsonl: what was skipped, saved, resumed."""

    def __init__(self, recipe: Recipe, is_main: bool = True) -> None:
        self.settings, self.folder, self.is_main = recipe.logging, recipe.folder, is_main
        steps = [phase.sft.steps if phase.sft else phase.rl.steps if phase.rl else 0 for phase in recipe.phases]
        self.before = [sum(steps[:number]) for number in range(len(steps) + 1)]  # steps of earlier phases
        self.start = time.time()
        self.bar: Any = None
        self.trackers: list[Tracker] = []
        self.running: list[Tracker] = []  # those of them that a run was begun at
        if is_main:
            self.trackers = [TRACKERS[kind](recipe) for kind in self.settings.to]

    def open(self) -> None:
        """Begins a run at each tracker, or goes on with it."""
        for tracker in self.trackers:
            tracker.open()
            self.running.append(tracker)

    def metrics(self, kind: str, phase: int, step: int, values: dict[str, float]) -> None:
        if not self.is_main or (step % self.settings.every and kind != "eval"):
            return
        when = {"phase": kind, "number": phase, "step": step, "time": round(time.time() - self.start, 3)}
        self._write("metrics", when | values)
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        for tracker in self.trackers:
            tracker.log(known, self.before[phase] + step)

    def samples(self, phase: int, step: int, samples: list[dict[str, Any]]) -> None:
        for sample in samples[: self.settings.samples] if self.is_main else []:
            self._write("samples", {"number": phase, "step": step} | sample)

    def map(self, phase: int, line: dict[str, Any]) -> None:
        if self.is_main:
            self._write("maps", {"number": phase} | line)

    def event(self, kind: str, **facts: Any) -> None:
        if self.is_main:
            self._write("events", {"event": kind, "time": round(time.time() - self.start, 3)} | facts)

    def progress(self, title: str, done: int, total: int, shown: dict[str, float]) -> None:
        if not (self.is_main and self.settings.progress):
            return
        text = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
        if not sys.stderr.isatty():
            if done == total or done % max(1, total // 10) == 0:
                print(f"{title} {done}/{total}  {text}", file=sys.stderr, flush=True)
            return
        if self.bar is None or self.bar[0] != title:
            self.close_progress()
            self.bar = (title, *_bar(title, total))
        self.bar[1].update(self.bar[2], completed=done, text=text)

    def close_progress(self) -> None:
        if self.bar is not None:
            self.bar[1].stop()
            self.bar = None

    def close(self) -> None:
        self.close_progress()
        while self.running:
            self.running.pop().close()

    def cut(self, phase: int, step: int) -> None:
        """Forgets what came after a checkpoint, the evaluation there included: it will be written again."""
        for name in ("metrics", "samples", "maps") if self.is_main else ():
            path = self.folder / f"{name}.jsonl"
            if not path.exists():
                continue
            kept = []
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the run was killed while it wrote
                at = (entry["number"], entry["step"])
                is_of_evaluation = name == "maps" or entry.get("phase") == "eval"
                if at < (phase, step) or (at == (phase, step) and not is_of_evaluation):
                    kept.append(line)
            new = path.with_name(f".new-{path.name}")
            new.write_text("".join(line + "\n" for line in kept))
            new.replace(path)

    def _write(self, name: str, entry: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _bar(title: str, total: int) -> tuple[Any, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )  # fmt: skip
    bar.start()
    return bar, bar.add_task(title, total=total, text="")
