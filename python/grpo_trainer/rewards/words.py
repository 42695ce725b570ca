"""Words of a text, as rewards and evaluation count them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = {"a", "an", "the"}
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")


def words_of(text: str) -> list[str]:
    """In lower case, without what is between them: don't is one word."""
    return _WORD.findall(text.lower())


def normalized(text: str) -> list[str]:
    """Words as SQuAD compares them: in lower case, without punctuation and articles."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def f1(text: str, gold: str) -> float:
    """Of the normalised words, each as often as it occurs; 0 without a common word."""
    said, wanted = normalized(text), normalized(gold)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def contains(words: Sequence[str], part: Sequence[str]) -> bool:
    """Whether the words of `part` follow each other in `words`."""
    return f" {' '.join(part)} " in f" {' '.join(words)} "
