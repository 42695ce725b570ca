"""Rows of the table: the trials of a part of the soak, their number and their outcome."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- soak: results -->", "<!-- soak: end of results -->"


@dataclasses.dataclass
class Outcome:
    """One row of the table."""

    part: str
    tried: str  # what was tried
    times: int  # how often
    expected: str  # stated before it is tried
    failures: list[str] = dataclasses.field(default_factory=list)  # every time that something else happened
    note: str = ""  # a figure or a limit to show beside the result
    not_run: str = ""  # why it could not be tried here

    def check(self, is_as_expected: bool, otherwise: str) -> None:
        """Counts one try."""
        self.times += 1
        if not is_as_expected:
            self.failures.append(otherwise)

    @property
    def result(self) -> str:
        if self.not_run:
            return f"not run: {self.not_run}"
        text = f"**{len(self.failures)} not**" if self.failures else "all" if self.times > 1 else "yes"
        return f"{text}; {self.note}" if self.note else text

    def text(self) -> str:
        """A line for the terminal, and one for each failure."""
        lines = [f"{self.times:>9,}  {self.tried}: {self.result.replace('**', '')}"]
        return "\n".join([*lines, *(f"           FAILED {failure}" for failure in self.failures[:20])])


@dataclasses.dataclass
class PartResult:
    """The rows of a part, and how to run it again."""

    part: str
    command: str
    date: str
    seconds: float
    outcomes: list[Outcome]

    @property
    def has_failed(self) -> bool:
        return any(outcome.failures for outcome in self.outcomes)


def read(path: Path) -> dict[str, PartResult]:
    """Results by part; empty if there is no file yet."""
    if not path.exists():
        return {}
    results = {}
    for name, entry in json.loads(path.read_text()).items():
        outcomes = [Outcome(**fields) for fields in entry.pop("outcomes")]
        results[name] = PartResult(**entry, outcomes=outcomes)
    return results


def add(path: Path, result: PartResult) -> None:
    """Replaces the part's earlier results in the file."""
    results = read(path) | {result.part: result}
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {name: dataclasses.asdict(result) for name, result in results.items()}
    path.write_text(json.dumps(content, indent=1) + "\n")


def today() -> str:
    return datetime.date.today().isoformat()


def markdown(results: Iterable[PartResult]) -> str:
    """Sections with one table per part."""
    blocks = []
    for result in results:
        head = [f"### {result.part}", "", f"`{result.command}`, {result.date}, {result.seconds:,.0f} seconds."]
        rows = ["| tried | times | expected | came out |", "|---|---|---|---|"]
        rows += [f"| {o.tried} | {o.times:,} | {o.expected} | {o.result} |" for o in result.outcomes]
        blocks.append("\n".join([*head, "", *rows]))
    return "\n\n".join(blocks)


def write_into(document: Path, results: Iterable[PartResult]) -> None:
    """Puts the tables between the marks of the document."""
    text = document.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{document}: must contain the lines {BEGIN} and {END} once each")
    document.write_text(
        re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{markdown(results)}\n\n{END}", text, flags=re.S)
    )
