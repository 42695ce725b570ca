#!/usr/bin/env python3
"""Run every check that is too slow for .ci/run, and end with a table of what passed.

    python tools/nightly.py [--parts NAME ...] [--list]

A part that fails stops no other. Its output is shown as it comes. The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Shell commands by name, run from the root.
PARTS: dict[str, str] = {
    "test-all": "make test-all",
    "test-floor": "make test-floor",
    "test-engine": "make test-engine",
    "soak": "make soak PARTS=",
    "bench": "make bench",
    "results": "make results",
}


def run_part(command: str) -> tuple[str, float]:
    """State and seconds of one part."""
    start = time.monotonic()
    status = subprocess.run(command, shell=True, cwd=ROOT).returncode
    state = "ok" if status == 0 else f"failed ({status})"
    return state, time.monotonic() - start


def format_table(outcomes: Mapping[str, tuple[str, float]]) -> str:
    lines = [("part", "state", "seconds"), *((name, state, f"{s:.0f}") for name, (state, s) in outcomes.items())]
    first, second, third = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(f"{name:{first}}  {state:{second}}  {seconds:>{third}}" for name, state, seconds in lines)


def nightly(parts: Mapping[str, str]) -> int:
    outcomes: dict[str, tuple[str, float]] = dict.fromkeys(parts, ("not run", 0.0))
    try:
        for name, command in parts.items():
            print(f"== {name}: {command}", flush=True)
            outcomes[name] = run_part(command)
    finally:  # also when interrupted
        print(format_table(outcomes), flush=True)
    return int(any(state != "ok" for state, _ in outcomes.values()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help="default: all")
    parser.add_argument("--list", action="store_true", help="print the parts and their commands")
    args = parser.parse_args(argv)
    parts = {name: PARTS[name] for name in PARTS if args.parts is None or name in args.parts}
    if args.list:
        print("\n".join(f"{name}: {command}" for name, command in parts.items()))
        return 0
    # Tools of the environment, such as cmake, for the parts that call them by name.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return nightly(parts)


if __name__ == "__main__":
    sys.exit(main())
