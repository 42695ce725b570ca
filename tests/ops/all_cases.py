"""The descriptions of all ops, and of what composes them in plain torch, by name."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.ops.promises import Op

TESTS = Path(__file__).parents[1]
OPS: dict[str, Op] = {}
for path in sorted([*TESTS.glob("ops/*/*cases.py"), *TESTS.glob("variants/cases.py")]):
    OPS |= importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts)).OPS
