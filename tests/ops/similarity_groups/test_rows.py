"""Rows that similarity_groups must treat alike or ignore: duplicates, zeros, NaN, masks; independence of prompts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import cpu_threads, device_of, needs_cpu_kernels
from tests.ops.similarity_groups.prompts import (
    BACKENDS,
    DTYPES,
    FAST,
    INF,
    KINDS,
    NAN,
    assert_same,
    batch_of,
    share_of,
    sizes_for,
)

WIDTHS = (1, 7, 8, 31, 512, 513, 1024, 1500)
Status = gk.RowStatus


def cosine(rows: Tensor, backend: str, **options: Any) -> Tensor:
    """Distances within one prompt."""
    return gk.pairwise_cosine(rows.to(device_of(backend)), len(rows), backend=backend, **options)[0].cpu()


def groups_of(rows: Tensor, ids: Tensor | int, backend: str, **options: Any) -> gk.SimilarityGroups:
    device = device_of(backend)
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    ids = ids.to(device) if isinstance(ids, Tensor) else ids
    got = gk.similarity_groups(rows.to(device), ids, backend=backend, **options)
    return gk.SimilarityGroups(*(field.cpu() for field in got))


def assert_same_prompt(whole: gk.SimilarityGroups, rows: Tensor, prompt: int, alone: gk.SimilarityGroups) -> None:
    """Checks that a prompt in a batch and the prompt alone agree bit for bit."""
    for field in ("labels", "status"):
        assert torch.equal(getattr(whole, field)[rows], getattr(alone, field)), field
    for field in ("num_groups", "silhouette", "best_k", "verdict"):
        assert torch.equal(getattr(whole, field)[prompt], getattr(alone, field)[0]), field


# Duplicates


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_rows_are_at_distance_zero_wherever_they_stand(backend: str, width: int, dtype: torch.dtype) -> None:
    """Duplicates at any places are at distance 0 and have bitwise equal distances to all other rows."""
    sizes = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 255, 256)
    for size in sizes_for(backend, *(sizes if backend in FAST else (2, 5, 8, 9, 16, 17))):
        distinct = torch.randn(max(size // 3, 1), width).to(dtype)
        which = torch.arange(size) % len(distinct) if size % 2 else torch.randint(len(distinct), (size,))
        distances = cosine(distinct[which], backend)
        twins = which[:, None] == which
        assert (distances[twins] == 0).all(), size
        assert torch.equal(distances, distances.mT) and not distances.diagonal().any(), size
        assert ((distances >= 0) & (distances <= 2)).all(), size
        if width > 8:
            assert (distances[~twins] > 0.1).all(), size
        first = [which.tolist().index(row) for row in which.tolist()]
        assert torch.equal(distances, distances[first][:, first]), size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7, 513])
@pytest.mark.parametrize("backend", BACKENDS)
def test_distances_move_with_their_rows_and_do_not_depend_on_others(
    backend: str, width: int, dtype: torch.dtype
) -> None:
    for size in sizes_for(backend, 6, 17, 65):
        rows, order = torch.randn(size, width).to(dtype), torch.randperm(size)
        distances = cosine(rows, backend)
        assert torch.equal(cosine(rows[order], backend), distances[order][:, order])
        few = order[: size // 2]
        assert torch.equal(cosine(rows[few], backend), distances[few][:, few])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_and_small_rows_have_the_distances_of_their_directions(backend: str, dtype: torch.dtype) -> None:
    """Scaling by powers of two changes no digit of the sums or the quotient while squares stay in float32's range."""
    rows = torch.randn(8, 40).to(dtype)
    scales = torch.tensor([2.0**e for e in (-6, -3, -1, 0, 1, 3, 6, 2)])
    if dtype is not torch.float16:  # float16 has 5 exponent bits
        scales = scales**5
    scaled = (rows.float() * scales[:, None]).to(dtype)
    assert torch.equal(scaled.float() / scales[:, None], rows.float())
    assert torch.equal(cosine(scaled, backend), cosine(rows, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_opposite_rows_are_at_distance_two_and_orthogonal_ones_at_one(backend: str) -> None:
    rows = torch.tensor([[3.0, 0.0], [-0.5, 0.0], [0.0, 2.0]])
    assert cosine(rows, backend).tolist() == [[0, 2, 1], [2, 0, 1], [1, 1, 0]]


# Zero vectors and non-finite rows


def distance_error(products: int, backend: str) -> float:
    """Largest error of the distance of two rows whose sums have so many products other than 0.

    The inner product, and either norm by half, is off by one rounding of 1 a product, and 1 - s by one more. Tensor
    cores cut off the digits of each product, which is up to two roundings; the emulator's those of the sum alone.
    """
    is_cut = backend == "cuda" and device_of(backend).type == "cuda"
    return (2 * products * (2 if is_cut else 1) + 1) * 2.0**-24


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_vectors_are_at_distance_one_from_all_others(backend: str, dtype: torch.dtype) -> None:
    rows = torch.randn(6, 33).to(dtype)
    rows[1], rows[4] = 0.0, -0.0
    distances = cosine(rows, backend)
    others = ~torch.eye(6, dtype=torch.bool)
    for zero in (1, 4):
        assert (distances[zero][others[zero]] == 1).all() and distances[zero, zero] == 0
    got = groups_of(rows, 6, backend)
    assert got.status.tolist() == [0, Status.ZERO_VECTOR, 0, 0, Status.ZERO_VECTOR, 0]
    assert (got.labels >= 0).all()
    assert groups_of(torch.zeros(3, 4, dtype=dtype), 3, backend).verdict.tolist() == [gk.Verdict.ALL_DIFFERENT]


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_finite_are_as_if_absent(backend: str, dtype: torch.dtype, bad: float) -> None:
    for where, column in itertools.product(((0,), (4, 8), (0, 1, 2, 3, 5)), (0, 40, 64)):
        rows = torch.randn(9, 65).to(dtype)
        rows[:5] += 2
        keep = torch.tensor([row not in where for row in range(9)])
        clean = groups_of(rows[keep], int(keep.sum()), backend)
        rows[~keep, column] = bad
        got = groups_of(rows, 9, backend)
        assert got.status.tolist() == [0 if kept else Status.NOT_FINITE for kept in keep]
        assert (got.labels[~keep] == -1).all() and (got.group_ids[~keep] == -1).all()
        assert_same_prompt(gk.SimilarityGroups(got.labels[keep], *got[1:6], got.status[keep]), ..., 0, clean)
        distances = cosine(rows, backend)
        assert torch.equal(distances[keep][:, keep], cosine(rows[keep], backend))
        assert distances[~keep].isposinf().all() and distances[:, ~keep].isposinf().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_with_a_square_beyond_float32_is_not_finite(backend: str) -> None:
    """The limit is 3.4e38: 1.8e19 squared is below; 1.9e19 squared and the sum of two squares of 1.4e19 are above."""
    rows = torch.tensor([[1.8e19, 0.0], [0.0, 1.9e19], [1.4e19, 1.4e19], [1e18, 1e18], [1.0, 1.0]])
    got = groups_of(rows, 5, backend)
    assert got.status.tolist() == [0, Status.NOT_FINITE, Status.NOT_FINITE, 0, 0]
    in_use = [0, 3, 4]
    wanted = torch.tensor([[0, 1 - 0.5**0.5, 1 - 0.5**0.5], [1 - 0.5**0.5, 0, 0], [1 - 0.5**0.5, 0, 0]])
    error = distance_error(2, backend)
    torch.testing.assert_close(cosine(rows, backend)[in_use][:, in_use], wanted, rtol=0, atol=error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_with_a_square_below_float32_is_a_zero_vector(backend: str) -> None:
    """The corresponding lower limit makes backends that sum in float32 and in float64 agree."""
    rows = torch.randn(5, 3)
    rows[1] *= 1e-25
    assert groups_of(rows, 5, backend).status.tolist() == [0, Status.ZERO_VECTOR, 0, 0, 0]


# Masks


@pytest.mark.parametrize("groups", ["int", "ids"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_rows_are_as_if_absent(backend: str, groups: str) -> None:
    """The contents of masked rows do not matter."""
    prompts, size = share_of(backend, 200), 8
    rows = torch.randn(prompts, 1, 20) + torch.randn(prompts, size, 20) * torch.rand(prompts, size, 1)
    rows = rows.flatten(0, 1)
    valid = torch.rand(len(rows)) < 0.7
    rows[~valid] = torch.tensor([NAN, INF, 0.0, 1.0])[torch.randint(4, (int((~valid).sum()), 1))].expand(-1, 20)
    ids = torch.arange(prompts).repeat_interleave(size)
    got = groups_of(rows, size if groups == "int" else ids, backend, valid=valid)
    there = ids[valid].unique()
    left = groups_of(rows[valid], ids[valid], backend)
    assert torch.equal(got.labels[valid], left.labels) and (got.labels[~valid] == -1).all()
    for field in ("num_groups", "silhouette", "best_k", "verdict"):
        assert torch.equal(getattr(got, field)[there], getattr(left, field)), field
    assert (got.group_ids[~valid] == -1).all() and (got.group_ids[valid] >= 0).all()
    assert not got.status[valid].any() and (got.status[~valid] & Status.MASKED).all()
    arguments = [t.to(device_of(backend)) for t in (rows, valid)]
    distances = gk.pairwise_cosine(arguments[0], size, valid=arguments[1], backend=backend).cpu()
    of_valid = valid.view(prompts, size)
    assert torch.equal(distances.isposinf(), ~(of_valid[:, :, None] & of_valid[:, None]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_valid_is_no_mask(backend: str) -> None:
    batch = batch_of(3, ["mixture", "bad"], sizes_for(backend, 5, 8))
    expected = groups_of(batch.rows, batch.ids, backend)
    every = torch.ones(len(batch.ids), dtype=torch.bool)
    assert_same(groups_of(batch.rows, batch.ids, backend, valid=every), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_status_of_places_tells_which_are_left_out(backend: str) -> None:
    distances = gk.pairwise_cosine(torch.randn(6, 5).to(device_of(backend)), 3, backend=backend)
    distances[0, 2], distances[0, :, 2] = INF, INF
    got = gk.cluster_distances(distances, backend=backend)
    assert got.labels.tolist() == [[0, 0, -1], got.labels[1].tolist()] and (got.labels[1] >= 0).all()
    assert got.status.tolist() == [[0, 0, Status.MASKED], [0, 0, 0]]
    assert got.group_ids.shape == (2, 3) and got.group_ids[0, 2] == -1
    assert not set(got.group_ids[0].tolist()) & set(got.group_ids[1].tolist())


# Independence


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_does_not_depend_on_its_neighbours_nor_on_shards(backend: str) -> None:
    """A prompt has the same result alone, in any shard, and in the full batch with one much larger prompt."""
    batch = batch_of(share_of(backend, 120), tuple(KINDS), sizes_for(backend, 1, 3, 4, 8, 21), width=37)
    names = batch.ids.unique()
    whole = groups_of(batch.rows, batch.ids, backend)
    distances = gk.pairwise_cosine(*(t.to(device_of(backend)) for t in (batch.rows, batch.ids)), backend=backend).cpu()
    for prompt, name in enumerate(names):
        mine = batch.ids == name
        alone = groups_of(batch.rows[mine], int(mine.sum()), backend)
        assert_same_prompt(whole, mine, prompt, alone)
        size = int(mine.sum())
        assert torch.equal(distances[prompt, :size, :size], cosine(batch.rows[mine], backend))
    for shards in (2, 5):
        for shard in range(shards):
            mine = torch.isin(batch.ids, names[shard::shards])
            if not mine.any():
                continue
            part = groups_of(batch.rows[mine], batch.ids[mine], backend)
            assert torch.equal(part.labels, whole.labels[mine])
            for field in ("num_groups", "silhouette", "best_k", "verdict"):
                assert torch.equal(getattr(part, field), getattr(whole, field)[shard::shards]), field


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_does_not_depend_on_its_id_nor_on_where_its_rows_are(backend: str) -> None:
    batch = batch_of(share_of(backend, 120), ("mixture", "isotropic", "bad"), sizes_for(backend, 2, 5, 9))
    names, at = batch.ids.unique(return_inverse=True)
    order = batch.ids.argsort(stable=True)  # rows grouped by prompt, in their original order
    expected = groups_of(batch.rows[order], batch.ids[order], backend)
    renamed = torch.randperm(len(names))
    got = groups_of(batch.rows, renamed[at] * 7 - 100, backend)
    assert torch.equal(got.labels[order], expected.labels) and torch.equal(got.status[order], expected.status)
    for field in ("num_groups", "silhouette", "best_k", "verdict"):
        assert torch.equal(getattr(got, field)[renamed], getattr(expected, field)), field


@pytest.mark.parametrize("backend", BACKENDS)
def test_knowing_the_sizes_changes_nothing(backend: str) -> None:
    batch = batch_of(share_of(backend, 120), ("mixture", "bad"), sizes_for(backend, 1, 4, 8, 13))
    count, most = len(batch.ids.unique()), int(batch.ids.unique(return_counts=True)[1].max())
    expected = groups_of(batch.rows, batch.ids, backend)
    for sizes in ({"num_groups": count}, {"max_size": most}, {"num_groups": count, "max_size": most}):
        assert_same(groups_of(batch.rows, batch.ids, backend, **sizes), expected)
    more = groups_of(batch.rows, batch.ids, backend, num_groups=count + 3, max_size=most + 9)
    assert_same(gk.SimilarityGroups(*more[:2], *(field[:count] for field in more[2:6]), more[6]), expected)
    assert more.verdict[count:].tolist() == [gk.Verdict.EMPTY] * 3
    by_size = groups_of(batch.rows[:12], 4, backend)
    assert_same(groups_of(batch.rows[:12], 4, backend, num_groups=3, max_size=4), by_size)


@needs_cpu_kernels
@pytest.mark.parametrize("size", [8, 64, 200])
def test_number_of_threads_changes_no_bit(size: int) -> None:
    rows = torch.randn(size * 9, 130) + torch.randn(9, 130).repeat_interleave(size, 0)
    results = []
    for threads in (1, 2, 5):
        with cpu_threads(threads):
            distances = gk.pairwise_cosine(rows, size, backend="cpu")
            results.append((*gk.similarity_groups(rows, size, backend="cpu"), distances))
    for fields in zip(*results, strict=True):
        assert torch.equal(fields[0], fields[1]) and torch.equal(fields[0], fields[2])
