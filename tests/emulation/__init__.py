"""CUDA kernels executed on the host."""

from __future__ import annotations

import contextlib
import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.emulation import build

only = pytest.mark.skipif(
    torch.cuda.is_available() or build.compiler() is None or not (build.ROOT / "csrc").exists(),
    reason="for the kernels emulated on the host",
)


def set_schedule(seed: int) -> None:
    """Sets the random order in which threads run from now on, and resets the count of launches."""
    ctypes.CDLL(str(build.library())).grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))


@contextlib.contextmanager
def shared_memory(kilobytes: int) -> Iterator[None]:
    """Emulates a device with that much shared memory per block: 227 KB on sm_90, 99 on sm_86, 64 on sm_75."""
    set_limit = ctypes.CDLL(str(build.library())).grpo_kernels_set_shared_memory_limit
    set_limit(ctypes.c_uint64(kilobytes * 1024))
    try:
        yield
    finally:
        set_limit(ctypes.c_uint64(227 * 1024))


def launches(call: Callable[[], object]) -> int:
    """Number of kernels that `call` launches."""
    set_schedule(1)
    call()
    count = ctypes.CDLL(str(build.library())).grpo_kernels_launches
    count.restype = ctypes.c_uint64
    return int(count())


def launched(call: Callable[[], object], with_arguments: bool = False) -> set[str]:
    """Names of the kernels that `call` launches, as op.kernel, with their template arguments if wanted."""
    set_schedule(1)
    call()
    find, capacity = ctypes.CDLL(str(build.library())).grpo_kernels_launched, 1000
    find.restype = ctypes.c_uint64
    offsets = (ctypes.c_uint64 * capacity)()
    count = find(offsets, ctypes.c_uint64(capacity))
    assert count <= capacity
    # kernels of two sources may share a name; the debug information has their source files
    command = ["addr2line", "-f", "-C", "-e", str(build.library()), *(hex(offset) for offset in offsets[:count])]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = set()
    for name, source in zip(lines[::2], lines[1::2], strict=True):
        match = re.search(r"(\w+)(<.*>)?\(", name)
        assert match is not None, (name, source)
        arguments = match[2] or "" if with_arguments else ""
        names.add(f"{Path(source.partition(':')[0]).parent.name}.{match[1]}{arguments}")
    return names
