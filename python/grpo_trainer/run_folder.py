"""What a run wrote down, read back; also of a run that was cut off, or that goes on."""

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

INSIDE = ("generate", "model")  # the parts of a step that no trainer can do without


@dataclasses.dataclass(frozen=True)
class Evaluated:
    split: str
    phase: int
    step: int
    content: Line

    @property
    def metrics(self) -> Line:
        found = self.content.get("metrics")
        return found if isinstance(found, dict) else {}

    @property
    def prompts(self) -> list[Line]:
        found = self.content.get("prompts")
        return [line for line in found if isinstance(line, dict)] if isinstance(found, list) else []


@dataclasses.dataclass
class RunFolder:
    path: Path
    recipe: Line
    metrics: list[Line]
    events: list[Line]
    maps: list[Line]
    evaluations: list[Evaluated]  # in the order of the run
    unreadable: list[str]  # files, and how many lines of them

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        if not (path / "recipe.json").exists() and not (path / "metrics.jsonl").exists():
            raise FileNotFoundError(f"{path}: no run is here: neither recipe.json nor metrics.jsonl")
        unreadable: list[str] = []
        metrics, events, maps = (_lines(path / f"{name}.jsonl", unreadable) for name in ("metrics", "events", "maps"))
        evaluations = []
        for file in sorted((path / "evaluations").glob("*.json")):
            named = re.fullmatch(r"(.+)-(\d+)-(\d+)", file.stem)
            content = _content(file, unreadable)
            if named is not None and content:
                evaluations.append(Evaluated(named[1], int(named[2]), int(named[3]), content))
        evaluations.sort(key=lambda found: (found.phase, found.step))
        recipe = _content(path / "recipe.json", unreadable)
        return cls(path, recipe, metrics, events, maps, evaluations, unreadable)

    def setting(self, *names: str | int) -> Any:
        """Of the recipe; None where it is not there."""
        place: Any = self.recipe
        for name in names:
            if isinstance(name, int) and isinstance(place, list):
                place = place[name] if name < len(place) else None
            else:
                place = place.get(name) if isinstance(place, dict) else None
        return place

    @property
    def phases(self) -> list[str]:
        """sft or rl, for each phase of the recipe."""
        found = self.setting("phases")
        given = [phase if isinstance(phase, dict) else {} for phase in found] if isinstance(found, list) else []
        return ["rl" if phase.get("rl") else "sft" for phase in given]

    def rl_offset(self, phase: int) -> float:
        """Steps of the RL phases before: phases are drawn one after another."""
        before = [i for i, kind in enumerate(self.phases[:phase]) if kind == "rl"]
        return sum(number(self.setting("phases", i, "rl", "steps")) for i in before)

    def lines(self, phase: str) -> list[Line]:
        return [line for line in self.metrics if line.get("phase") == phase and math.isfinite(number(line.get("step")))]

    def steps(self, lines: Sequence[Line]) -> list[float]:
        """Of lines of one kind of phase, counted on over phases: a step that is no higher begins another."""
        found: list[float] = []
        offset, before = 0.0, -math.inf
        for line in lines:
            step = number(line.get("step"))
            if step <= before:
                offset = found[-1]
            found.append(offset + step)
            before = step
        return found

    @property
    def seconds(self) -> float:
        """Of all processes that worked on it: time begins anew where a run goes on."""
        spent, before = 0.0, 0.0
        for line in self.metrics:
            time = number(line.get("time"))
            if time < before:
                spent += before
            before = time if math.isfinite(time) else before
        return spent + before

    @property
    def share_outside(self) -> float:
        """Of the time of RL steps; NaN without timings."""
        steps = [line for line in self.lines("rl") if math.isfinite(number(line.get("time/step")))]
        whole = sum(number(line["time/step"]) for line in steps)
        inside = sum(v for line in steps for name in INSIDE if math.isfinite(v := number(line.get(f"time/{name}"))))
        return 1 - inside / whole if whole > 0 else math.nan

    @property
    def seconds_of_parts(self) -> dict[str, float]:
        """Of an RL step, in the mean over steps; the whole step last."""
        rl = self.lines("rl")
        parts = {name.removeprefix("time/"): series(rl, name) for line in rl for name in line if name[:5] == "time/"}
        known = {name: mean(values) for name, values in parts.items() if has_value(values)}
        return {name: value for name, value in known.items() if name != "step"} | {"step": known.get("step", math.nan)}

    @property
    def date(self) -> str:
        told = next(
            (event["date"] for event in self.events if event.get("event") == "started" and "date" in event), None
        )
        if told is not None:
            return str(told)
        file = next(file for file in (self.path / "recipe.json", self.path / "metrics.jsonl") if file.exists())
        written = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.timezone.utc)
        return f"{written:%Y-%m-%d %H:%M} UTC"

    def before_and_after(self) -> tuple[Evaluated, Evaluated] | None:
        """The evaluation that RL, or else training, began from, and the last one; of the test split if it has both."""
        first_rl = self.phases.index("rl") if "rl" in self.phases else 0
        for split in ("test", "validation"):
            found = [each for each in self.evaluations if each.split == split and each.phase >= first_rl]
            if len(found) > 1 and found[0].step == 0 and found[0].phase == first_rl:
                return found[0], found[-1]
        return None


def number(value: object) -> float:
    """NaN for what is not a number that can be drawn."""
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
    found, damaged = [], 0
    for text in file.read_text(errors="replace").split("\n"):
        try:
            line = json.loads(text) if text.strip() else {}
        except json.JSONDecodeError:
            line = None
        if isinstance(line, dict):
            found.extend([line] if line else [])
        else:
            damaged += 1
    if damaged:
        unreadable.append(f"{file.name}: {damaged} line{'s' if damaged > 1 else ''}")
    return found


def _content(file: Path, unreadable: list[str]) -> Line:
    try:
        found = json.loads(file.read_text(errors="replace"))
    except (OSError, json.JSONDecodeError):
        found = None
    if isinstance(found, dict):
        return found
    unreadable.append(file.name)
    return {}
