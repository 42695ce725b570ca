"""The numbers that the reward for GSM8K reads, and its eight parts, against texts that try to look like a part."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from grpo_trainer.recipe import Reward
from grpo_trainer.rewards import load_reward
from grpo_trainer.rewards.numbers import final_number, parse_number

# texts that are one number, as people and models write it, by the number
PARSED: list[tuple[int | str | None, list[str]]] = [
    (18, ["18", " 18 ", "018", "18.", "18.0", "$18", "\\$18", "18 dollars.", "18km", "18 \\text{ dollars}", "**$18**"]),
    (-18, ["-18", "\u221218", "-$18", "$-18", "(-18)", "$\\boxed{-18}$"]),
    (42, ["(42)", "[42]", "\\boxed{42}", "\\boxed{\\text{42}}", "\\(42\\)", "\\[42\\]", "$x = 42$"]),
    (50, ["50%", "50 %", "50\\%", "50 \u20ac", "50 km/h", "50 m\u00b2"]),
    ("1/2", [".5", "1/2", "\\frac{1}{2}", "\\boxed{\\frac{1}{2}}", "0.50"]),
    ("-3/4", ["-.75", "-3/4", "-3 / 4", "-\\dfrac{3}{4}"]),
    (1234, ["1,234", "1,234.0", "= 1,234", "1{,}234", "1,\\!234"]),
    (12345678, ["12,345,678"]),
    (250, ["1,000/4"]),
    (
        None,
        ["", "none", "-", "1/0", "9-10", "1,2345", "1 and 2", "she has 18", "18 apples of 3", "H2O", "1e3", "3 1/2"],
    ),
    (None, ["9" * 401, "12:30", "18 a b c d"]),
]
# whole responses, by their answers
FINAL: list[tuple[int | str | None, list[str]]] = [
    (18, ["####18", "#### x = 18", "The answer is 3 apples * 6 = 18 apples.", "\\boxed{18", "- 18 apples"]),
    (18, ["Final Answer: 18, from 9 * 2", "ANSWER IS 18, not 20", "Final Answer:\n\n18", "**Answer**: $18"]),
    (18, ["The answer is: **18**"]),
    (42, ["#### **42**", "####\n42", "\\boxed{\\boxed{42}} of 7", "#### 1,000 #### 42"]),
    (50, ["#### 50%", "#### 50 dollars", "#### 100/2"]),
    # the last mark of the strongest kind
    (7, ["#### 5\nNo, that is wrong.\n#### 7", "#### 7\nI had 3 apples.", "#### Step 1: add\nThe answer is 7"]),
    (6, ["\\boxed{5} but then \\boxed{6}", "The answer is 5. Wait, the answer is 6.", "#### none\n5 or 6"]),
    (5, ["#### 5\nThe answer is 6", "\\boxed{5}. The answer is 6", "\\boxed{x = 2 + 3 = 5}", "H2O, 5 m2"]),
    (12, ["#### 1. Add\n#### 2. Halve\nSo we have 12", "#### 16 - 4 = 12"]),
    (3, ["The answer is clear. We have 3", "5 - 3", "5 -3", "a gain of $5-$3", "(1,2,3)"]),
    (4, ["\\boxed{x}, 4", "first 3, then 4"]),
    (-7, ["The answer to the question is -7.", "left: -7"]),
    (10, ["It takes 9-10", "It takes 9\u201310 days"]),
    (1234, ["#### 1,234", "She has 1,234."]),
    ("-37/2", ["#### -$18.50"]),
    (2345, ["1,2345"]),
    (None, ["no number", "", "5, or rather 1/0"]),
]
SHAPING = ("format", "answered", "length", "vocabulary", "steps", "numbers", "calculation")
ALL = {"format": 0.1, "answered": 0.1, **dict.fromkeys(SHAPING[2:], 0.15)}
SOLUTION = (
    "First, she sold half as many: 48 / 2 = 24 clips in total. Then add both months: 48 + 24 = 72. So the sum, twice "
    "counted, is the total of each month.\n#### 72"
)
# value of a part of the responses; whatever follows the answer is no solution, and brackets are not read
PARTS: list[tuple[str, float, list[str]]] = [
    ("correct", 1, ["#### 72", "#### 1 #### $72."]),
    ("correct", 0, ["72 is not it. #### 27", "#### 72.5"]),
    ("format", 1, ["#### 72", "#### 5"]),
    ("format", 0, ["72 ####", "#### 72 or 73", "The answer is 72.", ""]),
    ("answered", 1, ["#### 9", "9"]),
    ("answered", 0, ["it depends", "####"]),
    ("length", 1, [SOLUTION, "a" * 51 + "\n#### 72"]),
    ("length", 0, ["a" * 50 + "\n#### 72", "so " * 100 + "#### 72", " " * 400 + "\n#### 72", "#### 72 " + SOLUTION]),
    ("vocabulary", 1, [SOLUTION]),
    ("vocabulary", 0.2, ["sum sum sum sum sum sum", "add-on sums, madden, peruse, halfway, timeshare"]),
    ("vocabulary", 0.6, ["plus minus times"]),
    ("steps", 1, [SOLUTION, "step 1: go. step 2: stop."]),
    ("steps", 0, ["then then then", "thirst, nextdoor, authentic, stepping 1 and 2"]),
    ("numbers", 1, [SOLUTION]),
    ("numbers", 0, ["#### 72", "it is 72, so 72.\n#### 72", "x48 is a name\n#### 72"]),
    ("calculation", 1, [SOLUTION, "2 + 3 * 4 = 14", "10 / 3 = 3.33", "3 - 5 = -2", "48/2 = <<48/2=24>>24"]),
    ("calculation", 1, ["4 * $300 = $1,200. 1,200 - 200 = 1,000.", "3 + 4 = 5 + 2 = 7"]),
    ("calculation", 0, ["no calculation at all. 72", "72 = 72", "1 + 1 = 3", "2 + 3 * 4 = 20", "10 / 3 = 3"]),
    ("calculation", 0, ["5 / 0 = 0", "(3 + 4) * 2 = 14", "1 + 1 = 25"]),
    ("calculation", 0.5, ["1 + 1 = 2, 2 + 2 = 5", "1 + 1 = 2, " * 9 + "2 + 2 = 5"]),
]


def made(**options: Any) -> Any:
    return load_reward(Reward(name="gsm8k", options=options)).function


def part(name: str, *texts: str) -> list[float]:
    function = made(**(ALL if name in ("correct", "format") else {name: 0.5}))
    return function.graded(["p"] * len(texts), texts, answer=["72"] * len(texts))[1][name]


@pytest.mark.parametrize(("read", "table"), [(parse_number, PARSED), (final_number, FINAL)])
def test_numbers_of_texts(read: Any, table: list[tuple[int | str | None, list[str]]]) -> None:
    for expected, texts in table:
        want = None if expected is None else Fraction(expected)
        assert {text: read(text) for text in texts} == dict.fromkeys(texts, want)


WRITTEN = ("{}", "{}.", "${}", "{}%", "{} apples", "\\boxed{{{}}}", "**{}**", "[{}]", "$\\boxed{{\\text{{{} cm}}}}$")
MARKS = ("#### {}", "So.\n#### {}\n", "The answer is {}", "**Final answer:** {}", "3 of 4 are {}", "\\boxed{{{}}} of 7")


@given(
    value=st.integers(-(10**12), 10**12) | st.decimals(-999, 999, places=2) | st.fractions(-99, 99, max_denominator=99),
    written=st.sampled_from(WRITTEN),
    mark=st.sampled_from(MARKS),
    other=st.text(max_size=60) | st.text("0123/.,-$ #=", max_size=30),
)
def test_reads_back_numbers_and_survives_any_text(value: Any, written: str, mark: str, other: str) -> None:
    text = written.format(value if isinstance(value, Fraction) else f"{value:,}")
    assert parse_number(text) == final_number(mark.format(text)) == Fraction(value)
    assert isinstance(parse_number(other), Fraction | None) and isinstance(final_number(other), Fraction | None)


MARKED = ["\\boxed{", "\\frac{", "\\text{", "answer is ", "answer: \n", "#### ", "5 ab."]
LONG = [*MARKED, "1", "a1", "1,", "1,111", "(", "1 ", "-", "1/", "1 + ", "= 1", "1 = ", "\\", "1 + 1 "]


@pytest.mark.parametrize("repeated", LONG)
def test_long_texts_take_no_longer_than_their_length_allows(repeated: str) -> None:
    text = repeated * (100_000 // len(repeated))
    start = time.process_time()
    parse_number(text), final_number(text + " 5"), part("calculation", text), part("numbers", text)
    # at most 1 s on an idle machine; quadratic time would take minutes
    assert time.process_time() - start < 10


@pytest.mark.parametrize(("name", "value", "texts"), PARTS)
def test_each_part_measures_what_it_says(name: str, value: float, texts: list[str]) -> None:
    assert part(name, *texts) == [value] * len(texts)


def test_the_total_is_the_weighted_sum_of_the_parts_that_are_on() -> None:
    texts = [text for _, _, row in PARTS for text in row]
    columns = {"answer": ["4 * 18 = 72. #### 72"] * len(texts)}
    for weights in ({"correct": 2.0, **ALL}, {"correct": 1.0, "format": 0.1}):
        function = made(**(weights if len(weights) > 2 else {}))
        totals, parts = function.graded(["p"] * len(texts), texts, **columns)
        assert set(parts) == set(weights)
        expected = [sum(weights[name] * parts[name][i] for name in weights) for i in range(len(texts))]
        assert totals == function(["p"] * len(texts), texts, **columns) == pytest.approx(expected)
        assert max(expected) == pytest.approx(sum(weights.values())) and min(expected) == 0


def test_truncated_responses_and_references() -> None:
    texts = ["#### 18"] * 4
    values = made()(["p"] * 4, texts, answer=[18, 18.0, None, ""], truncated=[True, False, False, False])
    assert values == [1.0, 1.1, None, None]
    with pytest.raises(ValueError, match="'answer' must hold a number, got 'many'"):
        made()(["p"], ["18"], answer=["many"])


def test_form_must_be_worth_less_than_correctness_unless_asked_otherwise() -> None:
    for name in SHAPING:
        alone = {"format": 0.0, name: 1.0}
        with pytest.raises(
            ValueError, match=rf"correct: must exceed {name} = 1.0, or a wrong .* dominant is false, go"
        ):
            made(**alone)
        assert made(**alone, dominant=False).weight_of()[name] == 1.0
        with pytest.raises(ValueError, match=rf"options.{name}: must be greater than or equal to 0, got -0.1"):
            made(**{name: -0.1})
    # as published: 0.6 for a correct answer, and 1.15 for boilerplate
    published = {"correct": 0.6, "answered": 0.1, "length": 0.2, "vocabulary": 0.5, "steps": 0.3, "format": 0.15}
    with pytest.raises(ValueError, match=r"must exceed format \+ answered \+ length \+ vocabulary \+ steps = 1.25"):
        made(**published)
    texts = [SOLUTION.replace("#### 72", "#### 7"), "72"]
    wrong, right = made(**published, dominant=False)(["p"] * 2, texts, answer=["72"] * 2)
    assert wrong > right


@given(
    st.text(alphabet="0172 #.,=+-*/firstthenaddsumhalf\n", max_size=200),
    st.sampled_from(["", "\n#### 7", SOLUTION[:-2]]),
)
def test_no_wrong_text_is_worth_as_much_as_the_bare_answer(start: str, end: str) -> None:
    totals, parts = made(**ALL).graded(["p"] * 2, [start + end, "72"], answer=["72"] * 2)
    assert parts["correct"][0] == 1 or totals[0] < totals[1]
