"""The specification of policy_loss in plain, differentiable torch. In float64 it is the reference for all backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows, reduce_runs
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.policy_loss.config import K1, K2, K3, KL_ABS, KL_NONE
from grpo_kernels.ops.policy_loss.losses import SEGMENT_MEAN, SEQUENCE, SEQUENCE_TOKEN, Batch, Plan
from grpo_kernels.ops.policy_loss.reference.aggregation import Shares
from grpo_kernels.ops.policy_loss.reference.metrics import METRICS, measure
from grpo_kernels.ops.policy_loss.reference.rows import Terms, Tokens, Weights
from grpo_kernels.plans import read


@op_inputs
class Policy:
    """Everything a policy loss is computed from except log-probs and entropies.

    Tensors share one dtype, are contiguous and have no gradient. Those with one entry per token come first. The strings
    name what the tensors hold, by which arguments.py checks them.
    `counts` are for tokens, rows and segments: NaN where the batch is to be counted, inf for the next of `normalizers`.
    `settings` are the plan of a LossConfig.
    """

    old_logprobs: Annotated[Tensor | None, "numbers"]
    mask: Annotated[Tensor | None, "flags"]
    policy_mask: Annotated[Tensor | None, "flags"]
    segments: Annotated[Tensor | None, "ids"]
    ref_logprobs: Annotated[Tensor | None, "numbers"]
    weights: Annotated[Tensor | None, "constants"]
    advantages: Annotated[Tensor, "of rows or tokens"]
    is_weights: Annotated[Tensor | None, "of rows or tokens"]
    cu_seqlens: Tensor | None
    normalizers: Tensor | None
    counts: list[float]
    settings: list[float]


@op_inputs
class PolicyInputs:
    """Checked arguments of policy_loss; the gradient by the entropy is that of the bonus.

    `checks_values` lets the CPU kernel refuse values, which otherwise were checked.
    """

    logprobs: Tensor
    entropy: Tensor | None
    policy: Policy
    needs_entropy_gradient: bool
    checks_values: bool = False


def forward(inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    logprobs, policy = inputs.logprobs, inputs.policy
    plan = read(Plan, policy.settings)
    rows = TokenRows("policy_loss", logprobs.shape, policy.cu_seqlens, logprobs.device)
    mask, segments = policy.mask, policy.segments
    valid = torch.ones(logprobs.numel(), dtype=torch.bool, device=logprobs.device) if mask is None else mask.reshape(-1)
    valid = rows.within(valid)
    if segments is not None:
        valid = valid & (segments.reshape(-1) >= 0)

    def clean(values: Tensor | None) -> Tensor | None:
        """Sets slots that take no part to 0, whatever they hold, and expands one value per row to one per token."""
        if values is None:
            return None
        values = rows.spread(values.reshape(-1)) if values.shape != logprobs.shape else values.reshape(-1)
        return torch.where(valid, values.to(logprobs.dtype), 0)

    lp, advantage = clean(logprobs), clean(policy.advantages)
    old = lp.detach() if policy.old_logprobs is None else clean(policy.old_logprobs.detach())
    reference, weight_of, entropies = clean(policy.ref_logprobs), clean(policy.weights), clean(inputs.entropy)
    kept = valid if policy.policy_mask is None else valid & policy.policy_mask.reshape(-1)
    weight = _weights(rows, valid, policy.is_weights, logprobs.shape)

    def finite(values: Tensor | None) -> Tensor | None:
        """Sets NaN and inf of tokens without a policy term to 0, as 0 times NaN is a gradient of NaN."""
        return None if values is None else torch.where(kept | values.isfinite(), values, 0)

    tokens = Tokens(valid, kept, lp, old, finite(advantage))
    terms = _ratios(rows, tokens, segments, plan)
    folds = plan.row.folds_weights and weight.of_rows is None
    outcome = plan.row.formula(Batch(rows, tokens, terms, weight.of_tokens if folds else None, plan))
    term = outcome.term
    if weight.of_tokens is not None and not folds:
        term = term * finite(weight.of_tokens)
    term = torch.where(terms.here & kept, term, 0)
    kl = _kl(lp, reference, terms, plan)

    share = Shares(rows, valid, terms.here, policy.normalizers, policy.counts, weight_of, plan)
    policy_loss = (share.of(plan.aggregation, policy=True) * term).sum()
    kl_loss = (share.of(plan.kl_aggregation) * torch.where(valid, kl, 0)).sum()
    entropy_loss = lp.new_zeros(())
    if entropies is not None:
        entropy_loss = (share.of(plan.entropy_aggregation) * entropies).sum()
    loss = policy_loss
    if plan.kl_coef != 0:  # what is only measured may overflow
        loss = loss + plan.kl_coef * kl_loss
    if plan.entropy_coef != 0:
        loss = loss - plan.entropy_coef * entropy_loss

    parts = {"loss": loss, "policy_loss": policy_loss, "kl_loss": kl_loss, "entropy_loss": entropy_loss}
    table = {name: part.detach().double() for name, part in parts.items()}
    table |= measure(rows, tokens, terms, outcome, torch.where(valid, kl, 0), entropies, weight, plan)
    return loss.to(lp.dtype), torch.stack([table[name] for name in METRICS])


def _weights(rows: TokenRows, valid: Tensor, is_weights: Tensor | None, shape: torch.Size) -> Weights:
    if is_weights is None:
        return Weights(None, None)
    if is_weights.shape == shape:
        return Weights(torch.where(valid, is_weights.reshape(-1), 1), None)
    is_weights = is_weights.reshape(-1)
    of_rows = torch.where(rows.sum(valid.to(is_weights.dtype)) > 0, is_weights, math.nan)
    return Weights(torch.where(valid, rows.spread(is_weights), 1), of_rows)


def _ratios(rows: TokenRows, tokens: Tokens, segments: Tensor | None, plan: Plan) -> Terms:
    lp, valid = tokens.lp, tokens.valid
    # a token that the old policy could not sample: far beyond where the ratio stops, but finite, also in sums of rows
    old = tokens.old.clamp(min=-math.sqrt(torch.finfo(lp.dtype).max))
    d, here, score = lp - old, valid, lp
    if plan.row.is_of_rows:
        return _geometric(rows, tokens, d, plan)
    if plan.ratio in (SEQUENCE, SEQUENCE_TOKEN):
        mean = rows.sum(torch.where(valid, d, 0)) / rows.sum(valid.to(d.dtype)).clamp(min=1)
        of_row = rows.spread(mean)
        d = of_row if plan.ratio == SEQUENCE else of_row.detach() + lp - lp.detach()
    if plan.by_segment:
        here, joint = _joint(rows, valid, segments, plan)
        d, score = joint(d), joint(lp)
    return Terms(here, score, _limited_exp(d.clamp(plan.clamp_low, plan.clamp_high)))


def _limited_exp(log_ratio: Tensor) -> Tensor:
    """Ratios that stop where thousands of them have a finite sum, and keep their gradient.

    An infinite one would make NaN of the terms that are clipped or have no advantage.
    """
    limit = math.floor(math.log(torch.finfo(log_ratio.dtype).max)) - 8
    return torch.where(log_ratio > limit, limit + (log_ratio - log_ratio.detach()), log_ratio).exp()


def _joint(
    rows: TokenRows, valid: Tensor, segments: Tensor | None, plan: Plan
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Mask of the last tokens of segments, and a function that gives every token its segment's sum (or mean)."""
    assert segments is not None
    # the place of a segment is that of a token of its row, so that places ascend along all tokens
    place = rows.spread(rows.starts()) + segments.reshape(-1)
    reached = torch.where(valid, place, -1).cummax(0).values
    fits = (reached == place) & (place <= rows.spread(rows.last(valid)))
    torch._assert_async((fits | ~valid).all(), "policy_loss: segments must ascend from 0 along each row")
    reached = reached.clamp(0, max(len(place) - 1, 0))
    bounds = torch.searchsorted(reached, torch.arange(len(place) + 1, device=place.device))
    count = reduce_runs(valid.double(), bounds, "sum", 0.0)

    def joint(values: Tensor) -> Tensor:
        sums = reduce_runs(torch.where(valid, values, 0), bounds, "sum", 0.0)
        if plan.ratio == SEGMENT_MEAN:
            sums = sums / count.to(values.dtype).clamp(min=1)
        return sums[reached]

    position = torch.arange(len(valid), dtype=torch.float64, device=valid.device)
    last = reduce_runs(torch.where(valid, position, -1), bounds, "max", -1.0)
    is_last = valid & (last[reached] == position)
    return is_last, joint


def _geometric(rows: TokenRows, tokens: Tokens, d: Tensor, plan: Plan) -> Terms:
    """GMPO: one term a row, whose ratio is the mean of log ratios that are clipped where that lowers the objective."""
    valid, advantage = tokens.valid, tokens.advantage
    clipped = d.clamp(-plan.low, plan.high)
    pessimistic = torch.where(advantage < 0, torch.maximum(d, clipped), torch.minimum(d, clipped))
    pessimistic = torch.where(advantage == 0, 0, pessimistic)
    count = rows.sum(valid.to(d.dtype))
    mean = rows.sum(torch.where(valid, pessimistic, 0)) / count.clamp(min=1)
    spread = rows.spread(mean)
    at_end = valid & (torch.arange(len(d), device=d.device) == rows.spread(rows.last(valid)))
    return Terms(at_end, d, _limited_exp(spread))


def _kl(lp: Tensor, reference: Tensor | None, terms: Terms, plan: Plan) -> Tensor:
    if reference is None or plan.kl == KL_NONE:
        return torch.zeros_like(lp)
    d = lp - reference
    limited = d.clamp(-plan.kl_clamp_in, plan.kl_clamp_in)
    value = {
        K1: lambda: limited,
        K2: lambda: 0.5 * limited**2,
        K3: lambda: torch.expm1(-limited) + limited,
        KL_ABS: lambda: limited.abs(),
    }[plan.kl]()
    value = value.clamp(-plan.kl_clamp_out, plan.kl_clamp_out)
    if plan.kl_straight:
        straight = 0.5 * d**2
        value = straight - straight.detach() + value.detach()
    return value * terms.ratio if plan.kl_unbiased else value
