"""Edge cases of rewards: values in files, results of functions, unscored responses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainer.algorithm import Plan, assign_credit
from grpo_trainer.recipe import Algorithm, Reward
from grpo_trainer.rewards import RewardError, load_reward, score
from grpo_trainer.rollout import Rollout

NOTHING = math.nan


def rollout(texts: list[str], **columns: Any) -> Rollout:
    items = [{"prompt": "p", "prompt_ids": [1]} | columns]
    truncated = torch.zeros(len(texts), dtype=torch.bool)
    return cast(Rollout, SimpleNamespace(items=items, group_size=len(texts), texts=texts, truncated=truncated))


@pytest.mark.parametrize(("answer", "right"), [("4", 1), (" 4", 1), (4, 1), (4.0, 1), ("5", 0), (5, 0)])
def test_an_exact_answer_may_be_a_number(answer: object, right: float) -> None:
    exact = load_reward(Reward(name="exact"))
    assert exact(prompts=["p"], completions=["2 + 2 = 4. #### 4"], answer=[answer]) == [right]


def test_without_an_answer_exact_has_nothing_to_say() -> None:
    assert load_reward(Reward(name="exact"))(prompts=["p"], completions=["#### 4"], answer=[None]) == [None]


def test_empty_responses_have_no_diversity() -> None:
    diversity = load_reward(Reward(name="diversity", options={"embedder": "hashed"}))
    texts = ["the sky is blue", "the sky is blue", "the sky is blue!", "", " "]
    with_empty = diversity(prompts=["p"] * 5, completions=texts)
    assert with_empty[3:] == [0.0, 0.0]
    assert with_empty[:3] == pytest.approx(diversity(prompts=["p"] * 3, completions=texts[:3]))


def test_unknown_options_of_rewards_are_named() -> None:
    with pytest.raises(ValueError, match=r"rewards.options.correct: no such key; there is none$"):
        load_reward(Reward(name="exact", options={"correct": 1}))
    with pytest.raises(ValueError, match=r"rewards.options.corect: no such key; the nearest is 'correct'"):
        load_reward(Reward(name="gsm8k", options={"corect": 1.0}))


def no_number(prompts: list[str], completions: list[str], **_: object) -> list[Any]:
    return ["bad"] * len(completions)


def test_invalid_values_name_the_reward() -> None:
    setting = Reward(name=f"{__name__}:no_number")
    with pytest.raises(RewardError, match=r"no_number' must be a finite number or None, got 'bad' for response 0"):
        score([setting], [no_number], rollout(["a"]))
    skipping = Reward(name=setting.name, on_error="skip")
    values, skipped, _ = score([skipping], [no_number], rollout(["a", "b"]))
    assert skipped == 2 and bool(values.isnan().all())


@pytest.mark.parametrize("name", ["grpo", "similarity_group_grpo", "polychromic"])
def test_a_response_without_a_reward_is_left_out(name: str) -> None:
    mask = torch.ones(8, 3, dtype=torch.bool)
    mask[:, 2] = torch.arange(8) % 2 == 0
    rollout = cast(
        Rollout,
        SimpleNamespace(
            group_size=4,
            batch=SimpleNamespace(mask=mask),
            items=[{}, {}],
            texts=[""] * 8,
            lengths=mask.sum(1),
        ),
    )
    rewards = torch.tensor([1.0, 0, NOTHING, 1, 0, 1, 0, 1])[:, None]
    embeddings = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    credit = assign_credit(Plan.of(Algorithm(name=name), 3), rollout, rewards, torch.ones(1), embeddings, None)
    assert credit.mask is not None
    assert not credit.mask[2].any() and torch.equal(credit.mask[[0, 1, 3, 4, 5, 6, 7]], mask[[0, 1, 3, 4, 5, 6, 7]])
