"""Whether the answer to a word problem is right, and a little for the form it is asked in: a last line `#### number`.

The gold is in the column `answer`, a number or a solution that ends in one. A right answer is worth more than any wrong
one, whatever else the response says. The evaluation of a policy reads the component "correct".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_trainer.rewards.numbers import final_number, parse_number
from grpo_trainer.rewards.weighted import Parts, WeightedReward


def make(*, correct: float = 1.0, format: float = 0.1) -> Gsm8k:
    """What a right answer is worth, and what its form adds."""
    if not 0 < correct < math.inf:
        raise ValueError(f"gsm8k.correct: must be positive, got {correct!r}")
    if not 0 <= format < correct:
        raise ValueError(f"gsm8k.format: must be 0 or more, and less than correct = {correct!r}, got {format!r}")
    return Gsm8k("gsm8k", {"correct": correct, "format": format})


class Gsm8k(WeightedReward):
    columns = ("answer",)

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        gold = row.get("answer")
        if gold is None or gold == "":
            return None
        right = final_number(str(gold))
        if right is None:
            raise ValueError(f"gsm8k: the column 'answer' must hold a number, got {str(gold)[:80]!r}")
        return {
            "correct": float(final_number(response) == right),
            "format": float(is_formatted(response) and not row.get("truncated")),
        }


def is_formatted(response: str) -> bool:
    """Whether the response ends in #### and one number."""
    _solution, mark, answer = response.rpartition("####")
    return bool(mark) and parse_number(answer) is not None
