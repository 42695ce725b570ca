"""Memory as the process has it: allocators that torch does not know of included."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _give_back() -> None:
    """What the allocator keeps for later would hide what a call takes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_memory(call: Callable[[], Any]) -> int:
    """Bytes of memory that the call used at its peak beside what was in use."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        pytest.skip("asks Linux for the peak")

    def kilobytes(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])

    gc.collect()
    _give_back()
    reset.write_text("5")
    before = kilobytes("VmRSS:")
    call()
    return (kilobytes("VmHWM:") - before) * 1024
