"""Words of a text, as rewards count them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = {"a", "an", "the"}
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")


def words_of(text: str) -> list[str]:
    """Lower-cased words without punctuation between them; "don't" is one word."""
    return _WORD.findall(text.lower())


def normalized(text: str) -> list[str]:
    """Words as SQuAD compares them: lower-cased, without punctuation and articles."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def f1(text: str, reference: str) -> float:
    """F1 of the normalised words, counted with multiplicity; 0 without a common word."""
    words, expected = normalized(text), normalized(reference)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected)) if common else 0.0


def contains(words: Sequence[str], part: Sequence[str]) -> bool:
    """Whether `part` occurs as consecutive words."""
    return f" {' '.join(part)} " in f" {' '.join(words)} "
