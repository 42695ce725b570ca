"""The eight parts of the reward for GSM8K, against texts that try to look like what a part measures."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

pytest.importorskip("transformers")

from grpo_trainer.rewards import gsm8k
from hypothesis import given
from hypothesis import strategies as st

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


def test_by_default_only_correctness_and_format_count() -> None:
    function = gsm8k.make()
    assert function.weights == {"correct": 1.0, "format": 0.1}
    assert function(["p"] * 3, ["72", "#### 72", SOLUTION.replace("#### 72", "#### 7")], answer=["72"] * 3) == [
        1,
        1.1,
        0.1,
    ]


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


def test_the_sum_of_the_parts_counts() -> None:
    with pytest.raises(ValueError, match=r"gsm8k.format \+ length \+ steps: must be less than correct = 1.0, got 1.0"):
        gsm8k.make(format=0.5, length=0.25, steps=0.25)
    # as published: 0.6 for a correct answer, and 1.15 for boilerplate
    published = {"correct": 0.6, "answered": 0.1, "length": 0.2, "vocabulary": 0.5, "steps": 0.3, "format": 0.15}
    with pytest.raises(ValueError, match=r"got 1.25"):
        gsm8k.make(**published)
    wrong, right = gsm8k.make(**published, dominant=False)(
        ["p"] * 2, [SOLUTION.replace("#### 72", "#### 7"), "72"], answer=["72"] * 2
    )
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


def test_long_texts_take_no_longer_than_their_length_allows() -> None:
    start = time.perf_counter()
    for text in (
        "1" * 20_000,
        "1 + " * 20_000,
        "1,111" * 5_000,
        "1" + ",111" * 9_000,
        "1 + 1 " * 10_000,
        " = " * 20_000,
    ):
        part("calculation", text)
        part("numbers", text)
    assert time.perf_counter() - start < 20


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
