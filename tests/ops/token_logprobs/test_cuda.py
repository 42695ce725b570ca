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


# The gradient of a slice is contiguous, so its rows and those of the logits are aligned differently.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 9, 24, 301, 1800])
def test_logits_aligned_differently_from_their_gradient(vocabulary: int, dtype: torch.dtype) -> None:
    for before in range(1, 8):
        logits, targets = rows_of((2, before + vocabulary + 1), dtype)
        assert_matches(logits[:, before:-1], targets % vocabulary, "cuda")


# A batch of pieces of a whole warp, one piece less or more, and a warp that has none.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pieces", [127, 128, 129, 255, 256, 257, 1151])
def test_sizes_around_a_batch(pieces: int, dtype: torch.dtype) -> None:
    assert_matches(*rows_of((2, pieces * 16 // dtype.itemsize), dtype), "cuda")


def test_rows_whose_largest_logit_comes_late() -> None:
    """Every batch raises the warp's top, or none does after the first."""
    ascending = torch.linspace(-60, 30, 5000).expand(2, -1).contiguous()
    targets = torch.tensor([4999, 17])
    for logits in (ascending, ascending.flip(-1)):
        assert_matches(logits, targets, "cuda")
        assert_matches(logits, targets, "cuda", softcap=20.0)
