"""The newer losses take at most half as many instructions again as PPO's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools import sass
from tools.variant_instructions import ROOT, VARIANTS, Cost, table


@pytest.mark.full
@pytest.mark.skipif(sass.find_nvdisasm() is None, reason="needs nvdisasm of the toolkit or of Triton")
def test_instructions_of_the_variants() -> None:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "tools/variant_instructions.py"]
    done = subprocess.run(command, cwd=ROOT, env=compiling, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [*VARIANTS]
    assert float(rows[0].split("|")[-4]) > 100  # the ways through the kernels were found


@pytest.mark.full
def test_the_table_says_what_exceeds_the_limit() -> None:
    text = table({"clip": Cost(10, 90, 0), "near": Cost(10, 140, 0), "far": Cost(10, 90, 51)})
    assert "| `near` | 10.0 | 140.0 |  | 150.0 | 1.50 | met |" in text
    assert "| `far` | 10.0 | 90.0 | 51.0 | 151.0 | 1.51 | **not met** |" in text


@pytest.mark.full
def test_the_document_has_a_place_for_the_table() -> None:
    document = (ROOT / "docs/performance.md").read_text()
    assert document.count("<!-- variants -->") == document.count("<!-- end of variants -->") == 1
