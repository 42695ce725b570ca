"""Processes forked after the import, and after work that was divided among threads.

    python -m tools.soak.forks AFTER IN_CHILD     # one scenario in a fresh process

OpenMP's pool of threads does not exist in a forked child, and a region that waits for it never ends. The CPU kernels
use one thread there. torch's own ops hang, unless the child sets one thread first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.soak.outcome import Outcome

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 20.0  # seconds for a child
SAME = "the child ends, with the parent's bits"
# The parent's past, the child's ops and the expected outcome. torch's products hang as its other ops do.
SCENARIOS = (
    ("nothing", "all ops", "fork after import, all ops in the child", SAME),
    (
        "all ops",
        "kernels",
        "fork after all ops ran on two threads, ops whose work our kernels alone divide in the child",
        SAME,
    ),
    (
        "torch",
        "kernels",
        "fork after a torch op ran on two threads, ops whose work our kernels alone divide in the child",
        SAME,
    ),
    ("all ops", "all ops on one thread", "the same, all ops after `torch.set_num_threads(1)`", SAME),
    ("torch", "torch", "the same, a large op of torch without it", "torch's own op hangs, as documented"),
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


def results(names: str, threads_of_kernels: int = 1) -> dict[str, list[Any]]:
    """Results of the ops by case; "kernels" are those that use no product of torch."""
    from tests.harness import cpu_threads
    from tools.soak import threads

    with cpu_threads(threads_of_kernels) if threads_of_kernels > 1 else contextlib.nullcontext():
        return {
            name: case.call(inputs, threads.BACKEND)
            for name, (case, inputs) in threads.runnable(0, names == "kernels").items()
        }


def scenario(after: str, in_child: str) -> str:
    """Outcome of a forked child: "same", "differs", "hangs", or its status."""
    import torch

    from tools.soak import threads

    torch.set_num_threads(2)
    if after == "all ops":
        results("all ops", 2)
    if after == "torch":
        large_op()
    with tempfile.TemporaryDirectory(prefix="soak-fork-") as folder:
        path, patience = Path(folder) / "results", 10.0 if in_child == "torch" else PATIENCE
        pid = os.fork()
        if pid == 0:
            try:
                if in_child.endswith("on one thread"):
                    torch.set_num_threads(1)
                torch.save(large_op() if in_child == "torch" else results(in_child), path)
                os._exit(0)
            finally:
                os._exit(4)
        give_up = time.monotonic() + patience
        while time.monotonic() < give_up:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended and status:
                return f"status {status}"
            if ended:
                if in_child.endswith("on one thread"):
                    torch.set_num_threads(1)  # torch's products round as the number of threads says
                expected, got = results(in_child), torch.load(path)
                is_same = all(threads.equal(got[name], value) for name, value in expected.items())
                return "same" if is_same else "differs"
            time.sleep(0.01)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return "hangs"


if __name__ == "__main__":
    print(scenario(*sys.argv[1:]))
