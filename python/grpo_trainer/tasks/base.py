"""Parts of tasks: splits of data, held-out examples, mixtures of demonstrations."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

Item = dict[str, Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Number of lines in each split; every task takes them as options."""

    demonstrations: int = 6000  # for SFT
    train: int = 4000
    validation: int = 256
    test: int = 512


DEFAULT_SIZES = Sizes()


@dataclasses.dataclass(frozen=True)
class Splits:
    """Lines as in JSONL files: "prompt", "demonstration" for SFT, and the columns that the rewards read."""

    sft: list[Item]
    train: list[Item]
    validation: list[Item]
    test: list[Item]
    rewards: tuple[str, ...] = ("exact",)  # unless the recipe names others


def held_out(
    draw: Callable[[], T], key: Callable[[T], Hashable], sizes: Sizes
) -> tuple[list[T], list[T], list[T], list[T]]:
    """Draws examples for SFT, train, validation and test; the keys of the last two occur only once.

    Args:
        draw: draws an example.
        key: content of an example.
        sizes: number of examples in each split.
    """
    excluded: set[Hashable] = set()
    test_examples = _draw_many(draw, key, sizes.test, excluded, distinct=True)
    validation_examples = _draw_many(draw, key, sizes.validation, excluded, distinct=True)
    sft_examples = _draw_many(draw, key, sizes.demonstrations, excluded, distinct=False)
    train_examples = _draw_many(draw, key, sizes.train, excluded, distinct=False)
    return sft_examples, train_examples, validation_examples, test_examples


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


def to_lines(
    examples: Sequence[Sequence[T]],
    item: Callable[[T], Item],
    demonstrate: Callable[[T], str],
    rewards: tuple[str, ...] = Splits.rewards,
) -> Splits:
    """Turns examples for SFT, train, validation and test into lines; those for SFT have a demonstration."""
    sft, *others = examples
    train, validation, test = ([item(example) for example in split] for split in others)
    return Splits([item(x) | {"demonstration": demonstrate(x)} for x in sft], train, validation, test, rewards)


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
