"""The formulas of similarity_groups from their definitions, in plain Python, and verdicts worked out by hand.

Faults that this is for: a linkage with wrong weights; Ward's on distances that are not squared; a tie that goes to a
later pair; a silhouette that counts the row itself, or another cluster's size; a cut chosen outside k_min to k_max, or
within the tolerance on the wrong side; `>` for `>=` at a threshold; verdicts in the wrong order; labels out of order of
appearance; a row that is masked, not finite or zero in the wrong class; prompts out of the order of their ids.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.similarity_groups import cases
from tests.ops.similarity_groups.cases import BACKENDS, INF, LINKAGES, NAN, symmetric

V, Status = gk.Verdict, gk.RowStatus
Matrix = list[list[float]]

# From the definitions, for a prompt whose places are all in use


def linkage_distance(linkage: str, d: Matrix, a: list[int], b: list[int]) -> float:
    pairs = [d[i][j] for i in a for j in b]
    if linkage != "ward":
        return {"single": min(pairs), "complete": max(pairs), "average": math.fsum(pairs) / len(pairs)}[linkage]

    # unit vectors have the squared distances 2 d; by those of all pairs, means have these
    def spread(cluster: list[int]) -> float:
        return math.fsum(d[i][j] for i in cluster for j in cluster) / len(cluster) ** 2

    apart = 2 * math.fsum(pairs) / len(pairs) - spread(a) - spread(b)
    return 2 * len(a) * len(b) / (len(a) + len(b)) * apart


def tree(d: Matrix, linkage: str) -> tuple[list[tuple[int, int]], list[float], dict[int, list[int]]]:
    """Merges, heights, and the labels of the cut into k."""
    clusters = {place: [place] for place in range(len(d))}
    merges, heights, cuts = [], [], {len(d): list(range(len(d)))}
    while len(clusters) > 1:
        pairs = itertools.combinations(sorted(clusters), 2)
        apart = {pair: linkage_distance(linkage, d, *(clusters[place] for place in pair)) for pair in pairs}
        least = min(apart.values())
        low, high = min(pair for pair, value in apart.items() if value <= least + 1e-12 * abs(least))
        clusters[low] += clusters.pop(high)
        merges.append((low, high))
        heights.append(math.sqrt(max(least, 0)) if linkage == "ward" else least)
        names = {i: number for number, low in enumerate(sorted(clusters)) for i in clusters[low]}
        cuts[len(clusters)] = [names[i] for i in range(len(d))]
    return merges, heights, cuts


def silhouettes(d: Matrix, labels: list[int]) -> list[float]:
    result = []
    for i, own in enumerate(labels):
        of = {label: [d[i][j] for j, other in enumerate(labels) if other == label and j != i] for label in set(labels)}
        mates = of.pop(own)
        a, b = math.fsum(mates) / max(len(mates), 1), min(math.fsum(x) / len(x) for x in of.values())
        result.append((b - a) / max(a, b) if mates and max(a, b) > 0 else 0.0)
    return result


def grouping(d: Matrix, config: gk.SimilarityConfig) -> tuple[list[int], float, int, gk.Verdict]:
    """Labels, silhouette, best k and verdict."""
    n, score, best = len(d), 0.0, 1
    if n < 3:
        return [0] * n, 0.0, min(n, 1), V.SMALL if n else V.EMPTY
    _, _, cuts = tree(d, config.linkage)
    ks = range(config.k_min, min(config.k_max or n, n - 1) + 1)
    scores = {k: math.fsum(silhouettes(d, cuts[k])) / n for k in ks}
    if scores:
        best = min(k for k in ks if scores[k] >= max(scores.values()) - config.tie_tolerance)
        score = scores[best]
    apart = [d[i][j] for i, j in itertools.combinations(range(n), 2)]
    collapsed = {"one": [0] * n, "singletons": list(range(n))}
    if max(apart) <= config.distance_floor:
        return [0] * n, score, best, V.ALL_SAME
    if scores and score >= config.min_silhouette:
        return cuts[best], score, best, V.CLUSTERED
    if min(apart) > config.different_at:
        return collapsed[config.different or config.collapse], score, best, V.ALL_DIFFERENT
    return collapsed[config.collapse], score, best, V.UNCLEAR


@pytest.mark.parametrize("linkage", LINKAGES)
@given(batch=cases.batches(max_size=9, widths=(3, 16)), settings=cases.configs)
def test_groups_are_those_of_the_definitions(linkage: str, batch: cases.Batch, settings: gk.SimilarityConfig) -> None:
    """Cuts that tie but for rounding are within the tolerance, and no score is at a threshold."""
    tolerance, least = settings.tie_tolerance + 1e-6, settings.min_silhouette - 0.0123
    config = dataclasses.replace(settings, linkage=linkage, tie_tolerance=tolerance, min_silhouette=max(least, -1))
    d = gk.pairwise_cosine(batch.rows, batch.ids, valid=batch.valid, backend="reference")
    result = gk.cluster_distances(d, config=config, backend="reference")
    built = gk.agglomerate(d, linkage=linkage, backend="reference")
    for p, places in enumerate(d.diagonal(dim1=1, dim2=2).isfinite()):
        inner, at = d[p][places][:, places].double().tolist(), places.nonzero().flatten()
        labels, score, best, verdict = grouping(inner, config)
        assert result.labels[p, places].tolist() == labels and (result.labels[p, ~places] == -1).all()
        assert (result.best_k[p], result.verdict[p]) == (best, verdict)
        assert result.num_groups[p] == max(labels, default=-1) + 1
        assert result.silhouette[p].item() == pytest.approx(score, abs=1e-6)
        merges, heights, _ = tree(inner, linkage)
        count = len(merges)
        assert built.merges[p, :count].tolist() == [[at[low], at[high]] for low, high in merges]
        assert built.heights[p, :count].tolist() == pytest.approx(heights, abs=1e-6)
        assert (built.merges[p, count:] == -1).all() and built.heights[p, count:].isposinf().all()


# By hand, on every backend

LOOSE: dict[str, Any] = {"min_silhouette": -1.0, "distance_floor": 0.0}  # neither threshold decides
ALONE: dict[str, Any] = {"collapse": "singletons", "different": "singletons", "different_at": 0.0}
PAIRS = symmetric(4, 0.25, {(0, 1): 2**-10, (2, 3): 2**-10})
BELOW = math.nextafter(0.25, 0)
ABSENT = torch.full((1, 3, 3), INF)
# Pairs of duplicates; the first two pairs are 3/8 apart, the last two 3/4, all others 1. Every row scores 1 in the cut
# into 4. Into 3, the first four have a = 2/3 * 3/8 = 1/4, b = 1: 3/4. Into 2, the last four have a = 1/2: 1/2.
NESTED = symmetric(
    8,
    1.0,
    {(2 * i, 2 * i + 1): 0.0 for i in range(4)}
    | {(i, j): 0.375 for i in (0, 1) for j in (2, 3)}
    | {(i, j): 0.75 for i in (4, 5) for j in (6, 7)},
)
INTO_2, INTO_3, INTO_4 = [0] * 4 + [1] * 4, [0] * 4 + [1, 1, 2, 2], [0, 0, 1, 1, 2, 2, 3, 3]
GAP = torch.where(torch.tensor([[0, 1, 0, 0]]) + torch.tensor([[0, 1, 0, 0]]).T > 0, INF, symmetric(4, 0.5))


def near(scale: float) -> Tensor:
    return symmetric(4, scale, {(0, 1): scale / 8, (2, 3): scale / 8})


def scored(silhouette: float) -> Tensor:
    return symmetric(4, 1.0, {(0, 1): 1 - silhouette, (2, 3): 1 - silhouette})


# distances, settings, labels, silhouette, best k, verdict
VERDICTS: list[tuple[Tensor, dict[str, Any], list[int], float, int, gk.Verdict]] = [
    (symmetric(1, 2.0), ALONE, [0], 0, 1, V.SMALL),
    (symmetric(2, 2.0), ALONE, [0, 0], 0, 1, V.SMALL),
    (symmetric(3, 1.0, {(0, 2): 0.25}), {}, [0, 1, 0], 0.5, 2, V.CLUSTERED),
    (ABSENT, {}, [-1, -1, -1], 0, 0, V.EMPTY),
    (torch.zeros(1, 0, 0), {}, [], 0, 0, V.EMPTY),
    # distances up to the floor are all the same, before any other verdict
    (PAIRS, {"distance_floor": 0.25}, [0] * 4, 1 - 2**-8, 2, V.ALL_SAME),
    (PAIRS, {"distance_floor": BELOW}, [0, 0, 1, 1], 1 - 2**-8, 2, V.CLUSTERED),
    (PAIRS, {"distance_floor": 0.3, **ALONE}, [0] * 4, 1 - 2**-8, 2, V.ALL_SAME),
    (near(0.9e-4), {}, [0] * 4, 0.875, 2, V.ALL_SAME),
    (near(1.1e-4), {}, [0, 0, 1, 1], 0.875, 2, V.CLUSTERED),
    (symmetric(8, 0.0), {"distance_floor": 0.0, **ALONE}, [0] * 8, 0, 2, V.ALL_SAME),
    # all different: further apart than different_at, and no good cut
    (symmetric(5, 0.25), {"different_at": BELOW}, [0] * 5, 0, 2, V.ALL_DIFFERENT),
    (symmetric(5, 0.25), {"different_at": 0.25}, [0] * 5, 0, 2, V.UNCLEAR),
    (symmetric(5, 0.29), {}, [0] * 5, 0, 2, V.UNCLEAR),
    (symmetric(5, 0.29), {"linkage": "ward"}, [0] * 5, 0, 2, V.UNCLEAR),
    (symmetric(5, 0.31), {"linkage": "ward"}, [0] * 5, 0, 2, V.ALL_DIFFERENT),
    (symmetric(4, 0.5, {(1, 3): 0.25}), {"different_at": 0.25, "min_silhouette": 1.0}, [0] * 4, 0.25, 3, V.UNCLEAR),
    (symmetric(4, 2.0, {(0, 2): 0.5, (1, 3): 0.5}), {}, [0, 1, 0, 1], 0.75, 2, V.CLUSTERED),
    # what a collapsed prompt becomes
    (symmetric(4, 0.25), {"collapse": "singletons"}, [0, 1, 2, 3], 0, 2, V.UNCLEAR),
    (symmetric(4, 0.25), {"different": "singletons"}, [0] * 4, 0, 2, V.UNCLEAR),
    (symmetric(4, 0.5), {"collapse": "singletons"}, [0, 1, 2, 3], 0, 2, V.ALL_DIFFERENT),
    (symmetric(4, 0.5), {"different": "singletons"}, [0, 1, 2, 3], 0, 2, V.ALL_DIFFERENT),
    (symmetric(4, 0.5), {"collapse": "singletons", "different": "one"}, [0] * 4, 0, 2, V.ALL_DIFFERENT),
    (GAP, {"different": "singletons"}, [0, -1, 1, 2], 0, 2, V.ALL_DIFFERENT),
    # min_silhouette, met by an equal score; a tenth by default
    (scored(0.11), {}, [0, 0, 1, 1], 0.11, 2, V.CLUSTERED),
    (scored(0.09), {}, [0] * 4, 0.09, 2, V.ALL_DIFFERENT),
    (scored(0.75), {"min_silhouette": 0.75}, [0, 0, 1, 1], 0.75, 2, V.CLUSTERED),
    (scored(0.75), {"min_silhouette": math.nextafter(0.75, 1)}, [0] * 4, 0.75, 2, V.UNCLEAR),
    # k_min and k_max; a score may be below the best by as much as the tolerance
    (NESTED, {}, INTO_4, 1, 4, V.CLUSTERED),
    (NESTED, {"k_max": 4}, INTO_4, 1, 4, V.CLUSTERED),
    (NESTED, {"k_max": 2**31}, INTO_4, 1, 4, V.CLUSTERED),
    (NESTED, {"k_max": 3, "linkage": "ward"}, INTO_3, 0.875, 3, V.CLUSTERED),
    (NESTED, {"k_max": 2, "linkage": "single"}, INTO_2, 0.625, 2, V.CLUSTERED),
    (NESTED, {"tie_tolerance": 0.125}, INTO_3, 0.875, 3, V.CLUSTERED),
    (NESTED, {"tie_tolerance": 0.1249}, INTO_4, 1, 4, V.CLUSTERED),
    (NESTED, {"tie_tolerance": 0.375, "linkage": "complete"}, INTO_2, 0.625, 2, V.CLUSTERED),
    (NESTED, {"tie_tolerance": 0.375, "k_min": 3}, INTO_3, 0.875, 3, V.CLUSTERED),
    # too few places for k_min: no cut, even if any were good enough
    (symmetric(3, 1.0, {(0, 1): 0.01}), {"k_min": 3}, [0] * 3, 0, 1, V.UNCLEAR),
    (symmetric(5, 1.0), {"k_min": 7, **LOOSE}, [0] * 5, 0, 1, V.ALL_DIFFERENT),
    (symmetric(5, 1.0), {"k_min": 2**32, **LOOSE}, [0] * 5, 0, 1, V.ALL_DIFFERENT),
    # of equally near pairs the lowest, of equally good cuts the smallest k
    (symmetric(7, 0.5), {"k_min": 3, **LOOSE}, [0, 0, 0, 0, 0, 1, 2], 0, 3, V.CLUSTERED),
    (symmetric(4, 0.5, {(0, 3): 0.25, (1, 2): 0.25}), {"k_min": 3}, [0, 1, 2, 0], 0.25, 3, V.CLUSTERED),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_verdicts_by_hand(backend: str) -> None:
    for case in VERDICTS:
        d, settings, labels, silhouette, best_k, verdict = case
        got = gk.cluster_distances(d.to(device_of(backend)), config=gk.SimilarityConfig(**settings), backend=backend)
        assert got.labels.tolist() == [labels] and got.num_groups.tolist() == [max(labels, default=-1) + 1], case
        assert got.silhouette.tolist() == pytest.approx([silhouette], rel=1e-6, abs=0), case
        assert (got.best_k.tolist(), got.verdict.tolist()) == ([best_k], [verdict]), case


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_classified_by_their_squared_norm(backend: str) -> None:
    """Up to 3.4e38: 1.8e19 squared is below; 1.9e19 squared and two squares of 1.4e19 are above. From 1e-30 on."""
    rows = [[1.8e19, 0], [0, 1.9e19], [1.4e19, 1.4e19], [0, 1e18], [NAN, 1], [0, -INF], [0, -0.0], [0, 9e-16], [1, 0]]
    status = [0, 2, 2, 0, 2, 2, 4, 4, 0]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor(rows, dtype=dtype, device=device_of(backend))
        got = gk.similarity_groups(x, 9, backend=backend)
        assert got.status.tolist() == status and ((got.labels < 0).cpu() == torch.tensor(status).eq(2)).all()
        d = gk.pairwise_cosine(x, 9, backend=backend)[0].cpu()
        out, zero = torch.tensor(status) == Status.NOT_FINITE, torch.tensor(status) == Status.ZERO_VECTOR
        assert torch.equal(d.isposinf(), out[:, None] | out)
        others = ~torch.eye(9, dtype=torch.bool) & ~out & ~out[:, None]
        assert (d[(zero[:, None] | zero) & others] == 1).all() and not d.diagonal()[~out].any()
        assert d[0, [3, 8]].tolist() == [1, 0]
