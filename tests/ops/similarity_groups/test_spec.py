"""The specification of similarity_groups: small prompts, verdicts, thresholds, ties, duplicates, labels, ids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.similarity_groups.prompts import (
    BACKENDS,
    INF,
    LINKAGES,
    batch_of,
    canonical,
    grid_distances,
    share_of,
    sizes_for,
    tree,
    wanted,
)

Verdict = gk.Verdict
NOTHING: dict[str, Any] = {"min_silhouette": -1.0, "distance_floor": 0.0}  # disables both thresholds


def symmetric(size: int, value: float, pairs: dict[tuple[int, int], float] | None = None) -> Tensor:
    """Distances [1, K, K] that equal `value` except for some pairs."""
    distances = torch.full((size, size), value)
    for (i, j), apart in (pairs or {}).items():
        distances[i, j] = distances[j, i] = apart
    return distances.fill_diagonal_(0)[None]


def clusters(distances: Tensor, backend: str, linkage: str = "average", **settings: Any) -> gk.SimilarityGroups:
    config = gk.SimilarityConfig(linkage, **settings)
    return gk.cluster_distances(distances.to(device_of(backend)), config=config, backend=backend)


def embedded(rows: Tensor, backend: str, valid: Tensor | None = None, **settings: Any) -> gk.SimilarityGroups:
    """Groups the rows as one prompt."""
    device = device_of(backend)
    mask = None if valid is None else valid.to(device)
    config = gk.SimilarityConfig(**settings)
    return gk.similarity_groups(rows.to(device), len(rows), valid=mask, config=config, backend=backend)


def assert_prompt(
    got: gk.SimilarityGroups, labels: list[int], silhouette: float, best_k: int, verdict: gk.Verdict
) -> None:
    """Checks all results of a batch with one prompt."""
    assert got.labels.flatten().tolist() == labels
    assert got.num_groups.tolist() == [max(labels, default=-1) + 1]
    assert got.silhouette.tolist() == pytest.approx([silhouette], rel=1e-6, abs=0)
    assert got.best_k.tolist() == [best_k]
    assert got.verdict.tolist() == [int(verdict)]


# Small and empty prompts


@pytest.mark.parametrize("collapse", ["one", "singletons"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_than_three_responses_are_one_group(backend: str, size: int, collapse: str) -> None:
    """Holds even for opposite responses and for every setting of `collapse`, as there is no cut to try."""
    rows = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])[:size]
    assert_prompt(embedded(rows, backend, collapse=collapse), [0] * size, 0.0, 1, Verdict.SMALL)
    assert_prompt(clusters(symmetric(size, 2.0), backend, collapse=collapse), [0] * size, 0.0, 1, Verdict.SMALL)


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_responses_try_two_groups_only(backend: str) -> None:
    got = clusters(symmetric(3, 1.0, {(0, 2): 0.25}), backend)
    assert_prompt(got, [0, 1, 0], 2 * 0.75 / 3, 2, Verdict.CLUSTERED)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_without_a_response_in_use_is_empty(backend: str) -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    assert_prompt(embedded(torch.randn(3, 4), backend, nothing), [-1] * 3, 0.0, 0, Verdict.EMPTY)
    assert_prompt(embedded(torch.full((3, 4), math.nan), backend), [-1] * 3, 0.0, 0, Verdict.EMPTY)
    assert_prompt(clusters(torch.full((1, 3, 3), INF), backend), [-1] * 3, 0.0, 0, Verdict.EMPTY)
    assert_prompt(clusters(torch.zeros(1, 0, 0), backend), [], 0.0, 0, Verdict.EMPTY)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_beyond_those_there_are_are_empty(backend: str) -> None:
    rows, ids = (t.to(device_of(backend)) for t in (torch.randn(4, 5), torch.tensor([7, 7, 7, 7])))
    got = gk.similarity_groups(rows, ids, num_groups=3, max_size=6, backend=backend)
    assert got.verdict.tolist()[1:] == [Verdict.EMPTY] * 2 and got.verdict[0] != Verdict.EMPTY
    assert [f.tolist()[1:] for f in (got.num_groups, got.best_k, got.silhouette)] == [[0, 0]] * 3
    distances = gk.pairwise_cosine(rows, ids, num_groups=3, max_size=6, backend=backend)
    assert distances.shape == (3, 6, 6) and distances[1:].isinf().all() and distances[0, 4:].isinf().all()
    assert distances[0, :, 4:].isinf().all() and distances[0, :4, :4].isfinite().all()


@pytest.mark.parametrize("groups", ["int", "ids"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_give_empty_results(backend: str, groups: str) -> None:
    device = device_of(backend)
    rows = torch.zeros(0, 4, device=device)
    ids = 8 if groups == "int" else torch.zeros(0, dtype=torch.int64, device=device)
    got = gk.similarity_groups(rows, ids, backend=backend)
    assert [list(field.shape) for field in got] == [[0]] * 7
    kinds = (torch.int32, torch.int64, torch.int32, torch.float32, torch.int32, torch.uint8, torch.uint8)
    assert tuple(field.dtype for field in got) == kinds
    assert gk.pairwise_cosine(rows, ids, backend=backend).shape[0] == 0
    none = clusters(torch.zeros(0, 5, 5), backend)
    assert none.labels.shape == none.status.shape == (0, 5) and none.verdict.shape == (0,)


# Verdicts


@pytest.mark.parametrize("distance_floor", [1e-4, 0.0])
@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_identical_responses_are_one_group_with_silhouette_zero(
    backend: str, linkage: str, distance_floor: float
) -> None:
    for size in sizes_for(backend, 3, 8, 33):
        rows = torch.randn(1, 65).expand(size, 65)
        settings = {"linkage": linkage, "distance_floor": distance_floor, "collapse": "singletons"}
        got = embedded(rows, backend, different="singletons", different_at=0.0, **settings)
        assert_prompt(got, [0] * size, 0.0, 2, Verdict.ALL_SAME)


@pytest.mark.parametrize("backend", BACKENDS)
def test_distance_floor_is_met_by_distances_up_to_it_and_comes_before_a_good_cut(backend: str) -> None:
    """The silhouette and its k are still reported."""
    pairs = symmetric(4, 0.25, {(0, 1): 2**-10, (2, 3): 2**-10})
    score = 1 - 2**-8
    assert_prompt(clusters(pairs, backend, distance_floor=0.25), [0] * 4, score, 2, Verdict.ALL_SAME)
    below = math.nextafter(0.25, 0)
    assert_prompt(clusters(pairs, backend, distance_floor=below), [0, 0, 1, 1], score, 2, Verdict.CLUSTERED)
    single = {"collapse": "singletons", "different": "singletons", "different_at": 0.0}
    assert_prompt(clusters(pairs, backend, distance_floor=0.3, **single), [0] * 4, score, 2, Verdict.ALL_SAME)


@pytest.mark.parametrize("backend", BACKENDS)
def test_distance_floor_is_the_documented_one_by_default(backend: str) -> None:
    """The default is 1e-4, checked with one prompt on either side."""
    for scale, verdict in ((0.9e-4, Verdict.ALL_SAME), (1.1e-4, Verdict.CLUSTERED)):
        distances = symmetric(4, scale, {(0, 1): scale / 8, (2, 3): scale / 8})
        assert clusters(distances, backend).verdict.tolist() == [verdict]


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_different_is_further_apart_than_different_at(backend: str) -> None:
    """With equal distances, every cut has silhouette 0."""
    equal = symmetric(5, 0.5)
    below = math.nextafter(0.5, 0)
    assert_prompt(clusters(equal, backend, different_at=below), [0] * 5, 0.0, 2, Verdict.ALL_DIFFERENT)
    assert_prompt(clusters(equal, backend, different_at=0.5), [0] * 5, 0.0, 2, Verdict.UNCLEAR)
    assert_prompt(clusters(symmetric(5, 0.29), backend), [0] * 5, 0.0, 2, Verdict.UNCLEAR)
    assert_prompt(clusters(symmetric(5, 0.31), backend), [0] * 5, 0.0, 2, Verdict.ALL_DIFFERENT)
    # a single near pair prevents the verdict ALL_DIFFERENT
    near = symmetric(5, 0.5, {(1, 3): 0.25})
    assert clusters(near, backend, different_at=0.25, min_silhouette=1.0).verdict.tolist() == [Verdict.UNCLEAR]


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_with_a_good_cut_is_clustered_however_far_apart(backend: str) -> None:
    far = symmetric(4, 2.0, {(0, 2): 0.5, (1, 3): 0.5})
    assert_prompt(clusters(far, backend), [0, 1, 0, 1], 0.75, 2, Verdict.CLUSTERED)


@pytest.mark.parametrize(
    ("collapse", "different", "unclear", "apart"),
    [
        ("one", None, "one", "one"),
        ("singletons", None, "singletons", "singletons"),
        ("one", "singletons", "one", "singletons"),
        ("singletons", "one", "singletons", "one"),
        ("one", "one", "one", "one"),
        ("singletons", "singletons", "singletons", "singletons"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_collapsed_prompts_become_what_the_config_says(
    backend: str, collapse: str, different: str | None, unclear: str, apart: str
) -> None:
    becomes = {"one": [0] * 4, "singletons": [0, 1, 2, 3]}
    settings = {"collapse": collapse, "different": different}
    got = clusters(symmetric(4, 0.25), backend, **settings)
    assert_prompt(got, becomes[unclear], 0.0, 2, Verdict.UNCLEAR)
    got = clusters(symmetric(4, 0.5), backend, **settings)
    assert_prompt(got, becomes[apart], 0.0, 2, Verdict.ALL_DIFFERENT)
    # rows left out get no group of their own
    left_out = symmetric(4, 0.5)
    left_out[0, 1] = left_out[0, :, 1] = INF
    labels = {"one": [0, -1, 0, 0], "singletons": [0, -1, 1, 2]}[apart]
    assert_prompt(clusters(left_out, backend, **settings), labels, 0.0, 2, Verdict.ALL_DIFFERENT)


# Choice of k

# Pairs of duplicates (0, 1), (2, 3), (4, 5), (6, 7); the first two pairs are 3/8 apart, the last two 3/4, all others 1.
# In the cut into 4 every row has silhouette 1. Into 3, the first four have a = 2/3 * 3/8 = 1/4, b = 1: 3/4.
# Into 2, the last four have a = 1/2: 1/2.
SCORES = {2: 0.625, 3: 0.875, 4: 1.0}
LABELS = {2: [0, 0, 0, 0, 1, 1, 1, 1], 3: [0, 0, 0, 0, 1, 1, 2, 2], 4: [0, 0, 1, 1, 2, 2, 3, 3]}


def nested() -> Tensor:
    within = {(0, 1): 0.0, (2, 3): 0.0, (4, 5): 0.0, (6, 7): 0.0}
    first = {(i, j): 0.375 for i in (0, 1) for j in (2, 3)}
    last = {(i, j): 0.75 for i in (4, 5) for j in (6, 7)}
    return symmetric(8, 1.0, within | first | last)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize(
    ("settings", "k"),
    [
        ({}, 4),
        ({"k_max": 4}, 4),
        ({"k_max": 3}, 3),
        ({"k_max": 2}, 2),
        ({"k_max": 100}, 4),
        ({"k_min": 3}, 4),
        ({"k_min": 3, "k_max": 3}, 3),
        ({"tie_tolerance": 0.125}, 3),  # a difference from the best of at most this
        ({"tie_tolerance": 0.1249}, 4),
        ({"tie_tolerance": 0.375}, 2),
        ({"tie_tolerance": 0.375, "k_min": 3}, 3),
        ({"tie_tolerance": 10.0}, 2),
        ({"min_silhouette": 1.0}, 4),  # a score equal to the threshold suffices
        ({"k_max": 3, "min_silhouette": 0.875}, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_k_is_chosen_within_its_limits(backend: str, settings: dict[str, Any], k: int, linkage: str) -> None:
    got = clusters(nested(), backend, linkage, **settings)
    assert_prompt(got, LABELS[k], SCORES[k], k, Verdict.CLUSTERED)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cut_that_is_not_good_enough_collapses_but_is_reported(backend: str, linkage: str) -> None:
    threshold = math.nextafter(0.875, 1)
    got = clusters(nested(), backend, linkage, k_max=3, min_silhouette=threshold)
    assert_prompt(got, [0] * 8, 0.875, 3, Verdict.UNCLEAR)


@pytest.mark.parametrize("backend", BACKENDS)
def test_min_silhouette_is_a_tenth_by_default(backend: str) -> None:
    """Two pairs at distance 1 from each other and 1 - s within have silhouette s."""
    for score, verdict in ((0.11, Verdict.CLUSTERED), (0.09, Verdict.ALL_DIFFERENT)):
        got = clusters(symmetric(4, 1.0, {(0, 1): 1 - score, (2, 3): 1 - score}), backend)
        assert got.verdict.tolist() == [verdict] and got.silhouette.item() == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_worst_silhouettes_are_reported_below_zero(backend: str) -> None:
    distances = grid_distances(share_of(backend, 200), 9, 4)
    settings = {"linkage": "single", "k_min": 2, "k_max": 2, "min_silhouette": 0.5}
    got, expected = clusters(distances, backend, **settings), wanted(distances, gk.SimilarityConfig(**settings))
    below = expected.silhouette < -1e-3
    assert below.any() and (got.silhouette.cpu().numpy()[below] < 0).all()
    np.testing.assert_allclose(got.silhouette.cpu().numpy(), expected.silhouette, rtol=0, atol=1e-6)
    assert not got.labels.cpu()[torch.from_numpy(below)].any()


@pytest.mark.parametrize(("k_min", "size"), [(3, 3), (4, 4), (7, 5)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_too_small_for_k_min_has_no_cut(backend: str, size: int, k_min: int) -> None:
    pair = symmetric(size, 1.0, {(0, 1): 0.01})
    assert_prompt(clusters(pair, backend, k_min=k_min), [0] * size, 0.0, 1, Verdict.UNCLEAR)
    # not even with the lowest min_silhouette
    got = clusters(symmetric(size, 1.0), backend, k_min=k_min, min_silhouette=-1.0)
    assert_prompt(got, [0] * size, 0.0, 1, Verdict.ALL_DIFFERENT)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_smallest_of_equally_good_ks_and_lowest_of_equally_near_pairs(backend: str, linkage: str) -> None:
    """With equal distances, every cut scores 0 and clusters grow from place 0."""
    for size in sizes_for(backend, 3, 7, 12):
        equal = symmetric(size, 0.5)
        cuts = tree(equal.double().numpy(), linkage).cuts[0]
        for k in range(2, size):
            got = clusters(equal, backend, linkage, k_min=k, **NOTHING)
            assert got.best_k.item() == k and got.silhouette.item() == pytest.approx(0, abs=1e-6)
            assert got.labels[0].tolist() == cuts[k].tolist()
            if linkage in ("single", "complete"):
                assert got.labels[0].tolist() == [0] * (size - k) + list(range(k))


# Duplicates


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_cut_into_more_groups_than_distinct_responses_can_win(backend: str, linkage: str) -> None:
    """The cut into distinct responses scores the share of duplicated rows; finer cuts score at least 2 / n less."""
    size = 9
    rows = batch_of(share_of(backend, 60), ["duplicates"], [size], width=24, seed=5)
    arguments = [t.to(device_of(backend)) for t in (rows.rows, rows.ids)]
    at = {
        k: gk.similarity_groups(*arguments, config=gk.SimilarityConfig(linkage, k_min=k, k_max=k), backend=backend)
        for k in range(2, size)
    }
    best = gk.similarity_groups(*arguments, config=gk.SimilarityConfig(linkage, **NOTHING), backend=backend)
    seen = 0
    for prompt, name in enumerate(rows.ids.unique()):
        _, twins, counts = rows.rows[rows.ids == name].unique(dim=0, return_inverse=True, return_counts=True)
        distinct = len(counts)
        if not 2 <= distinct < size:
            continue
        seen += 1
        score = at[distinct].silhouette[prompt].item()
        assert score == np.float32(int(counts[counts > 1].sum()) / size)
        finer = [at[k].silhouette[prompt].item() for k in range(distinct + 1, size)]
        # scores are rounded to float32
        assert all(other <= score - 2 / size + 1e-6 for other in finer)
        assert best.best_k[prompt] <= distinct
        result = best.labels.cpu()[rows.ids == name]
        for twin in range(distinct):
            assert len(result[twins == twin].unique()) == 1, "twins share a label"
    assert seen > 0


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_few_distinct_responses_many_times_are_their_groups(backend: str, linkage: str) -> None:
    """The distinct responses are orthogonal, so the cut into them scores 1."""
    for size in sizes_for(backend, 8, 32, 64, 256):
        for distinct in (2, 3, min(5, size // 2)):
            which = torch.randint(distinct, (size,))
            which[:distinct] = torch.arange(distinct)
            which[-distinct:] = torch.arange(distinct)
            got = embedded(torch.eye(distinct)[which] * 0.3, backend, linkage=linkage)
            assert_prompt(got, canonical(which), 1.0, distinct, Verdict.CLUSTERED)


# Labels and ids


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_count_up_in_order_of_first_appearance(backend: str) -> None:
    batch = batch_of(share_of(backend, 400), ("mixture", "isotropic", "bad"), sizes_for(backend, 3, 8, 12))
    config = gk.SimilarityConfig(min_silhouette=-1.0, k_min=2)
    got = gk.similarity_groups(
        *(t.to(device_of(backend)) for t in (batch.rows, batch.ids)), config=config, backend=backend
    )
    most = 0
    for prompt, name in enumerate(batch.ids.unique()):
        labels = [label for label in got.labels.cpu()[batch.ids == name].tolist() if label >= 0]
        assert labels == canonical(labels) and max(labels, default=-1) + 1 == got.num_groups[prompt]
        most = max(most, *labels, 0)
    assert most >= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_group_ids_are_unique_and_group_advantages_takes_them(backend: str) -> None:
    device = device_of(backend)
    batch = batch_of(share_of(backend, 300), ("mixture", "bad", "zeros"), sizes_for(backend, 2, 3, 8, 11), seed=2)
    rows, ids = batch.rows.to(device), batch.ids.to(device)
    got = gk.similarity_groups(rows, ids, config=gk.SimilarityConfig(different="singletons"), backend=backend)
    left_out = got.labels < 0
    assert torch.equal(got.group_ids < 0, left_out) and (got.group_ids[left_out] == -1).all() and left_out.any()
    pairs = torch.stack((ids, got.labels.long()), 1)[~left_out].unique(dim=0)
    together = torch.cat((torch.stack((ids, got.labels.long()), 1), got.group_ids[:, None]), 1)[~left_out].unique(dim=0)
    assert len(pairs) == len(together) == len(got.group_ids[~left_out].unique()) == got.num_groups.sum()

    rewards = torch.randn(len(ids), device=device)
    by_id = gk.group_advantages(rewards, ids, subgroups=got.group_ids)
    by_label = gk.group_advantages(rewards, ids, subgroups=got.labels)
    assert torch.equal(by_id.advantages, by_label.advantages) and by_id.advantages.any()
    alone = gk.group_advantages(rewards[~left_out], got.group_ids[~left_out])
    torch.testing.assert_close(by_id.advantages[~left_out], alone.advantages, rtol=1e-5, atol=1e-6)
    assert not by_id.advantages[left_out].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_come_in_ascending_order_of_their_ids(backend: str) -> None:
    """Ids have either sign and any size; prompts of 1 to 4 rows are recognized by their verdicts and labels."""
    names = torch.tensor([2**62, -(2**40), 5, -1])  # 4, 1, 3 and 2 rows
    order = torch.tensor([0, 2, 3, 0, 1, 2, 0, 3, 2, 0])
    rows = torch.eye(4)[torch.tensor([0, 1, 0, 1, 0, 1, 2, 1, 0, 3])]
    got = gk.similarity_groups(*(t.to(device_of(backend)) for t in (rows, names[order])), backend=backend)
    kinds = [Verdict.SMALL, Verdict.SMALL, Verdict.CLUSTERED, Verdict.ALL_DIFFERENT]
    assert got.verdict.tolist() == kinds
    assert got.labels[order == 2].tolist() == [0, 0, 1] and got.num_groups.tolist() == [1, 1, 2, 1]
