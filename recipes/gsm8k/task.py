"""Word problems with two or three steps in the format of GSM8K, easy enough for a small model.

    Question: Ann has 4 boxes of 300 pens each and sells 200. How many pens are left?
    Answer:    4 * 300 = 1,200. 1,200 - 200 = 1,000. #### 1,000

Many demonstrations omit the last step, although the arithmetic of the others is correct; some give the answer alone, or
without `####`. Correct solutions are among them, and the reward `gsm8k` tells them apart.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Hashable

from grpo_trainer.section import Share
from grpo_trainer.tasks import Item, Sizes, Splits, held_out, load_task, to_lines

NAMES = load_task("arithmetic").NAMES
THINGS = ("pens", "coins", "cards", "books", "nuts", "beads")
HUNDREDS = range(100, 1000, 100)
SMALL = range(2, 10)


@dataclasses.dataclass(frozen=True)
class Story:
    """Template with placeholders for the numbers a, b, ..., and the operators between them, from left to right."""

    text: str
    operators: str
    numbers: tuple[range, ...]


SOLD = "{name} has {a} boxes of {b} {things} each and sells {c}. How many {things} are left?"
STORIES = (
    Story(
        "{name} has {a} {things}, finds {b} more and gives away {c}. How many {things} are left?",
        "+-",
        (range(10, 60), SMALL, SMALL),
    ),
    Story(SOLD, "*-", (SMALL, SMALL, SMALL)),
    Story(
        "{name} puts {a} {things} into {b} equal bags and adds {c} to each. How many {things} are in a bag?",
        "/+",
        (range(4, 82), SMALL, SMALL),
    ),
    Story(SOLD, "*-", (SMALL, HUNDREDS, HUNDREDS)),
)
LONG_STORIES = (
    Story(
        "{name} has {a} boxes of {b} {things} each, sells {c} and then finds {d}. How many {things} are left?",
        "*-+",
        (SMALL, SMALL, SMALL, SMALL),
    ),
    Story(
        "{name} earns ${a} a day for {b} days, spends ${c} and gets ${d}. How many dollars are left?",
        "*-+",
        (SMALL, SMALL, SMALL, SMALL),
    ),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    story: Story
    name: str
    things: str
    numbers: tuple[int, ...]

    @property
    def question(self) -> str:
        numbers = dict(zip("abcd", self.numbers, strict=False))
        return self.story.text.format(name=self.name, things=self.things, **numbers)

    @property
    def prompt(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    @property
    def expression(self) -> Hashable:
        return self.story.operators, self.numbers

    def values(self) -> list[int] | None:
        """Values from the first number to the answer; None if one is negative or not an integer."""
        values = [self.numbers[0]]
        for operator, number in zip(self.story.operators, self.numbers[1:], strict=True):
            value = values[-1]
            if operator == "/" and value % number:
                return None
            results = {"+": value + number, "-": value - number, "*": value * number, "/": value // number}
            values.append(results[operator])
        return values if min(values) >= 0 else None

    def solution(self, skipped: int = 0, mark: str = "#### {}") -> str:
        """All steps except the last `skipped` ones, and the answer they lead to."""
        values = self.values() or []
        lines = list(zip(values, self.story.operators, self.numbers[1:], values[1:], strict=False))
        lines = lines[: len(lines) - skipped]
        steps = [f"{value:,} {operator} {number:,} = {result:,}." for value, operator, number, result in lines]
        return " ".join([*steps, mark.format(f"{lines[-1][-1]:,}")])


class Options(Sizes):
    skipped: Share = 0.4
    """share of demonstrations without the last step"""
    terse: Share = 0.15
    """share of demonstrations that give the answer alone"""
    unmarked: Share = 0.1
    """share of demonstrations that end without ####"""
    three_steps: Share = 0.25
    """share of problems with three steps"""

    kinds = ("skipped", "terse", "unmarked")


def draw_problem(three_steps: float, rng: random.Random) -> Problem:
    while True:
        story = rng.choice(rng.choices((LONG_STORIES, STORIES), (three_steps, 1 - three_steps))[0])
        numbers = tuple(rng.choice(values) for values in story.numbers)
        problem = Problem(story, rng.choice(NAMES), rng.choice(THINGS), numbers)
        if problem.values() is not None:
            return problem


def make(seed: int, options: Options) -> Splits:
    rng = random.Random(f"gsm8k {seed}")

    def demonstrate(problem: Problem) -> str:
        kind = options.kind(rng, "right")
        if kind == "terse":
            return f"#### {(problem.values() or [])[-1]:,}"
        if kind == "unmarked":
            return problem.solution(mark="The answer is {}.")
        return problem.solution(skipped=1 if kind == "skipped" else 0)

    def item(problem: Problem) -> Item:
        return {"prompt": problem.prompt, "answer": problem.solution()}

    draw = functools.partial(draw_problem, options.three_steps, rng)
    return to_lines(held_out(draw, lambda problem: problem.expression, options), item, demonstrate, rewards=("gsm8k",))
