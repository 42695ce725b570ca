"""The specification of policy_loss in plain, differentiable torch. In float64 it is the reference for all backends."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows, reduce_runs
from grpo_kernels.ops.policy_loss.config import (
    CISPO,
    CLIP,
    DPPO_KL,
    DPPO_TV,
    DRO,
    GEO_MEAN,
    ICEPOP,
    IPO,
    K1,
    K2,
    K3,
    KL_ABS,
    KL_NONE,
    METRICS,
    SAPO,
    SEGMENT_MEAN,
    SEQUENCE,
    SEQUENCE_TOKEN,
    TOPR,
    VESPO,
    Plan,
)
from grpo_kernels.ops.policy_loss.reference.aggregation import Shares
from grpo_kernels.ops.policy_loss.reference.metrics import measure
from grpo_kernels.ops.policy_loss.reference.rows import Terms, Tokens, Weights


def forward(
    logprobs: Tensor,
    entropy: Tensor | None,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None,
    policy_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    segments: Tensor | None,
    ref_logprobs: Tensor | None,
    is_weights: Tensor | None,
    weights: Tensor | None,
    normalizers: Tensor | None,
    counts: list[float],
    modes: list[int],
    coefficients: list[float],
) -> tuple[Tensor, Tensor]:
    plan = Plan(*modes, *coefficients)
    rows = TokenRows("policy_loss", logprobs.shape, cu_seqlens, logprobs.device)
    valid = torch.ones(logprobs.numel(), dtype=torch.bool, device=logprobs.device) if mask is None else mask.reshape(-1)
    valid = rows.within(valid)
    if segments is not None:
        valid = valid & (segments.reshape(-1) >= 0)

    def clean(values: Tensor | None) -> Tensor | None:
        """Sets slots that take no part to 0, whatever they hold, and expands one value per row to one per token."""
        if values is None:
            return None
        values = rows.spread(values) if values.shape != logprobs.shape else values.reshape(-1)
        return torch.where(valid, values.to(logprobs.dtype), 0)

    lp, advantage = clean(logprobs), clean(advantages)
    old = lp.detach() if old_logprobs is None else clean(old_logprobs.detach())
    reference, weight_of, entropies = clean(ref_logprobs), clean(weights), clean(entropy)
    kept = valid if policy_mask is None else valid & policy_mask.reshape(-1)
    weight = _weights(rows, valid, is_weights)

    tokens = Tokens(valid, kept, lp, old, advantage)
    terms = _ratios(rows, tokens, segments, plan)
    # these two make one weight of the row of the tokens' weights
    folded = plan.loss in (VESPO, GEO_MEAN) and weight.of_rows is None
    policy, counters = _policy(rows, tokens, terms, weight.of_tokens if folded else None, plan)
    if weight.of_tokens is not None and not folded:
        policy = policy * weight.of_tokens
    policy = torch.where(terms.here & kept, policy, 0)
    kl = _kl(lp, reference, terms, plan)

    share = Shares(rows, valid, terms.here, normalizers, counts, weight_of, plan)
    policy_loss = (share.of(plan.aggregation, policy=True) * policy).sum()
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
    table |= measure(rows, tokens, terms, counters, torch.where(valid, kl, 0), entropies, weight, plan)
    return loss.to(lp.dtype), torch.stack([table[name] for name in METRICS])


def _weights(rows: TokenRows, valid: Tensor, is_weights: Tensor | None) -> Weights:
    if is_weights is None:
        return Weights(None, None)
    if is_weights.dim() > 1 or len(is_weights) == len(valid):
        return Weights(torch.where(valid, is_weights.reshape(-1), 1), None)
    of_rows = torch.where(rows.sum(valid.to(is_weights.dtype)) > 0, is_weights, math.nan)
    return Weights(torch.where(valid, rows.spread(is_weights), 1), of_rows)


def _ratios(rows: TokenRows, tokens: Tokens, segments: Tensor | None, plan: Plan) -> Terms:
    lp, valid = tokens.lp, tokens.valid
    # a token that the old policy could not sample: far beyond where the ratio stops, but finite, also in sums of rows
    old = tokens.old.clamp(min=-math.sqrt(torch.finfo(lp.dtype).max))
    d, here, score = lp - old, valid, lp
    if plan.ratio in (SEQUENCE, SEQUENCE_TOKEN):
        mean = rows.sum(torch.where(valid, d, 0)) / rows.sum(valid.to(d.dtype)).clamp(min=1)
        of_row = rows.spread(mean)
        d = of_row if plan.ratio == SEQUENCE else of_row.detach() + lp - lp.detach()
    if plan.by_segment:
        here, joint = _joint(rows, valid, segments, plan)
        d, score = joint(d), joint(lp)
    if plan.loss == GEO_MEAN:
        return _geometric(rows, tokens, plan)
    d = d.clamp(plan.clamp_low, plan.clamp_high)
    # an infinite ratio would make NaN of the terms that are clipped or have no advantage
    limit = math.floor(math.log(torch.finfo(d.dtype).max))
    return Terms(here, score, torch.where(d > limit, limit + (d - d.detach()), d).exp())


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


def _geometric(rows: TokenRows, tokens: Tokens, plan: Plan) -> Terms:
    """GMPO: one term a row, whose ratio is the mean of log ratios that are clipped where that lowers the objective."""
    valid, advantage, d = tokens.valid, tokens.advantage, tokens.lp - tokens.old
    clipped = d.clamp(-plan.low, plan.high)
    pessimistic = torch.where(advantage < 0, torch.maximum(d, clipped), torch.minimum(d, clipped))
    pessimistic = torch.where(advantage == 0, 0, pessimistic)
    count = rows.sum(valid.to(d.dtype))
    mean = rows.sum(torch.where(valid, pessimistic, 0)) / count.clamp(min=1)
    spread = rows.spread(mean)
    at_end = valid & (torch.arange(len(d), device=d.device) == rows.spread(rows.last(valid)))
    return Terms(at_end, d, spread.exp())


def _policy(
    rows: TokenRows, tokens: Tokens, terms: Terms, is_weights: Tensor | None, plan: Plan
) -> tuple[Tensor, dict[str, Tensor]]:
    """The terms before their weights, and what is counted of them."""
    valid, _, lp, old, advantage = tokens
    ratio, low, high = terms.ratio, plan.low, plan.high
    fixed = ratio.detach().clamp(max=plan.cap)
    none = torch.zeros_like(valid)
    counters = {"low": none, "high": none, "clipped": none, "dual": none, "phi": torch.zeros_like(ratio)}
    if plan.loss == CLIP:
        counters["low"] = (fixed < low) & (advantage < 0)
        counters["high"] = (fixed > high) & (advantage > 0)
        counters["clipped"] = counters["low"] | counters["high"]
        plain, clipped = -advantage * ratio.clamp(max=plan.cap), -advantage * ratio.clamp(low, high)
        policy = torch.maximum(plain, clipped)
        if plan.dual_clip < math.inf:
            ceiling = -advantage * plan.dual_clip
            counters["dual"] = (advantage < 0) & (policy.detach() > ceiling)
            policy = torch.where(advantage < 0, torch.minimum(policy, ceiling), policy)
        return policy, counters
    if plan.loss == SAPO:
        tau = _by_sign(advantage > 0, plan.sapo_pos, plan.sapo_neg, ratio)
        return -advantage * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), counters
    if plan.loss == GEO_MEAN:
        d = (lp - old).detach()
        below, above = d < -low, d > high
        counters |= {"low": below & (advantage < 0), "high": above & (advantage > 0)}
        # verl counts tokens outside on either side, apart for better and worse rows
        counters |= {"clipped": (below | above) & (advantage > 0), "dual": (below | above) & (advantage < 0)}
        total = rows.sum(valid.to(ratio.dtype)).clamp(min=1)
        policy = -rows.spread(rows.sum(advantage) / total) * ratio
        if is_weights is not None:
            logs = torch.where(valid, (is_weights + 1e-10).log(), 0)
            policy = policy * rows.spread(rows.sum(logs) / total).exp()
        return policy, counters
    if plan.loss in (IPO, ICEPOP):
        bound = -low if plan.loss == IPO else low
        position = (lp.exp() - old.exp()).detach() if plan.loss == IPO else ratio.detach()
        counters |= {"low": position < bound, "high": position > high}
        counters["clipped"] = counters["low"] | counters["high"]
        return torch.where(counters["clipped"], 0, -advantage * ratio), counters
    if plan.loss == DRO:
        return -(lp * advantage - 0.5 * plan.dro_beta * (lp - old) ** 2), counters
    return _score_function(rows, tokens, terms, is_weights, counters, plan)


def _score_function(
    rows: TokenRows, tokens: Tokens, terms: Terms, is_weights: Tensor | None, counters: dict[str, Tensor], plan: Plan
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of the form -weight * advantage * log-prob, whose weight has no gradient."""
    valid, _, lp, old, advantage = tokens
    fixed = terms.ratio.detach()
    weight = torch.ones_like(fixed)
    if plan.loss == CISPO:
        weight = fixed.clamp(plan.low, plan.high)
        counters["high"] = (fixed > plan.high) & (advantage > 0)
        counters["low"] = (fixed < plan.low) & (advantage < 0)
        counters["clipped"] = weight != fixed
    if plan.loss in (DPPO_TV, DPPO_KL):
        weight = fixed.clamp(max=plan.cap)
        trusted = _trusted(lp.detach(), old, advantage, plan)
        counters["clipped"], counters["dual"] = ~trusted, (fixed > plan.cap) & trusted
        weight = torch.where(trusted, weight, 0)
    if plan.loss == TOPR:
        counters["clipped"] = (advantage <= 0) & (fixed > plan.cap)
        weight = torch.where(advantage > 0, 1, fixed.clamp(max=plan.cap))
    if plan.loss == VESPO:
        floor = math.log(1e-8)
        log_w = rows.sum(torch.where(valid, (lp - old).detach().clamp(-20, 20), 0))
        if is_weights is not None:
            log_w = log_w + rows.sum(torch.where(valid, is_weights.log().clamp(floor, 20), 0))
        log_w = rows.spread(log_w.clamp(floor, 20))
        k = _by_sign(advantage >= 0, plan.k_pos, plan.k_neg, fixed)
        rate = _by_sign(advantage >= 0, plan.lambda_pos, plan.lambda_neg, fixed).clamp(min=1e-4)
        weight = (rate + k * log_w - rate * log_w.exp()).exp()
        weight = torch.where(weight.isinf(), 0, weight)
        counters["phi"] = weight
    return -weight * advantage * terms.score, counters


def _by_sign(positive: Tensor, value: float, other: float, like: Tensor) -> Tensor:
    """Selects one of two numbers at each token. torch.where alone would round them to float32."""
    return torch.where(positive, like.new_full((), value), like.new_full((), other))


def _trusted(lp: Tensor, old: Tensor, advantage: Tensor, plan: Plan) -> Tensor:
    """DPPO: tokens whose probability moved little, or back, as seen by the two outcomes "this token" and "another"."""
    new, before = lp.exp(), old.exp()
    if plan.loss == DPPO_TV:
        return torch.where(advantage > 0, new - before <= plan.high, new - before >= -plan.low)
    others = (1 - before) * ((1 - before + 1e-8) / (1 - new + 1e-8)).log()
    divergence = before * (old - lp) + others
    upward = (divergence <= plan.high) | (new <= before)
    downward = (divergence <= plan.low) | (new >= before)
    return torch.where(advantage > 0, upward, downward)


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
