"""similarity_groups on every backend: scikit-learn's trees and silhouettes, and float64 on many random prompts."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import grpo_kernels as gk
from tests.harness import device_of, needs_cpu_kernels, quick
from tests.ops.similarity_groups.prompts import (
    BACKENDS,
    FAST,
    KERNELS,
    KINDS,
    LINKAGES,
    Batch,
    assert_same,
    assert_wanted,
    batch_of,
    canonical,
    grid_distances,
    scores_of_cuts,
    share_of,
    sizes_for,
    tree,
    wanted,
)

# The second implementation sums in another order, so a score at a threshold may fall on either side. Therefore no
# threshold is a ratio of small integers, and cuts that tie mathematically are within the tolerance.
APART = {"tie_tolerance": 1e-6, "min_silhouette": 0.1234567}


def run(batch: Batch, backend: str, config: gk.SimilarityConfig | str) -> gk.SimilarityGroups:
    device = device_of(backend)
    return gk.similarity_groups(batch.rows.to(device), batch.ids.to(device), config=config, backend=backend)


# scikit-learn

# name: number of prompts, their sizes
CASES = {"small": (2000, (3, 4, 5, 6, 7, 8, 10, 12)), "large": (40, (16, 17, 31, 40)), "largest": (2, (200, 256))}
# A cut between two merges of nearly equal height may differ from scikit-learn's.
TIED = 1e-6


class Peer:
    """scikit-learn on the prompts of one case. Scores are cached, as linkages often agree on a cut."""

    def __init__(self, case: str, backend: str) -> None:
        count, sizes = CASES[case]
        kinds = ("mixture", "isotropic", "duplicates")
        self.batch = batch_of(share_of(backend, count), kinds, sizes_for(backend, *sizes), seed=7)
        points = (t.to(device_of(backend)) for t in (self.batch.rows, self.batch.ids))
        self.distances = gk.pairwise_cosine(*points, backend=backend).cpu().double().numpy()
        self.prompts = self.batch.prompts()
        self._scores: dict[tuple[int, ...], float] = {}

    def score(self, prompt: int, labels: np.ndarray) -> float:
        from sklearn import config_context
        from sklearn.metrics import silhouette_score

        key = (prompt, *canonical(labels))
        if key not in self._scores:
            size = len(labels)
            inner = self.distances[prompt, :size, :size]
            with config_context(assume_finite=True, skip_parameter_validation=True):  # halves the time
                self._scores[key] = float(silhouette_score(inner, labels, metric="precomputed"))
        return self._scores[key]

    def fit(self, prompt: int, linkage: str, k: int) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Labels of the cut into k clusters, and of every cut without ties."""
        from sklearn.cluster import AgglomerativeClustering

        rows = self.prompts[prompt].double().numpy()
        size = len(rows)
        if linkage == "ward":
            model, points = AgglomerativeClustering(k, compute_distances=True), rows
            points = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        else:
            model = AgglomerativeClustering(k, metric="precomputed", linkage=linkage, compute_distances=True)
            points = self.distances[prompt, :size, :size]
        model.fit(points)
        members: list[list[int]] = [[i] for i in range(size)]
        labels, cuts = np.arange(size), {}
        for step, (a, b) in enumerate(model.children_):
            k_here = size - step
            if 2 <= k_here < size and model.distances_[step] - model.distances_[step - 1] > TIED:
                cuts[k_here] = labels.copy()
            members.append(members[a] + members[b])
            labels[members[-1]] = size + step
        return model.labels_, cuts


@functools.cache
def peer_of(case: str, backend: str) -> Peer:
    return Peer(case, backend)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize(
    ("backend", "case"), [(b, case) for b in BACKENDS for case, (_, sizes) in CASES.items() if sizes_for(b, *sizes)]
)
def test_chosen_partition_is_that_of_scikit_learn(backend: str, case: str, linkage: str) -> None:
    """The chosen k has the best of scikit-learn's silhouettes, and the clusters are scikit-learn's for that k."""
    pytest.importorskip("sklearn")
    peer = peer_of(case, backend)
    config = gk.SimilarityConfig(linkage, min_silhouette=-1.0, distance_floor=0.0)
    got = run(peer.batch, backend, config)
    labels = got.labels.cpu()
    compared = 0
    for prompt, name in enumerate(peer.batch.ids.unique()):
        best = int(got.best_k[prompt])
        expected, cuts = peer.fit(prompt, linkage, best)
        if best not in cuts:  # identical responses have nothing but ties
            assert not peer.distances[prompt, : len(expected), : len(expected)].any()
            continue
        result = labels[peer.batch.ids == name]
        assert result.tolist() == canonical(expected), prompt
        # at most 30 cuts of a large prompt, to limit the time
        scores = {k: peer.score(prompt, cut) for k, cut in cuts.items() if k in (best, *range(2, 32))}
        assert scores[best] >= max(scores.values()) - 1e-6, prompt
        assert got.silhouette[prompt].item() == pytest.approx(scores[best], abs=1e-6), prompt
        compared += 1
    assert compared >= 0.9 * len(peer.prompts)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", quick(BACKENDS, "cpu", "cuda", "reference"))
def test_every_cut_and_its_silhouette_is_that_of_scikit_learn(backend: str, linkage: str) -> None:
    pytest.importorskip("sklearn")
    peer = peer_of("small", backend)
    trees = [peer.fit(prompt, linkage, 2)[1] for prompt in range(len(peer.prompts))]
    compared = 0
    for k in range(2, 12):
        config = gk.SimilarityConfig(linkage, k_min=k, k_max=k, min_silhouette=-1.0, distance_floor=0.0)
        got = run(peer.batch, backend, config)
        labels, scores = got.labels.cpu(), got.silhouette.cpu()
        for prompt, name in enumerate(peer.batch.ids.unique()):
            if k not in trees[prompt]:
                continue
            assert labels[peer.batch.ids == name].tolist() == canonical(trees[prompt][k]), (k, prompt)
            expected = peer.score(prompt, trees[prompt][k])
            assert scores[prompt].item() == pytest.approx(expected, abs=1e-6), (k, prompt)
            compared += 1
    assert compared >= 2 * len(peer.prompts)


# float64


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_prompts_have_the_groups_that_float64_gives(backend: str, kind: str, linkage: str) -> None:
    """20,000 prompts on the CPU: 750 for each kind and linkage, a third of them with many rows."""
    config = gk.SimilarityConfig(linkage, **APART)
    device = device_of(backend)
    for sizes, count in (((1, 2, 3, 4, 5, 8), 500), ((7, 9, 16, 17, 24), 250)):
        batch = batch_of(share_of(backend, count), [kind], sizes_for(backend, *sizes), seed=len(sizes))
        arguments = batch.rows.to(device), batch.ids.to(device)
        distances = gk.pairwise_cosine(*arguments, backend=backend)
        expected = wanted(distances, config)
        assert_wanted(gk.cluster_distances(distances, config=config, backend=backend), expected)
        got = gk.similarity_groups(*arguments, config=config, backend=backend)
        for prompt, name in enumerate(batch.ids.unique()):
            labels = got.labels.cpu()[batch.ids == name].tolist()
            assert labels == expected.labels[prompt, : len(labels)].tolist(), prompt


def large_of(backend: str) -> list[int]:
    return [64] if backend not in FAST else sizes_for(backend, 64, 128, 255, 256)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize(("backend", "size"), [(b, size) for b in BACKENDS for size in large_of(b)])
def test_large_prompts_have_the_groups_that_float64_gives(backend: str, size: int, linkage: str) -> None:
    config = gk.SimilarityConfig(linkage, k_max=20, **APART)
    kinds = ("mixture", "grid", "bad") if backend in FAST else ("mixture",)
    batch = batch_of(len(kinds), kinds, [size], seed=3)
    device = device_of(backend)
    distances = gk.pairwise_cosine(batch.rows.to(device), batch.ids.to(device), backend=backend)
    assert_wanted(gk.cluster_distances(distances, config=config, backend=backend), wanted(distances, config))


@pytest.mark.parametrize("levels", [1, 2, 5])
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lowest_places(backend: str, linkage: str, levels: int) -> None:
    """Distances have few different values; every merge must be the smallest (distance, lower place, higher place)."""
    for size in sizes_for(backend, 3, 4, 6, 9, 16):
        distances = grid_distances(share_of(backend, 400), size, levels, seed=size)
        expected = wanted(distances, gk.SimilarityConfig(linkage, **APART))
        device = device_of(backend)
        got = gk.cluster_distances(distances.to(device), config=gk.SimilarityConfig(linkage, **APART), backend=backend)
        assert_wanted(got, expected)
        result = gk.agglomerate(distances.to(device), linkage=linkage, backend=backend)
        assert np.array_equal(result.merges.cpu().numpy(), tree(distances.double().numpy(), linkage).merges)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_tolerance_the_best_cut_is_best_to_the_last_digits(backend: str, linkage: str) -> None:
    """Sums of 40 distances in any order differ by at most 40 float64 roundings of 2e-16 each."""
    distances = grid_distances(share_of(backend, 1000), 10, 3)
    config = gk.SimilarityConfig(linkage, min_silhouette=-1.0, distance_floor=0.0)
    got = gk.cluster_distances(distances.to(device_of(backend)), config=config, backend=backend)
    cuts = tree(distances.double().numpy(), linkage).cuts
    scores = scores_of_cuts(distances.double().numpy(), cuts, range(2, 10))
    best, at = got.best_k.cpu().numpy(), np.arange(len(distances))
    assert (scores[at, best] >= scores.max(1) - 1e-14).all()
    assert np.array_equal(got.labels.cpu().numpy(), cuts[at, best])


# Backends and ways to call


SETTINGS = (
    gk.SimilarityConfig(),
    gk.SimilarityConfig("ward", k_min=3, k_max=6, collapse="singletons"),
    gk.SimilarityConfig("single", tie_tolerance=0.05, min_silhouette=0.4, different="singletons", different_at=0.1),
    gk.SimilarityConfig("complete", distance_floor=0.5, min_silhouette=0.6, different_at=0.6),
)


@functools.cache
def of_the_reference(settings: int) -> tuple[torch.Tensor, gk.SimilarityGroups]:
    batch = batch_of(24, tuple(KINDS), (1, 2, 3, 4, 7, 8, 13), seed=settings)
    distances = gk.pairwise_cosine(batch.rows, batch.ids, backend="reference")
    return distances, gk.cluster_distances(distances, config=SETTINGS[settings], backend="reference")


@pytest.mark.parametrize("settings", range(len(SETTINGS)))
@pytest.mark.parametrize("backend", KERNELS)
def test_backends_agree_on_the_same_distances(backend: str, settings: int) -> None:
    distances, expected = of_the_reference(settings)
    got = gk.cluster_distances(distances.to(device_of(backend)), config=SETTINGS[settings], backend=backend)
    assert_same(got, expected)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_call_gives_what_its_two_parts_give(backend: str, linkage: str) -> None:
    batch, device = (
        batch_of(share_of(backend, 700), tuple(KINDS), sizes_for(backend, 1, 2, 3, 6, 11)),
        device_of(backend),
    )
    config = gk.SimilarityConfig(linkage, different="singletons")
    whole = run(batch, backend, config)
    distances = gk.pairwise_cosine(batch.rows.to(device), batch.ids.to(device), backend=backend)
    parts = gk.cluster_distances(distances, config=config, backend=backend)
    for field in ("num_groups", "silhouette", "best_k", "verdict"):
        assert torch.equal(getattr(whole, field), getattr(parts, field)), field
    for prompt, name in enumerate(batch.ids.unique()):
        rows = (batch.ids == name).to(device)
        assert torch.equal(whole.labels[rows], parts.labels[prompt, : int(rows.sum())])


@pytest.mark.parametrize("backend", quick(BACKENDS, "cpu", "cuda", "reference"))
def test_int_groups_are_the_ids_of_neighbours(backend: str) -> None:
    for size in sizes_for(backend, 1, 2, 3, 8, 37):
        rows = torch.randn(3 * size, 9, device=device_of(backend))
        ids = torch.arange(3, device=rows.device).repeat_interleave(size)
        by_size = gk.similarity_groups(rows, size, backend=backend)
        assert_same(by_size, gk.similarity_groups(rows, ids, backend=backend))
        assert by_size.group_ids.tolist() == (by_size.labels + ids * size).tolist()


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_name_of_a_linkage_is_its_default_config(backend: str, linkage: str) -> None:
    rows = batch_of(3, ["mixture"], [8]).rows.to(device_of(backend))
    expected = gk.similarity_groups(rows, 8, config=gk.SimilarityConfig(linkage), backend=backend)
    assert_same(gk.similarity_groups(rows, 8, config=linkage, backend=backend), expected)


@needs_cpu_kernels
@pytest.mark.parametrize("linkage", quick(LINKAGES, "ward", "average"))
@pytest.mark.parametrize("backend", [name for name in KERNELS if name != "cpu"])
def test_labels_are_those_of_the_cpu(backend: str, linkage: str) -> None:
    """Compares labels of 20,000 prompts whose distances differ by rounding."""
    prompts, depth = 5000, 24
    random = torch.Generator().manual_seed(LINKAGES.index(linkage))
    sizes = torch.randint(3, 13, (prompts,), generator=random)
    ids = torch.repeat_interleave(torch.arange(prompts), sizes)
    centers = torch.randn(prompts, 3, depth, generator=random)
    which = torch.randint(3, ids.shape, generator=random)
    spread = torch.tensor([0.0, 0.2, 0.5, 1.0])[ids % 4, None]
    rows = centers[ids, which] + spread * torch.randn(len(ids), depth, generator=random)
    device = device_of(backend)
    expected = gk.similarity_groups(rows, ids, config=linkage, backend="cpu")
    got = gk.similarity_groups(rows.to(device), ids.to(device), config=linkage, backend=backend)
    assert torch.equal(got.labels.cpu(), expected.labels)
    # distances differ by at most 1e-6; within clusters of small spread they are 20 times smaller than between them
    torch.testing.assert_close(got.silhouette.cpu(), expected.silhouette, rtol=0, atol=4e-5)
