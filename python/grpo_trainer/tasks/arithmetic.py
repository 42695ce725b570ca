"""Two steps of arithmetic in words, with demonstrations of which many are wrong on purpose.

    Ann has 29 shells, sells 9, finds 5. How many?       29 - 9 = 20. 20 + 5 = 25. #### 25

One annotator reads some verbs the wrong way round, though the arithmetic of each step is right; another writes the
answer alone. What supervised training learns from them is a mixture, and a reward tells which part of it is right.
"""

from __future__ import annotations

import dataclasses
import random

from grpo_trainer.tasks.base import Item, Splits

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
    boxes: tuple[int, int] | None  # so many of so many
    start: int
    steps: tuple[tuple[str, int], ...]  # verb, by how much

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
        found = [self.start]
        for change in self.changes(misread):
            found.append(found[-1] + change)
        return found

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


def problems(count: int, rng: random.Random, seen: set[tuple[object, ...]], boxes: float = 0.3) -> list[Problem]:
    """So many, with expressions that are not in `seen`; every value, misread or not, is within 0 and LARGEST."""
    found: list[Problem] = []
    for _ in range(100 * count + 1000):
        if len(found) == count:
            return found
        of = (rng.randint(2, 9), rng.randint(2, 9)) if rng.random() < boxes else None
        start = rng.randint(2, 50) if of is None else of[0] * of[1]
        verbs = rng.sample(GAINS + LOSSES, 2)
        problem = Problem(
            rng.choice(NAMES), rng.choice(THINGS), of, start, tuple((verb, rng.randint(1, 9)) for verb in verbs)
        )
        reached = problem.values() + problem.values(MISREAD)
        if problem.expression not in seen and all(0 <= value <= LARGEST for value in reached):
            found.append(problem)
    raise ValueError(f"data.options: there are too few different problems for {count} lines in a split; ask for fewer")


def held_out(
    seed: int, demonstrations: int, train: int, validation: int, test: int, boxes: float
) -> tuple[random.Random, list[Problem], list[Problem], list[Problem], list[Problem]]:
    """Problems for the four splits; expressions of the last two occur in no other."""
    rng = random.Random(f"arithmetic {seed}")
    tests = problems(test, rng, set(), boxes)
    seen = {problem.expression for problem in tests}
    checks = problems(validation, rng, seen, boxes)
    seen |= {problem.expression for problem in checks}
    return rng, problems(demonstrations, rng, seen, boxes), problems(train, rng, seen, boxes), checks, tests


def item(problem: Problem) -> Item:
    return {"prompt": problem.prompt, "answer": str(problem.answer)}


def make(
    *, seed: int, demonstrations: int = 6000, train: int = 4000, validation: int = 256, test: int = 512,
    misread: float = 0.45, terse: float = 0.2, boxes: float = 0.3,
) -> Splits:  # fmt: skip
    """Shares of the demonstrations that misread verbs, and that say the answer alone; the others are right."""
    rng, shown, trained, checked, tested = held_out(seed, demonstrations, train, validation, test, boxes)

    def demonstrated(problem: Problem) -> str:
        style = rng.random()
        if style < terse:
            return f"#### {problem.answer}"
        return problem.worked(MISREAD if style < terse + misread else ())

    sft = [item(problem) | {"demonstration": demonstrated(problem)} for problem in shown]
    train_items, validation_items, test_items = ([item(each) for each in some] for some in (trained, checked, tested))
    return Splits(sft, train_items, validation_items, test_items)
