"""GVPO, REAL and FlowRL: objectives of whole rows, as the coefficients of a policy gradient.

Each is a function of one score per row, the sum or mean of its tokens' log ratios. The kernels get minus its derivative
by a token's log-prob as the advantage of the row in "reinforce", and `replace_policy_loss` writes the objective over
the value of that loss. Everything here but the sums over tokens has the size of the rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.groups import RowGroups, packed_bounds
from grpo_kernels.ops.policy_loss.arguments import RowInputs, policy_tokens, spread_packed
from grpo_kernels.ops.policy_loss.config import METRICS, LossConfig
from grpo_kernels.ops.policy_loss.registration import ROW_SUMS, Policy


class Objective(NamedTuple):
    """The replacement of the policy term: value, with a gradient by log_z alone, and the rows' weights, NaN: none."""

    value: Tensor
    weights: Tensor | None


class _Rows(NamedTuple):
    """Rows as the objectives see them, in float64: whether a row has a token, their number, and the advantage."""

    active: Tensor
    tokens: Tensor
    advantage: Tensor


def as_policy_gradient(
    logprobs: Tensor, policy: Policy, rows: RowInputs, config: LossConfig, backend: str
) -> tuple[Policy, Objective]:
    """The policy with the advantages whose policy gradient is that of the config's objective, and the objective."""
    lp = logprobs.detach()
    valid = policy_tokens(policy, lp)
    old, reference = policy.old_logprobs, policy.ref_logprobs
    of_old, tokens = _row_sums(lp, old, valid, policy, backend)
    active = tokens > 0
    seen = _Rows(active, tokens.clamp(min=1), torch.where(active, policy.advantages.double(), 0))
    if config.loss == "flowrl":
        of_reference, _ = _row_sums(lp, reference, valid, policy, backend)
        slope, objective = _flowrl(seen, of_old, of_reference, policy.is_weights, rows, config)
    elif config.loss == "gvpo":
        of_base = of_old if reference is None else _row_sums(lp, reference, valid, policy, backend)[0]
        slope, objective = _gvpo(seen, of_base, rows, config)
    else:
        slope, objective = _real(seen, of_old / seen.tokens, rows, config)
    if lp.shape == slope.shape and policy.cu_seqlens is not None:  # the kernels would take them for those of tokens
        slope = spread_packed(slope, policy.cu_seqlens, len(lp))
    return policy._replace(
        advantages=(-slope).to(lp.dtype).contiguous(),
        ref_logprobs=None if config.kl == "none" else reference,
        is_weights=None,
    ), objective


def replace_policy_loss(loss: Tensor, metrics: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
    """Loss and metrics with the value of the objective, and the loss's own gradient by log-probs and entropies."""
    at = METRICS.index
    assert METRICS[:2] == ("loss", "policy_loss")
    others = metrics[at("loss")] - metrics[at("policy_loss")]
    value = objective.value.detach()
    measured = torch.cat([torch.stack([others + value, value]), metrics[2:]])
    if objective.weights is not None:
        known = ~objective.weights.isnan()
        weights = torch.where(known, objective.weights, 0)
        measured[at("is_sum")], measured[at("is_square_sum")] = weights.sum(), weights.square().sum()
        measured[at("is_count")] = known.sum()
        for name, sign in (("is_min", -1), ("is_max", 1)):
            extremes = torch.where(known, sign * objective.weights, -math.inf)
            extreme = sign * torch.cat([extremes, extremes.new_full((1,), -math.inf)]).amax()
            measured[at(name)] = torch.where(known.any(), extreme, math.nan)
    # a difference of equal numbers: the gradient without the value
    return (others + objective.value).to(loss.dtype) + (loss - loss.detach()), measured


def _row_sums(
    lp: Tensor, base: Tensor | None, valid: Tensor | None, policy: Policy, backend: str
) -> tuple[Tensor, Tensor]:
    """Sums of lp - base over the tokens of each row that have a policy term, 0 without a base, and their numbers."""
    if backend in ROW_SUMS:
        sums, counts = ROW_SUMS[backend](lp, lp if base is None else base, valid, policy.cu_seqlens)
        return sums, counts
    differences = torch.zeros_like(lp) if base is None else lp - base
    counted = torch.ones_like(lp, dtype=torch.bool) if valid is None else valid
    terms = torch.stack([torch.where(counted, differences, 0).double(), counted.double()])
    if policy.cu_seqlens is None:
        sums, counts = terms.sum(2)
        return sums, counts
    bounds = packed_bounds("policy_loss", policy.cu_seqlens, len(lp))
    if terms.numel() == 0:
        sums, counts = terms.new_zeros(2, len(bounds) - 1)
        return sums, counts
    by_row = torch.segment_reduce(terms.T.contiguous(), "sum", offsets=bounds, unsafe=True, initial=0.0)
    return by_row[:, 0], by_row[:, 1]


def _divisor(known: float | Tensor | None, counted: Tensor) -> float | Tensor:
    return counted.clamp(min=1) if known is None else known


def _group_count(groups: RowGroups, active_rows: Tensor, rows: RowInputs, config: LossConfig) -> float | Tensor:
    """The number of groups that the mean is over: those with a token, or with count_empty_rows all."""
    is_counted = groups.starts.diff() > 0 if config.count_empty_rows else active_rows > 0
    return _divisor(rows.normalizer, is_counted.sum().double())


def _gvpo(seen: _Rows, score: Tensor, rows: RowInputs, config: LossConfig) -> tuple[Tensor, Objective]:
    """Half the variance, over the rows of a group, of reward minus gvpo_beta times the joint log ratio.

    Its derivative by the mean of the group is 0, so that this is the gradient although the mean depends on each row.
    """
    groups = rows.groups
    assert groups is not None
    excess = torch.where(seen.active, seen.advantage - config.gvpo_beta * score, 0)
    totals = groups.reduce(torch.stack([seen.active.double(), excess], 1), "sum", 0.0)
    size, total = totals.unbind(1)
    mean, freedom = total / size.clamp(min=1), (size - 1).clamp(min=1)
    count = _group_count(groups, size, rows, config)
    centered = torch.where(seen.active, excess - mean[groups.group], 0)
    share = 1 / (freedom * count)[groups.group]
    value = 0.5 * (centered.square() * share).sum()
    return -config.gvpo_beta * centered * share, Objective(value, None)


def _real(seen: _Rows, score: Tensor, rows: RowInputs, config: LossConfig) -> tuple[Tensor, Objective]:
    """log(1 + sum of e^s) over the rows that are not better plus log(1 + sum of e^-s) over those that are, of groups
    that have both; s is the mean log ratio over the temperature."""
    groups = rows.groups
    assert groups is not None
    better = seen.advantage > 0
    sides = torch.stack([seen.active & better, seen.active & ~better], 1)
    scaled = score / config.real_tau
    exponents = torch.where(sides, torch.stack([-scaled, scaled], 1), -math.inf)
    top = groups.reduce(exponents, "max", 0.0)
    spread = (exponents - top[groups.group]).exp()
    totals = groups.reduce(torch.cat([spread, sides.double()], 1), "sum", 0.0)
    logs = top + (totals[:, :2] + (-top).exp()).log()
    has_both = (totals[:, 2:] > 0).all(1)
    count = _group_count(groups, totals[:, 2:].sum(1), rows, config)
    value = torch.where(has_both, logs.sum(1), 0).sum() / count
    shares = torch.where(has_both[groups.group, None], (exponents - logs[groups.group]).exp(), 0)
    slope = (shares[:, 1] - shares[:, 0]) / (config.real_tau * count * seen.tokens)
    return slope, Objective(value, None)


def _flowrl(
    seen: _Rows, of_old: Tensor, of_reference: Tensor, is_weights: Tensor | None, rows: RowInputs, config: LossConfig
) -> tuple[Tensor, Objective]:
    """The mean over rows of weight * (log_z + mean log ratio to the reference - flowrl_beta * reward)^2."""
    assert rows.log_z is not None
    low = -math.inf if config.clip_low is None else 1 - config.clip_low
    high = math.inf if config.clip_high is None else 1 + config.clip_high
    mean = of_old / seen.tokens
    weight = (mean if config.flowrl_clip == "geometric" else of_old).exp()
    moved, has_gradient = mean, seen.active
    if config.flowrl_clip == "logprob":
        bounds = -math.inf if low == -math.inf else math.log(low), math.log(high)
        moved = mean.clamp(*bounds)
        has_gradient = seen.active & (moved == mean)
    else:
        weight = weight.clamp(low, high)
    weight = weight.clamp(max=math.inf if config.ratio_cap is None else config.ratio_cap)
    if is_weights is not None:
        weight = weight * is_weights.double()
    weight = torch.where(seen.active, weight, 0)
    counted = torch.ones_like(seen.active) if config.count_empty_rows else seen.active
    count = _divisor(rows.normalizer, counted.sum().double())
    residual = rows.log_z + of_reference / seen.tokens + (moved - mean) - config.flowrl_beta * seen.advantage
    residual = torch.where(seen.active, residual, 0)
    value = (weight * residual.square()).sum() / count
    slope = torch.where(has_gradient, 2 * weight * residual.detach() / (count * seen.tokens), 0)
    return slope, Objective(value, torch.where(seen.active, weight, math.nan))
