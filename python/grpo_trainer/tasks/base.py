"""What a task is made of."""

from __future__ import annotations

import dataclasses
from typing import Any

Item = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Splits:
    """Lines as a JSONL file has them: "prompt", with "demonstration" for sft, and columns that the rewards read."""

    sft: list[Item]
    train: list[Item]
    validation: list[Item]
    test: list[Item]
    rewards: tuple[str, ...] = ("exact",)  # unless the recipe names others
