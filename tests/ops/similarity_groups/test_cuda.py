"""The CUDA kernels against those of the CPU, at the sizes where their code changes and wherever matrices are stored."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch

import grpo_kernels as gk
from tests import emulation
from tests.harness import needs_cpu_kernels
from tests.ops.similarity_groups.prompts import INF, LINKAGES, assert_same, grid_distances

pytestmark = emulation.only
# Around multiples of a warp, and of the sizes from which on nearest clusters are kept (97) and the matrix is in global
# memory (162).
EDGES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97, 128, 129, 161, 162)
# The matrix fits into shared memory up to 85, 105 and 161 rows; the sizes are just below and above these limits.
LIMITS, SIZES = (64, 99, 227), (85, 86, 105, 106, 128, 161, 162)


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


@pytest.mark.parametrize(("kilobytes", "largest"), zip(LIMITS, (85, 105, 161), strict=True))
def test_matrices_are_in_shared_memory_as_far_as_they_fit(kilobytes: int, largest: int) -> None:
    with emulation.shared_memory(kilobytes):
        for size, is_shared in ((largest, "true"), (largest + 1, "false")):
            distances = torch.zeros(1, size, size)
            names = emulation.launched(
                lambda distances=distances: gk.cluster_distances(distances, backend="cuda"), with_arguments=True
            )
            assert names == {f"similarity_groups.cluster_kernel<false, {is_shared}>"}


def test_a_block_never_asks_for_more_than_there_is() -> None:
    """42 KB suffice for 256 rows; 41 KB do not even hold their vectors, without the matrix."""
    with emulation.shared_memory(42):
        assert gk.similarity_groups(torch.randn(256, 5), 256, backend="cuda").labels.shape == (256,)
    with emulation.shared_memory(41), pytest.raises(RuntimeError, match="invalid configuration"):
        gk.similarity_groups(torch.randn(256, 5), 256, backend="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("depth", [40, 1024, 1027, 4096])
def test_distances_are_those_of_float64_at_any_depth(depth: int, dtype: torch.dtype) -> None:
    """Within two roundings of 1, although tensor cores cut digits off."""
    rows = (0.3 * torch.randn(1, depth) + torch.randn(20, depth)).to(dtype)
    wanted = 1 - torch.nn.functional.normalize(rows.double()) @ torch.nn.functional.normalize(rows.double()).T
    got = gk.pairwise_cosine(rows, 20, backend="cuda")[0]
    torch.testing.assert_close(got.double(), wanted.fill_diagonal_(0), rtol=0, atol=2.4e-7)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "depth"), [(65, 40), (128, 520), (130, 328), (256, 72)])
def test_no_distance_depends_on_the_tiles(size: int, depth: int, dtype: torch.dtype) -> None:
    """Tiles have up to 128 rows, 32 on a device with little shared memory, and at most 16 for a prompt of so few."""
    rows = (torch.randn(1, depth) + torch.randn(2 * size, depth)).to(dtype)
    rows[size // 2] = rows[size - 1] = rows[3]
    wide = gk.pairwise_cosine(rows, size, backend="cuda")
    assert not wide[0, [3, size // 2, size - 1]][:, [3, size // 2, size - 1]].any()
    for kilobytes in LIMITS[:2]:
        with emulation.shared_memory(kilobytes):
            assert torch.equal(gk.pairwise_cosine(rows, size, backend="cuda"), wide)
    unaligned = torch.cat([rows.flatten()[:1], rows.flatten()])[1:].view(rows.shape)
    assert torch.equal(gk.pairwise_cosine(unaligned, size, backend="cuda"), wide)
    taken = torch.arange(0, size, size // 16)[:16]
    assert torch.equal(gk.pairwise_cosine(rows[taken], 16, backend="cuda")[0], wide[0, taken][:, taken])


class Bits(NamedTuple):
    """Results of every part, by name, to be compared to the last digit."""

    groups: gk.SimilarityGroups
    tree: gk.Dendrogram
    silhouette: gk.Silhouette


# Number of different distances. With few, all pairs that are merged by single linkage are at the smallest.
LEVELS = {"many ties": lambda size: 3, "some ties": lambda size: size}


@functools.cache
def distances_of(kind: str, size: int) -> torch.Tensor:
    """Two prompts; in the second, a third of the places is not in use."""
    if kind in LEVELS:
        distances = grid_distances(2, size, LEVELS[kind](size), seed=size)
    else:
        random = torch.Generator().manual_seed(size)
        centres = torch.randn(5, 6, generator=random)
        rows = centres[torch.randint(5, (2 * size,), generator=random)]
        rows += 0.3 * torch.randn(2 * size, 6, generator=random)
        distances = gk.pairwise_cosine(rows, size, backend="reference")
    absent = torch.arange(0, size, 3)
    distances[1, absent] = distances[1, :, absent] = INF
    return distances


def bits(distances: torch.Tensor, linkage: str, k_max: int | None, backend: str) -> Bits:
    config = gk.SimilarityConfig(linkage, k_max=k_max, min_silhouette=-1.0)
    labels = torch.arange(distances.shape[1]).square().remainder(11).sub(1).expand(2, -1)
    return Bits(
        gk.cluster_distances(distances, config=config, backend=backend),
        gk.agglomerate(distances, linkage=linkage, backend=backend),
        gk.silhouette(distances, labels, backend=backend),
    )


@needs_cpu_kernels
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", [*LEVELS, "clusters"])
@pytest.mark.parametrize("size", EDGES)
def test_results_have_the_bits_of_the_cpu(size: int, kind: str, linkage: str) -> None:
    distances = distances_of(kind, size)
    for k_max in (None, 5):
        expected = bits(distances, linkage, k_max, "cpu")
        for part, wanted in zip(bits(distances, linkage, k_max, "cuda"), expected, strict=True):
            assert_same(part, wanted)


@needs_cpu_kernels
def test_the_largest_prompts_have_the_bits_of_the_cpu() -> None:
    for kind in ("some ties", "clusters"):
        distances = distances_of(kind, 256)
        for part, wanted in zip(
            bits(distances, "average", 20, "cuda"), bits(distances, "average", 20, "cpu"), strict=True
        ):
            assert_same(part, wanted)
