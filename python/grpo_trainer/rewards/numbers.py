"""The number that a text says, exactly, as a Fraction; in time linear in the text.

`parse_number` reads a text that is one number, `final_number` finds the answer of a whole response. Units are left out,
and a percent sign is one: 50% is 50, as the solutions of GSM8K have it, and not 0.5. Words such as "million" are units.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator
from fractions import Fraction

# Longer numerals and larger exponents are read as no number: Python's own limit is near, and they cost quadratic time.
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
    # what belongs to a word is none, and neither is an exponent or an index
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
# of what stands around a number, not of a sentence
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
_NEAR = 200  # characters between a mark and its number


@dataclasses.dataclass(frozen=True)
class _Found:
    match: re.Match[str]
    start: int  # of its sign
    negative: bool

    @property
    def end(self) -> int:
        return self.match.end()

    @property
    def value(self) -> Fraction | None:
        """None: it looks like a number, and is none that can be read."""
        size = _size(self.match)
        return -size if self.negative and size is not None else size


def parse_number(text: str) -> Fraction | None:
    """The number that the text is, with currency, brackets, emphasis or up to three words of units around it."""
    plain = _plain(text)
    found = _numbers(plain)
    if len(found) != 1:
        return None
    before = plain[: found[0].start].replace("\\boxed", "")
    if _BEFORE.fullmatch(before) is None or _AFTER.fullmatch(plain, found[0].end) is None:
        return None
    return found[0].value


def final_number(text: str) -> Fraction | None:
    """The answer of a response: after the last `####`, else in the last box, else after the last "answer is" or
    "answer:", else the last number. What is marked may end in an equation, whose result it is."""
    plain = _plain(text)
    found = _numbers(plain)
    if not found:
        return None
    starts = [each.start for each in found]
    for marked in (_after_hashes, _boxed, _after_phrase):
        for place, end in marked(plain):
            first = bisect_left(starts, place)
            if first == len(found) or starts[first] >= end:
                continue
            if _belongs(plain, place, found[first], marked is _after_hashes):
                return _result(plain, found, first, end)
    return found[-1].value


def _plain(text: str) -> str:
    """The text with one way to write each sign, and without LaTeX's commands but boxes."""
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


def _numbers(plain: str) -> list[_Found]:
    return [_Found(match, *_sign(plain, match.start())) for match in _NUMBER.finditer(plain)]


def _sign(plain: str, start: int) -> tuple[int, bool]:
    """Where the number starts with its sign and currency. A minus after something is an operator or a range: 9-10."""
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
    """Without the sign."""
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
        # a number before a fraction that is not below 1 is another number, and the fraction is the later one
        return Fraction(upper, lower) + (size if upper < lower and size.denominator == 1 else 0)
    if match["divisor"]:
        divisor = Fraction(match["divisor"].replace(",", ""))
        return size / divisor if divisor else None
    return size


def _after_hashes(plain: str) -> Iterator[tuple[int, int]]:
    yield from _to_line_ends(plain, _HASHES)


def _after_phrase(plain: str) -> Iterator[tuple[int, int]]:
    yield from _to_line_ends(plain, _PHRASE)


def _to_line_ends(plain: str, mark: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """From behind each mark, the last first, to the end of the line, or of the first line that is not blank."""
    for match in reversed(list(mark.finditer(plain))):
        place = match.end()
        near = plain[place : place + _NEAR]
        place += len(near) - len(near.lstrip())
        end = plain.find("\n", place, place + _NEAR)
        yield place, end if end >= 0 else min(len(plain), place + _NEAR)


def _boxed(plain: str) -> Iterator[tuple[int, int]]:
    """The insides of boxes, the last to end first."""
    opened: list[tuple[int, bool]] = []
    found: list[tuple[int, int]] = []
    for match in re.finditer(r"(\\boxed\s?)?\{|\}", plain):
        if match[0] != "}":
            opened.append((match.end(), match[1] is not None))
        elif opened:
            place, is_box = opened.pop()
            if is_box:
                found.append((place, match.start()))
    yield from reversed(found)


def _belongs(plain: str, place: int, number: _Found, after_hashes: bool) -> bool:
    """Whether a mark is of this number, and not the start of a heading or of a sentence about something else."""
    if number.start - place > _NEAR:
        return False
    between = plain[place : number.start]
    if after_hashes:
        return _BEFORE.fullmatch(between) is not None and _HEADING.match(plain, number.end) is None
    return _SENTENCE_END.search(between.lstrip()) is None


def _result(plain: str, found: list[_Found], first: int, end: int) -> Fraction | None:
    """The number, or what the equation that starts with it ends in."""
    last = first
    while last + 1 < len(found) and found[last + 1].start < end:
        between = plain[found[last].end : found[last + 1].start]
        if len(between) > 64 or _OPERATOR.fullmatch(between) is None:
            break
        last += 1
    return found[last].value
