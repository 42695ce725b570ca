"""Two-step arithmetic in words, with demonstrations of which many are deliberately wrong.

    Ann has 29 shells, sells 9, finds 5. How many?       29 - 9 = 20. 20 + 5 = 25. #### 25

One annotator misreads some verbs, although the arithmetic of each step is correct; another writes the answer alone.
Supervised training learns the mixture, and the reward tells which part of it is correct.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

from grpo_trainer.tasks import DEFAULT_SIZES, Item, Sizes, Splits, to_lines

NAMES = ("Ann", "Bob", "Cy", "Dan", "Eve", "Flo", "Gus", "Hal")
THINGS = ("shells", "stamps", "coins", "cards", "pens", "books", "nuts", "beads")
GAINS = ("finds", "buys", "wins", "gets")
LOSSES = ("sells", "loses", "eats", "drops")
MISREAD = ("finds", "loses", "wins")
LARGEST = 99


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    thing: str
    boxes: tuple[int, int] | None  # number of boxes and things per box
    start: int
    steps: tuple[tuple[str, int], ...]  # verb and amount

    @property
    def prompt(self) -> str:
        has = f"{self.start}" if self.boxes is None else f"{self.boxes[0]} boxes of {self.boxes[1]}"
        changes = ", ".join(f"{verb} {amount}" for verb, amount in self.steps)
        return f"{self.name} has {has} {self.thing}, {changes}. How many?"

    @property
    def expression(self) -> tuple[object, ...]:
        return (self.boxes or self.start, *self.changes())

    def changes(self, misread: tuple[str, ...] = ()) -> tuple[int, ...]:
        return tuple(amount if (verb in GAINS) != (verb in misread) else -amount for verb, amount in self.steps)

    def values(self, misread: tuple[str, ...] = ()) -> list[int]:
        return list(itertools.accumulate(self.changes(misread), initial=self.start))

    @property
    def answer(self) -> int:
        return self.values()[-1]

    def opening(self) -> list[str]:
        return [] if self.boxes is None else [f"{self.boxes[0]} * {self.boxes[1]} = {self.start}."]

    def worked(self, misread: tuple[str, ...] = ()) -> str:
        values = self.values(misread)
        steps = self.opening()
        for value, change, result in zip(values, self.changes(misread), values[1:], strict=False):
            steps.append(equation(value, change, result))
        return " ".join([*steps, f"#### {values[-1]}"])


def equation(value: int, change: int, result: int) -> str:
    return f"{value} {'+' if change >= 0 else '-'} {abs(change)} = {result}."


def problems(count: int, rng: random.Random, seen: set[tuple[object, ...]], boxes: float) -> list[Problem]:
    """Draws problems whose expression is not in `seen` and whose values, misread or not, are in [0, LARGEST]."""
    drawn: list[Problem] = []
    for _ in range(100 * count + 1000):
        if len(drawn) == count:
            return drawn
        product = (rng.randint(2, 9), rng.randint(2, 9)) if rng.random() < boxes else None
        start = rng.randint(2, 50) if product is None else product[0] * product[1]
        verbs = rng.sample(GAINS + LOSSES, 2)
        problem = Problem(
            rng.choice(NAMES), rng.choice(THINGS), product, start, tuple((verb, rng.randint(1, 9)) for verb in verbs)
        )
        values = problem.values() + problem.values(MISREAD)
        if problem.expression not in seen and all(0 <= value <= LARGEST for value in values):
            drawn.append(problem)
    raise ValueError(f"data.options: there are too few different problems for {count} lines in a split; ask for fewer")


def held_out(
    seed: int, sizes: Sizes, boxes: float
) -> tuple[random.Random, list[Problem], list[Problem], list[Problem], list[Problem]]:
    """The generator, and problems for SFT, train, validation and test; the last two share no expression with others."""
    rng = random.Random(f"arithmetic {seed}")
    test_problems = problems(sizes.test, rng, set(), boxes)
    seen = {problem.expression for problem in test_problems}
    validation_problems = problems(sizes.validation, rng, seen, boxes)
    seen |= {problem.expression for problem in validation_problems}
    sft_problems = problems(sizes.demonstrations, rng, seen, boxes)
    train_problems = problems(sizes.train, rng, seen, boxes)
    return rng, sft_problems, train_problems, validation_problems, test_problems


def item(problem: Problem) -> Item:
    return {"prompt": problem.prompt, "answer": str(problem.answer)}


def make(
    *,
    seed: int,
    sizes: Sizes = DEFAULT_SIZES,
    misread: float = 0.45,
    terse: float = 0.2,
    boxes: float = 0.3,
) -> Splits:
    """Generates the splits.

    Args:
        seed: seed of the data.
        sizes: number of lines in each split.
        misread: share of demonstrations that misread verbs.
        terse: share of demonstrations that give the answer alone; the rest is correct.
        boxes: share of problems that start with a product.
    """
    rng, *examples = held_out(seed, sizes, boxes)

    def demonstrate(problem: Problem) -> str:
        style = rng.random()
        if style < terse:
            return f"#### {problem.answer}"
        return problem.worked(MISREAD if style < terse + misread else ())

    return to_lines(examples, item, demonstrate)
