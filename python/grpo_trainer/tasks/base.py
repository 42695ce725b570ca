"""Parts of tasks: splits of data, held-out examples, mixtures of demonstrations."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Item = dict[str, Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Splits:
    """Lines as in JSONL files: "prompt", "demonstration" for SFT, and the columns that the rewards read."""

    sft: list[Item]
    train: list[Item]
    validation: list[Item]
    test: list[Item]
    rewards: tuple[str, ...] = ("exact",)  # unless the recipe names others


def held_out(
    draw: Callable[[], T],
    key: Callable[[T], Hashable],
    *,
    demonstrations: int,
    train: int,
    validation: int,
    test: int,
) -> tuple[list[T], list[T], list[T], list[T]]:
    """Draws examples for the four splits; keys of validation and test are distinct and occur in no other split.

    Args:
        draw: draws an example.
        key: content of an example.
        demonstrations: number of examples for SFT.
        train: number of examples for RL.
        validation: number of validation examples.
        test: number of test examples.

    Returns:
        Examples for SFT, RL, validation and test.
    """
    excluded: set[Hashable] = set()
    test_examples = _draw_many(draw, key, test, excluded, distinct=True)
    validation_examples = _draw_many(draw, key, validation, excluded, distinct=True)
    sft_examples = _draw_many(draw, key, demonstrations, excluded, distinct=False)
    return sft_examples, _draw_many(draw, key, train, excluded, distinct=False), validation_examples, test_examples


def _draw_many(
    draw: Callable[[], T], key: Callable[[T], Hashable], count: int, excluded: set[Hashable], distinct: bool
) -> list[T]:
    """Draws examples whose keys are not excluded; with `distinct`, excludes their keys from then on."""
    examples: list[T] = []
    for _ in range(20 * count + 1000):
        if len(examples) >= count:
            return examples
        example = draw()
        if key(example) not in excluded:
            examples.append(example)
            if distinct:
                excluded.add(key(example))
    raise ValueError(f"data.options: there are too few different problems for {count} lines in a split; ask for fewer")


class Mixture:
    """Kinds of demonstrations by their shares; `rest` gets what the shares leave."""

    def __init__(self, rest: str, **shares: float) -> None:
        total = math.fsum(shares.values())
        if min(shares.values()) < 0 or total > 1 + 1e-9:
            raise ValueError(f"data.options: shares must be 0 or more and sum to at most 1, got {shares}")
        self.kinds = (*shares, rest)
        self.shares = (*shares.values(), max(0.0, 1 - total))

    def draw(self, rng: random.Random) -> str:
        return rng.choices(self.kinds, self.shares)[0]
