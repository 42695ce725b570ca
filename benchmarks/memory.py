"""Peak memory: on the CPU of the whole process, whatever the allocator; on a GPU as torch counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _trim_heap() -> None:
    """Returns the allocator's free memory to the system, as it would hide the memory of a call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """Peak memory of the call in bytes, beyond the memory in use before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        raise NotImplementedError("peak memory of a process is only implemented for Linux")

    def kilobytes(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])

    gc.collect()
    _trim_heap()
    reset.write_text("5")
    before = kilobytes("VmRSS:")
    call()
    return (kilobytes("VmHWM:") - before) * 1024
