"""Ops called from several threads at once, and in processes that were forked after work was divided among threads.

    python -m tests.nightly.test_threads AFTER IN_CHILD     # one fork in a fresh process

OpenMP's pool of threads does not exist in a forked child, and a region that waits for it never ends. The CPU kernels
use one thread there. torch's own ops hang, unless the child sets one thread first.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.emulation.build import ROOT
from tests.harness import cpu_threads
from tests.ops.all_cases import OPS
from tests.ops.promises import Inputs, Op, Results, assert_same_bits, drawn, evaluated

THREADS, ROUNDS, BACKEND = 4, 25, "kernel"
PATIENCE = 60.0  # seconds for a child, also on a busy machine
# The others need ops of torch which it divides: products, and those of sampling_correction.
WITHOUT_PRODUCTS = (
    *("group_advantages", "gigpo_advantages", "token_logprobs", "policy_loss"),
    *("endpoint_segments", "token_advantages"),
)
Cases = dict[str, tuple[Op, Inputs]]


def runnable(without_products: bool = False) -> Cases:
    """The cases that the CPU kernels run, with their inputs; a few run on GPU backends only."""
    cases = {}
    for name, op in OPS.items():
        if without_products and not name.startswith(WITHOUT_PRODUCTS):
            continue
        inputs = drawn(op, 0)
        try:
            evaluated(op, inputs, BACKEND)
        except (RuntimeError, ValueError) as error:
            if not any(text in str(error) for text in ("cannot run here", "on a GPU")):
                raise
            continue
        cases[name] = op, inputs
    return cases


@pytest.mark.parametrize("count", [1, 2])
def test_four_threads_get_the_bits_of_one(chance: random.Random, count: int) -> None:
    """Every thread calls all cases in an order of its own, again and again."""
    ready = threading.Barrier(THREADS)
    with cpu_threads(count):
        cases = runnable()
        expected = {name: evaluated(op, inputs, BACKEND) for name, (op, inputs) in cases.items()}

        def work(own: random.Random) -> None:
            ready.wait()
            for _ in range(ROUNDS):
                for name in own.sample([*cases], len(cases)):
                    assert_same_bits(evaluated(*cases[name], BACKEND), expected[name])

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, [random.Random(chance.random()) for _ in range(THREADS)]))


# Forks


@pytest.mark.parametrize(
    ("after", "in_child", "expected"),
    [
        ("nothing", "all ops", "same"),
        ("all ops", "kernels", "same"),
        ("torch", "kernels", "same"),
        ("all ops", "all ops on one thread", "same"),
        ("torch", "torch", "hangs"),  # as documented
    ],
)
def test_a_forked_child(after: str, in_child: str, expected: str) -> None:
    """The parent's past, the child's ops, and what becomes of the child."""
    command = [sys.executable, "-m", "tests.nightly.test_threads", after, in_child]
    # One thread while the cases are imported, as some of them compute products then: "nothing" has started no threads.
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr[-500:]


def large_op() -> None:
    torch.ones(4_000_000).exp().sum()


def results(names: str, threads_of_kernels: int = 1) -> dict[str, Results]:
    """Results of the ops by case; "kernels" are those that use no product of torch."""
    with cpu_threads(threads_of_kernels) if threads_of_kernels > 1 else contextlib.nullcontext():
        return {name: op.call(inputs, BACKEND) for name, (op, inputs) in runnable(names == "kernels").items()}


def work_of_child(names: str, path: Path) -> None:
    status = 4
    try:
        if names.endswith("on one thread"):
            torch.set_num_threads(1)
        torch.save(large_op() if names == "torch" else results(names), path)
        status = 0
    finally:
        os._exit(status)


def outcome(after: str, in_child: str) -> str:
    """End of a forked child: "same", "hangs", or its status."""
    torch.set_num_threads(2)
    if after == "all ops":
        results("all ops", 2)
    if after == "torch":
        large_op()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results"
        child = multiprocessing.get_context("fork").Process(target=work_of_child, args=(in_child, path))
        child.start()
        child.join(10.0 if in_child == "torch" else PATIENCE)
        if child.is_alive():
            child.kill()
            return "hangs"
        if child.exitcode:
            return f"status {child.exitcode}"
        if in_child.endswith("on one thread"):
            torch.set_num_threads(1)  # torch's products round as the number of threads says
        expected, got = results(in_child), torch.load(path)
        for name, value in expected.items():
            assert_same_bits(got[name], value)
        return "same"


if __name__ == "__main__":
    print(outcome(*sys.argv[1:]))
