"""1 for the correct answer after the last `####`, else 0; None if the data has no answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from grpo_trainer.rewards.base import Parts, WeightedReward


class Exact(WeightedReward):
    columns_needed = (("answer",),)

    def weight_of(self) -> Mapping[str, float]:
        return {"correct": 1.0}

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        expected, answer = row["answer"], answer_of(response)
        if expected is None:
            return None
        if isinstance(expected, float | Decimal):
            return {"correct": float(_number(answer, type(expected)) == expected)}
        return {"correct": float(answer == str(expected).strip())}


def answer_of(text: str) -> str | None:
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


def _number(text: str | None, kind: Callable[[str], Any]) -> Any:
    """The value of an answer, NaN if it has none; in a file of decimal numbers 4.0 is 4 and 3.50 is 3.5."""
    try:
        value = math.nan if text is None else kind(text)
        return value if math.isfinite(value) else math.nan  # also of a signalling NaN, which nothing equals
    except (ValueError, InvalidOperation):
        return math.nan
