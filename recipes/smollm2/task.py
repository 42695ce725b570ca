"""Word problems for a pretrained chat model, of one to three steps with numbers up to a limit.

    Ann has 14 shells. Ann finds 5 more. How many shells does Ann have now?      14 + 5 = 19. #### 19

The model knows arithmetic from its pretraining, so that RL can start without demonstrations.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Annotated, Any

from grpo_trainer.section import Rule, Share
from grpo_trainer.tasks import Item, Sizes, Splits, held_out, load_task, to_lines
from pydantic import Field, NonNegativeInt

gsm8k = load_task("gsm8k")
Problem, Story = gsm8k.Problem, gsm8k.Story
THINGS = ("apples", "books", "cards", "coins", "cookies", "eggs", "marbles", "pens", "shells", "stamps")
QUESTION = "How many {things} does {name} have now?"
INSTRUCTION = "Show each step, then write #### and the answer."
# Placeholders of a story are a, b, c, d in the order of its operators. A product comes first, so that steps stay steps.
BEGINNINGS = {
    "": ("{name} has {a} {things}", "There are {a} {things} in a box of {name}", "{name} collected {a} {things}"),
    "*": ("{name} has {a} bags with {b} {things} each", "{name} buys {a} boxes of {b} {things}"),
}
CHANGES = {
    "+": ("finds {} more", "buys {} more", "gets {} more from a friend", "wins {} in a game"),
    "-": ("gives away {}", "sells {}", "loses {}", "gives {} to a friend"),
}
# Solved in the prompt; their names, things and expressions occur nowhere else.
EXAMPLES = tuple(
    Problem(Story(text + QUESTION, operators, ()), name, things, numbers)
    for text, operators, name, things, numbers in (
        ("{name} has {a} {things}. {name} gives {b} to a friend. ", "-", "Sam", "caps", (12, 7)),
        ("{name} collected {a} {things}. {name} buys {b} more. ", "+", "Leo", "cups", (6, 8)),
        ("{name} has {a} {things}. {name} sells {b}. Then {name} finds {c} more. ", "-+", "Kim", "toys", (9, 4, 7)),
        ("{name} has {a} {things}. {name} buys {b} more. Then {name} loses {c}. ", "+-", "Leo", "cups", (6, 8, 3)),
    )
)


class Options(Sizes):
    demonstrations: NonNegativeInt = 500
    train: NonNegativeInt = 2000
    validation: NonNegativeInt = 32
    test: NonNegativeInt = 100
    steps: Annotated[int, Field(ge=1, le=3)] = 1
    """calculations in each problem"""
    largest: Annotated[int, Field(ge=10)] = 20
    """largest number in a problem and its solution"""
    products: Share = 0.0
    """share of problems that begin with a product"""
    examples: NonNegativeInt = 2
    """solved problems of as many steps before each one, as turns of the chat; 0: an instruction instead"""

    @property
    def shown(self) -> list[Any]:
        """The solved problems."""
        return [example for example in EXAMPLES if len(example.story.operators) == self.steps][: self.examples]

    def rules(self) -> Iterator[Rule]:
        yield "examples", len(self.shown) == self.examples, f"must be at most {len(self.shown)} with {self.steps} steps"


def draw_story(steps: int, products: float, rng: random.Random) -> Any:
    """Draws the text and operators of a problem; a product, if there is one, is the first step."""
    operators = "*" if rng.random() < products else ""
    operators += "".join(rng.choices("+-", k=steps - len(operators)))
    letters = iter("abcd"[1 + operators.count("*") :])
    sentences = [rng.choice(BEGINNINGS["*" if "*" in operators else ""])]
    for i, operator in enumerate(operators.lstrip("*")):
        change = rng.choice(CHANGES[operator]).format("{" + next(letters) + "}")
        sentences.append(f"Then {{name}} {change}" if i else f"{{name}} {change}")
    return Story(". ".join([*sentences, QUESTION]), operators, ())


def draw_problem(steps: int, largest: int, products: float, rng: random.Random) -> Any:
    while True:
        story = draw_story(steps, products, rng)
        factors = (rng.randint(2, 9), rng.randint(2, 9)) if "*" in story.operators else (rng.randint(2, largest),)
        rest = [rng.randint(2, largest) for _ in range(len(story.operators) + 1 - len(factors))]
        problem = Problem(story, rng.choice(gsm8k.NAMES), rng.choice(THINGS), (*factors, *rest))
        values = problem.values()
        is_shown = problem.expression in {example.expression for example in EXAMPLES}
        if values is not None and max(values) <= largest and not is_shown:
            return problem


def make(seed: int, options: Options) -> Splits:
    rng = random.Random(f"word_problems {seed}")
    shown = [
        {"role": role, "content": content}
        for example in options.shown
        for role, content in (("user", example.question), ("assistant", example.solution()))
    ]

    def item(problem: Any) -> Item:
        if not shown:
            return {"prompt": f"{problem.question}\n{INSTRUCTION}", "answer": problem.solution()}
        return {"prompt": [*shown, {"role": "user", "content": problem.question}], "answer": problem.solution()}

    draw = functools.partial(draw_problem, options.steps, options.largest, options.products, rng)
    problems = held_out(draw, lambda problem: problem.expression, options)
    return to_lines(problems, item, Problem.solution, rewards=("gsm8k",))
