"""CUDA kernels executed on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from tests.emulation import build

only = pytest.mark.skipif(
    torch.cuda.is_available() or build.compiler() is None or not (build.ROOT / "csrc").exists(),
    reason="for the kernels emulated on the host",
)


def set_schedule(seed: int) -> None:
    """In which random order the threads run from now on; launches are counted from here."""
    ctypes.CDLL(str(build.library())).grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))


def launches(call: Callable[[], object]) -> int:
    set_schedule(1)
    call()
    count = ctypes.CDLL(str(build.library())).grpo_kernels_launches
    count.restype = ctypes.c_uint64
    return int(count())
