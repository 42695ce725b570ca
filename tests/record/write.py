"""Writes record.json: the results of the float64 reference for every case.

    python -m tests.record.write                       # adds the cases that the record lacks, and lists what differs
    python -m tests.record.write 'trl/*' --replace     # replaces the values of these cases
    python -m tests.record.write 'areal/*' --remove    # removes these cases, once cases.py no longer has them

The commit says why a value changed or a case went.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.record import calls
from tests.record.batch_cases import CASES as BATCH_CASES
from tests.record.cases import CASES as LOSS_CASES

PATH = Path(__file__).parent / "record.json"
CASES = LOSS_CASES | BATCH_CASES
DIGITS = 12
Record = dict[str, dict[str, Any]]


def read() -> Record:
    record: Record = json.loads(PATH.read_text()) if PATH.exists() else {}
    return record


def write(record: Record) -> None:
    """One case a line, so that a diff shows which cases changed."""
    lines = (f"{json.dumps(name)}: {json.dumps(record[name], separators=(',', ':'))}" for name in sorted(record))
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def recorded(value: Tensor) -> Any:
    """Numbers or nested lists with so many digits, without a decimal point where they are whole."""

    def rounded(number: Any) -> Any:
        if isinstance(number, list):
            return [rounded(one) for one in number]
        short = float(f"{number:.{DIGITS}g}")
        return int(short) if abs(short) < 2**53 and short.is_integer() else short

    return rounded(value.double().tolist())


def results(name: str, way: calls.Way) -> calls.Results:
    values: calls.Results = getattr(calls, CASES[name].call)(CASES[name], way)
    return values


def differences(name: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    lines = []
    for what in [*before, *(what for what in after if what not in before)]:
        old, new = (json.dumps(values[what]) if what in values else "none" for values in (before, after))
        if old != new:
            lines.append(f"{name}: {what}\n    was {old[:200]}\n    now {new[:200]}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"], help="patterns of names of cases; default: all")
    parser.add_argument("--replace", action="store_true", help="replace values that differ")
    parser.add_argument("--remove", action="store_true", help="remove the cases from the record")
    options = parser.parse_args(arguments)
    record = read()
    chosen = [name for name in sorted(CASES | record) if any(fnmatch.fnmatchcase(name, part) for part in options.names)]
    if not chosen:
        raise SystemExit(f"write: names must match a case, got {' '.join(options.names)}")
    if options.remove:
        kept = [name for name in chosen if name in CASES]
        if kept or options.names == ["*"]:
            raise SystemExit(f"write: names must be of cases that cases.py no longer has, got {', '.join(kept) or '*'}")
        for name in chosen:
            print(f"{name}: removed")
            del record[name]
        return write(record)
    changes = []
    for name in (name for name in chosen if name in CASES):
        after = {what: recorded(value) for what, value in results(name, calls.Way()).items()}
        changed = differences(name, record[name], after) if name in record else []
        changes += changed
        if name not in record:
            print(f"{name}: new")
        if name not in record or (changed and options.replace):
            record[name] = after
    write(record)
    print("\n".join(changes))
    if changes and not options.replace:
        raise SystemExit("write: these values differ and were left as they are; --replace replaces them")


if __name__ == "__main__":
    main()
