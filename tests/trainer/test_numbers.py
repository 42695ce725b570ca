"""Reading numbers from texts."""

from __future__ import annotations

import gc
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from grpo_trainer.rewards.numbers import final_number, parse_number

# one number each, as people and models write it
PARSED = {
    "0": 0, "18": 18, "007": 7, "+5": 5, "-5": -5, "\u22125": -5, "\u20135": -5, " 18 ": 18, "18.": 18, "18.0": 18,
    ".5": "1/2",
    "-.25": "-1/4", "3.14": "157/50", "1,234": 1234, "12,345,678": 12345678, "1,234.50": "2469/2", "1\u202f234": 1234,
    "1\u00a0234\u00a0567": 1234567, "\uff11\uff18": 18,
    # currency, percent, units
    "$18": 18, "$1,234.50": "2469/2", "-$18": -18, "$-18": -18, "\\$18": 18, "€20": 20, "20 €": 20, "USD 18": 18,
    "US$18": 18,
    "Rs. 250": 250, "50%": 50, "50 %": 50, "50\\%": 50, "12.5%": "25/2", "18 dollars": 18, "18 dollars.": 18,
    "18km": 18,
    "25 m^2": 25, "25 m\u00b2": 25, "60 km/h": 60, "18 \\text{ dollars}": 18, "90^\\circ": 90, "90\u00b0": 90,
    # fractions and mixed numbers
    "1/2": "1/2", "-1/2": "-1/2", "3 / 4": "3/4", "3 1/2": "7/2", "-3 1/2": "-7/2", "\u00bd": "1/2", "3\u00bd": "7/2",
    "3 \u00be": "15/4", "\\frac{1}{2}": "1/2", "\\dfrac{7}{8}": "7/8", "-\\frac{3}{4}": "-3/4", "\\frac12": "1/2",
    "3\\frac{1}{2}": "7/2", "24/2": 12, "1,000/4": 250, "1.5/2": "3/4",
    # exponents
    "1e3": 1000, "1E3": 1000, "1.5e-3": "3/2000", "-2e+2": -200, "5 \\times 10^3": 5000, "5 \\times 10^{-2}": "1/20",
    "5 \u00d7 10\u00b3": 5000, "5*10**3": 5000, "5 x 10^3": 5000, "5\\cdot10^{3}": 5000, "10^3": 1000,
    "10\u207b\u00b2": "1/100",
    "2^10": 1024, "-2^2": -4,
    # brackets, boxes, emphasis, mathematics
    "(42)": 42, "[42]": 42, "{42}": 42, "(-42)": -42, "[ 42 ]": 42, "\\boxed{42}": 42, "\\boxed{\\text{42}}": 42,
    "\\boxed{\\boxed{42}}": 42, "\\boxed{\\frac{1}{2}}": "1/2", "$\\boxed{-7}$": -7, "**18**": 18, "*18*": 18,
    "**$18**": 18,
    "$18$": 18, "$$18$$": 18, "\\(18\\)": 18, "\\[18\\]": 18, "`18`": 18, "= 1,250": 1250, "x = 18": 18,
    "$x = 18$": 18,
    "1{,}234": 1234, "1\\,234": 1234, "1,\\!234": 1234, "~18": 18,
    # none, or more than one
    "": None, "none": None, "-": None, "1/0": None, "\\frac{1}{0}": None, "9-10": None, "9 - 10": None,
    "1,2345": None,
    "1, 234": None, "1 and 2": None, "18 apples of 3": None, "she has 18": None, "H2O": None, "9^9^9": None,
    "1e401": None,
    "2^99999": None, "0^-1": None, "9" * 401: None, "12:30": None, "18 a b c d": None,
}  # fmt: skip

# whole responses
FINAL = {
    "18": 18, "#### 1,234": 1234, "####18": 18, "#### $18": 18, "#### -$18.50": "-37/2", "#### [42]": 42,
    "#### **42**": 42,
    "####\n42": 42, "#### x = 18": 18, "#### 18 dollars": 18, "#### 50%": 50, "#### \\frac{1}{2}": "1/2",
    "#### 1e3": 1000,
    # the last mark of the strongest kind
    "#### 5\nNo, that is wrong.\n#### 7": 7, "#### 7\nI had 3 apples.": 7, "\\boxed{5} but then \\boxed{6}": 6,
    "The answer is 5. Wait, the answer is 6.": 6, "#### 5\nThe answer is 6": 5, "\\boxed{5}. The answer is 6": 5,
    "Final Answer: 18, from 9 * 2": 18, "Answer: 18\n(see 3 above)": 18, "ANSWER IS 18, not 20": 18,
    "Final Answer:\n\n18": 18, "**Answer**: $18": 18, "**Final answer:** \\frac{7}{8}": "7/8",
    "The answer is: **18**": 18,
    "The answer to the question is -7.": -7, "My answer would be 18 of 20": 18, "Answer = 18": 18,
    # marks without a number
    "#### Step 1: add\nThe answer is 7": 7, "#### 1. Add\n#### 2. Halve\nSo we have 12": 12, "##### 5\nso 6": 6,
    "The answer is clear. We have 3": 3, "\\boxed{x}, 4": 4, "#### none\n5 or 6": 6, "\\boxed{18": 18,
    # equations
    "The answer is 3 * 6 = 18 dollars, for 2": 18, "The answer is 3 apples * 6 = 18 apples.": 18,
    "#### 16 - 4 = 12": 12,
    "The answer is 18 because 2 * 9 = 18 and 1 = 1": 18, "\\boxed{x = 2 + 3 = 5}": 5,
    # no mark
    "first 3, then 4": 4, "4 boxes of 25 cm^2": 25, "It takes 9-10": 10, "It takes 9\u201310 days": 10, "5 - 3": 3,
    "5 -3": 3,
    "left: -3": -3, "a gain of $5-$3": 3, "- 18 apples": 18, "x_1 = 5 of x_{2}": 5, "e^{-5} of 3 is y^-2": 3,
    "10^{3} of them": 1000, "H2O, 5 m2": 5, "1,234,": 1234, "She has 1,234.": 1234, "no number": None, "": None,
    "5, or rather 1/0": None, "1, 2, 3": 3, "(1,2,3)": 3,
}  # fmt: skip

# a naive pattern of digits, dot and sign would find: 1, nothing, 1, 1, -10, 250, nothing
NAIVE_FAILURES = {
    "#### 1,234": 1234, "#### [42]": 42, "#### 1/2": "1/2", "#### 1e3": 1000, "#### 9-10": 10,
    "so we get = 1,250": 1250,
    "\\boxed{42}": 42, "**42**": 42, "#### 41\nNo: #### 42": 42, "#### $18": 18,
}  # fmt: skip


def expected(value: int | str | None) -> Fraction | None:
    return None if value is None else Fraction(value)


@pytest.mark.parametrize("text", PARSED)
def test_one_number(text: str) -> None:
    assert parse_number(text) == expected(PARSED[text])


@pytest.mark.parametrize("text", FINAL)
def test_answer_of_a_response(text: str) -> None:
    assert final_number(text) == expected(FINAL[text])


@pytest.mark.parametrize("text", NAIVE_FAILURES)
def test_what_a_plain_pattern_misreads(text: str) -> None:
    assert final_number(text) == expected(NAIVE_FAILURES[text])


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def decimal(value: Fraction, style: str) -> str:
    cents = round(value * 100)
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100:{style}}.{abs(cents) % 100:02}"


WHOLE = {
    "plain": str, "thousands": lambda n: f"{n:,}", "dot": lambda n: f"{n:,}.",
    "unicode": lambda n: str(n).replace("-", "\u2212"),
    "currency": lambda n: f"{'-' if n < 0 else ''}${abs(n):,}", "percent": lambda n: f"{n}%",
    "unit": lambda n: f"{n:,} apples",
    "boxed": lambda n: f"\\boxed{{{n:,}}}", "bold": lambda n: f"**{n}**", "math": lambda n: f"${n}$",
    "brackets": lambda n: f"[{n}]",
    "parentheses": lambda n: f"({n})", "latex thousands": lambda n: f"{n:,}".replace(",", "{,}"),
    "power": lambda n: f"{n} \\times 10^0",
    "exponent": lambda n: f"{n}e0", "decimal": lambda n: f"{n}.00",
    "nested": lambda n: f"$\\boxed{{\\text{{{n:,} cm}}}}$",
}  # fmt: skip
FRACTIONS = {
    "plain": str, "latex": latex, "boxed": lambda value: f"\\boxed{{{latex(value)}}}",
    "spaced": lambda value: str(value).replace("/", " / "),
}  # fmt: skip
MARKS = (
    "#### {}",
    "So.\n#### {}\n",
    "The answer is {}",
    "**Final answer:** {}",
    "Answer: {}\n",
    "3 of 4 are {}",
    "\\boxed{{{}}} of 7",
)


@pytest.mark.parametrize("style", WHOLE)
@given(number=st.integers(-(10**12), 10**12), mark=st.sampled_from(MARKS))
def test_reads_back_whole_numbers(style: str, number: int, mark: str) -> None:
    written = WHOLE[style](number)
    assert parse_number(written) == number
    assert final_number(mark.format(written)) == number


@pytest.mark.parametrize("style", FRACTIONS)
@given(value=st.fractions(-1000, 1000, max_denominator=1000), mark=st.sampled_from(MARKS))
def test_reads_back_fractions(style: str, value: Fraction, mark: str) -> None:
    written = FRACTIONS[style](value)
    assert parse_number(written) == value
    assert final_number(mark.format(written)) == value


@given(cents=st.integers(-(10**9), 10**9), style=st.sampled_from(["", ","]))
def test_reads_back_decimals_exactly(cents: int, style: str) -> None:
    value = Fraction(cents, 100)
    assert parse_number(decimal(value, style)) == value


@given(whole=st.integers(1, 999), value=st.fractions(0, 1, max_denominator=99).filter(lambda value: 0 < value < 1))
def test_reads_back_mixed_numbers(whole: int, value: Fraction) -> None:
    assert parse_number(f"{whole} {value}") == whole + value
    assert parse_number(f"{whole}{latex(value)}") == whole + value


@given(text=st.text(max_size=60))
def test_any_text_has_a_number_or_none(text: str) -> None:
    assert isinstance(parse_number(text), Fraction | None)
    assert isinstance(final_number(text), Fraction | None)


@given(low=st.integers(0, 999), high=st.integers(0, 999))
def test_a_range_is_not_a_negative_number(low: int, high: int) -> None:
    assert final_number(f"{low}-{high}") == high
    assert parse_number(f"{low}-{high}") is None


# texts of length n that provoke repeated scans
ADVERSARIAL = {
    "digits": lambda n: "1" * n, "words of digits": lambda n: "a" + "1" * n,
    "thousands": lambda n: "1" + ",111" * (n // 4) + "1",
    "list": lambda n: "1," * (n // 2), "round": lambda n: "(" * n + "#5", "curly": lambda n: "{" * n + "5",
    "spaces": lambda n: "1" + " " * n + "^",
    "boxes": lambda n: "\\boxed{" * (n // 14) + "5" + "}" * (n // 14), "open boxes": lambda n: "\\boxed{" * (n // 7),
    "deep boxes": lambda n: "\\boxed{" * (n // 14) + ". 5" + "}" * (n // 14),
    "empty boxes": lambda n: "\\boxed{x}" * (n // 9) + "3", "answers": lambda n: "answer is " * (n // 10),
    "answer": lambda n: "answer " * (n // 7),
    "blank answer": lambda n: "answer: " + "\n" * n + "5", "marks": lambda n: "#### " * (n // 5) + "x 5",
    "hashes": lambda n: "#" * n,
    "lines": lambda n: "#### 5\n" * (n // 7), "dashes": lambda n: "-" * n + "5", "stars": lambda n: "*" * n + "5",
    "slashes": lambda n: "1/" * (n // 2),
    "exponents": lambda n: "1e" * (n // 2), "powers": lambda n: "10^" * (n // 3),
    "raised": lambda n: "1" + "\u2075" * n, "dollars": lambda n: "$" * n + "5",
    "fractions": lambda n: "\\frac{1}{2}" * (n // 11), "cut fractions": lambda n: "\\frac{" * (n // 6),
    "halves": lambda n: "\u00bd" * n,
    "units": lambda n: "5" + "a/" * (n // 2) + "^", "words": lambda n: "5 " + "ab " * (n // 3) + "^",
    "stops": lambda n: "5 ab" + "." * n + "^",
    "sum": lambda n: "1 + " * (n // 4), "equals": lambda n: "answer: " + "1 = " * (n // 4),
    "escapes": lambda n: "\\" * n + "5",
}  # fmt: skip


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_time_is_linear(name: str) -> None:
    text = ADVERSARIAL[name](100_000)
    gc.disable()  # a collection goes through all that earlier tests left in this process: 3 s where the work takes 1 s
    try:
        start = time.process_time()
        parse_number(text)
        final_number(text)
        seconds = time.process_time() - start
    finally:
        gc.enable()
    # at most 1 s on an idle machine; quadratic time would take minutes
    assert seconds < 3
