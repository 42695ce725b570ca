"""Bundled tasks, which generate their data from a seed, and the parts that they share.

A task is the file task.py beside its recipe: a function `make` that returns `Splits`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import math
import random
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from grpo_trainer.messages import unknown_key, unknown_name
from grpo_trainer.recipes import FOLDERS

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


def make(name: str, seed: int, options: dict[str, Any]) -> Splits:
    """Generates the data of a task.

    Args:
        name: name of the task.
        seed: seed of the data.
        options: fields of `Sizes`, and arguments of the task's `make`.
    """
    make_splits = load_task(name).make
    parameters = inspect.signature(make_splits).parameters
    size_names = [field.name for field in dataclasses.fields(Sizes)]
    known = [*size_names, *(name for name in parameters if name not in ("seed", "sizes"))]
    for option in options:
        if option not in known:
            raise ValueError(unknown_key("data.options", option, known))
    sizes = {name: value for name, value in options.items() if name in size_names}
    others = {name: value for name, value in options.items() if name not in size_names}
    splits: Splits = make_splits(seed=seed, sizes=dataclasses.replace(parameters["sizes"].default, **sizes), **others)
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
