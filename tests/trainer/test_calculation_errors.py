"""Kinds of answers to word problems."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tools.calculation_errors import KINDS, count, kind

RIGHT, OTHER_PROBLEM, WRONG, OTHER_FORM = KINDS


@pytest.mark.parametrize(
    ("answer", "is_correct", "expected"),
    [
        ("3 + 5 = 8. #### 8", True, RIGHT),
        ("It is 8. #### 8", True, RIGHT),
        ("3 x 5 = 15.#### 15", False, OTHER_PROBLEM),
        ("3 - 5 = -2. #### -2", False, OTHER_PROBLEM),
        ("3 * 5 = 15. #### 15", False, OTHER_PROBLEM),
        ("11 - 3 = 6.#### 6", False, WRONG),
        ("11 + 3 = 15. #### 15\n", False, WRONG),
        ("11 - 3 = 8. #### 7", False, OTHER_FORM),
        ("10 - Cy = 10. #### 10", False, OTHER_FORM),
        ("", False, OTHER_FORM),
    ],
)
def test_kinds(answer: str, is_correct: bool, expected: str) -> None:
    assert kind(answer, is_correct) == expected


def test_counts() -> None:
    prompts = [{"greedy": "1 + 1 = 2. #### 2", "correct": 1.0}, {"greedy": "1 + 1 = 3. #### 3", "correct": 0.0}]
    assert count([*prompts, prompts[1]]) == {RIGHT: 1, WRONG: 2}
