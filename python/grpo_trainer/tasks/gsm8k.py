"""Word problems of two and three steps in the form of GSM8K, small enough for a small model.

    Question: Ann has 4 boxes of 300 pens each and sells 200. How many pens are left?
    Answer:    4 * 300 = 1,200. 1,200 - 200 = 1,000. #### 1,000

Many demonstrations stop a step early, though the arithmetic of the steps they have is true; others give the answer
alone, or without `####`. What a policy needs is among them, and the reward `gsm8k` tells which part of it is right.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Hashable

from grpo_trainer.tasks.arithmetic import NAMES
from grpo_trainer.tasks.base import Item, Mixture, Splits, held_out

THINGS = ("pens", "coins", "cards", "books", "nuts", "beads")
HUNDREDS = range(100, 1000, 100)
SMALL = range(2, 10)


@dataclasses.dataclass(frozen=True)
class Story:
    """A problem whose numbers a, b, ... are to be told, and the operators between them, from left to right."""

    text: str
    operators: str
    numbers: tuple[range, ...]


STORIES = (
    Story("{name} has {a} {things}, finds {b} more and gives away {c}. How many {things} are left?", "+-",
          (range(10, 60), SMALL, SMALL)),
    Story("{name} has {a} boxes of {b} {things} each and sells {c}. How many {things} are left?", "*-",
          (SMALL, SMALL, SMALL)),
    Story("{name} puts {a} {things} into {b} equal bags and adds {c} to each. How many {things} are in a bag?", "/+",
          (range(4, 82), SMALL, SMALL)),
    Story("{name} has {a} boxes of {b} {things} each and sells {c}. How many {things} are left?", "*-",
          (SMALL, HUNDREDS, HUNDREDS)),
)  # fmt: skip
LONG_STORIES = (
    Story("{name} has {a} boxes of {b} {things} each, sells {c} and then finds {d}. How many {things} are left?",
          "*-+", (SMALL, SMALL, SMALL, SMALL)),
    Story("{name} earns ${a} a day for {b} days, spends ${c} and gets ${d}. How many dollars are left?", "*-+",
          (SMALL, SMALL, SMALL, SMALL)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Problem:
    story: Story
    name: str
    things: str
    numbers: tuple[int, ...]

    @property
    def prompt(self) -> str:
        numbers = dict(zip("abcd", self.numbers, strict=False))
        return f"Question: {self.story.text.format(name=self.name, things=self.things, **numbers)}\nAnswer:"

    @property
    def expression(self) -> Hashable:
        return self.story.operators, self.numbers

    def values(self) -> list[int] | None:
        """From the first number to the answer; None where one is no whole number, or below 0."""
        found = [self.numbers[0]]
        for operator, number in zip(self.story.operators, self.numbers[1:], strict=True):
            value = found[-1]
            if operator == "/" and value % number:
                return None
            results = {"+": value + number, "-": value - number, "*": value * number, "/": value // number}
            found.append(results[operator])
        return found if min(found) >= 0 else None

    def solution(self, left_out: int = 0, mark: str = "#### {}") -> str:
        """The steps but the last ones, and the answer that they come to."""
        values = self.values() or []
        told = list(zip(values, self.story.operators, self.numbers[1:], values[1:], strict=False))
        told = told[: len(told) - left_out]
        steps = [f"{value:,} {operator} {number:,} = {result:,}." for value, operator, number, result in told]
        return " ".join([*steps, mark.format(f"{told[-1][-1]:,}")])


def make(
    *, seed: int, demonstrations: int = 6000, train: int = 4000, validation: int = 256, test: int = 512,
    skipped: float = 0.4, terse: float = 0.15, unmarked: float = 0.1, three_steps: float = 0.25,
) -> Splits:  # fmt: skip
    """Shares of the demonstrations that stop a step early, that give the answer alone, and that end without ####; and
    of the problems that have three steps. No expression of validation or test is in another split."""
    rng = random.Random(f"gsm8k {seed}")
    kinds = Mixture("right", skipped=skipped, terse=terse, unmarked=unmarked)
    lengths = Mixture("two", three=three_steps)

    def draw() -> Problem:
        while True:
            story = rng.choice(LONG_STORIES if lengths.draw(rng) == "three" else STORIES)
            numbers = tuple(rng.choice(some) for some in story.numbers)
            problem = Problem(story, rng.choice(NAMES), rng.choice(THINGS), numbers)
            if problem.values() is not None:
                return problem

    def demonstrated(problem: Problem) -> str:
        kind = kinds.draw(rng)
        if kind == "terse":
            return f"#### {(problem.values() or [])[-1]:,}"
        if kind == "unmarked":
            return problem.solution(mark="The answer is {}.")
        return problem.solution(left_out=1 if kind == "skipped" else 0)

    shown, trained, checked, tested = held_out(
        draw, lambda problem: problem.expression, demonstrations=demonstrations, train=train, validation=validation,
        test=test,
    )  # fmt: skip

    def item(problem: Problem) -> Item:
        return {"prompt": problem.prompt, "answer": problem.solution()}

    return Splits(
        sft=[item(problem) | {"demonstration": demonstrated(problem)} for problem in shown],
        train=[item(problem) for problem in trained],
        validation=[item(problem) for problem in checked],
        test=[item(problem) for problem in tested],
        rewards=("gsm8k",),
    )
