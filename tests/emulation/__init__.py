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
    """In which random order the threads run from now on; launches are counted from here."""
    ctypes.CDLL(str(build.library())).grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))


@contextlib.contextmanager
def shared_memory(kilobytes: int) -> Iterator[None]:
    """A device whose blocks can have so much shared memory: 227 KB on sm_90, 99 on sm_86, 64 on sm_75."""
    set_limit = ctypes.CDLL(str(build.library())).grpo_kernels_set_shared_memory_limit
    set_limit(ctypes.c_uint64(kilobytes * 1024))
    try:
        yield
    finally:
        set_limit(ctypes.c_uint64(227 * 1024))


def launches(call: Callable[[], object]) -> int:
    set_schedule(1)
    call()
    count = ctypes.CDLL(str(build.library())).grpo_kernels_launches
    count.restype = ctypes.c_uint64
    return int(count())


def launched(call: Callable[[], object]) -> set[str]:
    """The kernels that it launches, as source.kernel."""
    set_schedule(1)
    call()
    find, room = ctypes.CDLL(str(build.library())).grpo_kernels_launched, 1000
    find.restype = ctypes.c_uint64
    places = (ctypes.c_uint64 * room)()
    count = find(places, ctypes.c_uint64(room))
    assert count <= room
    # Two sources may have a kernel of the same name: the library's debug information says where one is from.
    command = ["addr2line", "-f", "-C", "-e", str(build.library()), *(hex(place) for place in places[:count])]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = set()
    for name, where in zip(lines[::2], lines[1::2], strict=True):
        match = re.search(r"(\w+)(?:<.*>)?\(", name)
        assert match is not None, (name, where)
        found.add(f"{Path(where.partition(':')[0]).stem}.{match.group(1)}")
    return found
