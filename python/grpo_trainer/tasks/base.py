"""What a task is made of."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Item = dict[str, Any]
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Splits:
    """Lines as a JSONL file has them: "prompt", with "demonstration" for sft, and columns that the rewards read."""

    sft: list[Item]
    train: list[Item]
    validation: list[Item]
    test: list[Item]
    rewards: tuple[str, ...] = ("exact",)  # unless the recipe names others


def held_out(
    draw: Callable[[], Made], key: Callable[[Made], Hashable], *, demonstrations: int, train: int, validation: int,
    test: int,
) -> tuple[list[Made], list[Made], list[Made], list[Made]]:  # fmt: skip
    """Draws for the four splits. Those of validation and test have keys of their own, which occur in no other split."""
    seen: set[Hashable] = set()
    tested = _drawn(draw, key, test, seen, distinct=True)
    checked = _drawn(draw, key, validation, seen, distinct=True)
    shown = _drawn(draw, key, demonstrations, seen, distinct=False)
    return shown, _drawn(draw, key, train, seen, distinct=False), checked, tested


def _drawn(
    draw: Callable[[], Made], key: Callable[[Made], Hashable], count: int, seen: set[Hashable], distinct: bool
) -> list[Made]:
    found: list[Made] = []
    for _ in range(20 * count + 1000):
        if len(found) >= count:
            return found
        made = draw()
        if key(made) not in seen:
            found.append(made)
            if distinct:
                seen.add(key(made))
    raise ValueError(f"data.options: there are too few different problems for {count} lines in a split; ask for fewer")


class Mixture:
    """Kinds of demonstrations by their shares; what the shares leave is of the last kind."""

    def __init__(self, rest: str, **shares: float) -> None:
        total = math.fsum(shares.values())
        if min(shares.values()) < 0 or total > 1 + 1e-9:
            raise ValueError(f"data.options: shares must be 0 or more and sum to at most 1, got {shares}")
        self.kinds = (*shares, rest)
        self.shares = (*shares.values(), max(0.0, 1 - total))

    def draw(self, rng: random.Random) -> str:
        return rng.choices(self.kinds, self.shares)[0]
