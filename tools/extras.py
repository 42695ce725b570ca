"""Prints the requirements of one extra in pyproject.toml, for installing them without the package itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(extra: str) -> list[str]:
    # by pattern, as Python 3.10 has no reader for TOML
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    found = re.search(rf"^{re.escape(extra)} = \[(.*?)\]", section, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"no extra {extra!r} in pyproject.toml")
    return re.findall(r'"([^"]+)"', found.group(1))


if __name__ == "__main__":
    print(*requirements(sys.argv[1]))
