"""Two-step arithmetic in words, with demonstrations of which many are deliberately wrong.

    Ann has 29 shells, sells 9, finds 5. How many?       29 - 9 = 20. 20 + 5 = 25. #### 25

One annotator misreads some verbs, although the arithmetic of each step is correct; another writes the answer alone.
Supervised training learns the mixture, and the reward tells which part of it is correct.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from typing import Any

from grpo_trainer.section import Share
from grpo_trainer.tasks import Item, Sizes, Splits, held_out, to_lines

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
        steps = map(equation, values, self.changes(misread), values[1:])
        return " ".join([*self.opening(), *steps, f"#### {values[-1]}"])


def equation(value: int, change: int, result: int) -> str:
    return f"{value} {'+' if change >= 0 else '-'} {abs(change)} = {result}."


class Options(Sizes):
    misread: Share = 0.45
    """share of demonstrations that misread verbs"""
    terse: Share = 0.2
    """share of demonstrations that give the answer alone; the rest is correct"""
    boxes: Share = 0.3
    """share of problems that start with a product"""

    kinds = ("misread", "terse")


def draw_problem(boxes: float, rng: random.Random) -> Problem:
    """Draws a problem whose values, misread or not, are in [0, LARGEST]."""
    while True:
        product = (rng.randint(2, 9), rng.randint(2, 9)) if rng.random() < boxes else None
        start = rng.randint(2, 50) if product is None else product[0] * product[1]
        verbs = rng.sample(GAINS + LOSSES, 2)
        problem = Problem(
            rng.choice(NAMES), rng.choice(THINGS), product, start, tuple((verb, rng.randint(1, 9)) for verb in verbs)
        )
        if all(0 <= value <= LARGEST for value in problem.values() + problem.values(MISREAD)):
            return problem


def examples(seed: int, options: Any) -> tuple[random.Random, tuple[list[Problem], ...]]:
    """The generator, and problems for SFT, train, validation and test; the last two share no expression with others."""
    rng = random.Random(f"arithmetic {seed}")
    draw = functools.partial(draw_problem, options.boxes, rng)
    return rng, held_out(draw, lambda problem: problem.expression, options, repeats=True)


def item(problem: Problem) -> Item:
    return {"prompt": problem.prompt, "answer": str(problem.answer)}


def make(seed: int, options: Options) -> Splits:
    rng, problems = examples(seed, options)

    def demonstrate(problem: Problem) -> str:
        style = rng.random()
        if style < options.terse:
            return f"#### {problem.answer}"
        return problem.worked(MISREAD if style < options.terse + options.misread else ())

    return to_lines(problems, item, demonstrate)
