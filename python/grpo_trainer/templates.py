"""Prompts and demonstrations from the columns of a line: `data.template` and `data.demonstration_template`."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

from grpo_trainer.messages import known_columns

Line = dict[str, Any]


class Template:
    """A text with columns in braces; {{ and }} are literal braces.

    Args:
        key: recipe key of the text, for errors.
        text: the text.
    """

    def __init__(self, key: str, text: str) -> None:
        self.key, self.parts = key, parse(key, text)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for _, column in self.parts if column is not None))

    def check(self, split: str, lines: Sequence[Line]) -> None:
        """Raises if a line lacks a column."""
        for number, line in enumerate(lines, 1):
            for column in self.columns:
                if column not in line:
                    columns = known_columns(column, sorted(line))
                    raise ValueError(f"{self.key}: no column {column!r}{columns} (example {number} of {split})")

    def fill(self, where: str, line: Line) -> str:
        """The text with the columns of a line."""
        return "".join(
            literal + ("" if column is None else self._value(where, column, line[column]))
            for literal, column in self.parts
        )

    def fill_each(self, where: str, line: Line) -> list[str]:
        """One text for each element of the column that holds a list; one text if no column does."""
        lists = [column for column in self.columns if isinstance(line[column], list)]
        if len(lists) > 1:
            raise ValueError(f"{self.key}: at most one column may hold a list, got {lists} ({where})")
        if not lists:
            return [self.fill(where, line)]
        return [self.fill(where, line | {lists[0]: value}) for value in texts_of(self.key, where, line[lists[0]])]

    def _value(self, where: str, column: str, value: object) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            way_out = "; messages of a chat need no template, as the chat template of the tokenizer is applied to them"
            raise ValueError(
                f"{self.key}: column {column!r} must hold a text or a number, got {value!r:.80} ({where})"
                + (way_out if isinstance(value, list) else "")
            )
        return str(value)


def parse(key: str, text: str) -> list[tuple[str, str | None]]:
    """Pairs of a literal text and the column after it, None at the end."""
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{key}: must have columns in braces, with {{{{ and }}}} for a brace: {error}") from None
    for _, column, form, conversion in parts:
        if column is not None and (form or conversion or not column or set(column) & set(".[]")):
            written = "{" + column + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "") + "}"
            raise ValueError(f"{key}: must have nothing but the name of a column in braces, got {written!r}")
    if not any(column is not None for _, column, _, _ in parts):
        raise ValueError(f"{key}: must have a column in braces, got {text!r}")
    return [(literal, column) for literal, column, _, _ in parts]


def texts_of(key: str, where: str, value: object) -> list[str]:
    """The texts of a column with a text, a number or a list of texts; raises if one is empty or something else."""
    values = value if isinstance(value, list) else [value]
    is_number = [isinstance(v, int | float) and not isinstance(v, bool) for v in values]
    texts = [str(v) for v, may_be in zip(values, is_number, strict=True) if may_be or isinstance(v, str)]
    if not values or len(texts) < len(values) or not all(text.strip() for text in texts):
        raise ValueError(f"{key}: must be a text or a list of texts, none of them empty, got {value!r:.80} ({where})")
    return texts
