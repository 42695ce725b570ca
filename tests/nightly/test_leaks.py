"""Memory in use over many calls of each op, forward and backward, on the CPU.

    python -m tests.nightly.test_leaks CASE CALLS     # the growth of one case, as JSON

malloc counts the bytes in use, of tensors and of C++, and Python counts its own blocks, so a leak of one byte a call
shows. After a warm-up that fills caches, the bytes may grow by less than a byte a call, and the blocks by less than one
in forty calls, since Python keeps up to two hundred sooner or later.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from tests.emulation.build import ROOT
from tests.ops.all_cases import OPS
from tests.ops.promises import drawn, evaluated

WARM_UP, CALLS = 1_000, 20_000


class Usage(NamedTuple):
    in_use: int  # bytes
    blocks: int  # of Python


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def usage() -> Usage:
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return Usage(found.uordblks + found.hblkhd, sys.getallocatedblocks())


def growth(call: Callable[[], object], calls: int, warm_up: int = WARM_UP) -> Usage:
    """How much more is in use after the calls than after the warm-up."""
    for _ in range(warm_up):
        call()
    before = usage()
    for _ in range(calls):
        call()
    after = usage()
    return Usage(*(b - a for a, b in zip(before, after, strict=True)))


def leaks(grown: Usage, calls: int) -> str:
    """Description of the leak; empty if there is none."""
    problems = []
    if grown.in_use >= calls:
        problems.append(f"{grown.in_use / calls:.1f} bytes a call")
    if grown.blocks >= calls / 40:
        problems.append(f"{grown.blocks / calls:.2f} Python blocks a call")
    return ", ".join(problems)


@pytest.mark.parametrize("name", OPS)
def test_memory_does_not_grow(name: str) -> None:
    """In a process of its own."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.nightly.test_leaks", name, str(CALLS)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    grown = Usage(*json.loads(done.stdout))
    print(f"{name}: {grown.in_use:+,} bytes, {grown.blocks:+,} Python blocks")
    assert not (problem := leaks(grown, CALLS)), problem


if __name__ == "__main__":
    torch.set_num_threads(1)
    op = OPS[sys.argv[1]]
    inputs = drawn(op, 0)
    print(json.dumps(growth(lambda: evaluated(op, inputs, None), int(sys.argv[2]))))
