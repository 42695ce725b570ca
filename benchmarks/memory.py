"""Memory as the process has it, allocators that torch does not know of included; a GPU's as torch has it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _give_back() -> None:
    """What the allocator keeps for later would hide what a call takes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes of the device's memory that the call used at its peak beside what was in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        raise NotImplementedError("the peak is asked of Linux, which is not what runs here")

    def kilobytes(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])

    gc.collect()
    _give_back()
    reset.write_text("5")
    before = kilobytes("VmRSS:")
    call()
    return (kilobytes("VmHWM:") - before) * 1024
