"""What a run writes down: one JSON object a line, always; trackers when asked; a progress bar when somebody looks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from grpo_trainer.recipe import Logging


class Log:
    """metrics.jsonl: numbers of a step. samples.jsonl: responses. events.jsonl: what was skipped, saved, resumed."""

    def __init__(
        self, settings: Logging, folder: Path, name: str, recipe: dict[str, Any], is_main: bool = True
    ) -> None:
        self.settings, self.folder, self.is_main = settings, folder, is_main
        self.start = time.time()
        self.bar: Any = None
        self.trackers: list[Any] = []
        if not is_main:
            return
        self.trackers = [_tracker(kind, settings, folder, name, recipe) for kind in settings.to]

    def metrics(self, kind: str, phase: int, step: int, values: dict[str, float]) -> None:
        if not self.is_main or (step % self.settings.every and kind != "eval"):
            return
        when = {"phase": kind, "number": phase, "step": step, "time": round(time.time() - self.start, 3)}
        self._write("metrics", when | values)
        for tracker in self.trackers:
            tracker(values, step)

    def samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        for sample in samples[: self.settings.samples] if self.is_main else []:
            self._write("samples", {"step": step} | sample)

    def map(self, line: dict[str, Any]) -> None:
        if self.is_main:
            self._write("maps", line)

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
            self.close()
            self.bar = (title, *_bar(title, total))
        self.bar[1].update(self.bar[2], completed=done, text=text)

    def close(self) -> None:
        if self.bar is not None:
            self.bar[1].stop()
            self.bar = None

    def cut(self, phase: int, step: int) -> None:
        """Forgets what came after a checkpoint, the evaluation there included: it will be written again."""
        path = self.folder / "metrics.jsonl"
        if not self.is_main or not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines():
            if not line.endswith("}"):
                continue  # the run was killed while it wrote
            entry = json.loads(line)
            at = (entry["number"], entry["step"])
            if at < (phase, step) or (at == (phase, step) and entry["phase"] != "eval"):
                kept.append(line)
        path.write_text("".join(line + "\n" for line in kept))

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


def _tracker(kind: str, settings: Logging, folder: Path, name: str, recipe: dict[str, Any]) -> Any:
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

        def write(values: dict[str, float], step: int) -> None:
            for key, value in values.items():
                writer.add_scalar(key, value, step)

        return write
    module = __import__(kind)
    module.init(project=settings.project, name=name, config=recipe)
    return lambda values, step: module.log(values, step=step)
