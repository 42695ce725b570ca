"""The parts of similarity_groups: trees against scipy, silhouettes and distances against scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.similarity_groups.prompts import (
    BACKENDS,
    DTYPES,
    FAST,
    INF,
    KERNELS,
    LINKAGES,
    assert_same,
    batch_of,
    grid_distances,
    share_of,
    silhouettes,
    sizes_for,
    tree,
)

SINGLE = torch.finfo(torch.float32).eps
# Heights are computed in float64 from the same distances and rounded to float32 once, by half an ulp; a whole ulp
# leaves room for another order of sums.
HEIGHTS: dict[str, Any] = {"rtol": SINGLE, "atol": 0.0}


def ragged(backend: str, count: int, *sizes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and ids in random order, and their distances, on the backend's device."""
    batch = batch_of(share_of(backend, count), ("mixture", "isotropic"), sizes_for(backend, *sizes), seed=seed)
    rows, ids = batch.rows.to(device_of(backend)), batch.ids.to(device_of(backend))
    return rows, ids, gk.pairwise_cosine(rows, ids, backend=backend)


def inner(distances: Tensor, prompt: int) -> np.ndarray:
    """Distances between a prompt's used places, in float64."""
    size = int(distances[prompt].diagonal().isfinite().sum())
    return distances[prompt, :size, :size].cpu().double().numpy()


# Trees


def members_of(merges: np.ndarray, size: int) -> list[list[int]]:
    """Rows of the new cluster of each (lo, hi) merge."""
    clusters, result = {place: [place] for place in range(size)}, []
    for lo, hi in merges.tolist():
        assert lo < hi and lo == min(clusters[lo]) and hi == min(clusters[hi]), "lowest places, the lower first"
        clusters[lo] = sorted(clusters[lo] + clusters.pop(hi))
        result.append(clusters[lo])
    assert len(clusters) <= 1 or size == 0
    return result


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tree_is_that_of_scipy(backend: str, linkage: str) -> None:
    """Compares heights and the cluster of every merge; ward uses the Euclidean distances of unit vectors."""
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    _, _, distances = ragged(backend, 400, 2, 3, 5, 8, 13, 40)
    result = gk.agglomerate(distances, linkage=linkage, backend=backend)
    merges, heights = result.merges.cpu().numpy(), result.heights.cpu().numpy()
    assert result.merges.dtype == torch.int32 and result.heights.dtype == torch.float32
    for prompt in range(len(distances)):
        square = inner(distances, prompt)
        size = len(square)
        condensed = square[np.triu_indices(size, 1)]
        expected = hierarchy.linkage(np.sqrt(2 * condensed) if linkage == "ward" else condensed, linkage)
        # scipy's ward takes a square root and squares it at every merge, a negligible float64 rounding here
        np.testing.assert_allclose(heights[prompt, : size - 1], expected[:, 2], **HEIGHTS)
        clusters = [[place] for place in range(size)]
        for a, b in expected[:, :2].astype(int):
            clusters.append(sorted(clusters[a] + clusters[b]))
        assert members_of(merges[prompt, : size - 1], size) == clusters[size:], prompt
        assert (merges[prompt, size - 1 :] == -1).all() and np.isposinf(heights[prompt, size - 1 :]).all()


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tree_of_the_largest_prompts(backend: str, linkage: str) -> None:
    for size in sizes_for(backend, 64, 256) if backend in FAST else (64,):
        _, _, distances = ragged(backend, 1, size) if backend in FAST else (0, 0, grid_distances(1, size, 1000))
        result = gk.agglomerate(distances.to(device_of(backend)), linkage=linkage, backend=backend)
        expected = tree(distances.cpu().double().numpy(), linkage)
        assert np.array_equal(result.merges.cpu().numpy(), expected.merges)
        np.testing.assert_allclose(result.heights.cpu().numpy(), expected.heights, **HEIGHTS)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_heights_ascend(backend: str, linkage: str) -> None:
    """Heights ascend in all four linkages, with and without ties."""
    for distances in (grid_distances(share_of(backend, 300), 9, 3), ragged(backend, 300, 3, 6, 9)[2]):
        heights = gk.agglomerate(distances.to(device_of(backend)), linkage=linkage, backend=backend).heights
        assert (heights[:, 1:] >= heights[:, :-1]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_places_that_are_not_in_use_take_no_part_in_a_tree(backend: str) -> None:
    """Used places keep their numbers in the merges."""
    distances = grid_distances(share_of(backend, 100), 7, 5)
    smaller = distances[:, [0, 2, 3, 5, 6]][:, :, [0, 2, 3, 5, 6]].contiguous()
    distances[:, [1, 4]] = distances[:, :, [1, 4]] = INF
    device, renamed = device_of(backend), torch.tensor([0, 2, 3, 5, 6, -1])
    for linkage in LINKAGES:
        got = gk.agglomerate(distances.to(device), linkage=linkage, backend=backend)
        expected = gk.agglomerate(smaller.to(device), linkage=linkage, backend=backend)
        assert torch.equal(got.merges[:, :4].cpu(), renamed.int()[expected.merges.cpu().long()])
        assert torch.equal(got.heights[:, :4], expected.heights)
        assert (got.merges[:, 4:] == -1).all() and got.heights[:, 4:].isposinf().all()


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_smallest_trees(backend: str, size: int) -> None:
    distances = (torch.ones(3, size, size) - torch.eye(size)).to(device_of(backend))
    result = gk.agglomerate(distances, backend=backend)
    assert result.merges.tolist() == [[[0, 1]]] * 3 if size == 2 else result.merges.shape == (3, 0, 2)
    assert result.heights.tolist() == [[1.0]] * 3 if size == 2 else result.heights.shape == (3, 0)
    none = gk.agglomerate(distances[:0], backend=backend)
    assert none.merges.shape == (0, max(size - 1, 0), 2) and none.heights.shape == (0, max(size - 1, 0))


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_of_a_prompt_are_a_cut_of_its_tree(backend: str, linkage: str) -> None:
    _, _, distances = ragged(backend, 100, 8)
    merges = gk.agglomerate(distances, linkage=linkage, backend=backend).merges.tolist()
    config = gk.SimilarityConfig(linkage, min_silhouette=-1.0, distance_floor=0.0)
    groups = gk.cluster_distances(distances, config=config, backend=backend)
    for prompt, labels in enumerate(groups.labels.tolist()):
        lowest = list(range(8))
        for lo, hi in merges[prompt][: 8 - int(groups.best_k[prompt])]:
            lowest = [lo if place == hi else place for place in lowest]
        assert [lowest.index(place) for place in lowest] == [labels.index(label) for label in labels]


@pytest.mark.parametrize("steps", [None, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 33])
@pytest.mark.parametrize("backend", KERNELS)
def test_parts_have_the_bits_of_the_reference(backend: str, size: int, steps: int | None) -> None:
    """Two prompts, the second with unused places; with `steps`, distances are multiples of 1 / steps with many ties."""
    values = torch.rand(2, size, size)
    values = values if steps is None else (values * steps).round() / steps
    distances = values.triu(1) + values.triu(1).mT
    left_out = torch.rand(size) < 0.3
    distances[1] = distances[1].masked_fill(left_out | left_out[:, None], INF)
    linkage = LINKAGES[(size + (steps is None)) % 4]
    config = gk.SimilarityConfig(linkage, min_silhouette=0.0, collapse="singletons")
    labels = (torch.arange(2 * size).view(2, size) * 7) % 5 - 1
    results = []
    for name in (backend, "reference"):
        on_device, of_places = distances.to(device_of(name)), labels.to(device_of(name))
        groups = gk.cluster_distances(on_device, config=config, backend=name)
        tree = gk.agglomerate(on_device, linkage=linkage, backend=name)
        results.append((groups, tree, gk.silhouette(on_device, of_places, backend=name)))
    for got, expected in zip(*results, strict=True):
        assert_same(got, expected)


# Silhouettes

# A sample is at most 1 and rounded to float32 once, by at most 6e-8; so is the mean, which
# scikit-learn sums in another order.
SCORES: dict[str, Any] = {"rtol": 0, "atol": 2 * SINGLE}


@pytest.mark.parametrize("left_out", [0.0, 0.3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_silhouettes_are_those_of_scikit_learn(backend: str, left_out: float) -> None:
    """Labels may have gaps; rows with negative labels are ignored."""
    metrics = pytest.importorskip("sklearn.metrics")
    _, _, distances = ragged(backend, 300, 3, 4, 8, 11, 30)
    names = torch.tensor([4, 0, 9, 2, 17])
    labels = names[torch.randint(len(names), distances.shape[:2])]
    labels[torch.rand(labels.shape) < left_out] = -3
    got = gk.silhouette(distances, labels.to(distances.device), backend=backend)
    score, samples = got.score.cpu().numpy(), got.samples.cpu().numpy()
    assert got.score.dtype == got.samples.dtype == torch.float32 and samples.shape == labels.shape
    compared = 0
    for prompt in range(len(distances)):
        square = inner(distances, prompt)
        kwargs = labels[prompt, : len(square)].numpy()
        in_use = kwargs >= 0
        rest = np.ones(labels.shape[1], bool)
        rest[: len(square)] = ~in_use
        assert np.isnan(samples[prompt, rest]).all(), "places that are not in use"
        if not 2 <= len(np.unique(kwargs[in_use])) < in_use.sum():
            continue
        compared += 1
        arguments = square[np.ix_(in_use, in_use)], kwargs[in_use]
        expected = metrics.silhouette_samples(*arguments, metric="precomputed")
        np.testing.assert_allclose(samples[prompt, : len(square)][in_use], expected, **SCORES)
        expected = metrics.silhouette_score(*arguments, metric="precomputed")
        np.testing.assert_allclose(score[prompt], expected, **SCORES)
    assert compared >= len(distances) / 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_silhouettes_where_scikit_learn_has_none(backend: str) -> None:
    """A single label gives NaN; labels that are all different, and rows alone in their cluster, give 0."""
    distances = (torch.ones(1, 4, 4) - torch.eye(4)).to(device_of(backend))

    def of(*labels: int) -> gk.Silhouette:
        return gk.silhouette(distances, torch.tensor([labels], device=distances.device), backend=backend)

    assert of(3, 3, 3, 3).score.isnan().all() and of(-1, -1, -1, -1).score.isnan().all()
    assert of(-1, 2, 2, -1).score.isnan().all() and of(-1, 2, -1, -1).score.isnan().all()
    assert of(0, 1, 2, 3).samples.tolist() == [[0, 0, 0, 0]] and of(0, 1, 2, 3).score.item() == 0
    assert of(5, 1, -1, -1).samples[0, :2].tolist() == [0, 0] and of(5, 1, -1, -1).samples[0, 2:].isnan().all()
    assert of(0, 0, 0, 1).samples.tolist() == [[0, 0, 0, 0]], "as near to its own as to the others"
    same = gk.silhouette(
        torch.zeros_like(distances), torch.tensor([[0, 0, 1, 1]]).to(distances.device), backend=backend
    )
    assert same.samples.tolist() == [[0, 0, 0, 0]] and same.score.item() == 0, "0 / 0"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_of_every_integer_type(backend: str, dtype: torch.dtype) -> None:
    distances = grid_distances(4, 6, 5).to(device_of(backend))
    labels = torch.tensor([7, 0, 7, 100, 0, 100], device=distances.device).expand(4, 6)
    expected = silhouettes(distances.cpu().numpy(), np.tile([0, 1, 0, 2, 1, 2], (4, 1)))
    got = gk.silhouette(distances, labels.to(dtype), backend=backend).samples
    np.testing.assert_allclose(got.cpu().numpy(), expected, **SCORES)


@pytest.mark.parametrize("names", [(10**6, 2**31 - 1, 0), (2**31, 2**32, 2**33 + 5), (2**32, 2**62, 0)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_of_any_size(backend: str, names: tuple[int, ...]) -> None:
    """Labels can be the group_ids of a large batch or hashes: distinct and not negative."""
    distances = grid_distances(4, 6, 5).to(device_of(backend))
    which = [0, 1, 0, 2, 1, 2]
    labels = torch.tensor([names[i] for i in which], device=distances.device).expand(4, 6)
    got = gk.silhouette(distances, labels, backend=backend).samples
    np.testing.assert_allclose(
        got.cpu().numpy(), silhouettes(distances.cpu().numpy(), np.tile(which, (4, 1))), **SCORES
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_of_rows_are_those_of_their_places(backend: str) -> None:
    """Labels of rows [N], with ids in any order and with an integer group size."""
    rows, ids, distances = ragged(backend, 100, 2, 5, 8, seed=3)
    groups = gk.similarity_groups(rows, ids, backend=backend)
    padded = torch.full(distances.shape[:2], -1, dtype=torch.int32, device=rows.device)
    for prompt, name in enumerate(ids.unique()):
        mine = groups.labels[ids == name]
        padded[prompt, : len(mine)] = mine
    expected = gk.silhouette(distances, padded, backend=backend)
    got = gk.silhouette(distances, groups.labels, ids, backend=backend)
    assert torch.equal(got.score.nan_to_num(nan=9), expected.score.nan_to_num(nan=9))
    for prompt, name in enumerate(ids.unique()):
        mine = got.samples[ids == name]
        assert torch.equal(mine.nan_to_num(nan=9), expected.samples[prompt, : len(mine)].nan_to_num(nan=9))
    clustered = groups.verdict == gk.Verdict.CLUSTERED
    torch.testing.assert_close(got.score[clustered], groups.silhouette[clustered], **SCORES)

    near = gk.pairwise_cosine(rows[:10], 5, backend=backend)
    labels = torch.tensor([0, 0, 1, 1, -1, 2, 2, 0, 0, 0], device=rows.device)
    by_size = gk.silhouette(near, labels, 5, backend=backend)
    of_places = gk.silhouette(near, labels.view(2, 5), backend=backend)
    assert_same(by_size, gk.Silhouette(of_places.score, of_places.samples.flatten()))
    assert by_size.samples.shape == (10,) and by_size.samples[4].isnan()


# Distances


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 384, 1025])
@pytest.mark.parametrize("backend", BACKENDS)
def test_distances_are_those_of_scikit_learn(backend: str, width: int, dtype: torch.dtype) -> None:
    """Compares with scikit-learn's float64 distances of the same values.

    A float32 sum of D products is off by at most D / 2 roundings of the sum of their magnitudes, and typically by a few
    times sqrt(D). By Cauchy-Schwarz that sum is at most the product of the norms, so one rounding of it is one rounding
    of 1 in s. Both norms and the dot product have this error, and 1 - s is rounded once more.
    """
    pairwise = pytest.importorskip("sklearn.metrics.pairwise")
    for size in sizes_for(backend, 3, 9, 33):
        rows = (torch.randn(size, width) + 0.5 * torch.randn(width)).to(dtype)
        rows[0] *= 0.01
        got = gk.pairwise_cosine(rows.to(device_of(backend)), size, backend=backend)[0].cpu()
        expected = pairwise.cosine_distances(rows.double().numpy())
        np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=SINGLE * (1 + 2 * width**0.5))


@pytest.mark.parametrize("backend", BACKENDS)
def test_distances_are_laid_out_by_prompt_and_place(backend: str) -> None:
    rows, ids, distances = ragged(backend, 40, 1, 2, 5, 9)
    most = int(ids.unique(return_counts=True)[1].max())
    assert distances.shape == (len(ids.unique()), most, most) and distances.dtype == torch.float32
    for prompt, name in enumerate(ids.unique()):
        mine = rows[ids == name]
        alone = gk.pairwise_cosine(mine, len(mine), backend=backend)[0]
        size = len(mine)
        assert torch.equal(distances[prompt, :size, :size], alone)
        assert distances[prompt, size:].isposinf().all() and distances[prompt, :, size:].isposinf().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_distances_in_float64_are_taken_as_float32(backend: str) -> None:
    distances = ragged(backend, 20, 6)[2]
    for call in (gk.cluster_distances, gk.agglomerate):
        assert_same(call(distances.double(), backend=backend), call(distances, backend=backend))
    labels = torch.tensor([0, 0, 1, 1, 2, 2], device=distances.device).expand(len(distances), 6)
    expected = gk.silhouette(distances, labels, backend=backend)
    assert_same(gk.silhouette(distances.double(), labels, backend=backend), expected)
