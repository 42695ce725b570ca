"""The numbers that the reward for GSM8K reads, and its eight parts, against texts that try to look like a part."""

from __future__ import annotations

import math
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from grpo_trainer.rewards import gsm8k
from grpo_trainer.rewards.numbers import final_number, parse_number

# one number each, as people and models write it
PARSED = {
    "0": 0,
    "18": 18,
    "007": 7,
    "-5": -5,
    "\u22125": -5,
    " 18 ": 18,
    "18.": 18,
    "18.0": 18,
    ".5": "1/2",
    "-.25": "-1/4",
    "3.14": "157/50",
    "1,234": 1234,
    "12,345,678": 12345678,
    "1,234.50": "2469/2",
    "$18": 18,
    "-$18": -18,
    "$-18": -18,
    "\\$18": 18,
    "20 €": 20,
    "50%": 50,
    "50 %": 50,
    "50\\%": 50,
    "18 dollars.": 18,
    "18km": 18,
    "60 km/h": 60,
    "25 m\u00b2": 25,
    "18 \\text{ dollars}": 18,
    "1/2": "1/2",
    "-1/2": "-1/2",
    "3 / 4": "3/4",
    "1,000/4": 250,
    "\\frac{1}{2}": "1/2",
    "-\\dfrac{3}{4}": "-3/4",
    "(42)": 42,
    "[42]": 42,
    "(-42)": -42,
    "\\boxed{42}": 42,
    "\\boxed{\\text{42}}": 42,
    "\\boxed{\\frac{1}{2}}": "1/2",
    "$\\boxed{-7}$": -7,
    "**$18**": 18,
    "\\(18\\)": 18,
    "\\[18\\]": 18,
    "= 1,250": 1250,
    "$x = 18$": 18,
    "1{,}234": 1234,
    "1,\\!234": 1234,
    # none, or more than one
    "": None,
    "none": None,
    "-": None,
    "1/0": None,
    "9-10": None,
    "1,2345": None,
    "1 and 2": None,
    "she has 18": None,
    "18 apples of 3": None,
    "H2O": None,
    "1e3": None,
    "3 1/2": None,
    "9" * 401: None,
    "12:30": None,
    "18 a b c d": None,
}
# whole responses
FINAL = {
    "#### 1,234": 1234,
    "####18": 18,
    "#### -$18.50": "-37/2",
    "#### **42**": 42,
    "####\n42": 42,
    "#### x = 18": 18,
    "#### 50%": 50,
    "#### \\frac{1}{2}": "1/2",
    # the last mark of the strongest kind
    "#### 5\nNo, that is wrong.\n#### 7": 7,
    "#### 7\nI had 3 apples.": 7,
    "\\boxed{5} but then \\boxed{6}": 6,
    "The answer is 5. Wait, the answer is 6.": 6,
    "#### 5\nThe answer is 6": 5,
    "\\boxed{5}. The answer is 6": 5,
    "Final Answer: 18, from 9 * 2": 18,
    "ANSWER IS 18, not 20": 18,
    "Final Answer:\n\n18": 18,
    "**Answer**: $18": 18,
    "The answer is: **18**": 18,
    "The answer to the question is -7.": -7,
    # marks without a number
    "#### Step 1: add\nThe answer is 7": 7,
    "#### 1. Add\n#### 2. Halve\nSo we have 12": 12,
    "\\boxed{x}, 4": 4,
    "\\boxed{\\boxed{42}} of 7": 42,
    "The answer is clear. We have 3": 3,
    "#### none\n5 or 6": 6,
    "\\boxed{18": 18,
    # equations
    "The answer is 3 apples * 6 = 18 apples.": 18,
    "#### 16 - 4 = 12": 12,
    "\\boxed{x = 2 + 3 = 5}": 5,
    # no mark
    "first 3, then 4": 4,
    "It takes 9-10": 10,
    "It takes 9\u201310 days": 10,
    "5 - 3": 3,
    "5 -3": 3,
    "left: -3": -3,
    "a gain of $5-$3": 3,
    "- 18 apples": 18,
    "H2O, 5 m2": 5,
    "She has 1,234.": 1234,
    "no number": None,
    "": None,
    "5, or rather 1/0": None,
    "(1,2,3)": 3,
    "1,2345": 2345,
}
SHAPING = ("format", "answered", "length", "vocabulary", "steps", "numbers", "calculation")
ALL = {"format": 0.1, "answered": 0.1, **dict.fromkeys(SHAPING[2:], 0.15)}
SOLUTION = (
    "First, she sold half as many: 48 / 2 = 24 clips in total. Then add both months: 48 + 24 = 72. So the sum, twice "
    "counted, is the total of each month.\n#### 72"
)
# part, response, value
TEXTS: list[tuple[str, str, float]] = [
    ("correct", "#### 72", 1),
    ("correct", "72 is not it. #### 27", 0),
    ("correct", "#### 72.5", 0),
    ("format", "#### 72", 1),
    ("format", "72 ####", 0),
    ("format", "#### 72 or 73", 0),
    ("format", "The answer is 72.", 0),
    ("answered", "#### 9", 1),
    ("answered", "it depends", 0),
    ("answered", "####", 0),
    ("length", SOLUTION, 1),
    ("length", "a" * 50 + "\n#### 72", 0),
    ("length", "a" * 51 + "\n#### 72", 1),
    ("length", "so " * 100 + "#### 72", 0),
    ("length", " " * 400 + "\n#### 72", 0),
    ("length", "#### 72 " + SOLUTION, 0),  # what follows the answer is not the solution
    ("vocabulary", SOLUTION, 1),
    ("vocabulary", "sum sum sum sum sum sum", 0.2),
    ("vocabulary", "add-on sums, madden, peruse, halfway, timeshare", 0.2),  # "add" alone is a word here
    ("vocabulary", "plus minus times", 0.6),
    ("steps", SOLUTION, 1),
    ("steps", "step 1: go. step 2: stop.", 1),
    ("steps", "then then then", 0),
    ("steps", "thirst, nextdoor, authentic, stepping 1 and 2", 0),
    ("numbers", SOLUTION, 1),
    ("numbers", "#### 72", 0),
    ("numbers", "it is 72, so 72.\n#### 72", 0),
    ("numbers", "x48 is a name\n#### 72", 0),
    ("calculation", SOLUTION, 1),
    ("calculation", "no calculation at all. 72", 0),
    ("calculation", "72 = 72", 0),
    ("calculation", "1 + 1 = 3", 0),
    ("calculation", "1 + 1 = 2, 2 + 2 = 5", 0.5),
    ("calculation", "1 + 1 = 2, " * 9 + "2 + 2 = 5", 0.5),
    ("calculation", "2 + 3 * 4 = 14", 1),
    ("calculation", "2 + 3 * 4 = 20", 0),
    ("calculation", "4 * $300 = $1,200. 1,200 - 200 = 1,000.", 1),
    ("calculation", "10 / 3 = 3.33", 1),
    ("calculation", "10 / 3 = 3", 0),
    ("calculation", "5 / 0 = 0", 0),
    ("calculation", "3 - 5 = -2", 1),
    ("calculation", "48/2 = <<48/2=24>>24", 1),
    ("calculation", "3 + 4 = 5 + 2 = 7", 1),  # the left one is not read
    ("calculation", "(3 + 4) * 2 = 14", 0),  # brackets are not read
    ("calculation", "1 + 1 = 25", 0),
]


def expected(value: int | str | None) -> Fraction | None:
    return None if value is None else Fraction(value)


@pytest.mark.parametrize("text", PARSED)
def test_one_number(text: str) -> None:
    assert parse_number(text) == expected(PARSED[text])


@pytest.mark.parametrize("text", FINAL)
def test_answer_of_a_response(text: str) -> None:
    assert final_number(text) == expected(FINAL[text])


WRITTEN = ("{}", "{}.", "${}", "{}%", "{} apples", "\\boxed{{{}}}", "**{}**", "[{}]", "$\\boxed{{\\text{{{} cm}}}}$")
MARKS = ("#### {}", "So.\n#### {}\n", "The answer is {}", "**Final answer:** {}", "3 of 4 are {}", "\\boxed{{{}}} of 7")


@given(
    value=st.integers(-(10**12), 10**12) | st.decimals(-999, 999, places=2) | st.fractions(-99, 99, max_denominator=99),
    written=st.sampled_from(WRITTEN),
    mark=st.sampled_from(MARKS),
)
def test_reads_back_numbers(value: Any, written: str, mark: str) -> None:
    text = written.format(value if isinstance(value, Fraction) else f"{value:,}")
    assert parse_number(text) == Fraction(value)
    assert final_number(mark.format(text)) == Fraction(value)


@given(text=st.text(max_size=60) | st.text("0123/.,-$ #=", max_size=30))
def test_any_text_has_a_number_or_none(text: str) -> None:
    assert isinstance(parse_number(text), Fraction | None)
    assert isinstance(final_number(text), Fraction | None)


MARKED = ["\\boxed{", "\\frac{", "\\text{", "answer is ", "answer: \n", "#### ", "5 ab."]
LONG = [*MARKED, "1", "a1", "1,", "1,111", "(", "1 ", "-", "1/", "1 + ", "= 1", "1 = ", "\\", "1 + 1 "]


@pytest.mark.parametrize("repeated", LONG)
def test_long_texts_take_no_longer_than_their_length_allows(repeated: str) -> None:
    text = repeated * (100_000 // len(repeated))
    start = time.process_time()
    parse_number(text), final_number(text + " 5"), part("calculation", text), part("numbers", text)
    # at most 1 s on an idle machine; quadratic time would take minutes
    assert time.process_time() - start < 10


def part(name: str, text: str, **row: Any) -> float:
    function = gsm8k.make(**(ALL if name in ("correct", "format") else {name: 0.5}))
    return function.components(["p"], [text], answer=["72"], **{key: [value] for key, value in row.items()})[name][0]


@pytest.mark.parametrize(("name", "text", "value"), TEXTS)
def test_each_part_measures_what_it_says(name: str, text: str, value: float) -> None:
    assert part(name, text) == value


def test_the_total_is_the_weighted_sum_of_the_parts_that_are_on() -> None:
    texts = [text for _, text, _ in TEXTS]
    function = gsm8k.make(correct=2.0, **ALL)
    parts = function.components(["p"] * len(texts), texts, answer=["72"] * len(texts))
    weights = {"correct": 2.0, **ALL}
    assert set(parts) == set(weights)
    expected = [sum(weights[name] * parts[name][i] for name in weights) for i in range(len(texts))]
    assert function(["p"] * len(texts), texts, answer=["72"] * len(texts)) == pytest.approx(expected)
    assert max(expected) == pytest.approx(2.95) and min(expected) == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 1,000", 1.1),
        ("#### $1000.", 1.1),
        ("so 1000", 1.0),
        ("#### 17", 0.1),
        ("#### 17 or so, it says", 0.0),
        ("", 0.0),
        ("#### 1000 #### 17", 0.1),
        ("#### 17\n#### 1000", 1.1),
        (SOLUTION.replace("#### 72", "#### 7"), 0.1),
    ],
)
def test_by_default_only_correctness_and_format_count(text: str, value: float) -> None:
    function = gsm8k.make()
    assert function.weights == {"correct": 1.0, "format": 0.1}
    assert function(["p"], [text], answer=["4 * 300 = 1,200. 1,200 - 200 = 1,000. #### 1,000"]) == [value]


def test_truncated_responses_and_golds_without_a_number() -> None:
    values = gsm8k.make()(["p"] * 2, ["#### 18"] * 2, answer=[18, 18.0], truncated=[True, False])
    assert values == [1.0, 1.1]
    with pytest.raises(ValueError, match="'answer' must hold a number, got 'many'"):
        gsm8k.make()(["p"], ["18"], answer=["many"])


@pytest.mark.parametrize("name", SHAPING)
def test_shaping_must_stay_below_correctness_unless_asked_otherwise(name: str) -> None:
    others = {"format": 0.0}
    with pytest.raises(
        ValueError, match=rf"gsm8k.{name}: must be less than correct = 1.0, got 1.0, .* dominant: false"
    ):
        gsm8k.make(**{**others, name: 1.0})
    with pytest.raises(ValueError, match=rf"gsm8k.{name}: must be 0 or more, got -0.1"):
        gsm8k.make(**{**others, name: -0.1})
    assert gsm8k.make(**{**others, name: 1.0}, dominant=False).weights[name] == 1.0


def test_the_published_weights_need_to_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"gsm8k.format \+ length \+ steps: must be less than correct = 1.0, got 1.0"):
        gsm8k.make(format=0.5, length=0.25, steps=0.25)
    # as published: 0.6 for a correct answer, and 1.15 for boilerplate
    published = {"correct": 0.6, "answered": 0.1, "length": 0.2, "vocabulary": 0.5, "steps": 0.3, "format": 0.15}
    with pytest.raises(ValueError, match=r"got 1.25"):
        gsm8k.make(**published)
    texts = [SOLUTION.replace("#### 72", "#### 7"), "72"]
    wrong, right = gsm8k.make(**published, dominant=False)(["p"] * 2, texts, answer=["72"] * 2)
    assert wrong is not None and right is not None and wrong > right


@given(
    st.text(alphabet="0172 #.,=+-*/firstthenaddsumhalf\n", max_size=200),
    st.sampled_from(["", "\n#### 7", SOLUTION[:-2]]),
)
def test_no_wrong_text_is_worth_as_much_as_the_bare_answer(start: str, end: str) -> None:
    function = gsm8k.make(**ALL)
    if function.components(["p"], [start + end], answer=["72"])["correct"] == [1.0]:
        return
    wrong, right = function(["p"] * 2, [start + end, "72"], answer=["72"] * 2)
    assert wrong is not None and right is not None and wrong < right


@pytest.mark.parametrize("missing", [None, ""])
def test_without_a_reference_the_form_alone_is_scored_if_asked(missing: str | None) -> None:
    texts, answers = ["#### 72", "72", "#### 72"], [missing, missing, "72"]
    by_form = gsm8k.make(format=0.25, answered=0.5, without_answer="form")
    totals, components = by_form.graded(["p"] * 3, texts, answer=answers)
    assert totals == [0.75, 0.5, 1.75]
    assert [math.isnan(value) for value in components["correct"]] == [True, True, False]
    assert components["format"] == [1.0, 0.0, 1.0]
    assert gsm8k.make(format=0.25).graded(["p"] * 3, texts, answer=answers)[0] == [None, None, 1.25]
    with pytest.raises(ValueError, match="must be 'skip' or 'form', got 'format'"):
        gsm8k.make(without_answer="format")
