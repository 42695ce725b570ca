"""JSON of results as every parser reads it: numbers that are not finite become null, for which JSON has no form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_text(value: Any, **settings: Any) -> str:
    """JSON text of a value.

    Args:
        value: numbers, texts, and lists, tuples and mappings of them.
        settings: of `json.dumps`.
    """
    return json.dumps(_finite(value), allow_nan=False, **settings)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
