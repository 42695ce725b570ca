"""docs/conformance.md, against a fresh run of the ops.

The fault to notice: a table that is not what the code does now.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_conformance import CONVENTIONS, INVARIANTS, run
from grpo_conformance.adapters import load
from grpo_conformance.report import markdown

PAGE = Path(__file__).parent.parent.parent / "docs" / "conformance.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="tests are run from outside the checkout")


def column(text: str, name: str) -> list[list[str]]:
    """First cells of the rows of all tables, with those of this trainer."""
    rows: list[list[str]] = []
    place = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and name in cells:
            place = cells.index(name)
        elif not line.startswith("|"):
            place = None
        elif place is not None:
            rows.append([cells[0], cells[place]])
    return rows


def test_the_column_of_the_ops_is_fresh() -> None:
    fresh = column(markdown({"grpo_kernels": run(load("grpo_kernels"), (*INVARIANTS, *CONVENTIONS))}), "grpo_kernels")
    assert len(fresh) == len(INVARIANTS) + len(CONVENTIONS) + 2  # with the lines below the heads
    assert column(PAGE.read_text(), "grpo_kernels") == fresh
