"""Exact numbers in texts, as Fractions, in time linear in the text.

`parse_number` reads a text that is one number, `final_number` finds the answer in a whole response. Units are ignored,
including the percent sign (50% is 50 and not 0.5, as in the solutions of GSM8K) and words such as "million".
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

# Longer numerals and larger exponents are rejected: they cost quadratic time, and Python's own limit is near.
DIGITS = 400

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_VULGAR = {
    chr(code): unicodedata.normalize("NFKC", chr(code)).replace("\u2044", "/")
    for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F), 0x2189)
}
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\ufe63\uff0d\u2010\u2011\u2012\u2013", "-"),  # minus signs, hyphens, the dash of ranges
        **dict.fromkeys("\u00a0\u2009\u202f", "\u2009"),  # spaces that do not break
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        "\u2044": "/",
        "\uff0c": ",",
        "\uff05": "%",
    }
)
_NUMERAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"(?:\^ ?\{? ?(?P<power>[+-]?\d+) ?\}?|\*\* ?(?P<stars>[+-]?\d+)|(?P<raised>[⁺⁻]?[⁰¹²³⁴-⁹]+))"
_NUMBER = re.compile(
    # not within a word, an exponent or an index
    r"(?<![A-Za-z0-9_^])(?<![\^_]\{)(?<!\^-)(?<!\^\{-)"
    rf"(?P<numeral>{_NUMERAL})"
    rf"(?:e(?P<exponent>[+-]?\d+)(?![A-Za-z0-9])|(?: {{0,3}}[\u00d7*x·] {{0,3}}(?P<ten>10))? ?{_POWER}"
    rf"| {{1,3}}(?P<upper>\d+)/(?P<lower>\d+)| {{0,3}}/ {{0,3}}(?P<divisor>{_NUMERAL})|)"
    r"(?P<unread> ?(?:\^|\*\*|[⁰¹²³⁴-⁹⁺⁻]))?",
    re.IGNORECASE,
)
_FRACTION = re.compile(r"(\d?)\\[dtc]?frac\s?(?:\{([^{}]{1,64})\}\s?\{([^{}]{1,64})\}|(\d)\s?(\d))")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_CURRENCY_NAME = re.compile(r"\b(?:usd|us\$|eur|gbp|inr|rs\.?)(?=\s?[-$]{0,2}\d)", re.IGNORECASE)
_CURRENCY = "$€£¥₹"
# characters that may surround a number
_AROUND = r"[\s$€£¥₹*:=~≈\"'`\\()\[\]{}]"
_BEFORE = re.compile(rf"{_AROUND}*(?:[A-Za-z] ?={_AROUND}*)?")
_UNIT = r"[A-Za-z°][A-Za-z%°/]*(?:\^\{?\d\}?|[²³])?"
_GAP = r"[\s.,;:!)\]}$*\\-]"
_AFTER = re.compile(rf"[\s$€£¥₹%°*\"'`\\)\]{{}}.,;:!]*(?:{_UNIT}(?:{_GAP}+{_UNIT}){{0,2}}{_GAP}*)?")
_OPERATOR = re.compile(rf"%?{_AROUND}*(?:[A-Za-z]{{1,20}}{_AROUND}*)?[-+*/\u00d7·÷=≈]{_AROUND}*")
_HEADING = re.compile(r"[.):]{1,2}\**\s+[A-Za-z]")
_SENTENCE_END = re.compile(r"[.!?]\s|\n")
_HASHES = re.compile(r"(?<!#)####(?!#)")
_PHRASE = re.compile(
    r"\banswer\b[*_ ]{0,4}(?::|=|[^.:=\n]{0,60}?(?:\b(?:is|equals|would be|was)\b:?|:|=))", re.IGNORECASE
)
_NEAR = 200  # largest number of characters between a mark and its number


class _Number(NamedTuple):
    match: re.Match[str]
    start: int  # position of the sign
    is_negative: bool

    @property
    def end(self) -> int:
        return self.match.end()

    @property
    def value(self) -> Fraction | None:
        """None if the text only looks like a number."""
        size = _size(self.match)
        return -size if self.is_negative and size is not None else size


def parse_number(text: str) -> Fraction | None:
    """Reads a text that is one number, with currency, brackets, emphasis or up to three words of units around it."""
    plain = _plain(text)
    numbers = _numbers(plain)
    if len(numbers) != 1:
        return None
    before = plain[: numbers[0].start].replace("\\boxed", "")
    if _BEFORE.fullmatch(before) is None or _AFTER.fullmatch(plain, numbers[0].end) is None:
        return None
    return numbers[0].value


def final_number(text: str) -> Fraction | None:
    """Finds the answer of a response.

    It follows the last `####`, else is in the last box, else follows the last "answer is" or "answer:", else is the
    last number. If an equation starts there, the answer is its result.
    """
    plain = _plain(text)
    numbers = _numbers(plain)
    if not numbers:
        return None
    starts = [number.start for number in numbers]
    for mark, spans in (
        (_HASHES, _to_line_ends(plain, _HASHES)),
        (None, _boxed(plain)),
        (_PHRASE, _to_line_ends(plain, _PHRASE)),
    ):
        for place, end in spans:
            first = bisect_left(starts, place)
            if first == len(numbers) or starts[first] >= end:
                continue
            if _belongs(plain, place, numbers[first], mark is _HASHES):
                return _result(plain, numbers, first, end)
    return numbers[-1].value


def _plain(text: str) -> str:
    """The text with one spelling of each sign, and without LaTeX commands other than boxes."""
    text = text.translate(_CHARACTERS)
    for sign, fraction in _VULGAR.items():
        if sign in text:
            text = re.sub(rf"(?<=\d)\s?{sign}", f" {fraction}", text).replace(sign, fraction)
    text = re.sub(r"(?<=\d)(?:\\!)?(?:\\[,;: ]|\{,\}|,\\!|\u2009)(?:\\!)?(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"\^ ?\{? ?\\circ ?\}?", "°", text)
    text = re.sub(r"\\([!$%#&])", lambda match: "" if match[1] == "!" else match[1], text)
    text = _FRACTION.sub(_written, text)
    text = _COMMAND.sub(_command, text)
    text = re.sub(r"(?<!\d)\*\*|\*\*(?!\d)", "", text)
    return _CURRENCY_NAME.sub("$", text)


def _written(match: re.Match[str]) -> str:
    whole, upper, lower, digit, other = match.groups()
    return f"{whole} {upper or digit}/{lower or other} " if whole else f"{upper or digit}/{lower or other} "


def _command(match: re.Match[str]) -> str:
    name = match[1]
    if name in ("boxed", "fbox"):
        return "\\boxed"
    return "\u00d7" if name in ("times", "cdot") else " "


def _numbers(plain: str) -> list[_Number]:
    return [_Number(match, *_sign(plain, match.start())) for match in _NUMBER.finditer(plain)]


def _sign(plain: str, start: int) -> tuple[int, bool]:
    """Start of a number with its sign and currency, and whether it is negative.

    A minus after an operand is an operator or a range: 9-10.
    """
    place = start
    while place > max(0, start - 3) and plain[place - 1] in _CURRENCY + "({":
        place -= 1
    if place == 0 or plain[place - 1] not in "+-":
        return start, False
    before = plain[max(0, place - 9) : place - 1]
    attached = before[-1:]
    left = before.rstrip(" ")[-1:]
    if attached.isalnum() or attached in ("-", "_") or left.isdigit() or left in (")", "]", "}", "%"):
        return start, False
    return place - 1, plain[place - 1] == "-"


def _size(match: re.Match[str]) -> Fraction | None:
    """Absolute value of a number."""
    if match["unread"] or match.end() - match.start() > DIGITS:
        return None
    size = Fraction(match["numeral"].replace(",", ""))
    power = match["exponent"] or match["power"] or match["stars"] or (match["raised"] or "").translate(_SUPERSCRIPTS)
    if power:
        scaled = match["exponent"] or match["ten"]
        base = Fraction(10) if scaled else size
        if abs(int(power)) * len(str(base)) > DIGITS or (base == 0 and int(power) < 0):
            return None
        return size * base ** int(power) if scaled else base ** int(power)
    if match["upper"]:
        upper, lower = int(match["upper"]), int(match["lower"])
        if lower == 0:
            return None
        # before an improper fraction, a number is not part of it
        return Fraction(upper, lower) + (size if upper < lower and size.denominator == 1 else 0)
    if match["divisor"]:
        divisor = Fraction(match["divisor"].replace(",", ""))
        return size / divisor if divisor else None
    return size


def _to_line_ends(plain: str, mark: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yields the span from each mark, last first, to the end of its line or of the next line that is not blank."""
    for match in reversed(list(mark.finditer(plain))):
        place = match.end()
        near = plain[place : place + _NEAR]
        place += len(near) - len(near.lstrip())
        end = plain.find("\n", place, place + _NEAR)
        yield place, end if end >= 0 else min(len(plain), place + _NEAR)


def _boxed(plain: str) -> Iterator[tuple[int, int]]:
    """Yields the span inside each box, in the reverse order of their ends."""
    opened: list[tuple[int, bool]] = []
    spans: list[tuple[int, int]] = []
    for match in re.finditer(r"(\\boxed\s?)?\{|\}", plain):
        if match[0] != "}":
            opened.append((match.end(), match[1] is not None))
        elif opened:
            place, is_box = opened.pop()
            if is_box:
                spans.append((place, match.start()))
    yield from reversed(spans)


def _belongs(plain: str, place: int, number: _Number, after_hashes: bool) -> bool:
    """Whether a mark belongs to this number, rather than to a heading or to another sentence."""
    if number.start - place > _NEAR:
        return False
    between = plain[place : number.start]
    if after_hashes:
        return _BEFORE.fullmatch(between) is not None and _HEADING.match(plain, number.end) is None
    return _SENTENCE_END.search(between.lstrip()) is None


def _result(plain: str, numbers: list[_Number], first: int, end: int) -> Fraction | None:
    """Value of a number, or the result of the equation that starts with it."""
    last = first
    while last + 1 < len(numbers) and numbers[last + 1].start < end:
        between = plain[numbers[last].end : numbers[last + 1].start]
        if len(between) > 64 or _OPERATOR.fullmatch(between) is None:
            break
        last += 1
    return numbers[last].value
