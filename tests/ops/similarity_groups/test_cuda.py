"""Properties of the CUDA kernels alone: results do not depend on where the matrix of a prompt is stored."""

from __future__ import annotations

import pytest
import torch

import grpo_kernels as gk
from tests import emulation

pytestmark = emulation.only
# The matrix fits into shared memory up to 87, 109 and 162 rows; the sizes are just below and above these limits.
LIMITS, SIZES = (64, 99, 227), (86, 90, 106, 112, 128, 160, 165)


def results(size: int) -> list[torch.Tensor]:
    torch.manual_seed(size)
    rows = torch.randn(2 * size, 5)
    distances = gk.pairwise_cosine(rows, size, backend="reference")
    labels = torch.arange(size).remainder(7).expand(2, size)
    return [
        *gk.similarity_groups(rows, size, backend="cuda"),
        *gk.agglomerate(distances, backend="cuda"),
        *gk.silhouette(distances, labels, backend="cuda"),
    ]


@pytest.mark.parametrize("size", SIZES)
def test_the_shared_memory_of_the_device_changes_nothing(size: int) -> None:
    expected = results(size)
    for kilobytes in LIMITS[:2]:
        with emulation.shared_memory(kilobytes):
            for got, wanted in zip(results(size), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_block_never_asks_for_more_than_there_is() -> None:
    """32 KB suffice for 256 rows; 30 KB do not even hold their vectors, without the matrix."""
    with emulation.shared_memory(32):
        assert gk.similarity_groups(torch.randn(256, 5), 256, backend="cuda").labels.shape == (256,)
    with emulation.shared_memory(30), pytest.raises(RuntimeError, match="invalid configuration"):
        gk.similarity_groups(torch.randn(256, 5), 256, backend="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("depth", [40, 1024, 1027, 4096])
def test_distances_are_those_of_float64_at_any_depth(depth: int, dtype: torch.dtype) -> None:
    """Within two roundings of 1, although tensor cores cut digits off."""
    rows = (0.3 * torch.randn(1, depth) + torch.randn(20, depth)).to(dtype)
    wanted = 1 - torch.nn.functional.normalize(rows.double()) @ torch.nn.functional.normalize(rows.double()).T
    got = gk.pairwise_cosine(rows, 20, backend="cuda")[0]
    torch.testing.assert_close(got.double(), wanted.fill_diagonal_(0), rtol=0, atol=2.4e-7)
