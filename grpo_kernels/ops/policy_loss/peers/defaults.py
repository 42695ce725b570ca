"""The fields of a peer's settings."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown


def with_defaults(where: str, fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in defaults:
            raise unknown(where, "field", name, defaults)
    return defaults | fields
