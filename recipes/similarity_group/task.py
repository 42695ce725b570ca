"""The problems of `arithmetic`, demonstrated in three orders: a task with several correct solutions.

    forward  29 - 9 = 20. 20 + 5 = 25.      reverse  29 + 5 = 34. 34 - 9 = 25.      net  5 - 9 = -4. 29 - 4 = 25.

`strategy` identifies the order of a response by the two numbers of its first equation.
"""

from __future__ import annotations

import re
from typing import Any

from grpo_trainer.section import Share
from grpo_trainer.tasks import Sizes, Splits, load_task, to_lines

arithmetic = load_task("arithmetic")
equation = arithmetic.equation
ORDERS = ("forward", "reverse", "net")


def solve(problem: Any, order: str) -> str | None:
    """Solution of an arithmetic problem in this order; None if an intermediate value would be out of range."""
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
    intermediate = start + changes[0]
    if not 0 <= intermediate <= arithmetic.LARGEST:
        return None
    steps = [equation(start, changes[0], intermediate), equation(intermediate, changes[1], answer)]
    return " ".join([*problem.opening(), *steps, f"#### {answer}"])


def strategy(response: str) -> str | None:
    """First sum or difference that the response computes; None if there is none."""
    match = re.search(r"(-?\d+) ([+-]) (\d+) =", response)
    return None if match is None else " ".join(match.groups())


class Options(Sizes):
    forward: Share = 0.4
    """share of demonstrations in the order of the problem"""
    reverse: Share = 0.3
    """share of demonstrations in the reverse order; the rest combines both changes first"""
    boxes: Share = 0.3
    """share of problems that start with a product"""

    kinds = ("forward", "reverse")


def make(seed: int, options: Options) -> Splits:
    rng, problems = arithmetic.examples(seed, options)
    shares = (options.forward, options.reverse, 1 - options.forward - options.reverse)

    def demonstrate(problem: Any) -> str:
        orders = [*rng.choices(ORDERS, shares, k=3), "forward"]
        return next(text for order in orders if (text := solve(problem, order)) is not None)

    return to_lines(problems, arithmetic.item, demonstrate)
