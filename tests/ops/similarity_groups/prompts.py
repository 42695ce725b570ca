"""Prompts for similarity_groups, and a second float64 implementation written from its documentation alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.similarity_groups.registration import SUPPORTS
from tests.harness import runnable_backends

BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
# The reference loops over prompts; the emulated CUDA is 10 to 1000 times slower.
FAST = ("cpu",) if not torch.cuda.is_available() else tuple(KERNELS)
LINKAGES = ("single", "complete", "average", "ward")
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
NAN, INF = float("nan"), float("inf")


def sizes_for(backend: str, *sizes: int) -> list[int]:
    """The prompt sizes among `sizes` that the backend handles quickly."""
    return [size for size in sizes if size <= (256 if backend in FAST else 40)]


def share_of(backend: str, count: int) -> int:
    """The number of prompts to run, of `count` for a fast backend."""
    return count if backend in FAST else max(2, count // 100)


# Prompts


def _mixture(size: int, width: int, random: np.random.Generator) -> np.ndarray:
    centres = random.normal(size=(random.integers(1, 5), width))
    return centres[random.integers(len(centres), size=size)] + 0.4 * random.normal(size=(size, width))


def _duplicates(size: int, width: int, random: np.random.Generator) -> np.ndarray:
    """Between one and `size` distinct rows, repeated in random order."""
    distinct = random.normal(size=(random.integers(1, size + 1), width))
    return distinct[random.integers(len(distinct), size=size)]


def _noise(size: int, width: int, random: np.random.Generator) -> np.ndarray:
    return random.normal(size=width) + 1e-6 * random.normal(size=(size, width))


def _zeros(size: int, width: int, random: np.random.Generator) -> np.ndarray:
    return random.normal(size=(size, width)) * (random.random((size, 1)) < 0.7)


def _bad(size: int, width: int, random: np.random.Generator) -> np.ndarray:
    rows = _mixture(size, width, random)
    for row in np.flatnonzero(random.random(size) < 0.3):
        rows[row, random.integers(width)] = random.choice([np.nan, np.inf, -np.inf])
    return rows


def _grid(size: int, width: int, random: np.random.Generator) -> np.ndarray:
    """Rows with few different distances, so nearly every merge is a tie."""
    return np.pad(random.integers(-1, 2, size=(size, min(width, 4))), ((0, 0), (0, max(width - 4, 0))))


KINDS = {
    "mixture": _mixture,
    "isotropic": lambda size, width, random: random.normal(size=(size, width)),
    "duplicates": _duplicates,
    "grid": _grid,
    "noise": _noise,
    "zeros": _zeros,
    "bad": _bad,
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows in random order with the ids of their prompts; `prompts` returns them in the order of the ids."""

    rows: Tensor
    ids: Tensor

    def prompts(self) -> list[Tensor]:
        return [self.rows[self.ids == name] for name in self.ids.unique()]


def batch_of(count: int, kinds: Sequence[str], sizes: Sequence[int], width: int = 16, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    prompts = [KINDS[kinds[i % len(kinds)]](int(random.choice(sizes)), width, random) for i in range(count)]
    ids = np.repeat(random.permutation(3 * count)[:count] - count, [len(rows) for rows in prompts])
    order = random.permutation(len(ids))
    rows = torch.from_numpy(np.concatenate(prompts)[order]).float()
    return Batch(rows, torch.from_numpy(ids[order]))


def grid_distances(count: int, size: int, levels: int, seed: int = 0) -> Tensor:
    """Symmetric distances [P, K, K] with `levels` values in eighths, exact in float32 and in short sums."""
    random = np.random.default_rng(seed)
    upper = np.triu(random.integers(1, levels + 1, size=(count, size, size)), 1) / 8
    return torch.from_numpy(upper + upper.transpose(0, 2, 1)).float()


# Expected results


class Tree(NamedTuple):
    merges: np.ndarray  # [P, n - 1, 2]
    heights: np.ndarray  # [P, n - 1]
    cuts: np.ndarray  # [P, n + 1, n]: cuts[:, k] are the labels in the cut into k, in order of first appearance


class Wanted(NamedTuple):
    labels: np.ndarray  # [P, K], -1 where a place is not in use
    num_groups: np.ndarray
    silhouette: np.ndarray
    best_k: np.ndarray
    verdict: np.ndarray


def _joined(linkage: str, a: np.ndarray, b: np.ndarray, of: tuple[np.ndarray, ...], apart: np.ndarray) -> np.ndarray:
    size_a, size_b, size_c = of
    if linkage in ("single", "complete"):
        return np.minimum(a, b) if linkage == "single" else np.maximum(a, b)
    if linkage == "average":
        return (size_a * a + size_b * b) / (size_a + size_b)
    return ((size_a + size_c) * a + (size_b + size_c) * b - size_c * apart) / (size_a + size_b + size_c)


def tree(distances: np.ndarray, linkage: str) -> Tree:
    """Trees of [P, n, n], all places in use; each merge has the smallest (distance, lower place, higher place)."""
    count, size = distances.shape[:2]
    at, places = np.arange(count), np.arange(size)
    work = distances.astype(np.float64) * (2 if linkage == "ward" else 1)
    work[:, places, places] = np.inf
    sizes, lowest = np.ones((count, size)), np.tile(places, (count, 1))
    merges, heights = np.zeros((count, max(size - 1, 0), 2), int), np.zeros((count, max(size - 1, 0)))
    cuts = np.full((count, size + 1, size), -1)
    cuts[:, size] = lowest
    for step in range(size - 1):
        pair = work.reshape(count, -1).argmin(1)  # the first minimum is the lowest (lo, hi), as work is symmetric
        lo, hi = np.divmod(pair, size)
        apart = work[at, lo, hi]
        merges[:, step], heights[:, step] = np.stack((lo, hi), 1), apart
        of = sizes[at, lo][:, None], sizes[at, hi][:, None], sizes
        joined = _joined(linkage, work[at, lo], work[at, hi], of, apart[:, None])
        joined[at, lo] = joined[at, hi] = np.inf
        work[at, lo] = work[at, :, lo] = joined
        work[at, hi] = work[at, :, hi] = np.inf
        sizes[at, lo] += sizes[at, hi]
        lowest = np.where(lowest == hi[:, None], lo[:, None], lowest)
        cuts[:, size - step - 1] = np.take_along_axis((lowest == places).cumsum(1) - 1, lowest, 1)
    return Tree(merges, np.sqrt(heights) if linkage == "ward" else heights, cuts)


def silhouettes(distances: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Silhouettes of all rows of [P, n, n] with all places in use, computed from scratch."""
    member = labels[:, :, None] == np.arange(labels.shape[1])
    sums, sizes = distances.astype(np.float64) @ member.astype(np.float64), member.sum(1)[:, None]
    own_sum, own_size = (np.where(member, x, 0).sum(2) for x in (sums, np.broadcast_to(sizes, member.shape)))
    a = own_sum / np.maximum(own_size - 1, 1)
    b = np.where(member | (sizes == 0), np.inf, sums / np.maximum(sizes, 1)).min(2)
    scale = np.maximum(a, b)
    return np.where((own_size == 1) | (scale == 0), 0, (b - a) / np.where(scale == 0, 1, scale))


def scores_of_cuts(distances: np.ndarray, cuts: np.ndarray, ks: Sequence[int]) -> np.ndarray:
    """Scores [P, n + 1] of the cuts into `ks` groups, -inf for all others."""
    scores = np.full(cuts.shape[:2], -np.inf)
    for k in ks:
        scores[:, k] = silhouettes(distances, cuts[:, k]).mean(1)
    return scores


def _of_one_size(distances: np.ndarray, config: gk.SimilarityConfig) -> Wanted:
    count, size = distances.shape[:2]
    whole, apart = np.zeros((count, size), int), np.tile(np.arange(size), (count, 1))
    few, zeros = np.full(count, min(size, 1)), np.zeros(count)
    if size < 3:
        verdict = gk.Verdict.SMALL if size else gk.Verdict.EMPTY
        return Wanted(whole, few, zeros, few, np.full(count, int(verdict)))
    cuts = tree(distances, config.linkage).cuts
    tried = range(config.k_min, min(config.k_max or size, size - 1) + 1)
    scores = scores_of_cuts(distances, cuts, tried)
    near = scores >= scores.max(1, keepdims=True) - config.tie_tolerance
    best_k = near.argmax(1) if tried else few
    score = np.take_along_axis(scores, best_k[:, None], 1)[:, 0] if tried else zeros
    pairs = distances[(slice(None), *np.triu_indices(size, 1))]
    same = pairs.max(1) <= config.distance_floor
    clustered = ~same & (score >= config.min_silhouette) & bool(tried)
    different = ~same & ~clustered & (pairs.min(1) > config.different_at)
    other = config.collapse if config.different is None else config.different
    alone = ~same & ~clustered & (np.where(different, other, config.collapse) == "singletons")
    cut = np.take_along_axis(cuts, best_k[:, None, None], 1)[:, 0]
    labels = np.where(clustered[:, None], cut, np.where(alone[:, None], apart, whole))
    kinds = [gk.Verdict.ALL_SAME, gk.Verdict.CLUSTERED, gk.Verdict.ALL_DIFFERENT]
    verdict = np.select([same, clustered, different], [int(kind) for kind in kinds], int(gk.Verdict.UNCLEAR))
    return Wanted(labels, labels.max(1) + 1, score, best_k, verdict)


def wanted(distances: Tensor, config: gk.SimilarityConfig | str) -> Wanted:
    """Expected result for distances [P, K, K], whose diagonal is infinite at unused places."""
    settings, matrices = gk.SimilarityConfig.of(config, "tests"), distances.cpu().double().numpy()
    in_use = np.isfinite(matrices[:, np.arange(matrices.shape[1]), np.arange(matrices.shape[1])])
    results = Wanted(np.full(in_use.shape, -1), *(np.zeros(len(matrices), t) for t in (int, float, int, int)))
    for size in np.unique(in_use.sum(1)):
        chosen = np.flatnonzero(in_use.sum(1) == size)
        places = np.argsort(~in_use[chosen], axis=1, kind="stable")[:, :size]
        inner = matrices[chosen[:, None, None], places[:, :, None], places[:, None]]
        result = _of_one_size(inner, settings)
        results.labels[chosen[:, None], places] = result.labels
        for whole, part in zip(results[1:], result[1:], strict=True):
            whole[chosen] = part
    return results


def canonical(labels: Sequence[int] | np.ndarray | Tensor) -> list[int]:
    """The same partition with labels in order of first appearance."""
    names: dict[int, int] = {}
    return [names.setdefault(int(label), len(names)) for label in labels]


# Comparisons


def assert_same(got: NamedTuple, expected: NamedTuple) -> None:
    """Checks that results agree bit for bit, also across devices."""
    for field, one, other in zip(got._fields, got, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, field
        one, other = one.cpu(), other.cpu()
        assert torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0)), field


def assert_wanted(got: gk.SimilarityGroups, expected: Wanted) -> None:
    """Checks a result of cluster_distances; scores are rounded to float32 once, and NumPy sums in another order."""
    for field in ("labels", "num_groups", "best_k", "verdict"):
        one, other = getattr(got, field).cpu().numpy(), getattr(expected, field)
        assert np.array_equal(one, other), (
            f"{field} of prompt {np.flatnonzero((one != other).reshape(len(one), -1).any(1))[0]}"
        )
    np.testing.assert_allclose(got.silhouette.cpu().numpy(), expected.silhouette, rtol=0, atol=1e-6)
