"""The command `grpo-conformance`, or `python -m grpo_conformance`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from grpo_conformance import CONVENTIONS, INVARIANTS, Result, report, run
from grpo_conformance.adapters import BUILT_IN, AdapterError, load

WRITERS = {
    "html": report.page,
    "json": report.as_json,
    "markdown": report.markdown,
    "junit": report.junit,
    "badge": report.badge,
}
FAIL_ON: dict[str, Callable[[Result], bool]] = {
    "faults": lambda result: result.is_fault,
    "all": lambda result: result.has_failed,
    "nothing": lambda result: False,
}


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a case fails of the kind to fail on, and 2 if an adapter or a page cannot be used."""
    parser = argparse.ArgumentParser("grpo-conformance", description="Checks that a trainer counts right.")
    parser.add_argument("adapters", nargs="+", help=f"{', '.join(BUILT_IN)}, or a Python file that defines `adapter`")
    for kind in WRITERS:
        parser.add_argument(f"--{kind}", type=Path, metavar="PATH", help=f"also write the results as {kind}")
    fail = "what makes the status 1: faults (the default), or robustness, too, or nothing"
    parser.add_argument("--fail-on", choices=FAIL_ON, default="faults", help=fail)
    options = parser.parse_args(arguments)
    results: dict[str, list[Result]] = {}
    try:
        table = options.markdown
        text = table.read_text() if table is not None and table.exists() else ""
        if text.strip() and report.START not in text:
            raise AdapterError(
                f"--markdown: {table} must have a line {report.START}, after which tables replace all text"
            )
        for adapter in [load(name) for name in options.adapters]:
            if adapter.name in results:
                raise AdapterError(f"adapters must have different names, got {adapter.name} twice")
            results[adapter.name] = run(adapter, (*INVARIANTS, *CONVENTIONS))
        print(report.text(results))
        for kind, write in WRITERS.items():
            path = getattr(options, kind)
            if path is not None:
                path.write_text(write(results, path.read_text() if path.exists() else ""))
    except (AdapterError, OSError) as error:
        print(f"grpo-conformance: {error}", file=sys.stderr)
        return 2
    return int(any(FAIL_ON[options.fail_on](result) for of in results.values() for result in of))


if __name__ == "__main__":
    sys.exit(main())
