"""Errors of all ops, configs and metrics, from the tables errors.py of the ops' folders.

Faults that this is for: a wrong argument or setting that is taken, or fails with another type, without the name of the
call and the argument, the rule, the value or the way out; a right argument that is refused.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest

from tests.harness import assert_raises
from tests.ops.error_rows import Call, Errors

CALLS: dict[str, Call] = {}
TABLES: dict[str, list[Errors]] = {}
for path in sorted(Path(__file__).parent.glob("*/errors.py")):
    module = importlib.import_module(f"tests.ops.{path.parent.name}.errors")
    CALLS |= module.CALLS
    for errors in module.ERRORS:
        for name in (errors.of,) if isinstance(errors.of, str) else errors.of:
            TABLES.setdefault(name, []).append(errors)


@pytest.mark.parametrize("name", CALLS)
def test_errors(name: str) -> None:
    """Names of calls are their errors' first word, and perhaps others."""
    function, right = CALLS[name]
    function(**right)
    for errors in TABLES[name]:
        for message, wrong in errors.rows.items():
            start, *parts = message.split(" ... ")
            call = functools.partial(function, **right | wrong)
            assert_raises(errors.type, f"{name.partition(' ')[0]}: {start}", parts, call)


def test_every_table_has_a_call() -> None:
    assert CALLS.keys() == TABLES.keys()
