"""The command `grpo-conformance`, or `python -m grpo_conformance`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grpo_conformance import CONVENTIONS, INVARIANTS, Result, report, run
from grpo_conformance.adapters import BUILT_IN, AdapterError, load


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if an invariant fails, and 2 if an adapter cannot be loaded or a page cannot be written."""
    parser = argparse.ArgumentParser("grpo-conformance", description="Checks that a trainer counts right.")
    parser.add_argument("adapters", nargs="+", help=f"{', '.join(BUILT_IN)}, or a Python file that defines `adapter`")
    writers = {"html": report.page, "json": report.as_json, "markdown": report.markdown}
    for kind in writers:
        parser.add_argument(f"--{kind}", type=Path, metavar="PATH", help=f"also write the tables as {kind}")
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
        for kind, write in writers.items():
            path = getattr(options, kind)
            if path is not None:
                path.write_text(write(results, path.read_text() if path.exists() else ""))
    except (AdapterError, OSError) as error:
        print(f"grpo-conformance: {error}", file=sys.stderr)
        return 2
    return int(any(result.has_failed for of in results.values() for result in of))


if __name__ == "__main__":
    sys.exit(main())
