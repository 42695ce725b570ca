"""Memory in use over many calls of each op, forward and backward, on the CPU.

    python -m tools.soak.leaks CASE CALLS     # the growth of one case, as JSON

malloc counts the bytes in use, of tensors and of C++, and Python counts its own blocks, so a leak of one byte a call
shows. After a warm-up that fills caches, the bytes may grow by less than a byte a call, and the blocks by less than one
in a hundred calls. The resident memory is shown beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tools.soak.outcome import Outcome

ROOT = Path(__file__).parent.parent.parent
WARM_UP = 1_000


class Usage(NamedTuple):
    in_use: int  # bytes
    blocks: int  # of Python
    resident: int  # bytes


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def usage() -> Usage:
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(found.uordblks + found.hblkhd, sys.getallocatedblocks(), resident)


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
    if grown.blocks >= calls / 100:
        problems.append(f"{grown.blocks / calls:.2f} Python blocks a call")
    return ", ".join(problems)


def run(options: argparse.Namespace) -> Iterator[Outcome]:
    from tests.ops.all_cases import OPS

    with ThreadPoolExecutor(options.jobs) as pool:
        for name, (grown, seconds) in zip(OPS, pool.map(lambda name: measure(name, options.calls), OPS), strict=True):
            outcome = Outcome("leaks", f"`{name}`", options.calls, "less than one byte a call")
            if problem := leaks(grown, options.calls):
                outcome.failures.append(problem)
            resident = f"resident {grown.resident / 2**20:+.1f} MiB"
            outcome.note = f"{grown.in_use:+,} bytes, {grown.blocks:+,} Python blocks, {resident}, {seconds:.0f} s"
            yield outcome


def measure(name: str, calls: int) -> tuple[Usage, float]:
    """The growth of a case, measured in a process of its own."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.soak.leaks", name, str(calls)]
    began = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{name}: must run, got status {done.returncode}:\n{done.stderr[-2000:]}")
    return Usage(*json.loads(done.stdout)), time.monotonic() - began


def main(name: str, calls: int) -> None:
    import torch

    from tests.ops.all_cases import OPS
    from tests.ops.promises import drawn, evaluated

    torch.set_num_threads(1)
    inputs = drawn(OPS[name], 0)
    print(json.dumps(growth(lambda: evaluated(OPS[name], inputs, None), calls)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
