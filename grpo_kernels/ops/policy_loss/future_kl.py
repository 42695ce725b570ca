"""FIPO's weights: how the later tokens of a row have moved, as a factor of each token's policy term."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.ops.policy_loss.arguments import policy_tokens, spread_rows
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.registration import FUTURE_KL, Policy
from grpo_kernels.ops.token_advantages import registration as token_advantages
from grpo_kernels.ops.token_advantages.config import TokenAdvantageConfig


class _Settings(NamedTuple):
    """The discount of a token, the bounds of a weight, those of log ratios, and of the weight beyond the last."""

    gamma: float
    low: float
    high: float
    log_cap: float
    log_safety: float
    safe_low: float = 0.8
    safe_high: float = 1.0


def future_kl_weights(logprobs: Tensor, policy: Policy, config: LossConfig, backend: str) -> Tensor:
    """The weights of the tokens, times the given importance weights; 1 is that of a token that nothing follows.

    Tokens that take no part add nothing to the sum, but count as steps of the discount.
    """
    assert config.future_kl_half_life is not None
    lp = logprobs.detach()
    old, valid = lp if policy.old_logprobs is None else policy.old_logprobs, policy_tokens(policy, lp)
    settings = _Settings(
        2 ** (-1 / config.future_kl_half_life),
        *(config.future_kl_clip or (0.0, math.inf)),
        math.inf if config.future_kl_cap is None else math.log(config.future_kl_cap),
        math.inf if config.future_kl_safety is None else math.log(config.future_kl_safety),
    )
    if backend in FUTURE_KL:
        weights: Tensor = FUTURE_KL[backend](lp, old, policy.advantages, valid, policy.cu_seqlens, list(settings))
    else:
        weights = _weights(lp, old, policy, valid, settings, backend)
    return weights if policy.is_weights is None else weights * spread_rows(policy.is_weights, policy, lp)


def _weights(
    lp: Tensor, old: Tensor, policy: Policy, valid: Tensor | None, settings: _Settings, backend: str
) -> Tensor:
    moved = lp - old if valid is None else torch.where(valid, lp - old, 0)
    summed = torch.where(moved > settings.log_cap, 0, moved)
    config = TokenAdvantageConfig("reinforce", gamma=settings.gamma)
    everywhere = torch.ones_like(lp, dtype=torch.bool)
    scan = token_advantages.FORWARD["triton" if backend == "cuda" else backend]
    future: Tensor = scan(summed, None, everywhere, policy.cu_seqlens, None, config.modes, config.coefficients)[1]
    weights = future.exp().clamp(settings.low, settings.high)
    is_risky = (moved > settings.log_safety) & (spread_rows(policy.advantages, policy, lp) < 0)
    return torch.where(is_risky, weights.clamp(settings.safe_low, settings.safe_high), weights)
