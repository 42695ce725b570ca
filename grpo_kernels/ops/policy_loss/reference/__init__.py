"""The specification of policy_loss in plain, differentiable torch. In float64 it is the reference for all backends."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows, reduce_runs
from grpo_kernels.ops.policy_loss.config import (
    AVERAGE,
    CISPO,
    CLIP,
    CLIP_COV,
    CORRECTION_NONE,
    COUNTED,
    CROSS_ENTROPY,
    DPPO_KL,
    DPPO_TV,
    DRO,
    GEO_MEAN,
    GEOMETRIC_AVERAGE,
    GEOMETRIC_MASK,
    GEOMETRIC_TRUNCATE,
    ICEPOP,
    IPO,
    K1,
    K2,
    K3,
    KL_ABS,
    KL_COV,
    KL_NONE,
    METRICS,
    POLICY,
    POLICY_CROSS_ENTROPY,
    REFERENCE_KL,
    SAPO,
    SEGMENT_MEAN,
    SELECTED,
    SEQUENCE,
    SEQUENCE_MASK,
    SEQUENCE_TOKEN,
    SEQUENCE_TRUNCATE,
    TOKEN_TRUNCATE,
    TOPR,
    VESPO,
    Plan,
)
from grpo_kernels.ops.policy_loss.reference.aggregation import Shares
from grpo_kernels.ops.policy_loss.reference.metrics import measure
from grpo_kernels.ops.policy_loss.reference.rows import Correction, Terms, Tokens


def forward(
    logprobs: Tensor,
    entropy: Tensor | None,
    entropy_floor: Tensor | None,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    segments: Tensor | None,
    kinds: Tensor | None,
    ref_logprobs: Tensor | None,
    sampling_logprobs: Tensor | None,
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

    counted, has_term, regularized, selected = valid, valid, valid, torch.zeros_like(valid)
    if kinds is not None:
        kind = kinds.reshape(-1)
        has_term = counted & (kind != COUNTED)
        selected = counted & (kind == SELECTED)
        valid = selected | (counted & ((kind == POLICY) | (kind == POLICY_CROSS_ENTROPY)))
        regularized = valid | (counted & (kind == REFERENCE_KL))

    def clean(values: Tensor | None, where: Tensor) -> Tensor | None:
        """Sets slots that take no part to 0, whatever they hold, and expands one value per row to one per token."""
        if values is None:
            return None
        values = rows.spread(values) if values.shape != logprobs.shape else values.reshape(-1)
        return torch.where(where, values.to(logprobs.dtype), 0)

    lp, advantage = clean(logprobs, regularized), clean(advantages, valid)
    old = lp.detach() if old_logprobs is None else clean(old_logprobs.detach(), regularized)
    reference, weight_of = clean(ref_logprobs, regularized), clean(weights, has_term)
    entropies = clean(entropy, regularized)
    kept = valid if entropy_floor is None else valid & (entropies.detach() >= entropy_floor)
    # in a geometric mean, tokens that are not kept have left the mean itself
    factor = torch.ones_like(lp) if plan.loss == GEO_MEAN else kept.to(lp.dtype)

    correction, correction_by_row = _correction(rows, valid, old, sampling_logprobs, is_weights, plan)
    dropped = _off_policy(rows, valid, advantage, lp.detach(), sampling_logprobs, old, plan)
    factor = torch.where(dropped, 0, factor)

    tokens = Tokens(valid, kept, lp, old, advantage, selected)
    terms = _ratios(rows, tokens, segments, plan)
    # these two make one weight of the row of the tokens' weights
    folded = plan.loss in (VESPO, GEO_MEAN) and correction_by_row is None
    policy, counters = _policy(rows, tokens, terms, correction if folded else None, plan)
    if correction is not None and not folded:
        factor = factor * correction
    policy = torch.where(terms.here, policy * factor, 0)
    kl = _kl(lp, reference, terms, plan)

    here = terms.here if kinds is None else counted
    share = Shares(rows, counted, kept, here, normalizers, counts, weight_of, plan)
    policy_loss = (share.of(plan.aggregation, policy=True) * policy).sum()
    kl_loss = (share.of(plan.kl_aggregation) * torch.where(regularized, kl, 0)).sum()
    cross_entropy_loss = lp.new_zeros(())
    if kinds is not None:
        is_imitated = counted & ((kind == CROSS_ENTROPY) | (kind == POLICY_CROSS_ENTROPY))
        of_each = share.of(plan.aggregation, policy=True)
        if normalizers is not None:
            mean = (1 if weight_of is None else weight_of) / normalizers[-1]
            of_each = torch.where(normalizers[-1].isnan(), of_each, mean)
        cross_entropy_loss = (of_each * -clean(logprobs, is_imitated)).sum()
    entropy_loss = lp.new_zeros(())
    if entropies is not None:
        entropy_loss = (share.of(plan.entropy_aggregation) * entropies).sum()
    loss = policy_loss
    if plan.kl_coef != 0:  # what is only measured may overflow
        loss = loss + plan.kl_coef * kl_loss
    if plan.entropy_coef != 0:
        loss = loss - plan.entropy_coef * entropy_loss
    if plan.cross_entropy_coef != 0:
        loss = loss + plan.cross_entropy_coef * cross_entropy_loss

    weight, gap = torch.full((2, *old.shape), math.nan, dtype=old.dtype, device=old.device)
    if correction is not None:
        weight = torch.where(valid, correction, math.nan)
    if sampling_logprobs is not None:
        gap = torch.where(valid, (old - sampling_logprobs.reshape(-1)).abs(), math.nan)
    mismatch = Correction(weight, correction_by_row, gap, dropped)
    parts = {"loss": loss, "policy_loss": policy_loss, "kl_loss": kl_loss, "entropy_loss": entropy_loss}
    table = {name: part.detach().double() for name, part in parts.items()}
    table["cross_entropy_loss"] = cross_entropy_loss.detach().double()
    table |= measure(
        rows, tokens, terms, counters, counted, here, torch.where(regularized, kl, 0), entropies, mismatch, plan
    )
    return loss.to(lp.dtype), torch.stack([table[name] for name in METRICS])


def _correction(
    rows: TokenRows, valid: Tensor, old: Tensor, sampling: Tensor | None, is_weights: Tensor | None, plan: Plan
) -> tuple[Tensor | None, Tensor | None]:
    """Weights for rollout mismatch, one per token, and if they are of rows, one per row."""
    if is_weights is not None:
        by_row = is_weights.dim() == 1 and len(is_weights) != len(valid)
        spread = rows.spread(is_weights) if by_row else is_weights.reshape(-1)
        by_row = torch.where(rows.sum(valid.to(old.dtype)) > 0, is_weights, math.nan) if by_row else None
        return torch.where(valid, spread, 1), by_row
    if plan.correction == CORRECTION_NONE or sampling is None:
        return None, None
    # a token that the sampler could not score says nothing: ratio 1
    gap = old - sampling.reshape(-1)
    gap = torch.where(valid & ~gap.isnan(), gap, 0)
    by_row = plan.correction in (SEQUENCE_TRUNCATE, SEQUENCE_MASK, GEOMETRIC_TRUNCATE, GEOMETRIC_MASK)
    gap = rows.sum(gap) if by_row else gap
    if plan.correction in (GEOMETRIC_TRUNCATE, GEOMETRIC_MASK):
        gap = gap / rows.sum(valid.to(gap.dtype)).clamp(min=1)
    ratio = gap.exp()
    low, high = plan.correction_min, plan.correction_max
    if plan.correction in (TOKEN_TRUNCATE, SEQUENCE_TRUNCATE, GEOMETRIC_TRUNCATE):
        ratio = ratio.clamp(low, high)
    else:
        ratio = torch.where((ratio < low) | (ratio > high), 0, ratio)
    return (rows.spread(ratio), ratio) if by_row else (ratio, None)


def _off_policy(
    rows: TokenRows, valid: Tensor, advantage: Tensor, lp: Tensor, sampling: Tensor | None, old: Tensor, plan: Plan
) -> Tensor:
    """Tokens without a policy term, as their row is too far from the policy that sampled it and their advantage < 0."""
    if plan.off_policy_threshold == math.inf:
        return torch.zeros_like(valid)
    gap = (old if sampling is None else sampling.reshape(-1)) - lp
    gap = torch.where(valid & ~gap.isnan(), gap, 0)
    distance = rows.sum(gap) / rows.sum(valid.to(gap.dtype)).clamp(min=1)
    return valid & (advantage < 0) & rows.spread(~(distance <= plan.off_policy_threshold))


def _ratios(rows: TokenRows, tokens: Tokens, segments: Tensor | None, plan: Plan) -> Terms:
    lp, valid = tokens.lp, tokens.valid
    # a token that the old policy could not sample: far beyond where the ratio stops, but finite, also in sums of rows
    old = tokens.old.clamp(min=-math.sqrt(torch.finfo(lp.dtype).max))
    d, here, score = lp - old, valid, lp
    if plan.ratio in (SEQUENCE, SEQUENCE_TOKEN, AVERAGE, GEOMETRIC_AVERAGE):
        mean = rows.sum(torch.where(valid, d, 0)) / rows.sum(valid.to(d.dtype)).clamp(min=1)
        of_row = rows.spread(mean)
        d = {
            SEQUENCE: lambda: of_row,
            SEQUENCE_TOKEN: lambda: of_row.detach() + lp - lp.detach(),
            AVERAGE: lambda: torch.logaddexp(d, of_row) - math.log(2),
            GEOMETRIC_AVERAGE: lambda: (d + of_row) / 2,
        }[plan.ratio]()
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
    kept, advantage, d = tokens.kept, tokens.advantage, tokens.lp - tokens.old
    clipped = d.clamp(-plan.low, plan.high)
    pessimistic = torch.where(advantage < 0, torch.maximum(d, clipped), torch.minimum(d, clipped))
    pessimistic = torch.where(advantage == 0, 0, pessimistic)
    count = rows.sum(kept.to(d.dtype))
    mean = rows.sum(torch.where(kept, pessimistic, 0)) / count.clamp(min=1)
    spread = rows.spread(mean)
    at_end = kept & (torch.arange(len(d), device=d.device) == rows.spread(rows.last(kept)))
    return Terms(at_end, d, spread.exp())


def _policy(
    rows: TokenRows, tokens: Tokens, terms: Terms, correction: Tensor | None, plan: Plan
) -> tuple[Tensor, dict[str, Tensor]]:
    """The terms before their weights, and what is counted of them."""
    valid, _, lp, old, advantage, _ = tokens
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
        if correction is not None:
            logs = torch.where(valid, (correction + 1e-10).log(), 0)
            policy = policy * rows.spread(rows.sum(logs) / total).exp()
        return policy, counters
    if plan.loss in (IPO, ICEPOP):
        bound = -low if plan.loss == IPO else low
        position = (lp.exp() - old.exp()).detach() if plan.loss == IPO else ratio.detach()
        counters |= {"low": position < bound, "high": position > high}
        counters["clipped"] = counters["low"] | counters["high"]
        return torch.where(counters["clipped"], 0, -advantage * ratio), counters
    if plan.loss == CLIP_COV:
        counters["low"] = (fixed < low) & (advantage < 0)
        counters["high"] = (fixed > high) & (advantage > 0)
        counters["clipped"] = tokens.selected
        clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
        return torch.where(tokens.selected, 0, clipped), counters
    if plan.loss == KL_COV:
        penalty = torch.where(tokens.selected, plan.cov_kl_coef * (lp - old).abs(), 0)
        return -advantage * ratio + penalty, counters
    if plan.loss == DRO:
        return -(lp * advantage - 0.5 * plan.dro_beta * (lp - old) ** 2), counters
    return _score_function(rows, tokens, terms, correction, counters, plan)


def _score_function(
    rows: TokenRows, tokens: Tokens, terms: Terms, correction: Tensor | None, counters: dict[str, Tensor], plan: Plan
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of the form -weight * advantage * log-prob, whose weight has no gradient."""
    valid, _, lp, old, advantage, _ = tokens
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
        if correction is not None:
            log_w = log_w + rows.sum(torch.where(valid, correction.log().clamp(floor, 20), 0))
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
