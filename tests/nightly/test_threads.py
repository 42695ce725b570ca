"""Ops called from several threads at once, and in processes that were forked after work was divided among threads.

    python -m tests.nightly.test_threads AFTER IN_CHILD     # one fork in a fresh process

OpenMP's pool of threads does not exist in a forked child, and a region that waits for it never ends. The CPU kernels
use one thread there. torch's own ops hang, unless the child sets one thread first.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.emulation.build import ROOT
from tests.harness import cpu_threads, needs_cpu_kernels
from tests.ops.all_cases import OPS
from tests.ops.promises import Inputs, Op, Results, drawn, evaluated

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


def call_at_once(cases: Cases, chance: random.Random) -> list[str]:
    """Every thread calls all cases in an order of its own, again and again. Returns what came out otherwise."""
    expected = {name: evaluated(op, inputs, BACKEND) for name, (op, inputs) in cases.items()}
    ready, wrong = threading.Barrier(THREADS), list[str]()

    def work(own: random.Random) -> None:
        ready.wait()
        for _ in range(ROUNDS):
            for name in own.sample([*cases], len(cases)):
                try:
                    is_same = equal(evaluated(*cases[name], BACKEND), expected[name])
                    problem = "" if is_same else "other bits"
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                if problem:
                    wrong.append(f"{name}: {problem}")

    threads = [threading.Thread(target=work, args=(random.Random(chance.random()),)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def equal(results: Results, expected: Results) -> bool:
    """Whether all tensors have the same bits; NaN equals NaN."""
    return results.keys() == expected.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))
        for a, b in ((results[name], expected[name]) for name in expected)
    )


@needs_cpu_kernels
@pytest.mark.parametrize("count", [1, 2])
def test_four_threads_get_the_bits_of_one(chance: random.Random, count: int) -> None:
    with cpu_threads(count):
        assert call_at_once(runnable(), chance) == []


def test_a_result_that_depends_on_other_calls_is_found(chance: random.Random) -> None:
    count = itertools.count()
    steady = Op(dict, lambda inputs, backend: {"result": torch.ones(2)}, {})
    counting = Op(dict, lambda inputs, backend: {"result": torch.tensor(next(count))}, {})
    wrong = call_at_once({"steady": (steady, {}), "counting": (counting, {})}, chance)
    assert wrong == ["counting: other bits"] * (THREADS * ROUNDS)


# Forks


@needs_cpu_kernels
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
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr[-500:]


def large_op() -> None:
    torch.ones(4_000_000).exp().sum()


def results(names: str, threads_of_kernels: int = 1) -> dict[str, Results]:
    """Results of the ops by case; "kernels" are those that use no product of torch."""
    with cpu_threads(threads_of_kernels) if threads_of_kernels > 1 else contextlib.nullcontext():
        return {name: op.call(inputs, BACKEND) for name, (op, inputs) in runnable(names == "kernels").items()}


def outcome(after: str, in_child: str) -> str:
    """What becomes of a forked child: "same", "differs", "hangs", or its status."""
    torch.set_num_threads(2)
    if after == "all ops":
        results("all ops", 2)
    if after == "torch":
        large_op()
    with tempfile.TemporaryDirectory() as folder:
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
                is_same = all(equal(got[name], value) for name, value in expected.items())
                return "same" if is_same else "differs"
            time.sleep(0.01)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return "hangs"


if __name__ == "__main__":
    print(outcome(*sys.argv[1:]))
