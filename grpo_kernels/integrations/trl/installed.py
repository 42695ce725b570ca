"""Checks that the installed TRL is one that this integration was written for."""

from __future__ import annotations

import sys

import trl
from trl import GRPOTrainer

_NEEDED = (1, 16)


def refuse_other_trl(who: str) -> None:
    """Refuses an older TRL, and one whose trainers Unsloth has rewritten."""
    version = tuple(int(part) for part in trl.__version__.split(".")[:2])
    if version < _NEEDED:
        raise ImportError(f"{who}: needs TRL {'.'.join(map(str, _NEEDED))} or later, got {trl.__version__}")
    if "unsloth" in sys.modules or GRPOTrainer.__name__.startswith("Unsloth"):
        raise RuntimeError(
            f"{who}: Unsloth has rewritten TRL's trainers, so that what is replaced in them here would not be called; "
            "do not import unsloth in this process"
        )
