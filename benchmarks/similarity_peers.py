"""Peers of similarity_groups: scikit-learn as it is commonly used, and the fastest use of SciPy and fastcluster."""

from __future__ import annotations

import pkgutil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray


class Cut(NamedTuple):
    labels: Array
    score: float


def distances_of(x: Array) -> Array:
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    distances = np.clip(1 - unit @ unit.T, 0, 2)
    np.fill_diagonal(distances, 0)  # required by silhouette_score
    return distances


def by_scikit_learn(embeddings: Tensor, size: int) -> list[Cut]:
    """Fits and scores every k, prompt by prompt, as the published similarity-group GRPO does."""
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import silhouette_score

    cuts = []
    for x in embeddings.view(-1, size, embeddings.shape[1]).cpu().numpy():
        distances = distances_of(x)
        best = Cut(np.zeros(size, int), -1.0)
        for k in range(2, size):
            model = AgglomerativeClustering(n_clusters=k, metric="precomputed", linkage="average")
            labels = model.fit_predict(distances)
            score = silhouette_score(distances, labels, metric="precomputed")
            if score > best.score:
                best = Cut(labels, score)
        cuts.append(best)
    return cuts


def by_tree(linkage: str, embeddings: Tensor, size: int) -> list[Cut]:
    """Builds one tree per prompt by the function of this name, and updates every cut's silhouette from the previous."""
    cuts = []
    upper = np.triu_indices(size, 1)
    for x in embeddings.view(-1, size, embeddings.shape[1]).cpu().numpy():
        distances = distances_of(x)
        merges = pkgutil.resolve_name(linkage)(distances[upper], method="average")[:, :2].astype(int)
        cuts.append(_best_cut(distances, merges, size))
    return cuts


def _best_cut(distances: Array, merges: Array, size: int) -> Cut:
    sums = distances.astype(np.float64)
    counts = np.ones(size)
    own, items = np.arange(size), np.arange(size)
    slot = dict(enumerate(range(size)))
    best = Cut(own, -1.0)
    for m, (a, b) in enumerate(merges):
        low, high = slot.pop(a), slot.pop(b)
        slot[size + m] = low
        sums[low] += sums[high]
        sums[high] = np.inf
        counts[low] += counts[high]
        own = np.where(own == high, low, own)
        k = size - 1 - m
        if k < 2:
            break
        means = sums / counts[:, None]
        mates = counts[own] - 1
        within = sums[own, items] / np.maximum(mates, 1)
        means[own, items] = np.inf
        nearest = means.min(0)
        score = float(np.where(mates == 0, 0, (nearest - within) / np.maximum(nearest, within)).mean())
        if score >= best.score:  # the smallest k among equal scores
            best = Cut(own, score)
    return best


def partition(labels: Array | Tensor) -> list[int]:
    """Labels renumbered by first appearance."""
    seen: dict[int, int] = {}
    return [seen.setdefault(label, len(seen)) for label in labels.tolist()]


def mixture(prompts: int, size: int, depth: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Embeddings around three points per prompt; the cosine within one is about 0.8."""
    options: Any = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    centers = torch.randn(prompts, 3, depth, **options)
    which = torch.randint(3, (prompts, size), **options)
    noise = torch.randn(prompts, size, depth, **options)
    points = centers.gather(1, which[:, :, None].expand(-1, -1, depth)) + 0.5 * noise
    return points.view(-1, depth)
