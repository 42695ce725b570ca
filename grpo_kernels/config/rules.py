"""What configs check alike."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any


def unknown(where: str, argument: str, value: object, allowed: Sequence[str] | dict[str, Any]) -> ValueError:
    near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return ValueError(f"{where}: {argument} must be one of {', '.join(allowed)}, got {value!r}{hint}")


def finite(where: str, argument: str, value: object, minimum: float | None = None, open_end: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{where}: {argument} must be a number, got {type(value).__name__} {value!r}")
    low_enough = minimum is None or value > minimum or (value == minimum and not open_end)
    if not math.isfinite(value) or not low_enough:
        rule = "" if minimum is None else f" {'above' if open_end else 'of at least'} {minimum:g}"
        raise ValueError(f"{where}: {argument} must be a finite number{rule}, got {value!r}")
