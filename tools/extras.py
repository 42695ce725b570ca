"""Prints the requirements of extras in pyproject.toml, for installing them without the package itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(extra: str) -> list[str]:
    # by regex, as Python 3.10 has no TOML parser
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    match = re.search(rf"^{re.escape(extra)} = \[(.*?)\]", section, re.DOTALL | re.MULTILINE)
    if match is None:
        raise SystemExit(f"extras: pyproject.toml has no extra {extra!r}")
    return re.findall(r'"([^"]+)"', match.group(1))


if __name__ == "__main__":
    print(*(requirement for extra in sys.argv[1:] for requirement in requirements(extra)))
