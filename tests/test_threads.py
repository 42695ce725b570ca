"""The CPU kernels divide work among threads only where one thread would take about a millisecond.

That the number of threads changes no bit is tested with each op.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.backends import cpu_library
from tests.harness import cpu_threads, needs_cpu_kernels

pytestmark = needs_cpu_kernels
Call = Callable[[], object]
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def forks_of(call: Call) -> int:
    assert cpu_library is not None
    before = cpu_library.forks()
    call()
    return int(cpu_library.forks() - before)


def group_advantages(rows: int, groups: int | torch.Tensor = 8, config: str = "grpo") -> Call:
    return lambda: gk.group_advantages(torch.randn(rows), groups, config=config)


def policy_loss(rows: int, width: int, config: str = "dapo") -> Call:
    lp = -torch.rand(rows, width)
    return lambda: gk.policy_loss(lp, lp - 0.1, torch.ones(rows), config=config)


def token_logprobs(rows: int, columns: int) -> Call:
    logits = torch.randn(rows, columns, requires_grad=True)
    return lambda: gk.token_logprobs(logits, torch.arange(rows)).logprobs.sum().backward()


def endpoint_segments(rows: int, width: int) -> Call:
    numbers, mask = torch.rand(rows, width), torch.ones(rows, width, dtype=torch.bool)
    config = gk.SegmentConfig(norm="none")
    return lambda: gk.endpoint_segments(numbers, -numbers, -numbers, mask, values=numbers, config=config)


def token_advantages(rows: int, width: int) -> Call:
    numbers = torch.rand(rows, width)
    return lambda: gk.token_advantages(numbers, numbers)


def similarity_groups(prompts: int, size: int) -> Call:
    return lambda: gk.similarity_groups(torch.randn(prompts * size, 384), size)


# short work and long work; ids, or groups by size, take different ways
WORK: dict[str, tuple[Call, ...]] = {
    "group_advantages": (group_advantages(8192), group_advantages(2**19)),
    "group_advantages of ids": (
        group_advantages(8192, torch.randint(1000, (8192,))),
        group_advantages(2**17, torch.randint(1000, (2**17,))),
        group_advantages(2**19, torch.randint(1000, (2**19,))),
    ),
    "group_advantages of a batch": (group_advantages(8192, 8, "trl-batch"), group_advantages(2**18, 8, "trl-batch")),
    "policy_loss": (policy_loss(64, 512), policy_loss(256, 2048)),
    "policy_loss of whole rows": (policy_loss(64, 512, "vespo"), policy_loss(256, 2048, "vespo")),
    "token_logprobs": (token_logprobs(8, 32_000), token_logprobs(128, 32_000)),
    "endpoint_segments": (endpoint_segments(16, 1024), endpoint_segments(256, 4096)),
    "token_advantages": (token_advantages(16, 1024), token_advantages(256, 4096)),
    "similarity_groups": (similarity_groups(8, 8), similarity_groups(32, 64)),
}


@pytest.mark.parametrize("name", WORK)
def test_long_work_is_divided_and_short_work_only_on_request(name: str) -> None:
    short, *long = WORK[name]
    assert forks_of(short) == 0 and all(forks_of(call) > 0 for call in long)
    with cpu_threads(2):
        assert forks_of(short) > 0
    torch.set_num_threads(1)
    assert all(forks_of(call) == 0 for call in long)


# Forks

# A child of a process whose OpenMP pool has started would wait for its threads forever.
FORK = """
import os, signal, torch
import grpo_kernels as gk
from grpo_kernels.backends import cpu_library
from tests.harness import cpu_threads
rewards = torch.randn(64)
with cpu_threads(2):
    expected = gk.group_advantages(rewards, 8).advantages
    before = cpu_library.forks()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        is_same = torch.equal(gk.group_advantages(rewards, 8).advantages, expected)
        os._exit(0 if is_same and cpu_library.forks() == before > 0 else 3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_kernels_run_on_one_thread_in_a_forked_child() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stdout + done.stderr
