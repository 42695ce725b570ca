r"""Exact numbers in texts, as Fractions.

Numbers have a sign, thousands commas, decimals, or are fractions a/b and \frac{a}{b}. Currencies and units are ignored,
including the percent sign: 50% is 50 and not 0.5, as in the solutions of GSM8K.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

DIGITS = 400  # longer numbers are not read, as their conversion takes quadratic time

_CURRENCY = "$€£¥₹"
_SIZE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)%])(?<![\d)%] )-)?"  # a minus after an operand is an operator or a range: 9-10
    rf"[{_CURRENCY}]?(?<![\w.^])(?P<upper>{_SIZE})(?: ?/ ?(?P<lower>{_SIZE}))?"
)
_BEFORE = re.compile(r"\W*(?:[A-Za-z] ?= ?\W*)?")  # signs, brackets, "x ="
_AFTER = re.compile(r"\W*(?:[^\W\d]+\W*){0,3}")  # signs, brackets, up to three words of a unit
_HEADING = re.compile(r"[.:)]+\**\s+[A-Za-z]")  # "#### 1. Add the apples"
_HASHES = re.compile(r"####\s*([^\n#]*)")
_BOX = re.compile(r"\\boxed\s?\{(?=([^{}\n]*))")
_PHRASE = re.compile(r"\banswer\b[^.:=\n]{0,60}?(?:\bis\b|:|=)\W*?([^\n]*?)(?=[.!?]\s|\n|$)", re.IGNORECASE)
_REWRITTEN = (
    (re.compile("[\u2212\u2010-\u2013]"), "-"),
    (re.compile("[\u00a0\u2009\u202f]"), " "),
    (re.compile(r"\\([$%#&])"), r"\1"),
    (re.compile(r"(?<=\d)(?:\\,|\{,\}|,\\!)(?=\d{3})"), ","),
    (re.compile(r"(?<=\d)(?=\\[dt]?frac)"), " "),  # 3\frac{1}{2} is two numbers, not 31/2
    (re.compile(r"\\[dt]?frac\s?\{([^{}]{1,64})\}\s?\{([^{}]{1,64})\}"), r"\1/\2"),
    (re.compile(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]{0,64})\}"), r"\1"),
    (re.compile(r"\\[()\[\],;!]"), " "),
)


def parse_number(text: str) -> Fraction | None:
    """Reads a text that is one number, with currency, brackets, emphasis or up to three words of a unit around it."""
    plain = _plain(text)
    numbers = list(_NUMBER.finditer(plain))
    if len(numbers) != 1:
        return None
    before, after = plain[: numbers[0].start()].replace("\\boxed", ""), plain[numbers[0].end() :]
    return _value(numbers[0]) if _BEFORE.fullmatch(before) and _AFTER.fullmatch(after) else None


def final_number(text: str) -> Fraction | None:
    """Finds the answer of a response.

    It follows the last `####`, else is in the last box, else follows the last "answer is" or "answer:" in its sentence,
    else is the last number. If an equation is there, the answer is its right side.
    """
    plain = _plain(text)
    for marked in _marked(plain):
        side = marked.rpartition("=")[2]
        number = _NUMBER.search(side) or _NUMBER.search(marked)
        if number is not None:
            return _value(number)
    numbers = list(_NUMBER.finditer(plain))
    return _value(numbers[-1]) if numbers else None


def _plain(text: str) -> str:
    """The text with one spelling of signs, fractions and thousands."""
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    return text


def _marked(plain: str) -> Iterator[str]:
    """Yields the marked texts, the strongest marks and the last ones first."""
    for rest in reversed(_HASHES.findall(plain)):
        first = _NUMBER.search(rest)
        if first and _BEFORE.fullmatch(rest, 0, first.start()) and not _HEADING.match(rest, first.end()):
            yield rest
    for pattern in (_BOX, _PHRASE):
        yield from reversed(pattern.findall(plain))


def _value(number: re.Match[str]) -> Fraction | None:
    """None for a division by zero and for too many digits."""
    if len(number[0]) > DIGITS:
        return None
    upper, lower = (Fraction((number[part] or "1").replace(",", "")) for part in ("upper", "lower"))
    if lower == 0:
        return None
    return -upper / lower if number["sign"] else upper / lower
