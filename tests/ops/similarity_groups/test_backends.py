"""Kernels of similarity_groups against the reference: distances within the budget, all else to the last bit.

Faults that this is for: a sum with a wrong tail (vectors, chunks, bands, tiles), or in an order that depends on where
rows are, so that equal rows are apart; -0 that sorts below 0; a barrier or a neighbour search missing in a tree; a cut
memory that overlaps; sizes around warps, shared memory and the change of the search at 96; labels or ids of the wrong
rows, and ids that two prompts share.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import grpo_kernels as gk
from tests import emulation
from tests.harness import assert_within_budget, device_of
from tests.ops.similarity_groups import cases
from tests.ops.similarity_groups.cases import BACKENDS, DTYPES, KERNELS, LINKAGES, assert_same

# Distances


def assert_distances(backend: str, batch: cases.Batch) -> None:
    """Compares similarities, whose sums have the magnitude of 1, and what is infinite, 0 or symmetric, exactly."""
    placed = batch.to(device_of(backend))
    got = gk.pairwise_cosine(placed.rows, placed.ids, valid=placed.valid, backend=backend).cpu()
    working = gk.pairwise_cosine(*batch[:2], valid=batch.valid, backend="reference")
    gold = gk.pairwise_cosine(batch.rows.double(), batch.ids, valid=batch.valid, backend="reference")
    assert_within_budget(1 - got, 1 - working, 1 - gold.double())
    assert torch.equal(got, got.mT) and got.min(-1).values.eq(0).logical_or(got.diagonal(dim1=1, dim2=2).isinf()).all()
    for p, rows in enumerate(batch.prompts()):
        same = (rows[:, None] == rows).all(-1) & (rows != 0).any(-1)
        inner = got[p, : len(rows), : len(rows)]
        assert not inner[same & inner.isfinite()].any() and inner[inner.isfinite()].ge(0).all()


@pytest.mark.parametrize("backend", KERNELS)
@given(batch=cases.batches())
def test_distances_are_those_of_the_reference(backend: str, batch: cases.Batch) -> None:
    assert_distances(backend, batch)


# Sizes around vectors, bands and tiles; the largest tile has 128 rows, the largest block of columns 1024.
SHAPES = [(2, 4096), (5, 31), (9, 512), (16, 1024), (17, 7), (33, 1027), (48, 513), (64, 8), (65, 40), (130, 328)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (256, 72)], ids=str)
@pytest.mark.parametrize("backend", KERNELS)
def test_equal_rows_are_at_distance_zero_wherever_they_stand(
    backend: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Duplicates have bitwise equal distances to all others; a distance does not depend on any other row."""
    size, width = shape
    distinct = torch.randn(size // 3 + 1, width)
    which = torch.randint(len(distinct), (size,))
    rows = (distinct + distinct[0])[which].to(dtype)
    assert_distances(backend, cases.Batch(rows, torch.zeros(size).long(), torch.ones(size).bool()))
    placed = rows.to(device_of(backend))
    d = gk.pairwise_cosine(placed, size, backend=backend)[0].cpu()
    first = [which.tolist().index(row) for row in which.tolist()]
    assert torch.equal(d, d[first][:, first])
    order = torch.randperm(size)[:16]
    assert torch.equal(gk.pairwise_cosine(placed[order], len(order), backend=backend)[0].cpu(), d[order][:, order])


# Trees, cuts and silhouettes of the same distances


def assert_parts(backend: str, distances: Tensor, config: gk.SimilarityConfig) -> None:
    placed = distances.to(device_of(backend))
    labels = torch.arange(distances.shape[1]).square().remainder(11).sub(1).mul(2**32).expand(len(distances), -1)
    results: list[list[Any]] = []
    for name, d in ((backend, placed), ("reference", distances)):
        groups = gk.cluster_distances(d, config=config, backend=name)
        scores = gk.silhouette(d, labels.to(d.device), backend=name)
        results.append([groups, gk.agglomerate(d, linkage=config.linkage, backend=name), scores])
    for result, expected in zip(*results, strict=True):
        assert_same(result, expected)


@pytest.mark.parametrize("backend", KERNELS)
@given(distances=cases.distances(), config=cases.configs)
def test_parts_have_the_bits_of_the_reference(backend: str, distances: Tensor, config: gk.SimilarityConfig) -> None:
    assert_parts(backend, distances, config)


# Around multiples of a warp, and of the sizes from which on nearest clusters are kept (97) and the matrix is in global
# memory (162).
EDGES = (15, 16, 31, 32, 33, 63, 64, 65, 96, 97, 128, 129, 161, 162, 256)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("levels", [3, 40, None])
@pytest.mark.parametrize("size", EDGES)
@pytest.mark.parametrize("backend", KERNELS)
def test_large_prompts_have_the_bits_of_the_reference(
    backend: str, size: int, levels: int | None, linkage: str
) -> None:
    k_max = 20 if size % 2 else None
    config = gk.SimilarityConfig(linkage, k_max=k_max, min_silhouette=0.5 if levels else -1.0)
    distances = torch.cat([cases.of_levels(1, size, levels, size, absent) for absent in (0.0, 0.3)])
    assert_parts(backend, distances, config)


# The whole op


@pytest.mark.parametrize("backend", BACKENDS)
@given(batch=cases.batches(max_size=12), config=cases.configs)
def test_one_call_gives_what_its_two_parts_give(backend: str, batch: cases.Batch, config: gk.SimilarityConfig) -> None:
    placed = batch.to(device_of(backend))
    whole = gk.similarity_groups(placed.rows, placed.ids, valid=placed.valid, config=config, backend=backend)
    distances = gk.pairwise_cosine(placed.rows, placed.ids, valid=placed.valid, backend=backend)
    parts = gk.cluster_distances(distances, config=config, backend=backend)
    for field in ("num_groups", "silhouette", "best_k", "verdict"):
        assert torch.equal(getattr(whole, field), getattr(parts, field)), field
    assert torch.equal(whole.labels, gk.diversity.unpad_rows(parts.labels, placed.ids))
    of_rows = gk.silhouette(distances, whole.labels, placed.ids, backend=backend)
    scores = gk.silhouette(distances, parts.labels, backend=backend)
    assert_same(of_rows, scores._replace(samples=gk.diversity.unpad_rows(scores.samples, placed.ids)))
    status = gk.similarity_groups(batch.rows, batch.ids, valid=batch.valid, backend="reference").status
    assert torch.equal(whole.status.cpu(), status)
    assert torch.equal(parts.status, distances.diagonal(dim1=1, dim2=2).isinf().to(torch.uint8))
    prompts = torch.arange(len(distances), device=distances.device)[:, None].expand(parts.labels.shape)
    for names, result in ((placed.ids, whole), (prompts, parts)):
        kept = result.labels >= 0
        assert torch.equal(result.group_ids >= 0, kept) and (result.group_ids[~kept] == -1).all()
        triples = torch.stack([names[kept].long(), result.labels[kept].long(), result.group_ids[kept]]).unique(dim=1)
        assert triples.shape[1] == len(triples[2].unique()) == result.num_groups.sum()


# Shared memory

# The matrix fits into shared memory of these kilobytes up to so many rows: on sm_75, sm_86 and sm_90.
LIMITS = {64: 85, 99: 105, 227: 161}


def launched(size: int) -> set[str]:
    call = functools.partial(gk.cluster_distances, torch.zeros(1, size, size), backend="cuda")
    return emulation.launched(call, with_arguments=True)


@emulation.only
@pytest.mark.parametrize("kilobytes", LIMITS)
def test_matrices_are_in_shared_memory_as_far_as_they_fit(kilobytes: int) -> None:
    """Wherever they are, and whatever tiles fit, results are the same."""
    largest, kernel = LIMITS[kilobytes], "similarity_groups.cluster_kernel<false, {}>"
    size = min(largest + 1, 128)
    d = cases.of_levels(1, size, None, seed=0)
    rows, labels = torch.randn(size, 40) + torch.randn(40), torch.arange(size).remainder(7)[None]

    def results() -> list[Tensor]:
        scores = gk.silhouette(d, labels, backend="cuda")
        groups = gk.similarity_groups(rows, size, backend="cuda")
        halves = gk.pairwise_cosine(rows.half(), size, backend="cuda")
        return [*groups, *gk.agglomerate(d, backend="cuda"), *scores, halves]

    expected = results()
    with emulation.shared_memory(kilobytes):
        torch.testing.assert_close(results(), expected, rtol=0, atol=0, equal_nan=True)
        assert launched(largest) == {kernel.format("true")} and launched(largest + 1) == {kernel.format("false")}


@emulation.only
def test_prompts_take_turns_where_matrices_are_in_global_memory() -> None:
    """There are matrices for 256 prompts; 1 KB of shared memory does not hold one of 8 rows."""
    with emulation.shared_memory(1):
        assert_parts("cuda", cases.of_levels(300, 8, 5, seed=0, absent=0.1), gk.SimilarityConfig())


@emulation.only
def test_a_block_never_asks_for_more_than_there_is() -> None:
    """42 KB suffice for 256 rows; 41 KB do not even hold their vectors, without the matrix."""
    with emulation.shared_memory(42):
        assert gk.similarity_groups(torch.randn(256, 5), 256, backend="cuda").labels.shape == (256,)
    with emulation.shared_memory(41), pytest.raises(RuntimeError, match="invalid configuration"):
        gk.similarity_groups(torch.randn(256, 5), 256, backend="cuda")
