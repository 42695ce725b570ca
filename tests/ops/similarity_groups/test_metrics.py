"""similarity_metrics against counts by hand, and similarity_advantages against its two steps.

Faults that this is for: a mean over the wrong prompts; empty prompts that count; a count that stops at eight groups;
several copies to the host; a setting that is not passed on; a row left out of the clustering that gets an advantage.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.ops.similarity_groups.cases import INF, NAN

P = "similarity_groups/"


def by_hand() -> tuple[Tensor, Tensor]:
    """Five prompts: clusters of 3 and 1, all the same, all different, two responses, and one left out."""
    e = torch.cat([torch.eye(5), torch.full((1, 5), NAN)])
    return e[[0, 0, 1, 0, 2, 2, 2, 0, 1, 2, 3, 4, 0, 1, 5]], torch.tensor([0] * 4 + [1] * 3 + [2] * 5 + [3] * 2 + [4])


def test_metrics_of_a_batch_by_hand() -> None:
    embeddings, ids = by_hand()
    result = gk.similarity_groups(embeddings, ids)
    got = gk.similarity_metrics(result)
    expected = {
        "avg_groups_per_prompt": 5 / 4,
        "n_prompts_split_into_1_groups": 3,
        "n_prompts_split_into_2_groups": 1,
        **{f"n_prompts_split_into_{k}_groups": 0 for k in range(3, 9)},
        "n_single_member_groups": 1,
        # in the first prompt, the lone response scores 0 and the others 1
        "avg_silhouette_score": (0.75 + sum(result.silhouette[1:4].tolist())) / 4,
        **{f"share_{name}": 1 / 4 for name in ("clustered", "all_same", "all_different", "small")},
        "share_unclear": 0,
        "share_empty": 1 / 5,
    }
    assert got == {P + name: pytest.approx(value, abs=1e-7) for name, value in expected.items()}
    assert all(type(value) is float for value in got.values())
    assert gk.similarity_metrics(gk.cluster_distances(gk.pairwise_cosine(embeddings, ids))) == got
    larger = gk.similarity_metrics(gk.similarity_groups(embeddings, ids, num_groups=9, max_size=30))
    assert larger == got | {P + "share_empty": pytest.approx(5 / 9)}


@pytest.mark.parametrize("groups", [0, 8, 12, 256])
def test_metrics_show_as_many_groups_as_there_are(groups: int) -> None:
    ids = torch.zeros(groups, dtype=torch.int64)
    config = gk.SimilarityConfig(collapse="singletons")
    got = gk.similarity_metrics(
        gk.similarity_groups(torch.eye(max(groups, 4))[:groups], ids, num_groups=1, config=config)
    )
    assert sum(name.startswith(P + "n_prompts") for name in got) == max(groups, 8)
    assert got.get(P + f"n_prompts_split_into_{groups}_groups", 1) == 1
    assert got[P + "n_single_member_groups"] == groups and got[P + "share_empty"] == (groups == 0)
    assert groups > 0 or sum(got.values()) == 1


def test_metrics_copy_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    result, copies, original = gk.similarity_groups(*by_hand()), [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: copies.append(self.shape) or original(self))
    for name in ("item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, lambda self, name=name: pytest.fail(f"{name} waits for the device"))
    gk.similarity_metrics(result)
    assert len(copies) == 1


def test_advantages_pass_every_setting_on() -> None:
    x, rewards, lengths = torch.randn(24, 5), torch.rand(24), torch.arange(24)
    x[5], rewards[3], valid = INF, NAN, lengths % 5 != 2
    loose = gk.SimilarityConfig("complete", min_silhouette=-1.0)
    config = gk.AdvantageConfig("opo", singleton="parent")
    for settings in ({"config": config, "lengths": lengths}, {"config": "remax", "baselines": lengths / 9}):
        got = gk.similarity_advantages(rewards, x, 8, valid=valid, similarity=loose, **settings)
        result = gk.similarity_groups(x, 8, valid=valid, config=loose)
        within = gk.group_advantages(rewards, 8, subgroups=result.labels, valid=valid, **settings)
        assert all(torch.equal(one, other) for one, other in zip(got.groups, result, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(got[:5], within, strict=True))
        assert (result.labels[~valid] < 0).all() and not got.advantages[result.labels < 0].any()
    assert gk.similarity_advantages(torch.rand(24, 2), x, 8, config="gdpo").advantages.shape == (24,)
    sized = gk.similarity_advantages(rewards, x, lengths // 8, num_groups=5, max_size=9)
    assert sized.groups.num_groups.shape == (5,)


def test_a_response_unlike_all_others_learns_from_its_prompt_if_told_to() -> None:
    rows, rewards = torch.eye(2)[[0] * 7 + [1]], torch.tensor([0.0, 0, 1, 0, 1, 0, 0, 1])
    muted = gk.similarity_advantages(rewards, rows, 8)
    heard = gk.similarity_advantages(rewards, rows, 8, config=gk.AdvantageConfig(singleton="parent"))
    assert muted.groups.labels.tolist() == [0] * 7 + [1] and muted.groups.silhouette.tolist() == [0.875]
    assert muted.advantages[7] == 0 < heard.advantages[7]
    assert torch.equal(heard.advantages[:7], muted.advantages[:7])
