"""JSON lines, and splitting them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_jsonl(path: str | Path, columns: Mapping[str, str] | None = None) -> list[Line]:
    """Every line an object; an error names the file and the line.

    columns  that each must have, by the keys of the recipe that name them
    """
    found = []
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: must be JSON, got {text[:80]!r} ({error})") from None
        if not isinstance(line, dict):
            raise TypeError(f"{path}, line {number}: must be an object, got {type(line).__name__}")
        for key, column in (columns or {}).items():
            if column not in line:
                raise ValueError(
                    f"{key}: must be a column of every line, got {column!r} with the columns {sorted(line)} "
                    f"({path}, line {number})"
                )
        found.append(line)
    return found


def write_jsonl(path: str | Path, lines: Sequence[Line]) -> None:
    Path(path).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def stratified(
    lines: Sequence[Line], by: Sequence[float], ratio: float, parts: int, seed: int
) -> tuple[list[Line], list[Line]]:
    """Two parts with the same share, within one line, of each of `parts` equal ranks of `by`, and of all lines."""
    if parts < 1:
        raise ValueError(f"--parts: must be at least 1, got {parts}")
    order = sorted(range(len(lines)), key=lambda i: (by[i], i))
    rng = random.Random(seed)
    first: set[int] = set()
    for part in range(parts):
        start, end = part * len(order) // parts, (part + 1) * len(order) // parts
        taken = math.floor(ratio * end + 0.5) - math.floor(ratio * start + 0.5)  # so that roundings do not add up
        first |= set(rng.sample(order[start:end], taken))
    if not 0 < len(first) < len(lines):
        raise ValueError(
            f"--ratio: must leave lines to both parts, got {ratio} of {len(lines)} lines, which is {len(first)}"
        )
    return [lines[i] for i in sorted(first)], [line for i, line in enumerate(lines) if i not in first]


def ranks_of(lines: Sequence[Line], by: str) -> list[float]:
    """A column of numbers, or the quotient of two as "A/B", whose divisor counts as 1 at least."""
    names = by.split("/")
    if len(names) > 2:
        raise ValueError(f"--by: must be a column or A/B, got {by!r}")
    columns = []
    for name in names:
        for number, line in enumerate(lines, 1):
            value = line.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"--by: {name} must be a number on every line, got {value!r} on line {number}")
        columns.append([float(line[name]) for line in lines])
    return columns[0] if len(columns) == 1 else [a / max(b, 1.0) for a, b in zip(*columns, strict=True)]
