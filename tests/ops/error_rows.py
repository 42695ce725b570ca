"""Rows of the tables of errors, from which test_errors.py checks what every call refuses.

Each op's folder has a file errors.py with CALLS, what is called with arguments that are right by the name that errors
begin with, and ERRORS. A row has a message, in which " ... " stands for any text, and the arguments that are wrong.
Only rows that reach another line of the library are there: what test_promises.py checks of every tensor, and
test_configs.py of every field, is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

Rows = dict[str, dict[str, Any]]  # wrong arguments by message


class Call(NamedTuple):
    """A function, and arguments that are right."""

    function: Callable[..., object]
    arguments: dict[str, Any]


class Errors(NamedTuple):
    """Errors of one type, of one call or of several."""

    of: str | tuple[str, ...]
    type: type[Exception]
    rows: Rows


def each(name: str, rule: str, *values: Any, **others: Any) -> Rows:
    """One error for each value of an argument; `{}` in the rule stands for the value as errors show it."""

    def shown(value: Any) -> str:
        return str(list(value.shape)) if isinstance(value, Tensor) else repr(value)

    rows = {f"{name} {rule.replace('{}', shown(value))}": others | {name: value} for value in values}
    assert len(rows) == len(values), f"two values of {name} have one message"
    return rows
