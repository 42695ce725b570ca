"""SkyRL's reductions, as aggregations or weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.ops.policy_loss.test_spec import CASES, IDS, assert_near, graded, ragged

# SkyRL's loss_reduction as one of our aggregations or, for the mean over prompts, as weights.
SKYRL: dict[str, dict[str, Any]] = {
    "token_mean": {"aggregation": "token-mean"},
    "sequence_mean": {"aggregation": "seq-mean-token-mean"},
    "seq_mean_token_sum_norm": {"aggregation": "seq-mean-token-sum-norm", "max_length": 32},
    "prompt_mean": {},
}


@pytest.mark.parametrize("name", SKYRL)
@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=IDS)
def test_reductions_of_skyrl_are_covered(backend: str, dtype: torch.dtype, name: str) -> None:
    mask, prompts = ragged(6), torch.tensor([0, 0, 0, 1, 1, 2])
    logprobs, advantages = -torch.rand(mask.shape).to(dtype), torch.randn(6).to(dtype)
    terms = torch.where(mask, -logprobs * advantages[:, None], 0)
    of_prompt = torch.stack([mask[prompts == p].sum() for p in range(3)])
    weights = mask.to(dtype) / of_prompt[prompts][:, None] / 3 if name == "prompt_mean" else None
    want = {
        "token_mean": terms.sum() / mask.sum(),
        "sequence_mean": (terms.sum(1) / mask.sum(1)).mean(),
        "seq_mean_token_sum_norm": (terms.sum(1) / 32).mean(),
        "prompt_mean": torch.stack([terms[prompts == p].sum() / of_prompt[p] for p in range(3)]).mean(),
    }[name]
    config = gk.LossConfig(loss="reinforce", **SKYRL[name])
    got, _ = graded(backend, logprobs, None, advantages, mask=mask, weights=weights, config=config)
    assert_near(got.loss, want)
