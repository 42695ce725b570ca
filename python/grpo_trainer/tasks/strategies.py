"""The problems of `arithmetic`, shown solved in three orders: a task with several right ways.

    forward  29 - 9 = 20. 20 + 5 = 25.      reverse  29 + 5 = 34. 34 - 9 = 25.      net  5 - 9 = -4. 29 - 4 = 25.

`strategy` reads from a response which one it is: the two numbers of its first equation.
"""

from __future__ import annotations

import re

from grpo_trainer.tasks.arithmetic import LARGEST, Problem, equation, held_out, item
from grpo_trainer.tasks.base import Splits

ORDERS = ("forward", "reverse", "net")


def solved(problem: Problem, order: str) -> str | None:
    """The problem solved in this order; None where a value would be too small or too large."""
    first, second = problem.changes()
    start, answer = problem.start, problem.answer
    if order == "net":
        total = first + second
        steps = [equation(first, second, total) if first >= 0 else f"{second} - {-first} = {total}."]
        if second < 0 and first < 0:
            steps = [f"-{-first} - {-second} = {total}."]
        steps.append(equation(start, total, answer))
        return " ".join([*problem.opening(), *steps, f"#### {answer}"])
    changes = (first, second) if order == "forward" else (second, first)
    between = start + changes[0]
    if not 0 <= between <= LARGEST:
        return None
    steps = [equation(start, changes[0], between), equation(between, changes[1], answer)]
    return " ".join([*problem.opening(), *steps, f"#### {answer}"])


def strategy(response: str) -> str | None:
    """What the response computes first, a product of boxes apart; None where it computes nothing."""
    found = re.search(r"(-?\d+) ([+-]) (\d+) =", response)
    return None if found is None else " ".join(found.groups())


def make(
    *, seed: int, demonstrations: int = 6000, train: int = 4000, validation: int = 256, test: int = 512,
    forward: float = 0.4, reverse: float = 0.3, boxes: float = 0.3,
) -> Splits:  # fmt: skip
    """Shares of the demonstrations by their order; the rest is net."""
    rng, shown, trained, checked, tested = held_out(seed, demonstrations, train, validation, test, boxes)
    shares = (forward, reverse, 1 - forward - reverse)
    sft = []
    for problem in shown:
        orders = [*rng.choices(ORDERS, shares, k=3), "forward"]
        text = next(text for order in orders if (text := solved(problem, order)) is not None)
        sft.append(item(problem) | {"demonstration": text})
    train_items, validation_items, test_items = ([item(each) for each in some] for some in (trained, checked, tested))
    return Splits(sft, train_items, validation_items, test_items)
