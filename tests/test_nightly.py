"""`make nightly` continues after a failure, ends with a table of all parts, and fails if one failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = """
good: ; @echo of the first part, with parts $(PARTS)
bad: ; @exit 3
last: ; @sleep 1.1
"""


@pytest.mark.parametrize(("parts", "is_good"), [("good bad missing last", False), ("good last", True)])
def test_every_part_runs_and_is_in_the_table(tmp_path: Path, parts: str, is_good: bool) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in ("packages", "built"):  # done, and so not made
        (venv / name).touch()
    (tmp_path / "parts.mk").write_text(PARTS)
    command = ["make", "--no-print-directory", f"VENV={venv}", "SOURCES=", "nightly", f"PARTS={parts}"]
    environment = os.environ | {"MAKEFILES": str(tmp_path / "parts.mk")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == is_good, done.stderr
    assert "of the first part, with parts\n" in done.stdout
    table = [line.split() for line in done.stdout.rpartition("\n\n")[2].splitlines()]
    assert [row[0] for row in table] == parts.split()
    assert [row[1] for row in table] == ["ok" if part in ("good", "last") else "failed" for part in parts.split()]
    assert int(table[-1][2]) >= 1
