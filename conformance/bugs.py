"""Bugs that the suite would have caught: the case before the fix and after it, and the page of them.

python -m conformance.bugs                                 # those in packages: fetches both versions of each
python -m conformance.bugs --checkouts FOLDER              # also those in commits, of clones FOLDER/slime and others
python -m conformance.bugs --checkouts FOLDER --page docs/conformance_bugs.md
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

from grpo_conformance import INVARIANTS, run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
START = "<!-- written by python -m conformance.bugs -->"


@dataclasses.dataclass(frozen=True)
class Bug:
    """A bug, the case that it fails, and the versions or commits before and after its fix.

    Without a fix, `after` is empty; in brackets, it says why the fix is not measured.
    """

    thread: str
    what: str
    case: str
    package: str
    before: str
    after: str
    adapter: str  # a file beside this one, or a class in past.py

    @property
    def is_in_packages(self) -> bool:
        return bool(re.match(r"[\d.]+$", self.before))


BUGS = [Bug(**row) for row in csv.DictReader((HERE / "bugs.csv").open())]


def asked(bug: Bug, version: str, adapter: str, checkouts: Path | None) -> tuple[str, str]:
    """Asks a version about the case, and returns the status and the numbers."""
    variable, (case,) = (
        f"GRPO_SOURCE_{bug.package.upper().replace('-', '_')}",
        [one for one in INVARIANTS if one.name == bug.case],
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ[variable] = version if checkouts is None else _exported(checkouts / bug.package, version, folder)
        try:
            if adapter.endswith(".py"):
                trainer: Any = runpy.run_path(str(HERE / adapter))["adapter"]
            else:
                trainer = vars(__import__("past"))[adapter](os.environ[variable])
            (result,) = run(trainer, [case])
        finally:
            del os.environ[variable]
    return result.status, result.text.partition(";")[0]


def _exported(clone: Path, commit: str, folder: str) -> str:
    """The files of a commit in a folder."""
    archive = subprocess.run(
        ["git", "-C", str(clone), "archive", commit, ":(glob)**/*.py"], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder


def measured(bug: Bug, checkouts: Path | None) -> list[str]:
    """A row of the page: the bug, the case, both versions, and what the case says of them."""
    first, _, last = bug.adapter.partition(" ")
    found = checkouts if not bug.is_in_packages else None
    before, numbers = asked(bug, bug.before, first, found)
    is_measured = bool(bug.after) and not bug.after.startswith("(")
    after = asked(bug, bug.after, last or first, found)[0] if is_measured else "" if bug.after else "open"
    name, _, number = bug.thread.partition("#")
    thread = f"[{bug.thread}](https://github.com/{name}{'/issues/' * bool(number)}{number})"
    return [
        thread,
        bug.what,
        bug.case,
        f"{bug.package} {bug.before}: {before}, {numbers}",
        f"{bug.after} {after}".strip(),
    ]


def main() -> int:
    """Prints the rows, and writes them after the introduction of a page; returns 1 if one is not as it should be."""
    parser = argparse.ArgumentParser("conformance.bugs")
    parser.add_argument("--checkouts", type=Path, help="folder with clones of slime, miles, nemo-rl and prime-rl")
    parser.add_argument("--page", type=Path, help="page whose table is written again")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if bug.is_in_packages or options.checkouts is not None]
    rows = [measured(bug, options.checkouts) for bug in bugs]
    table = [["bug", "what was wrong", "case", "before", "after"], ["---"] * 5, *rows]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    print(lines)
    if options.page is not None:
        options.page.write_text(f"{options.page.read_text().partition(START)[0]}{START}\n\n{lines}\n")
    return int(any(": NO," not in row[3] or not row[4].endswith(("yes", "open", ")")) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
