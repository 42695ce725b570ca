"""Runs examples/NAME.py cell by cell, and writes docs/NAME.ipynb with what the cells print and plot.

python -m tools.notebook [tutorial | trl_side_by_side]

A script is in the percent format, which editors run by cells: `# %%` opens a cell of code, `# %% [markdown]` one of
text.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("tutorial", "trl_side_by_side")


def cells_of(script: str) -> list[tuple[str, str]]:
    """Kind, "markdown" or "code", and text of each cell."""
    cells = []
    for part in re.split(r"^# %%", script, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        is_text = head.strip() == "[markdown]"
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if is_text else body
        cells.append(("markdown" if is_text else "code", text.strip("\n")))
    return cells


def script_of(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


def notebook_of(name: str) -> Path:
    return ROOT / "docs" / f"{name}.ipynb"


def run_cell(code: str, scope: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell and returns its outputs: what it printed, then its figures."""
    import matplotlib.pyplot as plt

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "cell", "exec"), scope)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines_of(printed.getvalue())})
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, format="png", dpi=80, metadata={"Software": None})
        data = {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook(script: str, is_run: bool = True) -> dict[str, Any]:
    """The notebook of a script, with its outputs if it is run."""
    cells: list[dict[str, Any]] = []
    scope: dict[str, Any] = {"__name__": "__main__"}
    for kind, text in cells_of(script):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines_of(text)}
        if kind == "code":
            count = sum(other["cell_type"] == "code" for other in cells) + 1
            cell |= {"execution_count": count, "outputs": run_cell(text, scope) if is_run else []}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    import matplotlib

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=NAMES, default=NAMES[0], help="default: %(default)s")
    name = parser.parse_args().name
    matplotlib.use("agg")
    notebook_of(name).write_text(json.dumps(notebook(script_of(name).read_text()), indent=1) + "\n")


if __name__ == "__main__":
    main()
