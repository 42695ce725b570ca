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
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from pydantic import NonNegativeFloat, PositiveFloat

from grpo_trainer.rewards.base import Parts, WeightedReward
from grpo_trainer.rewards.numbers import final_number, parse_number
from grpo_trainer.rewards.words import words_of
from grpo_trainer.section import Rule

SHAPING = ("format", "answered", "length", "vocabulary", "steps", "numbers", "calculation")
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


class Gsm8k(WeightedReward):
    correct: PositiveFloat = 1.0
    """reward of a correct answer"""
    format: NonNegativeFloat = 0.1
    """reward of the requested format"""
    answered: NonNegativeFloat = 0.0
    """reward of an answer that can be read, right or wrong"""
    length: NonNegativeFloat = 0.0
    """reward of a solution of more than 50 characters"""
    vocabulary: NonNegativeFloat = 0.0
    """reward of five words of mathematics; of fewer, a share"""
    steps: NonNegativeFloat = 0.0
    """reward of words that order steps"""
    numbers: NonNegativeFloat = 0.0
    """reward of a number besides the answer"""
    calculation: NonNegativeFloat = 0.0
    """reward times the share of written calculations that are true"""
    dominant: bool = True
    """any correct answer must be worth more than any wrong one, so the other parts less than correct"""

    columns_needed = (("answer",),)

    def rules(self) -> Iterator[Rule]:
        shaping = {name: getattr(self, name) for name in SHAPING if getattr(self, name)}
        total = math.fsum(shaping.values())
        rule = f"must exceed {' + '.join(shaping)} = {total}, or a wrong answer could be worth as much as a correct one"
        yield "correct", not self.dominant or total < self.correct, f"{rule}, unless dominant is false"

    def weight_of(self) -> Mapping[str, float]:
        weights = {name: getattr(self, name) for name in ("correct", *SHAPING)}
        return {name: weight for name, weight in weights.items() if weight or name in ("correct", "format")}

    def parts(self, prompt: str, response: str, row: Mapping[str, Any]) -> Parts | None:
        answer = row.get("answer")
        if answer is None or answer == "":
            return None
        expected = final_number(str(answer))
        if expected is None:
            raise ValueError(f"gsm8k: the column 'answer' must hold a number, got {str(answer)[:80]!r}")
        measures = {
            "correct": lambda: float(final_number(response) == expected),
            "format": lambda: float(is_formatted(response) and not row.get("truncated")),
            "answered": lambda: float(final_number(response) is not None),
            "length": lambda: float(effective_length(response) > LENGTH),
            "vocabulary": lambda: min(1.0, len(VOCABULARY & set(words_of(response))) / 5),
            "steps": lambda: float(len(STEPS & set(words_of(response)) | set(_STEP.findall(response.lower()))) > 1),
            "numbers": lambda: float(has_other_number(response)),
            "calculation": lambda: share_of_true_calculations(response),
        }
        return {name: measures[name]() for name in self.weight_of()}


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
