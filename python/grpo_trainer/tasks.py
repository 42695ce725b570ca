"""Bundled tasks, which generate their data from a seed, and the parts that they share.

A task is the file task.py beside its recipe: `Options`, the keys of data.options, and a function `make` that returns
`Splits`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import random
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import NonNegativeInt

from grpo_trainer.messages import unknown_name
from grpo_trainer.recipes import FOLDERS, validated
from grpo_trainer.section import Rule, Section

SYSTEMS = {  # folder of each task
    "arithmetic": "arithmetic",
    "strategies": "similarity_group",
    "gsm8k": "gsm8k",
    "word_problems": "smollm2",
    "dialogue": "dialogue",
    "reply": "reply",
}
Item = dict[str, Any]
T = TypeVar("T")


class Sizes(Section):
    """Number of lines in each split, which every task takes as options."""

    demonstrations: NonNegativeInt = 6000
    """lines for SFT"""
    train: NonNegativeInt = 4000
    """lines for RL"""
    validation: NonNegativeInt = 256
    """lines for evaluations during training"""
    test: NonNegativeInt = 512
    """lines for evaluations before and after RL"""

    kinds: ClassVar[tuple[str, ...]] = ()  # options that are shares of the demonstrations

    def rules(self) -> Iterator[Rule]:
        if self.kinds:
            total = math.fsum(getattr(self, kind) for kind in self.kinds)
            yield self.kinds[0], total <= 1 + 1e-9, f"must sum to at most 1 with {' and '.join(self.kinds[1:])}"

    def kind(self, rng: random.Random, rest: str) -> str:
        """Draws one of the kinds; `rest` gets what their shares leave."""
        shares = [getattr(self, kind) for kind in self.kinds]
        return rng.choices([*self.kinds, rest], [*shares, max(0.0, 1 - math.fsum(shares))])[0]


@dataclasses.dataclass(frozen=True)
class Splits:
    """Lines as in JSONL files: "prompt", "demonstration" for SFT, and the columns that the rewards read."""

    sft: list[Item]
    train: list[Item]
    validation: list[Item]
    test: list[Item]
    rewards: tuple[str, ...] = ("exact",)  # unless the recipe names others


def make(name: str, seed: int, options: dict[str, Any]) -> Splits:
    """Generates the data of a task from a seed; errors name the keys of data.options."""
    task = load_task(name)
    splits: Splits = task.make(seed, validated(task.Options, options, "data.options"))
    return splits


@functools.cache
def load_task(name: str) -> Any:
    """Imports the file of a task, which is in no package; a task takes parts of another one from it, too."""
    if name not in SYSTEMS:
        raise ValueError(unknown_name("data.task", name, list(SYSTEMS)))
    path = next(path for folder in FOLDERS if (path := folder / SYSTEMS[name] / "task.py").is_file())
    spec = importlib.util.spec_from_file_location(f"grpo_trainer_task_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def held_out(
    draw: Callable[[], T], key: Callable[[T], Hashable], sizes: Sizes, repeats: bool = False
) -> tuple[list[T], list[T], list[T], list[T]]:
    """Draws examples for SFT, train, validation and test; no other split has a key of the last two.

    Args:
        draw: draws an example.
        key: content of an example.
        sizes: number of examples in each split.
        repeats: whether a key may be in validation or in test twice.
    """
    excluded: set[Hashable] = set()

    def examples(count: int, is_held_out: bool) -> list[T]:
        drawn: list[T] = []
        for _ in range(20 * count + 1000):
            if len(drawn) == count:
                if is_held_out:
                    excluded.update(map(key, drawn))
                return drawn
            example = draw()
            if key(example) not in excluded:
                drawn.append(example)
                if is_held_out and not repeats:
                    excluded.add(key(example))
        raise ValueError(
            f"data.options: there are too few different problems for {count} lines in a split; ask for fewer"
        )

    test, validation = examples(sizes.test, True), examples(sizes.validation, True)
    sft = examples(sizes.demonstrations, False)
    return sft, examples(sizes.train, False), validation, test


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
