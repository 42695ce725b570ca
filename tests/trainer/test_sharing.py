"""Sharing of rewards among similar responses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainer.algorithm import Plan, assign_credit, share_rewards
from grpo_trainer.recipe import Algorithm, Rl
from grpo_trainer.recipes import validated
from grpo_trainer.rollout import Rollout

import grpo_kernels as gk

# Two prompts with six responses each. The first has a cluster of four, of which one is wrong, and two singletons; the
# second has clusters of two and four.
REWARDS = torch.tensor([[1.0, 1, 1, 0, 1, 0], [3, 5, 2, 5, 5, 4]], dtype=torch.float64).view(12, 1)
CLUSTERS = torch.tensor([0, 0, 0, 0, 1, 2, 3, 3, 4, 4, 4, 4])
# Three roundings of doubles up to 5: a power, a product and a sum.
CLOSE = {"rtol": 0, "atol": 3 * 5 * torch.finfo(torch.float64).eps}


@pytest.mark.parametrize("power", [0.25, 1.0, 2.0])
def test_rewards_above_the_lowest_are_divided(power: float) -> None:
    third, half, all_ = 3**-power, 2**-power, 1.0
    of_second = [2 + 1 * half, 2 + 3 * half, 2, 2 + 3 * third, 2 + 3 * third, 2 + 2 * third]
    expected = torch.tensor([third, third, third, 0, all_, 0, *of_second], dtype=torch.float64)
    torch.testing.assert_close(share_rewards(REWARDS, CLUSTERS, 6, power).flatten(), expected, **CLOSE)


def test_clusters_of_equal_rewards_have_equal_totals() -> None:
    divided = share_rewards(REWARDS, CLUSTERS, 6, 1.0).flatten()
    torch.testing.assert_close(divided[CLUSTERS == 0].sum(), divided[CLUSTERS == 1].sum(), **CLOSE)


def test_a_shift_of_all_rewards_shifts_what_is_shared() -> None:
    torch.testing.assert_close(
        share_rewards(REWARDS - 2, CLUSTERS, 6, 0.5), share_rewards(REWARDS, CLUSTERS, 6, 0.5) - 2, **CLOSE
    )


def test_rewards_share_apart_from_each_other() -> None:
    both = torch.cat([REWARDS, REWARDS.flip(0)], 1)
    columns = [share_rewards(both[:, i : i + 1], CLUSTERS, 6, 0.5) for i in range(2)]
    assert torch.equal(share_rewards(both, CLUSTERS, 6, 0.5), torch.cat(columns, 1))


def test_responses_outside_clusters_do_not_share() -> None:
    clusters = torch.where((torch.arange(12) == 1) | (torch.arange(12) == 2), -1, CLUSTERS)
    divided = share_rewards(REWARDS, clusters, 6, 1.0).flatten()
    assert divided[:3].tolist() == [1, 1, 1]


def test_missing_rewards_stay_missing_and_take_no_share() -> None:
    missing = REWARDS.clone()
    missing[0] = math.nan
    divided = share_rewards(missing, CLUSTERS, 6, 1.0).flatten()
    assert divided[0].isnan() and divided[1:5].tolist() == [0.5, 0.5, 0, 1]
    nothing = torch.full_like(REWARDS, math.nan)
    assert share_rewards(nothing, CLUSTERS, 6, 1.0).isnan().all()


EMBEDDINGS = torch.eye(5, dtype=torch.float32)[CLUSTERS]


def advantages(name: str, embeddings: torch.Tensor = EMBEDDINGS, **similarity: object) -> torch.Tensor:
    settings = validated(Algorithm, {"name": name, "similarity": similarity or None})
    rollout = cast(Rollout, SimpleNamespace(group_size=6))
    rewards, weights = REWARDS.float(), torch.ones(1)
    return assign_credit(
        Plan.of(Rl(algorithm=settings)), rollout, rewards, weights, embeddings if similarity else None, None
    ).advantages


def test_between_without_sharing_is_plain_grpo() -> None:
    computed = advantages("similarity_group_grpo", within=0.0, between=1.0)
    assert torch.equal(computed, advantages("grpo"))
    assert not torch.equal(computed, advantages("similarity_group_grpo", within=0.5, between=1.0))


def test_advantages_are_computed_from_shared_rewards() -> None:
    computed = advantages("similarity_group_grpo", within=0.0, between=1.0, sharing=1.0)
    expected = gk.group_advantages(share_rewards(REWARDS.float(), CLUSTERS, 6, 1.0), 6).advantages
    assert torch.equal(computed, expected)


def test_a_response_without_an_embedding_has_no_advantage() -> None:
    spoilt = EMBEDDINGS.clone()
    spoilt[4] = math.nan
    computed = advantages("similarity_group_grpo", spoilt, within=1.0, between=1.0)
    assert computed[4] == 0 and computed[[0, 1, 2, 3, 5]].all()
