"""The specification of sampling_correction in plain torch. In float64 it is the reference for all backends."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows
from grpo_kernels.ops.sampling_correction.config import (
    BINARY_KL,
    ESTIMATORS,
    K1,
    K2,
    K3,
    LEVEL_MAX,
    LEVEL_MEAN,
    LEVEL_SUM,
    LEVEL_TOKEN,
    REJECTION_MAXIMA,
    REJECTION_MINIMA,
    REJECTION_SUMS,
    ROW_MAXIMA,
    ROW_MINIMA,
    ROW_SUMS,
    WEIGHT_GEOMETRIC,
    WEIGHT_NONE,
    WEIGHT_TOKEN,
    Plan,
)

# Probabilities of binary_kl stay this far from 0 and 1, where the divergence is infinite.
_LEAST_PROBABILITY = 1e-6


class _Tokens(NamedTuple):
    """One entry per token, 0 where a token takes no part."""

    rows: TokenRows
    valid: Tensor
    scored: Tensor  # valid, with a log-prob of the sampler
    old: Tensor
    sampling: Tensor
    log_ratio: Tensor
    limited: Tensor  # log ratio within the bound


def forward(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    m2_ceiling: Tensor | None,
    statistics: list[int],
    bounds: list[float],
    modes: list[int],
    coefficients: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    plan = Plan(*modes, *coefficients)
    tokens = _tokens(old_logprobs, sampling_logprobs, mask, cu_seqlens, plan)
    rows, valid = tokens.rows, tokens.valid
    m2 = tokens.log_ratio.square()  # compared in float32
    m2_dropped = torch.zeros_like(valid) if m2_ceiling is None else tokens.scored & (m2.float() > m2_ceiling)
    weights, table = _weights(tokens, plan)
    table |= _divergences(tokens, plan)
    kept = valid & ~m2_dropped
    of_rejections = []
    for code, low, high in zip(statistics, bounds[::2], bounds[1::2], strict=True):
        level, estimator = divmod(code, len(ESTIMATORS))
        rejected, columns = _rejection(tokens, level, estimator, low, high)
        kept = kept & ~rejected
        of_rejections.append(columns)
    weights = torch.where(kept, weights, 0)
    table["m2_sum"] = rows.sum(m2.double())
    table["m2_dropped_tokens"] = rows.sum(m2_dropped.double())
    table["kept_tokens"] = rows.sum(kept.double())
    table["dropped_rows"] = (table["kept_tokens"] < table["tokens"]).double()
    columns = []
    for base, own in ((ROW_SUMS, REJECTION_SUMS), (ROW_MINIMA, REJECTION_MINIMA), (ROW_MAXIMA, REJECTION_MAXIMA)):
        columns += [table[name] for name in base]
        columns += [values[name] for values in of_rejections for name in own]
    shape = old_logprobs.shape
    return weights.reshape(shape), kept.reshape(shape), torch.stack(columns, 1)


def _tokens(old: Tensor, sampling: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, plan: Plan) -> _Tokens:
    rows = TokenRows("sampling_correction", old.shape, cu_seqlens, old.device)
    old, sampling = old.reshape(-1), sampling.reshape(-1)
    valid = torch.ones_like(old, dtype=torch.bool) if mask is None else mask.reshape(-1)
    valid = rows.within(valid)
    log_ratio = old - sampling
    scored = valid & ~log_ratio.isnan()
    old, sampling, log_ratio = (torch.where(scored, values, 0) for values in (old, sampling, log_ratio))
    limited = log_ratio.clamp(-plan.bound, plan.bound)
    return _Tokens(rows, valid, scored, old, sampling, log_ratio, limited)


def _where_active(active: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One value per row as its own minimum and maximum."""
    return torch.where(active, values, math.inf), torch.where(active, values, -math.inf)


def _weights(tokens: _Tokens, plan: Plan) -> tuple[Tensor, dict[str, Tensor]]:
    rows, valid = tokens.rows, tokens.valid
    count = rows.sum(valid.double())
    active, size = count > 0, count.clamp(min=1)
    product = rows.sum(tokens.log_ratio.double())
    if plan.weights == WEIGHT_NONE:
        raw = torch.ones_like(tokens.old)
    elif plan.weights == WEIGHT_TOKEN:
        raw = tokens.limited.exp()
    else:
        by_row = product / size if plan.weights == WEIGHT_GEOMETRIC else product
        raw = rows.spread(by_row.clamp(-plan.bound, plan.bound).exp()).to(tokens.old.dtype)
    high, low = valid & (raw > plan.high), valid & (raw < plan.low_mark)
    outside = valid & ((raw > plan.high) | (raw < plan.low))
    weights = torch.where(outside, 0, raw) if plan.masks else raw.clamp(plan.low, plan.high)
    weights, raw = torch.where(valid, weights, 0), torch.where(valid, raw, 0)
    total = rows.sum(weights.double())
    mean, raw_mean = total / size, rows.sum(raw.double()) / size
    of_rows = plan.weights not in (WEIGHT_NONE, WEIGHT_TOKEN)

    def number(flags: Tensor) -> Tensor:
        found = rows.sum(flags.double())
        return (found > 0).double() if of_rows else found

    lightest, heaviest = rows.extremes(weights.double(), valid)
    return weights, {
        "rows": torch.ones_like(count),
        "active_rows": active.double(),
        "tokens": count,
        "scored_tokens": rows.sum(tokens.scored.double()),
        "weight_sum": total,
        "weight_square_sum": rows.sum(weights.double().square()),
        "row_weight_sum": mean,
        "row_weight_square_sum": mean.square(),
        "high_ratios": number(high),
        "low_ratios": number(low),
        "outside_tokens": rows.sum(outside.double()),
        "high_rows": (active & (raw_mean > plan.high)).double(),
        "low_rows": (active & (raw_mean < plan.low_mark)).double(),
        "product_square_sum": torch.where(active, (2 * product.clamp(-plan.bound, plan.bound)).exp(), 0),
        "weight_min": lightest,
        "weight_max": heaviest,
    } | dict(
        zip(
            ("row_weight_min", "row_weight_max", "log_product_min", "log_product_max"),
            (*_where_active(active, mean), *_where_active(active, product)),
            strict=True,
        )
    )


def _divergences(tokens: _Tokens, plan: Plan) -> dict[str, Tensor]:
    rows, scored, limited = tokens.rows, tokens.scored, tokens.limited
    active = rows.sum(tokens.valid.double()) > 0
    size = rows.sum(scored.double()).clamp(min=1)
    old, sampling = (-rows.sum(values.double()) / size for values in (tokens.old, tokens.sampling))
    gap = old - sampling
    ratio = torch.where(scored, limited.exp(), 0)
    smallest, largest = rows.extremes(tokens.log_ratio.double(), scored)

    def of_active(values: Tensor) -> Tensor:
        return torch.where(active, values, 0)

    gap_min, gap_max = _where_active(active, gap)
    return {
        "log_ratio_sum": rows.sum(tokens.log_ratio.double()),
        "gap_sum": rows.sum(tokens.log_ratio.abs().double()),
        "k3_sum": rows.sum((torch.expm1(limited) - limited).double()),
        "ratio_sum": rows.sum(ratio.double()),
        "ratio_square_sum": rows.sum(ratio.double().square()),
        "old_perplexity_sum": of_active(old.exp()),
        "old_log_perplexity_sum": old,
        "sampling_perplexity_sum": of_active(sampling.exp()),
        "sampling_log_perplexity_sum": sampling,
        "log_perplexity_gap_sum": gap.abs(),
        "perplexity_ratio_sum": of_active(gap.exp()),
        "log_ratio_min": smallest,
        "log_ratio_max": largest,
        "log_perplexity_gap_min": gap_min,
        "log_perplexity_gap_max": gap_max,
    }


def _estimate(tokens: _Tokens, estimator: int) -> Tensor:
    """The estimator of every token, 0 where the sampler has no log-prob."""
    if estimator == K1:
        return -tokens.limited
    if estimator == K2:
        return 0.5 * tokens.limited.square()
    if estimator == K3:
        return torch.expm1(tokens.limited) - tokens.limited
    assert estimator == BINARY_KL
    logs, others = [], []
    for logprob in (tokens.old, tokens.sampling):
        logs.append(logprob.clamp(math.log(_LEAST_PROBABILITY), math.log1p(-_LEAST_PROBABILITY)))
        others.append((-torch.expm1(logprob)).clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY))
    by_token, by_others = logs[0] - logs[1], others[0].log() - others[1].log()
    forward_kl = logs[0].exp() * by_token + others[0] * by_others
    backward_kl = -(logs[1].exp() * by_token + others[1] * by_others)
    return torch.where(tokens.scored, torch.maximum(forward_kl, backward_kl), 0)


def _rejection(
    tokens: _Tokens, level: int, estimator: int, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens that a rejection drops, and what is measured of it."""
    rows, valid, scored = tokens.rows, tokens.valid, tokens.scored
    count = rows.sum(valid.double())
    active, size = count > 0, count.clamp(min=1)
    values = _estimate(tokens, estimator)
    total = rows.sum(values.double())
    smallest, largest = rows.extremes(values.double(), scored)
    if level == LEVEL_TOKEN:
        above, below = scored & (values > high), scored & (values < low)
        rejected = above | below
        clamped = torch.where(scored, values.double().clamp(low, high), 0)
        columns = {
            "sum": total,
            "clamped_sum": rows.sum(clamped),
            "clamped_square_sum": rows.sum(clamped.square()),
            "high": rows.sum(above.double()),
            "low": rows.sum(below.double()),
        }
        by_row = total / size
        row_above, row_below = active & (by_row > high), active & (by_row < low)
        extremes = (smallest, largest)
    else:
        if level == LEVEL_MAX:  # of k1 the value farthest from 0; a row without scored tokens has none
            by_row = torch.where(smallest + largest < 0, smallest, largest)
            by_row = torch.where(largest > -math.inf, by_row, 0)
            row_above, row_below = active & (largest > high), active & (smallest < low)
        else:
            by_row = {LEVEL_SUM: total, LEVEL_MEAN: total / size}[level]
            row_above, row_below = active & (by_row > high), active & (by_row < low)
        rejected = valid & rows.spread(row_above | row_below)
        clamped = by_row.clamp(low, high)
        columns = {
            "sum": count * by_row,
            "clamped_sum": count * clamped,
            "clamped_square_sum": count * clamped.square(),
            "high": row_above.double(),
            "low": row_below.double(),
        }
        extremes = _where_active(active, by_row)
    masked = rows.sum(rejected.double())
    row_min, row_max = _where_active(active, by_row)
    return rejected, columns | {
        "masked_tokens": masked,
        "masked_rows": (masked > 0).double(),
        "row_sum": torch.where(active, by_row, 0),
        "row_square_sum": torch.where(active, by_row.square(), 0),
        "high_rows": row_above.double(),
        "low_rows": row_below.double(),
        "min": extremes[0],
        "max": extremes[1],
        "row_min": row_min,
        "row_max": row_max,
    }
