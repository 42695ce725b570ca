"""Logs of a run: JSON lines, trackers and a progress line."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import pydantic_core
from torch import Tensor

from grpo_trainer.recipe import Recipe
from grpo_trainer.trackers import TRACKERS

PHASES = ("sft", "rl")  # in their order
SHOWN = {  # in the progress line
    "train/loss": "loss",
    "rewards/mean": "reward",
    "train/kl_mean": "KL",
    "speed/tokens_per_second": "tokens/s",
}


def short(value: float) -> str:
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
    return f"{value:,.{decimals}f}"


class Log:
    """Writes the run's JSON lines.

    metrics.jsonl holds the metrics of each step and evaluation, evaluations.jsonl the responses of each evaluation,
    samples.jsonl some responses of each step, and events.jsonl what was skipped, saved and resumed.
    """

    def __init__(self, recipe: Recipe, is_main: bool = True) -> None:
        self.settings, self.folder, self.is_main = recipe.logging, recipe.folder, is_main
        self.steps_before_rl = 0 if recipe.sft is None else recipe.sft.steps
        self.start = time.time()
        self.bar: Any = None
        self.trackers = [TRACKERS[kind](recipe) for kind in self.settings.to] if is_main else []
        self.opened = contextlib.ExitStack()

    def open(self, phase: str, step: int) -> None:
        """Starts a run in each tracker, or resumes one after a step."""
        for tracker in self.trackers:
            tracker.open(self._step_of_trackers(phase, step))
            self.opened.callback(tracker.close)

    def metrics(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a training step."""
        if self.is_main and step % self.settings.every == 0:
            self._metrics({"kind": "train", "phase": phase, "step": step}, values)

    def evaluation(self, phase: str, step: int, split: str, values: Mapping[str, float], content: Any) -> None:
        """Writes the metrics of an evaluation, and its responses."""
        if self.is_main:
            self._metrics({"kind": "eval", "phase": phase, "step": step, "split": split}, values)
            self._write("evaluations", {"phase": phase, "step": step, "split": split} | content)

    def _metrics(self, header: dict[str, Any], values: Mapping[str, float]) -> None:
        self._write("metrics", {**header, "time": round(time.time() - self.start, 3), **values})
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        for tracker in self.trackers:
            tracker.log(known, self._step_of_trackers(header["phase"], header["step"]))

    def samples(self, phase: str, step: int, samples: list[dict[str, Any]]) -> None:
        if not (self.is_main and samples):
            return
        for sample in samples:
            self._write("samples", {"phase": phase, "step": step} | sample)
        if step % self.settings.every == 0:
            # lists, such as chat messages, as JSON
            rows = [[v if isinstance(v, str | int | float) else to_json(v) for v in of.values()] for of in samples]
            for tracker in self.trackers:
                tracker.table("samples", list(samples[0]), rows, self._step_of_trackers(phase, step))

    def histograms(self, phase: str, step: int, values: Mapping[str, Tensor]) -> None:
        """Sends the distributions of tensors to the trackers."""
        if not (self.is_main and self.trackers):
            return
        vectors = {name: tensor.detach().double().flatten().cpu() for name, tensor in values.items()}
        known = {name: finite for name, vector in vectors.items() if len(finite := vector[vector.isfinite()])}
        for tracker in self.trackers if known else []:
            tracker.histograms(known, self._step_of_trackers(phase, step))

    def event(self, kind: str, **facts: Any) -> None:
        if self.is_main:
            self._write("events", {"event": kind, "time": round(time.time() - self.start, 3)} | facts)

    def progress(self, phase: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
        if not (self.is_main and self.settings.progress):
            return
        shown = {name: metrics[key] for key, name in SHOWN.items() if key in metrics}
        text = ", ".join(f"{name} {short(value)}" for name, value in shown.items())
        if not sys.stderr.isatty():
            if done == total or done % max(1, total // 10) == 0:
                self.line(f"{phase} {done}/{total}  {text}")
            return
        if self.bar is None:
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=done - 1, desc=phase, dynamic_ncols=True)
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update()

    def line(self, text: str) -> None:
        """Prints a line, above the progress line if there is one."""
        if self.is_main and self.settings.progress:
            self.bar.write(text, sys.stderr) if self.bar is not None else print(text, file=sys.stderr, flush=True)

    def close_progress(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def close(self) -> None:
        self.close_progress()
        self.opened.close()

    def truncate(self, phase: str, step: int) -> None:
        """Removes the lines after a checkpoint, and the evaluations at it, which a resumed run repeats.

        Events stay. A line that was cut off when the run was killed goes from every file.
        """
        last = (PHASES.index(phase), step)
        for name in ("metrics", "evaluations", "samples", "events") if self.is_main else ():
            path = self.folder / f"{name}.jsonl"
            if not path.exists():
                continue
            kept = []
            # not splitlines(), which also splits at characters that JSON allows within texts, such as U+2028
            for line in path.read_text("utf-8", "replace").split("\n"):
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                position = last if name == "events" else (PHASES.index(entry["phase"]), entry["step"])
                if position < last or (position == last and "split" not in entry):
                    kept.append(line)
            temporary = path.with_name(f".new-{path.name}")
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            temporary.replace(path)

    def _step_of_trackers(self, phase: str, step: int) -> int:
        return step + (self.steps_before_rl if phase == "rl" else 0)

    def _write(self, name: str, entry: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(to_json(entry) + "\n")
        except OSError as error:  # a full disk's error names no file
            raise OSError(error.errno, error.strerror, str(path)) from error


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON in which NaN and infinities, which JSON lacks, are null."""
    return pydantic_core.to_json(value, indent=indent, inf_nan_mode="null").decode()
