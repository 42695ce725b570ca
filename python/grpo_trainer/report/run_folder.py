"""Reading a run's folder, also of a run that was killed or is still running."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]

INSIDE = ("generate", "model")  # the parts of a step that the algorithm does not add to


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """An evaluation written by a run."""

    split: str
    phase: int
    step: int
    content: Line

    @property
    def metrics(self) -> Line:
        metrics = self.content.get("metrics")
        return metrics if isinstance(metrics, dict) else {}

    @property
    def prompts(self) -> list[Line]:
        prompts = self.content.get("prompts")
        return [line for line in prompts if isinstance(line, dict)] if isinstance(prompts, list) else []


@dataclasses.dataclass
class RunFolder:
    """Contents of a run's folder. Everything in it may be missing or damaged."""

    path: Path
    recipe: Line
    metrics: list[Line]
    events: list[Line]
    maps: list[Line]
    evaluations: list[Evaluated]  # in chronological order
    unreadable: list[str]  # damaged files, with the number of their damaged lines
    solved: Line = dataclasses.field(default_factory=dict)  # calibration of correctness; empty without one

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        if not (path / "recipe.json").exists() and not (path / "metrics.jsonl").exists():
            inside = sorted(str(file.parent) for file in path.glob("*/recipe.json"))
            way_out = f"; there are {', '.join(inside)}" if inside else ""
            raise FileNotFoundError(f"{path}: contains no run: neither recipe.json nor metrics.jsonl{way_out}")
        unreadable: list[str] = []
        metrics, events, maps = (_lines(path / f"{name}.jsonl", unreadable) for name in ("metrics", "events", "maps"))
        evaluations = []
        for file in sorted((path / "evaluations").glob("*.json")):
            name = re.fullmatch(r"(.+)-(\d+)-(\d+)", file.stem)
            content = _content(file, unreadable)
            if name is not None and content:
                evaluations.append(Evaluated(name[1], int(name[2]), int(name[3]), content))
        evaluations.sort(key=lambda evaluated: (evaluated.phase, evaluated.step))
        recipe = _content(path / "recipe.json", unreadable)
        file = path / "solved.json"
        solved = _content(file, unreadable) if file.exists() else {}
        return cls(path, recipe, metrics, events, maps, evaluations, unreadable, solved)

    def setting(self, *names: str | int) -> Any:
        """A value of the recipe by its path; None if it does not exist."""
        value: Any = self.recipe
        for name in names:
            if isinstance(name, int) and isinstance(value, list):
                value = value[name] if name < len(value) else None
            else:
                value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def phases(self) -> list[str]:
        """Kind of each phase of the recipe, sft or rl."""
        phases = self.setting("phases")
        phases = [phase if isinstance(phase, dict) else {} for phase in phases] if isinstance(phases, list) else []
        return ["rl" if phase.get("rl") else "sft" for phase in phases]

    def rl_offset(self, phase: int) -> float:
        """Number of steps of earlier RL phases, as phases are drawn one after another."""
        earlier = [i for i, kind in enumerate(self.phases[:phase]) if kind == "rl"]
        return sum(number(self.setting("phases", i, "rl", "steps")) for i in earlier)

    def lines(self, phase: str) -> list[Line]:
        return [line for line in self.metrics if line.get("phase") == phase and math.isfinite(number(line.get("step")))]

    def steps(self, lines: Sequence[Line]) -> list[float]:
        """Steps of lines of one kind, counted over all its phases: a step that does not increase starts another."""
        steps: list[float] = []
        offset, last = 0.0, -math.inf
        for line in lines:
            step = number(line.get("step"))
            if step <= last:
                offset = steps[-1]
            steps.append(offset + step)
            last = step
        return steps

    @property
    def seconds(self) -> float:
        """Duration of the run; the logged time starts again at 0 when a run is resumed."""
        total, last = 0.0, 0.0
        for line in self.metrics:
            time = number(line.get("time"))
            if time < last:
                total += last
            last = time if math.isfinite(time) else last
        return total + last

    @property
    def share_outside(self) -> float:
        """Share of the RL steps' time outside generation and the model's passes; NaN without timings."""
        steps = [line for line in self.lines("rl") if math.isfinite(number(line.get("time/step")))]
        whole = sum(number(line["time/step"]) for line in steps)
        inside = sum(v for line in steps for name in INSIDE if math.isfinite(v := number(line.get(f"time/{name}"))))
        return 1 - inside / whole if whole > 0 else math.nan

    @property
    def times(self) -> dict[str, list[float]]:
        """Seconds of each part of every RL step, and under "step" of the whole; those that were logged."""
        rl = self.lines("rl")
        parts = {name.removeprefix("time/"): series(rl, name) for line in rl for name in line if name[:5] == "time/"}
        return {name: values for name, values in parts.items() if has_value(values)}

    @property
    def seconds_of_parts(self) -> dict[str, float]:
        """Mean seconds of each part of an RL step; the whole step last."""
        means = {name: mean(values) for name, values in self.times.items()}
        whole = means.pop("step", math.nan)
        return means | {"step": whole}

    @property
    def algorithms(self) -> dict[str, str]:
        """The fields that were set in the configs of advantages and loss, by phase."""
        known = [event["algorithms"] for event in self.events if isinstance(event.get("algorithms"), dict)]
        return {str(phase): str(text) for phase, text in (known[-1] if known else {}).items()}

    @property
    def date(self) -> str:
        dates = [event["date"] for event in self.events if event.get("event") == "started" and "date" in event]
        if dates and dates[0] is not None:
            return str(dates[0])
        file = next(file for file in (self.path / "recipe.json", self.path / "metrics.jsonl") if file.exists())
        written = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.timezone.utc)
        return f"{written:%Y-%m-%d %H:%M} UTC"

    def before_and_after(self) -> tuple[Evaluated, Evaluated] | None:
        """Evaluations at the start of RL, or of training without RL, and at the end; of the test split if possible."""
        first_rl = self.phases.index("rl") if "rl" in self.phases else 0
        for split in ("test", "validation"):
            evaluations = [e for e in self.evaluations if e.split == split and e.phase >= first_rl]
            if len(evaluations) > 1 and evaluations[0].step == 0 and evaluations[0].phase == first_rl:
                return evaluations[0], evaluations[-1]
        return None


def number(value: object) -> float:
    """The value as a float; NaN if it is not a number that can be drawn."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -1e300 < value < 1e300 else math.nan  # type: ignore[operator,arg-type]


def series(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [number(line.get(key)) for line in lines]


def has_value(values: Sequence[float]) -> bool:
    return any(math.isfinite(value) for value in values)


def mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _lines(file: Path, unreadable: list[str]) -> list[Line]:
    if not file.exists():
        return []
    lines, damaged = [], 0
    for text in file.read_text(errors="replace").split("\n"):
        try:
            line = json.loads(text) if text.strip() else {}
        except json.JSONDecodeError:
            line = None
        if isinstance(line, dict):
            lines.extend([line] if line else [])
        else:
            damaged += 1
    if damaged:
        unreadable.append(f"{file.name}: {damaged} line{'s' if damaged > 1 else ''}")
    return lines


def _content(file: Path, unreadable: list[str]) -> Line:
    try:
        content = json.loads(file.read_text(errors="replace"))
    except (OSError, json.JSONDecodeError):
        content = None
    if isinstance(content, dict):
        return content
    unreadable.append(file.name)
    return {}
