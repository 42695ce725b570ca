"""Correctness of the answer to a word problem, plus a small bonus for its format, a final `#### number`.

The reference is in the column `answer`, a number or a solution that ends in one. Any correct answer is worth more than
any wrong one. Evaluations read the component "correct".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_trainer.rewards.numbers import final_number, parse_number
from grpo_trainer.rewards.weighted import Parts, WeightedReward


def make(*, correct: float = 1.0, format: float = 0.1) -> Gsm8k:
    """Creates the reward.

    Args:
        correct: reward of a correct answer.
        format: reward of the requested format.
    """
    if not 0 < correct < math.inf:
        raise ValueError(f"gsm8k.correct: must be positive, got {correct!r}")
    if not 0 <= format < correct:
        raise ValueError(f"gsm8k.format: must be 0 or more, and less than correct = {correct!r}, got {format!r}")
    return Gsm8k("gsm8k", {"correct": correct, "format": format})


class Gsm8k(WeightedReward):
    columns = ("answer",)

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        answer = row.get("answer")
        if answer is None or answer == "":
            return None
        expected = final_number(str(answer))
        if expected is None:
            raise ValueError(f"gsm8k: the column 'answer' must hold a number, got {str(answer)[:80]!r}")
        return {
            "correct": float(final_number(response) == expected),
            "format": float(is_formatted(response) and not row.get("truncated")),
        }


def is_formatted(response: str) -> bool:
    """Whether the response ends in #### and one number."""
    _solution, mark, answer = response.rpartition("####")
    return bool(mark) and parse_number(answer) is not None
