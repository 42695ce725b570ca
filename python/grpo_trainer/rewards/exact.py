"""1 for the correct answer after the last `####`, else 0; None if the data has no answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_trainer.rewards.base import Parts, WeightedReward


class Exact(WeightedReward):
    columns_needed = (("answer",),)

    def weight_of(self) -> Mapping[str, float]:
        return {"correct": 1.0}

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        expected = row["answer"]
        return None if expected is None else {"correct": float(answer_of(response) == as_text(expected))}


def answer_of(text: str) -> str | None:
    _, mark, tail = text.rpartition("####")
    return tail.strip() if mark else None


def as_text(answer: object) -> str:
    """Answer as text; files may hold numbers, and 4.0 is 4."""
    return f"{answer:.0f}" if isinstance(answer, float) and answer.is_integer() else str(answer).strip()
