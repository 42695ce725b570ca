"""FIPO's weights: how the later tokens of a row have moved, as a factor of each token's policy term."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.ops.policy_loss.arguments import policy_tokens, spread_rows
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.registration import Policy
from grpo_kernels.ops.token_advantages import registration as token_advantages
from grpo_kernels.ops.token_advantages.config import WHITEN_NONE, Plan

_SAFE = (0.8, 1.0)  # bounds of the weight of worse tokens that have become much more probable


def future_kl_weights(logprobs: Tensor, policy: Policy, config: LossConfig, backend: str) -> Tensor:
    """The weights of the tokens, times the given importance weights; 1 is that of a token that nothing follows.

    Tokens that take no part add nothing to the sum, but count as steps of the discount.
    """
    assert config.future_kl_half_life is not None
    lp = logprobs.detach()
    valid = policy_tokens(policy, lp)
    moved = torch.zeros_like(lp) if policy.old_logprobs is None else lp - policy.old_logprobs
    if valid is not None:
        moved = torch.where(valid, moved, 0)
    summed = moved
    if config.future_kl_cap is not None:
        summed = torch.where(moved > math.log(config.future_kl_cap), 0, moved)
    plan = Plan(whiten=WHITEN_NONE, gamma=2 ** (-1 / config.future_kl_half_life), lam=1.0, whiten_eps=0.0)
    everywhere = torch.ones_like(lp, dtype=torch.bool)
    scan = token_advantages.FORWARD[backend]
    future: Tensor = scan(summed, None, everywhere, policy.cu_seqlens, None, [plan.whiten], list(plan[1:]))[1]
    weights = future.exp()
    if config.future_kl_clip is not None:
        weights = weights.clamp(*config.future_kl_clip)
    if config.future_kl_safety is not None:
        is_worse = spread_rows(policy.advantages, policy, lp) < 0
        risky = is_worse & (moved > math.log(config.future_kl_safety))
        weights = torch.where(risky, weights.clamp(*_SAFE), weights)
    return weights if policy.is_weights is None else weights * spread_rows(policy.is_weights, policy, lp)
