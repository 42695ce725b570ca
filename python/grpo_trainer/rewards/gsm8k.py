"""Correctness of the answer to a word problem, and seven parts that shape its form.

Only `format` of these is on by default.

The reference is in the column `answer`, a number or a solution that ends in one. Evaluations read the component
"correct". The parts, each from 0 to 1:

    correct      the answer is the reference's number
    format       the response ends in #### and one number
    answered     an answer can be read, right or wrong
    length       the solution has more than 50 characters, where repeated words count once
    vocabulary   share of five different words of mathematics
    steps        the solution orders its steps with two different words, such as "first" and "step 2"
    numbers      the solution has a number besides the answer
    calculation  share of the written calculations that are true
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from grpo_trainer.rewards.numbers import final_number, parse_number
from grpo_trainer.rewards.weighted import Parts, WeightedReward
from grpo_trainer.rewards.words import words_of

LENGTH = 50  # characters
VOCABULARY = frozenset(
    words_of(
        "add added subtract subtracted multiply multiplied divide divided plus minus times sum total difference "
        "product quotient equals half twice double per percent each remaining"
    )
)
STEPS = frozenset(words_of("first second third next then after finally therefore thus"))
_STEP = re.compile(r"\bstep \d+")
_NUMBER = r"\$?\d{1,40}(?:,\d{3}){0,10}(?:\.\d{1,40})?"  # bounded, as conversion takes quadratic time
_TERM = re.compile(rf"([-+*/\u00d7x\u00f7]?)\s?({_NUMBER})")
_CALCULATION = re.compile(
    rf"(?<![\w.,$/*+)-])(?<![-+*/)] )(?P<left>{_NUMBER}(?:\s?[-+*/\u00d7x\u00f7]\s?{_NUMBER}){{1,8}})\s?=\s?"
    rf"(?P<sign>-?)(?P<right>{_NUMBER})(?![\d.,]*\d|\s?[-+*/\u00d7\u00f7]\s?\d)"
)


def make(
    *,
    correct: float = 1.0,
    format: float = 0.1,
    answered: float = 0.0,
    length: float = 0.0,
    vocabulary: float = 0.0,
    steps: float = 0.0,
    numbers: float = 0.0,
    calculation: float = 0.0,
    dominant: bool = True,
    without_answer: str = "skip",
) -> Gsm8k:
    """Creates the reward.

    Args:
        correct: reward of a correct answer.
        format: reward of the requested format.
        answered: reward of an answer that can be read, right or wrong.
        length: reward of a solution of more than 50 characters.
        vocabulary: reward of five words of mathematics.
        steps: reward of words that order steps.
        numbers: reward of a number besides the answer.
        calculation: reward if all written calculations are true.
        dominant: any correct answer must be worth more than any wrong one, so the other parts less than `correct`.
        without_answer: responses to a prompt without a reference: "skip" leaves them unscored, "form" scores them by
            the other parts, with an undefined `correct`.
    """
    if without_answer not in ("skip", "form"):
        raise ValueError(f"gsm8k.without_answer: must be 'skip' or 'form', got {without_answer!r}")
    if not 0 < correct < math.inf:
        raise ValueError(f"gsm8k.correct: must be positive, got {correct!r}")
    shaping = {
        "format": format,
        "answered": answered,
        "length": length,
        "vocabulary": vocabulary,
        "steps": steps,
        "numbers": numbers,
        "calculation": calculation,
    }
    for name, weight in shaping.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"gsm8k.{name}: must be 0 or more, got {weight!r}")
    total = math.fsum(shaping.values())
    if dominant and not total < correct:
        names = " + ".join(name for name, weight in shaping.items() if weight)
        raise ValueError(
            f"gsm8k.{names}: must be less than correct = {correct!r}, got {total!r}, for which a wrong answer could be "
            "worth as much as a correct one; lower them, or set dominant: false"
        )
    return Gsm8k("gsm8k", {"correct": correct, **shaping}, scores_form=without_answer == "form")


class Gsm8k(WeightedReward):
    columns = ("answer",)

    def __init__(self, name: str, weights: Mapping[str, float], scores_form: bool = False) -> None:
        self.scores_form = scores_form  # of responses to prompts without a reference
        on = {part: weight for part, weight in weights.items() if weight or part in ("correct", "format")}
        super().__init__(name, on)

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        answer = row.get("answer")
        has_answer = answer is not None and answer != ""
        if not has_answer and not self.scores_form:
            return None
        expected = final_number(str(answer)) if has_answer else None
        if has_answer and expected is None:
            raise ValueError(f"gsm8k: the column 'answer' must hold a number, got {str(answer)[:80]!r}")
        parts = {
            "correct": float(final_number(response) == expected) if has_answer else math.nan,
            "format": float(is_formatted(response) and not row.get("truncated")),
        }
        measures = {
            "answered": lambda: float(final_number(response) is not None),
            "length": lambda: float(effective_length(response) > LENGTH),
            "vocabulary": lambda: min(1.0, len(VOCABULARY & set(words_of(response))) / 5),
            "steps": lambda: float(len(STEPS & set(words_of(response)) | set(_STEP.findall(response.lower()))) > 1),
            "numbers": lambda: float(has_other_number(response)),
            "calculation": lambda: share_of_true_calculations(response),
        }
        return parts | {name: measure() for name, measure in measures.items() if name in self.weights}

    def total(self, parts: Parts) -> float:
        is_known = not math.isnan(parts["correct"])
        return super().total(parts if is_known else {**parts, "correct": 0.0})


def is_formatted(response: str) -> bool:
    """Whether the response ends in #### and one number."""
    _solution, mark, answer = response.rpartition("####")
    return bool(mark) and parse_number(answer) is not None


def effective_length(response: str) -> int:
    """Characters of the solution before ####, with one space between words, and repeated words counted once."""
    return len(" ".join(dict.fromkeys(response.partition("####")[0].split())))


def has_other_number(response: str) -> bool:
    """Whether a number other than the answer occurs before ####."""
    answer, solution = final_number(response), response.partition("####")[0]
    return any(_value(match) != answer for match in re.findall(rf"(?<![\w.,]){_NUMBER}", solution))


def share_of_true_calculations(response: str) -> float:
    """Share of the calculations, such as 48 / 2 + 1 = 25, that are true as they are rounded; 0 without any.

    One that repeats counts once. Those with brackets are not read.
    """
    found = {(match["left"], match["sign"] + match["right"]) for match in _CALCULATION.finditer(response)}
    return sum(_is_true(left, right) for left, right in found) / len(found) if found else 0.0


def _is_true(left: str, right: str) -> bool:
    terms = [Fraction(0)]  # the sum, and the products in it
    for sign, text in _TERM.findall(left):
        value = _value(text)
        if sign in ("*", "\u00d7", "x"):
            terms[-1] *= value
        elif sign in ("/", "\u00f7"):
            if value == 0:
                return False
            terms[-1] /= value
        else:
            terms.append(-value if sign == "-" else value)
    shown = _value(right.removeprefix("-")) * (-1 if right.startswith("-") else 1)
    decimals = len(right.partition(".")[2])
    return abs(sum(terms) - shown) <= (Fraction(1, 2 * 10**decimals) if decimals else 0)


def _value(text: str) -> Fraction:
    return Fraction(text.replace("$", "").replace(",", ""))
