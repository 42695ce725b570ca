"""similarity_metrics against hand counts; similarity_advantages against its two steps and against plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk

NAN = float("nan")
P = "similarity_groups/"


def hand_made() -> tuple[Tensor, Tensor]:
    """Five prompts: clusters of 3 and 1, all the same, all different, two responses, and one left out."""
    e = torch.eye(5)
    rows = {
        0: [e[0], e[0], e[1], e[0]],
        1: [e[2]] * 3,
        2: [e[0], e[1], e[2], e[3], e[4]],
        3: [e[0], e[1]],
        4: [torch.full((5,), NAN)],
    }
    ids = [p for p, of_prompt in rows.items() for _ in of_prompt]
    return torch.stack([row for of_prompt in rows.values() for row in of_prompt]), torch.tensor(ids)


def test_metrics_of_a_hand_made_batch() -> None:
    embeddings, ids = hand_made()
    result = gk.similarity_groups(embeddings, ids)
    names = [gk.Verdict(v).name for v in result.verdict.tolist()]
    assert names == ["CLUSTERED", "ALL_SAME", "ALL_DIFFERENT", "SMALL", "EMPTY"]
    got = gk.similarity_metrics(result)
    expected = {
        "avg_groups_per_prompt": 5 / 4,
        "n_prompts_split_into_1_groups": 3,
        "n_prompts_split_into_2_groups": 1,
        **{f"n_prompts_split_into_{k}_groups": 0 for k in range(3, 9)},
        "n_single_member_groups": 1,
        # in the first prompt, the lone response scores 0 and the others 1
        "avg_silhouette_score": (0.75 + sum(result.silhouette[1:4].tolist())) / 4,
        "share_clustered": 1 / 4,
        "share_all_same": 1 / 4,
        "share_all_different": 1 / 4,
        "share_small": 1 / 4,
        "share_empty": 1 / 5,
        "share_unclear": 0,
    }
    assert got == {P + name: pytest.approx(value, abs=1e-7) for name, value in expected.items()}
    assert all(type(value) is float for value in got.values())


@pytest.mark.parametrize("seed", range(4))
def test_metrics_against_counting_in_python(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 3, generator=rng)
    ids = torch.randint(0, 12, (60,), generator=rng)
    valid = torch.rand(60, generator=rng) < 0.8
    config = gk.SimilarityConfig(different="singletons", min_silhouette=0.3)
    result = gk.similarity_groups(x, ids, valid=valid, num_groups=15, max_size=20, config=config)
    got = gk.similarity_metrics(result)
    clusters = [
        [result.labels[ids == p].tolist().count(label) for label in set(result.labels[ids == p].tolist()) - {-1}]
        for p in sorted(set(ids.tolist()))
    ]
    clusters = [of_prompt for of_prompt in clusters if of_prompt]
    assert got[P + "avg_groups_per_prompt"] == pytest.approx(statistics.mean(map(len, clusters)))
    for k in range(1, 9):
        assert got[P + f"n_prompts_split_into_{k}_groups"] == sum(len(c) == k for c in clusters)
    assert got[P + "n_single_member_groups"] == sum(c.count(1) for c in clusters)
    assert got[P + "avg_silhouette_score"] == pytest.approx(result.silhouette.sum().item() / len(clusters))
    assert got[P + "share_empty"] == pytest.approx(1 - len(clusters) / 15)
    shares = [got[P + f"share_{v.name.lower()}"] for v in gk.Verdict if v != gk.Verdict.EMPTY]
    assert sum(shares) == pytest.approx(1)


def test_metrics_of_distances_are_those_of_the_rows() -> None:
    embeddings, ids = hand_made()
    places = gk.cluster_distances(gk.pairwise_cosine(embeddings, ids))
    assert gk.similarity_metrics(places) == gk.similarity_metrics(gk.similarity_groups(embeddings, ids))


def test_metrics_show_as_many_groups_as_there_are() -> None:
    result = gk.similarity_groups(torch.eye(12).repeat_interleave(2, 0), 24)
    got = gk.similarity_metrics(result)
    assert got[P + "n_prompts_split_into_12_groups"] == 1
    assert P + "n_prompts_split_into_11_groups" in got and P + "n_prompts_split_into_13_groups" not in got
    largest = gk.SimilarityConfig(collapse="singletons")
    of_256 = gk.similarity_metrics(gk.similarity_groups(torch.eye(256), 256, config=largest))
    assert of_256[P + "n_prompts_split_into_256_groups"] == 1 and of_256[P + "n_single_member_groups"] == 256


def test_metrics_do_not_depend_on_sizes_given_too_large() -> None:
    embeddings, ids = hand_made()
    exact = gk.similarity_metrics(gk.similarity_groups(embeddings, ids))
    larger = gk.similarity_metrics(gk.similarity_groups(embeddings, ids, num_groups=9, max_size=30))
    assert larger.pop(P + "share_empty") == pytest.approx(5 / 9) and exact.pop(P + "share_empty") == 1 / 5
    assert larger == exact


@pytest.mark.parametrize("prompts", [0, 3])
def test_metrics_of_nobody_are_zero(prompts: int) -> None:
    ids = torch.zeros(0, dtype=torch.int64)
    got = gk.similarity_metrics(gk.similarity_groups(torch.zeros(0, 4), ids, num_groups=prompts))
    assert got.pop(P + "share_empty") == float(prompts > 0)
    assert set(got.values()) == {0.0}


def test_metrics_refuse_what_is_no_result() -> None:
    with pytest.raises(TypeError, match="similarity_metrics: result must be SimilarityGroups, got tuple"):
        gk.similarity_metrics(())  # type: ignore[arg-type]


def test_metrics_copy_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, ids = hand_made()
    result = gk.similarity_groups(embeddings, ids.new_zeros(15), num_groups=1, max_size=15)
    copies = []
    original = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: copies.append(self.shape) or original(self))
    for name in ("item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, lambda self, name=name: pytest.fail(f"{name} waits for the device"))
    gk.similarity_metrics(result)
    assert len(copies) == 1


def in_python(rewards: list[float], labels: list[int], ids: list[int], valid: list[bool]) -> list[float]:
    """GRPO in each cluster: ddof 1, eps 1e-6, and 0 for clusters of one or of equal rewards."""
    scored = [i for i, r in enumerate(rewards) if valid[i] and labels[i] >= 0 and not math.isnan(r)]
    result = [0.0] * len(rewards)
    for i in scored:
        own = [rewards[j] for j in scored if (ids[j], labels[j]) == (ids[i], labels[i])]
        if len(own) > 1 and min(own) != max(own):
            result[i] = (rewards[i] - statistics.fmean(own)) / (statistics.stdev(own) + 1e-6)
    return result


@pytest.mark.parametrize("layout", ["neighbours", "ids", "shuffled"])
@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_advantages_are_those_of_both_steps(layout: str, backend: str | None) -> None:
    if backend == "cpu" and gk.available_kernels()["cpu"] != "ok":
        pytest.skip("no compiled CPU ops")
    prompts, size = 9, 8
    centres = torch.randn(prompts, 3, 6)
    x = centres[torch.arange(prompts).repeat_interleave(size), torch.randint(0, 3, (prompts * size,))]
    x = x + 0.1 * torch.randn(prompts * size, 6)
    x[5], x[11] = x[4], torch.inf
    ids = torch.arange(prompts).repeat_interleave(size) * 7 - 20
    rewards = torch.randn(prompts * size, dtype=torch.float64).round(decimals=1)
    rewards[3] = NAN
    valid = torch.rand(prompts * size) < 0.9
    if layout == "shuffled":
        order = torch.randperm(prompts * size)
        x, ids, rewards, valid = x[order], ids[order], rewards[order], valid[order]
    groups = size if layout == "neighbours" else ids
    got = gk.similarity_advantages(rewards, x, groups, valid=valid, backend=backend)
    result = gk.similarity_groups(x, groups, valid=valid, backend=backend)
    within = gk.group_advantages(rewards, groups, subgroups=result.labels, valid=valid, backend=backend)
    for one, other in zip((*got[:5], *got.groups), (*within, *result), strict=True):
        assert torch.equal(one, other)
    assert (result.num_groups > 1).any()
    wanted = in_python(rewards.tolist(), result.labels.tolist(), ids.tolist(), valid.tolist())
    torch.testing.assert_close(got.advantages.tolist(), wanted, rtol=1e-9, atol=1e-9)
    # ids that are unique across prompts give the same result
    by_id = gk.group_advantages(rewards, result.group_ids, valid=valid & (result.labels >= 0), backend=backend)
    torch.testing.assert_close(got.advantages, by_id.advantages, rtol=1e-9, atol=1e-12)


def test_advantages_pass_every_setting_on() -> None:
    x, rewards = torch.randn(24, 5), torch.rand(24)
    loose = gk.SimilarityConfig("complete", min_silhouette=-1.0)
    config = gk.AdvantageConfig("opo", singleton="parent")
    got = gk.similarity_advantages(rewards, x, 8, similarity=loose, config=config, lengths=torch.arange(24))
    result = gk.similarity_groups(x, 8, config=loose)
    within = gk.group_advantages(rewards, 8, subgroups=result.labels, config=config, lengths=torch.arange(24))
    assert torch.equal(got.advantages, within.advantages) and torch.equal(got.groups.labels, result.labels)
    remax = gk.similarity_advantages(rewards, x, 8, config="remax", baselines=rewards.flip(0))
    by_hand = gk.group_advantages(rewards, 8, subgroups=remax.groups.labels, config="remax", baselines=rewards.flip(0))
    assert torch.equal(remax.advantages, by_hand.advantages)
    several = gk.similarity_advantages(torch.rand(24, 2), x, 8, config="gdpo")
    assert several.advantages.shape == (24,)
    sized = gk.similarity_advantages(rewards, x, torch.arange(24) // 8, num_groups=5, max_size=9)
    assert sized.groups.num_groups.shape == (5,)


def test_rows_left_out_of_the_clustering_get_nothing() -> None:
    x = torch.eye(4).repeat(2, 1)
    x[1] = NAN
    got = gk.similarity_advantages(torch.arange(8.0), x, 8, valid=torch.arange(8) != 2, config="dr_grpo")
    assert got.groups.labels[1:3].tolist() == [-1, -1]
    assert got.advantages[1:3].tolist() == [0, 0] and got.size[1:3].tolist() == [0, 0]
    # 0 and 4 are alike, and so are 3 and 7; 5 and 6 lack their counterparts 1 and 2
    assert got.advantages.tolist() == [-2, 0, 0, -2, 2, 0, 0, 2]


X, R = torch.zeros(4, 2), torch.zeros(4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rewards": [1.0]}, TypeError, "similarity_advantages: rewards must be a tensor, got list"),
        ({"embeddings": None}, TypeError, "similarity_advantages: embeddings must be a tensor, got NoneType"),
        ({"embeddings": X[:2]}, ValueError, r"embeddings must have one row per reward, 4, got \[2, 2\]"),
        ({"embeddings": X.to("meta")}, ValueError, "embeddings must be on cpu like the first argument, got meta"),
        ({"similarity": 3}, TypeError, "similarity must be a SimilarityConfig or a str, got int"),
        ({"config": "gropo"}, ValueError, "similarity_advantages: config must be one of grpo"),
        ({"similarity": "averag"}, ValueError, "similarity_advantages: similarity must be one of .*'average'"),
        ({"config": "grop"}, ValueError, "did you mean 'grpo'"),
        ({"groups": 3}, ValueError, "groups must divide the number of rows, 4, got 3"),
        ({"lengths": R}, ValueError, "lengths must be left out"),
    ],
)
def test_refusals(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gk.similarity_advantages(**({"rewards": R, "embeddings": X, "groups": 2} | arguments))  # type: ignore[arg-type]
