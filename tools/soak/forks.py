"""Processes forked after the import, and after work that was divided among threads.

    python -m tools.soak.forks AFTER IN_CHILD     # one scenario in a fresh process

OpenMP's pool of threads does not exist in a forked child, and a region that waits for it never ends. The CPU kernels
use one thread there. torch's own ops hang, unless the child sets one thread first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tools.soak.outcome import Outcome

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 60.0  # seconds for a child
BOTH_SAME = "the child ends, with the parent's bits"
# What the parent did before, what the child does, and what must come out.
SCENARIOS = (
    ("import", "ops", "fork after import, all ops in the child", BOTH_SAME),
    ("ops", "ops", "fork after all ops ran on two threads, all ops in the child", BOTH_SAME),
    ("torch", "ops", "fork after a torch op ran on two threads, all ops in the child", BOTH_SAME),
    ("ops", "torch on one thread", "the same, a large torch op after `torch.set_num_threads(1)`", "the child ends"),
    ("ops", "torch", "the same, a large torch op without it", "torch's own op hangs, as documented"),
)


def run(options: argparse.Namespace) -> Iterator[Outcome]:
    for after, in_child, title, expected in SCENARIOS:
        outcome = Outcome("fork", title, 0, expected)
        for _ in range(3):
            command = [sys.executable, "-m", "tools.soak.forks", after, in_child]
            environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "OMP_NUM_THREADS": "2"}
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
            result = done.stdout.strip() or done.stderr[-500:]
            outcome.check(result == ("hangs" if in_child == "torch" else "same"), result)
        yield outcome


def large_op() -> None:
    import torch

    torch.ones(4_000_000).exp().sum()


def scenario(after: str, in_child: str) -> str:
    """What a forked child does: "same", "differs", "hangs", or its status."""
    import torch

    from tests.harness import cpu_threads
    from tools.soak import threads

    cases = threads.runnable(0)  # small inputs, on one thread
    expected = {name: case.call(inputs, "cpu") for name, (case, inputs) in cases.items()}

    def all_ops() -> bool:
        return all(threads.equal(case.call(inputs, "cpu"), expected[name]) for name, (case, inputs) in cases.items())

    torch.set_num_threads(2)
    if after == "ops":
        with cpu_threads(2):
            all_ops()
    if after == "torch":
        large_op()
    pid = os.fork()
    if pid == 0:
        try:
            if in_child == "torch on one thread":
                torch.set_num_threads(1)
            is_same = all_ops() if in_child == "ops" else large_op() is None
            os._exit(0 if is_same else 3)
        finally:
            os._exit(4)
    give_up = time.monotonic() + (PATIENCE if in_child != "torch" else 10.0)
    while time.monotonic() < give_up:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return {0: "same", 3: "differs"}.get(os.waitstatus_to_exitcode(status), f"status {status}")
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"


if __name__ == "__main__":
    print(scenario(*sys.argv[1:]))
