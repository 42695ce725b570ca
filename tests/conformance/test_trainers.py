"""The adapters of foreign trainers, their cutter, and their pages.

The faults to notice: a function that is cut from another place, a line that is counted wrong, a bug that is no longer
noticed, a page that is out of date, a snippet that prints something else.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grpo_conformance import INVARIANTS

ROOT = Path(__file__).parent.parent.parent
DOCS, FOLDER = ROOT / "docs", ROOT / "conformance"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="tests are run from outside the checkout")
FILE = """
import absent

LIMIT = 2


@absent.decorated
def twice(value: absent.Number) -> int:
    return LIMIT * value


class Trainer:
    def step(self, batch):
        if batch:
            rows = len(batch)
            weight = rows / self.total
            loss = absent.loss(batch)
        return loss
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    from cutter import Source

    (tmp_path / "trainer.py").write_text(FILE)
    monkeypatch.setenv("GRPO_SOURCE_SOME_TRAINER", str(tmp_path))
    return Source("some-trainer", "1.0")


def test_functions_are_cut_with_their_lines(source: Any) -> None:
    cut = source.cut("trainer.py", "LIMIT", "twice", "Trainer.step")
    assert cut.twice(4) == 8 and cut.twice.__code__.co_firstlineno == 8
    assert cut.twice.__code__.co_filename == str(source.root / "trainer.py")
    assert source.lines == 1 + 2 + 6 and source.version == source.root.name
    assert (
        source.where("trainer.py", "weight =") == "trainer.py:16" and source.where("trainer.py", "no") == "trainer.py"
    )
    assert source.has("trainer.py", "Trainer.step") and not source.has("trainer.py", "step")
    with pytest.raises(KeyError, match=r"trainer.py of version .* must define three"):
        source.cut("trainer.py", "twice", "three")


def test_statements_are_cut_at_any_depth(source: Any) -> None:
    weigh = source.statements("trainer.py", "step", "rows = ", "weight = ", "self, batch", "weight")
    assert weigh(type("Me", (), {"total": 4}), [1, 2]) == 0.5 and source.lines == 2
    with pytest.raises(KeyError, match="must have 'rows = ' to 'none = ' in step"):
        source.statements("trainer.py", "step", "rows = ", "none = ", "self, batch", "weight")


def test_a_checkout_must_be_named(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_SOURCE_SOME_TRAINER")
    with pytest.raises(FileNotFoundError, match="GRPO_SOURCE_SOME_TRAINER must name a checkout of some-trainer"):
        type(source)("some-trainer")


def test_every_bug_is_on_the_page() -> None:
    bugs = list(csv.DictReader((FOLDER / "bugs.csv").open()))
    rows = re.findall(r"^\| \[.*", (DOCS / "conformance_bugs.md").read_text(), re.MULTILINE)
    assert len(rows) == len(bugs) >= 12
    for bug, row in zip(bugs, rows, strict=True):
        assert bug["case"] in {case.name for case in INVARIANTS}
        assert row.startswith(f"| [{bug['thread']}](") and f"{bug['package']} {bug['before']}: NO, " in row
        passes = f"{bug['after']} yes" if bug["after"] else "open"
        assert row.endswith(f"| {bug['after'] if bug['after'].startswith('(') else passes} |")


def test_snippets_for_upstream_print_what_they_say() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "conformance_upstream.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block, {})
        assert printed.getvalue().splitlines() == re.findall(r"^# (.*)", block, re.MULTILINE)


def fetched(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that fetches packages; skips where there is no index."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "'download'" in done.stderr:
        pytest.skip("no package index")
    return done


@pytest.mark.full
def test_the_page_of_trainers_is_fresh(tmp_path: Path) -> None:
    page, copy = DOCS / "conformance_trainers.md", tmp_path / "page.md"
    copy.write_text(page.read_text())
    done = fetched("conformance", str(copy))
    assert done.returncode == 0, done.stderr
    assert copy.read_text() == page.read_text()


@pytest.mark.full
def test_bugs_in_packages_fail_before_their_fix_and_pass_after_it() -> None:
    done = fetched("conformance.bugs")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| [")]
    page = (DOCS / "conformance_bugs.md").read_text()
    assert len(rows) >= 7 and all(row in page for row in rows)
