"""The command line of the soak; tools/soak/__init__.py describes it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools import soak
from tools.soak import outcome

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "build" / "soak" / "results.json"
# Modules with a function run(options) that yields each Outcome, in the order in which they run.
PARTS = {
    "faults": "tools.soak.faults",
    "threads": "tools.soak.threads",
    "fork": "tools.soak.forks",
    "kills": "tools.soak.kills",
    "leaks": "tools.soak.leaks",
    "fuzz": "tools.soak.fuzzing",
}
# By name, what a backend of the part fuzz is.
BACKENDS = {
    "cpu": "the CPU kernels as built",
    "cpu-sanitized": "the CPU kernels under AddressSanitizer and UBSan",
    "triton": "the Triton kernels in the interpreter",
    "cuda-sanitized": "the CUDA kernels on the host under AddressSanitizer and UBSan",
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.soak", description=soak.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--seed", type=int, default=None, help="of all random choices; default: another one each time")
    parser.add_argument("--kills", type=int, default=50, help="moments at which a run is killed")
    parser.add_argument("--seconds", type=float, default=600, help="of the part fuzz, for each backend")
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS), metavar="BACKEND")
    parser.add_argument("--calls", type=int, default=100_000, help="of the part leaks, for each case")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the part leaks")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true", help="print the parts and backends")
    parser.add_argument("--table", action="store_true", help="run nothing, show the results of earlier runs")
    parser.add_argument("--into", type=Path, help="write the table between the marks of this document")
    options = parser.parse_args(arguments)
    options.seed = int.from_bytes(os.urandom(3), "big") if options.seed is None else options.seed
    return options


def command_of(part: str, options: argparse.Namespace) -> str:
    """The command that repeats a part."""
    own = {
        "kills": f" --kills {options.kills}",
        "fuzz": f" --seconds {options.seconds:g} --backends {' '.join(options.backends)}",
        "leaks": f" --calls {options.calls}",
    }
    return f"python -m tools.soak --parts {part}{own.get(part, '')} --seed {options.seed}"


def run_part(part: str, options: argparse.Namespace) -> outcome.PartResult:
    command = command_of(part, options)
    print(f"== {part}: {command}", flush=True)
    began = time.monotonic()
    result = outcome.PartResult(part, command, outcome.today(), 0.0, [])
    try:
        for row in importlib.import_module(PARTS[part]).run(options):
            result.outcomes.append(row)
            print(row.text(), flush=True)
    finally:  # also when interrupted: the rows that are complete
        result.seconds = time.monotonic() - began
        outcome.add(options.results, result)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print("\n".join([*PARTS, *(f"  {name}: {what}" for name, what in BACKENDS.items())]))
        return 0
    has_failed = False
    for part in PARTS:
        if part in options.parts and not options.table:
            has_failed |= run_part(part, options).has_failed
    stored = outcome.read(options.results)
    ordered = [stored[part] for part in PARTS if part in stored]
    if options.table:
        print(outcome.markdown(ordered))
    if options.into is not None:
        outcome.write_into(options.into, ordered)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
