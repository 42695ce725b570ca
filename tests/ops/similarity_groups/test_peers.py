"""The parts of similarity_groups against scikit-learn and scipy; test_reference.py chooses among their cuts.

Faults that this is for: those of our own reading of the definitions, which test_reference.py shares: another order of
merges or other heights than scipy's, a silhouette other than scikit-learn's, another cosine distance.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.similarity_groups.cases import BACKENDS, DTYPES, KINDS, LINKAGES, NAN, Batch

hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
metrics = pytest.importorskip("sklearn.metrics")

SINGLE = torch.finfo(torch.float32).eps
# Scores and samples are at most 1 and rounded to float32 once, by at most 6e-8; sums have another order.
SCORES = {"rtol": 0, "atol": 2 * SINGLE}


class Prompts:
    """Prompts in random order, with their distances by one backend."""

    def __init__(self, backend: str) -> None:
        random = np.random.default_rng(7)
        # the reference loops over prompts, and the emulator is slow
        count, largest = (100, [40, 200, 256]) if backend == "cpu" else (12, [30])
        sizes = [*random.choice([2, 3, 4, 5, 7, 8, 13, 17], size=count), *largest]
        kinds = [("mixture", "isotropic", "duplicates")[i % 3] for i in range(len(sizes))]
        rows = np.concatenate([KINDS[kind](size, 16, random) for kind, size in zip(kinds, sizes, strict=True)])
        ids, order = np.repeat(np.arange(len(sizes)), sizes), random.permutation(len(rows))
        batch = Batch(*(torch.from_numpy(x[order]) for x in (rows, ids, np.ones(len(ids), bool))))
        placed = batch._replace(rows=batch.rows.float()).to(device_of(backend))
        self.distances = gk.pairwise_cosine(placed.rows, placed.ids, backend=backend)
        sizes = placed.ids.unique(return_counts=True)[1].tolist()
        self.inner = [d[:n, :n].cpu().double().numpy() for n, d in zip(sizes, self.distances, strict=True)]


@functools.cache
def prompts_of(backend: str) -> Prompts:
    return Prompts(backend)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_are_those_of_scipy(backend: str, linkage: str) -> None:
    """The height and the cluster of every merge; ward uses the Euclidean distances of unit vectors."""
    prompts = prompts_of(backend)
    result = gk.agglomerate(prompts.distances, linkage=linkage, backend=backend)
    merges, heights = result.merges.cpu().tolist(), result.heights.cpu().numpy()
    for p, square in enumerate(prompts.inner):
        size = len(square)
        condensed = square[np.triu_indices(size, 1)]
        expected = hierarchy.linkage(np.sqrt(2 * condensed) if linkage == "ward" else condensed, linkage)
        np.testing.assert_allclose(heights[p, : size - 1], expected[:, 2], rtol=SINGLE, atol=1e-7)
        if len(np.unique(condensed)) < len(condensed):
            continue  # duplicates: scipy breaks ties otherwise
        clusters, ours = [[place] for place in range(size)], {place: [place] for place in range(size)}
        for (a, b), (low, high) in zip(expected[:, :2].astype(int), merges[p], strict=False):
            clusters.append(sorted(clusters[a] + clusters[b]))
            assert low < high and (low, high) == (min(ours[low]), min(ours[high]))
            ours[low] = sorted(ours[low] + ours.pop(high))
            assert ours[low] == clusters[-1]


@pytest.mark.parametrize("left_out", [0.0, 0.3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_silhouettes_are_those_of_scikit_learn(backend: str, left_out: float) -> None:
    """Labels may have gaps; rows with negative labels are ignored. A single cluster has no score, and lone rows 0."""
    prompts, names = prompts_of(backend), torch.tensor([4, 0, 2**32, 2**32 + 4, 17])
    labels = names[torch.randint(len(names), prompts.distances.shape[:2])]
    labels[torch.rand(labels.shape) < left_out] = -3
    got = gk.silhouette(prompts.distances, labels.to(prompts.distances.device), backend=backend)
    compared = 0
    for p, square in enumerate(prompts.inner):
        named = labels[p, : len(square)].numpy()
        in_use, count = named >= 0, len(np.unique(named[named >= 0]))
        ours = got.samples[p, : len(square)].cpu().numpy()
        assert np.isnan(ours[~in_use]).all()
        if count < 2 or count == in_use.sum():
            np.testing.assert_array_equal([got.score[p].item(), *ours[in_use]], NAN if count < 2 else 0.0)
        else:
            compared += 1
            arguments = square[np.ix_(in_use, in_use)], named[in_use]
            samples = metrics.silhouette_samples(*arguments, metric="precomputed")
            np.testing.assert_allclose(ours[in_use], samples, **SCORES)
            score = metrics.silhouette_score(*arguments, metric="precomputed")
            np.testing.assert_allclose(got.score[p].item(), score, **SCORES)
    assert compared >= len(prompts.inner) / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 384, 1025])
@pytest.mark.parametrize("backend", BACKENDS)
def test_distances_are_those_of_scikit_learn(backend: str, width: int, dtype: torch.dtype) -> None:
    """In float64 on the same values. Sums of D products are off by a few times sqrt(D) roundings of their norms."""
    rows = (torch.randn(9, width) + 0.5 * torch.randn(width)).to(dtype)
    rows[0] *= 0.01
    got = gk.pairwise_cosine(rows.to(device_of(backend)), 9, backend=backend)[0].cpu()
    expected = metrics.pairwise.cosine_distances(rows.double().numpy())
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=SINGLE * (1 + 2 * width**0.5))
