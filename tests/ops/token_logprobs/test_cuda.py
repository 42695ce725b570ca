"""Properties of the CUDA kernels alone: one launch per call, several rows per block, the same bits in any schedule."""

from __future__ import annotations

import ctypes

import pytest
import torch

import grpo_kernels as gk
from tests.emulation import build
from tests.ops.token_logprobs.rows import assert_matches, assert_same, rows_of, run, upstream_of

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or build.compiler() is None or not (build.ROOT / "csrc").exists(),
    reason="looks at the kernels emulated on the host",
)


def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build.library()))


@pytest.mark.parametrize("entropy", [False, True])
def test_forward_and_backward_take_one_launch_each(entropy: bool) -> None:
    logits, targets = rows_of((3, 200))
    emulator = library()
    emulator.grpo_kernels_launches.restype = ctypes.c_uint64
    emulator.grpo_kernels_set_schedule_seed(ctypes.c_uint64(1))
    result = gk.token_logprobs(logits.requires_grad_(), targets, return_entropy=entropy, backend="cuda")
    assert emulator.grpo_kernels_launches() == 1
    sum(r.sum() for r in result if r is not None).backward()
    assert emulator.grpo_kernels_launches() == 2


# Blocks of 64 and 512 threads, and rows at any alignment.
@pytest.mark.parametrize("vocabulary", [301, 1801])
def test_same_bits_under_every_schedule(vocabulary: int) -> None:
    logits, targets = rows_of((3, vocabulary), torch.bfloat16)
    upstream = upstream_of(targets)
    results = []
    for seed in range(5):
        library().grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))
        results.append(run(logits, targets, "cuda", upstream, softcap=30.0))
    for result in results[1:]:
        assert_same(result, results[0])


# A grid has at most 2^14 blocks.
@pytest.mark.slow
def test_more_rows_than_blocks() -> None:
    logits, targets = rows_of((2**14 + 150, 40))
    targets[::3] = -100
    assert_matches(logits, targets, "cuda")
