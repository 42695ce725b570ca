"""Which tokens Clip-Cov and KL-Cov choose, by the covariance of advantage and log-prob."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.ops.policy_loss.arguments import counted_tokens, spread_rows
from grpo_kernels.ops.policy_loss.config import POLICY, SELECTED, LossConfig
from grpo_kernels.ops.policy_loss.registration import SELECT, Policy


def select_tokens(logprobs: Tensor, policy: Policy, config: LossConfig, backend: str) -> Policy:
    """The policy with the chosen ones of the counted tokens as a kind of their own, found without a wait.

    KL-Cov takes the tokens of highest covariance, Clip-Cov as many at random among those within cov_bounds that are not
    clipped. The random order is that of a hash of a token's place among the counted ones and of its log-prob, so that a
    repetition chooses the same tokens and no generator changes its state.
    """
    if backend in SELECT:
        mask = policy.mask if policy.segments is None else counted_tokens(policy, logprobs)
        batch = (logprobs.detach(), policy.old_logprobs, policy.advantages, mask, policy.cu_seqlens, policy.kinds)
        bounds = [*config.cov_bounds, *_ratio_bounds(config)]
        chosen = SELECT[backend](*batch, config.loss == "clip_cov", config.cov_ratio, bounds)
        return policy._replace(kinds=chosen)
    counted = counted_tokens(policy, logprobs)
    kinds = torch.zeros_like(counted, dtype=torch.int8) if policy.kinds is None else policy.kinds
    valid = (counted & (kinds == POLICY)).reshape(-1)
    lp, advantages = logprobs.detach().reshape(-1), spread_rows(policy.advantages, policy, logprobs).reshape(-1)
    # in float64, so that the order of the sums matters to no choice
    centered = [_centered(values, valid) for values in (advantages, lp)]
    covariance = centered[0] * centered[1]
    if config.loss == "kl_cov":
        eligible, keys = valid, torch.where(valid, -covariance, torch.inf)
    else:
        low, high = config.cov_bounds
        eligible = valid & (covariance > low) & (covariance < high)
        eligible &= ~_is_clipped(lp, advantages, policy, config)
        keys = torch.where(eligible, _hash(lp, valid), 2**32)
    count = (valid.sum().double() * config.cov_ratio).long().clamp(min=1)
    order = keys.sort(stable=True).indices
    first = torch.arange(len(order), device=order.device) < count
    chosen = torch.zeros_like(valid).scatter(0, order, first) & eligible
    return policy._replace(kinds=torch.where(chosen.view_as(kinds), SELECTED, kinds).to(torch.int8))


def _centered(values: Tensor, valid: Tensor) -> Tensor:
    values = torch.where(valid, values.double(), 0)
    return values - values.sum() / valid.sum().clamp(min=1)


def _is_clipped(lp: Tensor, advantages: Tensor, policy: Policy, config: LossConfig) -> Tensor:
    if policy.old_logprobs is None:
        return torch.zeros_like(lp, dtype=torch.bool)
    ratio = (lp - policy.old_logprobs.reshape(-1)).exp()
    low, high = _ratio_bounds(config)
    return -advantages * ratio.clamp(low, high) > -advantages * ratio


def _ratio_bounds(config: LossConfig) -> tuple[float, float]:
    low = 0.0 if config.clip_low is None else 1 - config.clip_low
    return low, torch.inf if config.clip_high is None else 1 + config.clip_high


def _hash(lp: Tensor, valid: Tensor) -> Tensor:
    """32 bits of each token's place among the valid ones and its log-prob, by a multiplicative hash in two rounds."""
    bits = lp.float().contiguous().view(torch.int32).long()
    value = (bits ^ (valid.cumsum(0) * 0x9E3779B1)) & 0xFFFFFFFF
    for factor in (0x45D9F3B, 0x119DE1F3):  # below 2^31, so that no product overflows 63 bits
        value = ((value ^ (value >> 16)) * factor) & 0xFFFFFFFF
    return value ^ (value >> 16)
