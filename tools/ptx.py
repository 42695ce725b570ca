"""Reads PTX for the rounding that its source asks for, and for the width of its loads."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["contractions", "widest_load"]

# Fused on purpose, or inside the math library, whose code is attributed to the line of the call.
_FUSED_ON_PURPOSE = re.compile(r"\b(fma|exp|expm1|log|log1p)f?\(")


def contractions(ptx: str) -> list[str]:
    """Source lines, as ``file:line: text``, whose products PTX fuses into sums or lets ptxas fuse.

    ptxas may contract ``mul`` and ``add``, but never the forms that name a rounding, ``mul.rn`` and ``add.rn``. Lines
    that call ``fma`` or a function of the math library are left out. The PTX needs line information.
    """
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, flags=re.MULTILINE))
    lines = set()
    where = ("", 0)
    for line in ptx.splitlines():
        location = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line)
        if location is not None:
            where = (files[location[1]], int(location[2]))
        elif re.match(r"\s*(@\S+\s+)?(fma\.rn(\.ftz)?|(mul|add|sub)(\.ftz)?)\.f(32|64)\b", line):
            lines.add(where)
    texts = [f"{Path(file).name}:{number}: {_source_line(file, number)}" for file, number in sorted(lines)]
    return [text for text in texts if _FUSED_ON_PURPOSE.search(text) is None]


def widest_load(ptx: str) -> int:
    """Bytes of the widest load from global memory; 0 without any."""
    loads = re.findall(r"\bld\.global\.(?:[a-z]+[0-9]*::\w+\.|[a-z]+\.)*(?:v(\d)\.)?[bsuf](\d+)", ptx)
    return max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0)


def _source_line(file: str, number: int) -> str:
    lines = Path(file).read_text().splitlines() if Path(file).is_file() else []
    return lines[number - 1].strip() if 0 < number <= len(lines) else "not found"
