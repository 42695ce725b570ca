"""Writes the page of foreign trainers: how much of each column is its own, and the tables of the suite.

python -m conformance docs/conformance_trainers.md                          # those with packages
python -m conformance docs/conformance_checkouts.md --checkouts FOLDER      # those of FOLDER/slime and others
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from grpo_conformance import CONVENTIONS, INVARIANTS, run  # noqa: E402
from grpo_conformance.report import START, markdown  # noqa: E402

IN_PACKAGES = ("ms_swift", "ms_swift_dynamic", "openrlhf", "skyrl", "areal", "art", "unsloth_zoo")
IN_CHECKOUTS = ("slime", "miles", "nemo_rl", "prime_rl", "roll")


def page_of(names: tuple[str, ...], introduction: str) -> str:
    """The page after its introduction."""
    results, columns = {}, [["column", "lines of its own", "lines of the adapter"], ["---"] * 3]
    for name in names:
        path = HERE / f"{name}.py"
        scope = runpy.run_path(str(path))
        adapter = scope["adapter"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results[adapter.name] = run(adapter, (*INVARIANTS, *CONVENTIONS))
        columns.append([adapter.name, str(scope["SOURCE"].lines), str(len(path.read_text().splitlines()))])
    table = "\n".join(f"| {' | '.join(row)} |" for row in columns)
    return markdown(results, introduction).replace(START, f"{START}\n\n## Columns\n\n{table}", 1)


def main() -> None:
    parser = argparse.ArgumentParser("conformance")
    parser.add_argument("page", type=Path, help="page whose tables are written again")
    parser.add_argument("--checkouts", type=Path, help="folder with clones of slime, miles, nemo-rl, prime-rl and roll")
    options = parser.parse_args()
    names = IN_PACKAGES if options.checkouts is None else IN_CHECKOUTS
    for name in IN_CHECKOUTS if options.checkouts else ():
        os.environ[f"GRPO_SOURCE_{name.upper()}"] = str(options.checkouts / name.replace("_", "-"))
    options.page.write_text(page_of(names, options.page.read_text()))


if __name__ == "__main__":
    main()
