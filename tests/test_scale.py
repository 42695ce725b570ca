"""The tables of docs/scale.md must match the output of tools/scale.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tables_are_up_to_date() -> None:
    output = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "scale.py")], capture_output=True, text=True, check=True
    ).stdout
    tables = output.strip().split("\n\n")
    assert len(tables) == 3 and all(table in (ROOT / "docs" / "scale.md").read_text() for table in tables)
