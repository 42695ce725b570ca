"""What a response's reward is among others like it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainer.algorithm import Plan, credit, shared
from grpo_trainer.recipe import Algorithm
from grpo_trainer.rollout import Rollout
from grpo_trainer.settings import build

import grpo_kernels as gk

# Two prompts of six. The first: four of a cluster, one of which is wrong, and two by themselves. The second: two of one
# cluster and four of another.
REWARDS = torch.tensor([[1.0, 1, 1, 0, 1, 0], [3, 5, 2, 5, 5, 4]], dtype=torch.float64).view(12, 1)
CLUSTERS = torch.tensor([0, 0, 0, 0, 1, 2, 3, 3, 4, 4, 4, 4])
# Of a power, a product and a sum of doubles up to 5, each rounded once.
CLOSE = {"rtol": 0, "atol": 3 * 5 * torch.finfo(torch.float64).eps}


@pytest.mark.parametrize("power", [0.25, 1.0, 2.0])
def test_what_is_above_the_lowest_is_divided_among_those_that_have_it(power: float) -> None:
    third, half, all_ = 3**-power, 2**-power, 1.0
    of_second = [2 + 1 * half, 2 + 3 * half, 2, 2 + 3 * third, 2 + 3 * third, 2 + 2 * third]
    expected = torch.tensor([third, third, third, 0, all_, 0, *of_second], dtype=torch.float64)
    torch.testing.assert_close(shared(REWARDS, CLUSTERS, 6, power).flatten(), expected, **CLOSE)


def test_equally_right_ways_are_worth_the_same_in_all() -> None:
    found = shared(REWARDS, CLUSTERS, 6, 1.0).flatten()
    torch.testing.assert_close(found[CLUSTERS == 0].sum(), found[CLUSTERS == 1].sum(), **CLOSE)


def test_a_shift_of_all_rewards_is_one_of_what_is_shared() -> None:
    torch.testing.assert_close(shared(REWARDS - 2, CLUSTERS, 6, 0.5), shared(REWARDS, CLUSTERS, 6, 0.5) - 2, **CLOSE)


def test_rewards_share_apart_from_each_other() -> None:
    both = torch.cat([REWARDS, REWARDS.flip(0)], 1)
    columns = [shared(both[:, i : i + 1], CLUSTERS, 6, 0.5) for i in range(2)]
    assert torch.equal(shared(both, CLUSTERS, 6, 0.5), torch.cat(columns, 1))


def test_responses_in_no_cluster_share_with_nobody() -> None:
    clusters = torch.where((torch.arange(12) == 1) | (torch.arange(12) == 2), -1, CLUSTERS)
    found = shared(REWARDS, clusters, 6, 1.0).flatten()
    assert found[:3].tolist() == [1, 1, 1]


def test_missing_rewards_stay_missing_and_take_no_share() -> None:
    missing = REWARDS.clone()
    missing[0] = math.nan
    found = shared(missing, CLUSTERS, 6, 1.0).flatten()
    assert found[0].isnan() and found[1:5].tolist() == [0.5, 0.5, 0, 1]
    nothing = torch.full_like(REWARDS, math.nan)
    assert shared(nothing, CLUSTERS, 6, 1.0).isnan().all()


def advantages(name: str, **similarity: object) -> torch.Tensor:
    settings = build(Algorithm, {"name": name, "similarity": similarity or None})
    rollout = cast(Rollout, SimpleNamespace(group_size=6))
    embeddings = torch.eye(5, dtype=torch.float32)[CLUSTERS]
    rewards, weights = REWARDS.float(), torch.ones(1)
    return credit(Plan.of(settings, 8), rollout, rewards, weights, embeddings if similarity else None, None).advantages


def test_between_alone_and_nothing_shared_is_plain_grpo() -> None:
    found = advantages("similarity_group_grpo", within=0.0, between=1.0)
    assert torch.equal(found, advantages("grpo"))
    assert not torch.equal(found, advantages("similarity_group_grpo", within=0.5, between=1.0))


def test_what_is_shared_is_the_reward_that_advantages_are_of() -> None:
    found = advantages("similarity_group_grpo", within=0.0, between=1.0, sharing=1.0)
    expected = gk.group_advantages(shared(REWARDS.float(), CLUSTERS, 6, 1.0), 6).advantages
    assert torch.equal(found, expected)
