"""sampling_correction in Triton: one program per row, which reads its tokens twice.

Per-token arithmetic is in the dtype of the log-probs, sums are in float64. Without
`from __future__ import annotations`: Triton reads the annotations of the kernel's scalars.
"""

from collections import namedtuple
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.aot import EXACT
from grpo_kernels.groups import packed_bounds
from grpo_kernels.ops.sampling_correction import config
from grpo_kernels.ops.sampling_correction.triton.numbers import clamp, exp, exp_remainders
from grpo_kernels.ops.sampling_correction.triton.rejections import (
    K1,
    K2,
    REJECTION_EXTREMES,
    REJECTION_SUMS,
    ROW_EXTREMES,
    ROW_SUMS,
    Record,
    Row,
    estimate,
    judge_row,
    load_token,
    measure_tokens,
    or_extreme,
    put,
)

# Kernels read module-level names only as constexprs.
TOKEN = tl.constexpr(config.WEIGHT_TOKEN)
SEQUENCE = tl.constexpr(config.WEIGHT_SEQUENCE)
GEOMETRIC = tl.constexpr(config.WEIGHT_GEOMETRIC)
BINARY_KL = tl.constexpr(config.BINARY_KL)
LEVEL_TOKEN = tl.constexpr(config.LEVEL_TOKEN)
ESTIMATORS = tl.constexpr(len(config.ESTIMATORS))
STATISTICS = tl.constexpr(len(config.STATISTICS))
# A statistic is four times its level plus its estimator, and has five bits of SLOTS: its place among the rejections
# plus one, or 0.
_BITS = 5
BLOCK = 256

# Integer arguments that change from batch to batch.
INTEGERS = ("rows", "width", "tokens")

# Sums over a row before its tokens are judged; least and most are log ratios, low and high the same within the bound.
Sums = namedtuple(
    "Sums",
    "tokens scored log_ratio gap limited k2 k3 kl ratio ratio_square old sampling m2 least most low high kl_max",
)
# Sums over a row of what was made of its tokens.
Weights = namedtuple("Weights", "kept above below outside far sum square lightest heaviest")


@triton.jit
def _measure_row(row, bound, wide_bound, NEEDS_KL: tl.constexpr, BLOCK: tl.constexpr):
    count, scored_count = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    nothing = tl.zeros([BLOCK], tl.float64)
    log_ratio, gap, limited, k2, k3, kl, ratio, ratio_square = (nothing,) * 8
    old, sampling, m2 = nothing, nothing, nothing
    least, most, kl_max = nothing + float("inf"), nothing - float("inf"), nothing - float("inf")
    for offset in range(0, row.length, BLOCK):
        token = load_token(row, offset + tl.arange(0, BLOCK), bound)
        count += token.valid.to(tl.int32)
        scored_count += token.scored.to(tl.int32)
        wide = token.log_ratio.to(tl.float64)
        log_ratio += wide
        gap += tl.abs(wide)
        m2 += wide * wide
        limited += token.limited.to(tl.float64)
        k2 += estimate(token, K2).to(tl.float64)
        divergence, excess = exp_remainders(token.limited)
        k3 += divergence.to(tl.float64)
        one = tl.where(token.scored, (excess + 1.0).to(tl.float64), 0.0)
        ratio += one
        ratio_square += one * one
        old += token.old.to(tl.float64)
        sampling += token.sampling.to(tl.float64)
        least = tl.minimum(least, tl.where(token.scored, wide, float("inf")))
        most = tl.maximum(most, tl.where(token.scored, wide, float("-inf")))
        if NEEDS_KL:
            divergence = estimate(token, BINARY_KL).to(tl.float64)
            kl += divergence
            kl_max = tl.maximum(kl_max, tl.where(token.scored, divergence, float("-inf")))
    least, most = tl.min(least, axis=0), tl.max(most, axis=0)
    return Sums(
        tl.sum(count, axis=0).to(tl.float64),
        tl.sum(scored_count, axis=0).to(tl.float64),
        tl.sum(log_ratio, axis=0),
        tl.sum(gap, axis=0),
        tl.sum(limited, axis=0),
        tl.sum(k2, axis=0),
        tl.sum(k3, axis=0),
        tl.sum(kl, axis=0),
        tl.sum(ratio, axis=0),
        tl.sum(ratio_square, axis=0),
        tl.sum(old, axis=0),
        tl.sum(sampling, axis=0),
        tl.sum(m2, axis=0),
        least,
        most,
        clamp(least, -wide_bound, wide_bound),
        clamp(most, -wide_bound, wide_bound),
        tl.max(kl_max, axis=0),
    )


@triton.jit
def _weigh_tokens(
    row,
    dropped,
    raw_row,
    ceiling_ptr,
    bound,
    lower,
    upper,
    mark,
    lows,
    highs,
    WEIGHTS: tl.constexpr,
    MASKS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes weights and mask of the row's tokens."""
    dtype: tl.constexpr = row.old.dtype.element_ty
    kept_count, high_count, low_count, outside_count, far_count = (tl.zeros([BLOCK], tl.int32),) * 5
    nothing = tl.zeros([BLOCK], tl.float64)
    weight_sum, weight_square = nothing, nothing
    lightest, heaviest = nothing + float("inf"), nothing - float("inf")
    for offset in range(0, row.length, BLOCK):
        k = offset + tl.arange(0, BLOCK)
        token = load_token(row, k, bound)
        kept = token.valid & (dropped == 0)
        for i in tl.static_range(ESTIMATORS):
            if ((SLOTS >> (5 * i)) & 31) > 0:
                value = estimate(token, i)
                kept = kept & ((token.scored & (value > tl.full([], highs[i], dtype))) == 0)
                if i == K1:
                    kept = kept & ((token.scored & (value < tl.full([], lows[0], dtype))) == 0)
        if ceiling_ptr is not None:  # squares are compared in float32
            square = (token.log_ratio * token.log_ratio).to(tl.float32)
            far = token.scored & (square > tl.load(ceiling_ptr))
            far_count += far.to(tl.int32)
            kept = kept & (far == 0)
        raw = tl.full([BLOCK], 1.0, dtype) * raw_row.to(dtype)
        if WEIGHTS == TOKEN:
            raw = exp(token.limited)
        above, below = raw > upper, raw < lower
        weight = clamp(raw, lower, upper)
        if MASKS:
            weight = tl.where(above | below, 0.0, raw)
        kept_count += kept.to(tl.int32)
        high_count += (token.valid & above).to(tl.int32)
        low_count += (token.valid & (raw < mark)).to(tl.int32)
        outside_count += (token.valid & (above | below)).to(tl.int32)
        wide = weight.to(tl.float64)
        counted = tl.where(token.valid, wide, 0.0)
        weight_sum += counted
        weight_square += counted * counted
        lightest = tl.minimum(lightest, tl.where(token.valid, wide, float("inf")))
        heaviest = tl.maximum(heaviest, tl.where(token.valid, wide, float("-inf")))
        tl.store(row.weights + row.start + k, tl.where(kept, weight, 0.0), mask=k < row.length)
        tl.store(row.kept + row.start + k, kept.to(tl.int8), mask=k < row.length)
    return Weights(
        tl.sum(kept_count, axis=0).to(tl.float64),
        tl.sum(high_count, axis=0).to(tl.float64),
        tl.sum(low_count, axis=0).to(tl.float64),
        tl.sum(outside_count, axis=0).to(tl.float64),
        tl.sum(far_count, axis=0).to(tl.float64),
        tl.sum(weight_sum, axis=0),
        tl.sum(weight_square, axis=0),
        tl.min(lightest, axis=0),
        tl.max(heaviest, axis=0),
    )


@triton.jit
def _put_row(
    record,
    sums,
    weights,
    raw_row,
    high,
    low_mark,
    bound,
    DTYPE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Writes the columns of a row that come from its weights and its mismatch."""
    above, below, divisor = weights.above, weights.below, tl.maximum(sums.tokens, 1.0)
    if WEIGHTS >= SEQUENCE:
        above, below = tl.minimum(above, 1.0), tl.minimum(below, 1.0)
        raw_row = raw_row.to(DTYPE).to(tl.float64)
    if WEIGHTS == TOKEN:
        raw_row = (sums.ratio + sums.tokens - sums.scored) / divisor
    active = sums.tokens > 0
    here = active.to(tl.float64)
    mean = weights.sum / divisor
    old_log = -sums.old / tl.maximum(sums.scored, 1.0)
    sampling_log = -sums.sampling / tl.maximum(sums.scored, 1.0)
    distance = old_log - sampling_log
    mean_min, mean_max = or_extreme(active, mean)
    product_min, product_max = or_extreme(active, sums.log_ratio)
    distance_min, distance_max = or_extreme(active, distance)
    columns = (
        here * 0.0 + 1.0,
        here,
        sums.tokens,
        sums.scored,
        weights.kept,
        (weights.kept < sums.tokens).to(tl.float64),
        weights.sum,
        weights.square,
        mean,
        mean * mean,
        above,
        below,
        weights.outside,
        (active & (raw_row > high)).to(tl.float64),
        (active & (raw_row < low_mark)).to(tl.float64),
        sums.log_ratio,
        sums.gap,
        sums.k3,
        sums.ratio,
        sums.ratio_square,
        here * exp(2.0 * clamp(sums.log_ratio, -bound, bound)),
        here * exp(old_log),
        old_log,
        here * exp(sampling_log),
        sampling_log,
        tl.abs(distance),
        here * exp(distance),
        sums.m2,
        weights.far,
    )
    minima = (weights.lightest, mean_min, sums.least, product_min, distance_min)
    maxima = (weights.heaviest, mean_max, sums.most, product_max, distance_max)
    for i in tl.static_range(ROW_SUMS):
        put(record, i, columns[i])
    first: tl.constexpr = ROW_SUMS + COUNT * REJECTION_SUMS
    for i in tl.static_range(ROW_EXTREMES):
        put(record, first + i, minima[i])
        put(record, first + ROW_EXTREMES + COUNT * REJECTION_EXTREMES + i, maxima[i])


@triton.jit(do_not_specialize=INTEGERS)
def rows_kernel(
    old_ptr,
    sampling_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    ceiling_ptr,
    weights_ptr,
    kept_ptr,
    table_ptr,
    rows: "i64",
    width: "i64",
    tokens: "i64",
    low: "fp64",
    high: "fp64",
    low_mark: "fp64",
    bound: "fp64",
    token_k1_low: "fp64",
    seq_sum_k1_low: "fp64",
    seq_mean_k1_low: "fp64",
    seq_max_k1_low: "fp64",
    token_k1_high: "fp64",
    token_k2_high: "fp64",
    token_k3_high: "fp64",
    token_binary_kl_high: "fp64",
    seq_sum_k1_high: "fp64",
    seq_sum_k2_high: "fp64",
    seq_sum_k3_high: "fp64",
    seq_sum_binary_kl_high: "fp64",
    seq_mean_k1_high: "fp64",
    seq_mean_k2_high: "fp64",
    seq_mean_k3_high: "fp64",
    seq_mean_binary_kl_high: "fp64",
    seq_max_k1_high: "fp64",
    seq_max_k2_high: "fp64",
    seq_max_k3_high: "fp64",
    seq_max_binary_kl_high: "fp64",
    WEIGHTS: tl.constexpr,
    MASKS: tl.constexpr,
    SLOTS: tl.constexpr,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    NEEDS_KL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weights and mask of a row's tokens and its row of the table; a last program is for tokens of no row."""
    row = tl.program_id(0).to(tl.int64)
    there = row < rows
    record = Record(table_ptr + row * COLUMNS, there)
    if cu_seqlens_ptr is None:
        start, length = row * width, width
    else:
        start = tl.load(cu_seqlens_ptr + row)
        length = tl.load(cu_seqlens_ptr + row + 1, mask=there, other=tokens) - start
    dtype: tl.constexpr = old_ptr.dtype.element_ty
    limit = tl.full([], bound, dtype)
    wide_bound = tl.full([], bound, tl.float64)
    here = Row(old_ptr, sampling_ptr, mask_ptr, weights_ptr, kept_ptr, start, length, there)
    lows = (token_k1_low, seq_sum_k1_low, seq_mean_k1_low, seq_max_k1_low)
    highs = (
        token_k1_high,
        token_k2_high,
        token_k3_high,
        token_binary_kl_high,
        seq_sum_k1_high,
        seq_sum_k2_high,
        seq_sum_k3_high,
        seq_sum_binary_kl_high,
        seq_mean_k1_high,
        seq_mean_k2_high,
        seq_mean_k3_high,
        seq_mean_binary_kl_high,
        seq_max_k1_high,
        seq_max_k2_high,
        seq_max_k3_high,
        seq_max_binary_kl_high,
    )

    sums = _measure_row(here, limit, wide_bound, NEEDS_KL, BLOCK)
    dropped = sums.tokens < 0
    for i in tl.static_range(STATISTICS):
        if ((SLOTS >> (5 * i)) & 31) > 0:
            slot = ((SLOTS >> (5 * i)) & 31) - 1
            lowest = tl.full([], float("-inf"), tl.float64)
            if i % 4 == K1:
                lowest = tl.full([], lows[i // 4], tl.float64)
            highest = tl.full([], highs[i], tl.float64)
            if i // 4 == LEVEL_TOKEN:
                measure_tokens(record, here, limit, lowest, highest, sums.tokens, slot, i, COUNT, BLOCK)
            else:
                dropped = dropped | judge_row(record, sums, lowest, highest, slot, i // 4, i % 4, COUNT)

    raw_row = sums.tokens * 0.0 + 1.0
    if WEIGHTS == SEQUENCE:
        raw_row = exp(clamp(sums.log_ratio, -wide_bound, wide_bound))
    if WEIGHTS == GEOMETRIC:
        raw_row = exp(clamp(sums.log_ratio / tl.maximum(sums.tokens, 1.0), -wide_bound, wide_bound))
    lower, upper, mark = tl.full([], low, dtype), tl.full([], high, dtype), tl.full([], low_mark, dtype)
    weights = _weigh_tokens(
        here, dropped, raw_row, ceiling_ptr, limit, lower, upper, mark, lows, highs, WEIGHTS, MASKS, SLOTS, BLOCK
    )
    wide_high, wide_mark = tl.full([], high, tl.float64), tl.full([], low_mark, tl.float64)
    _put_row(record, sums, weights, raw_row, wide_high, wide_mark, wide_bound, dtype, WEIGHTS, COUNT)


def forward(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    m2_ceiling: Optional[Tensor],
    statistics: list[int],
    bounds: list[float],
    modes: list[int],
    coefficients: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = old_logprobs.numel()
    rows, width = old_logprobs.shape if cu_seqlens is None else (cu_seqlens.numel() - 1, 0)
    if cu_seqlens is not None:
        cu_seqlens = packed_bounds("sampling_correction", cu_seqlens, tokens)
    plan = config.Plan(*modes, *coefficients)
    columns = sum(config.table_widths(len(statistics)))
    weights = torch.empty_like(old_logprobs)
    kept = torch.empty_like(old_logprobs, dtype=torch.int8)
    table = old_logprobs.new_empty(rows, columns, dtype=torch.float64)
    programs = rows + (cu_seqlens is not None)  # one more for the tokens behind the last packed row
    if programs > 0:
        rows_kernel[(programs,)](
            old_logprobs,
            sampling_logprobs,
            mask,
            cu_seqlens,
            m2_ceiling,
            weights,
            kept,
            table,
            rows,
            width,
            tokens,
            plan.low,
            plan.high,
            plan.low_mark,
            plan.bound,
            **_bounds(statistics, bounds),
            WEIGHTS=plan.weights,
            MASKS=plan.masks,
            SLOTS=_slots(statistics),
            COUNT=len(statistics),
            COLUMNS=columns,
            NEEDS_KL=any(code % len(config.ESTIMATORS) == config.BINARY_KL for code in statistics),
            BLOCK=BLOCK,
            **EXACT,
        )
    return weights, kept.view(torch.bool), table


def _slots(statistics: list[int]) -> int:
    return sum((place + 1) << (_BITS * code) for place, code in enumerate(statistics))


def _bounds(statistics: list[int], bounds: list[float]) -> dict[str, float]:
    """The kernel's bounds by name, infinite where no rejection has them."""
    named = {f"{name}_high": float("inf") for name in config.STATISTICS}
    named |= {f"{level}_k1_low": float("-inf") for level in config.LEVELS}
    for code, low, high in zip(statistics, bounds[::2], bounds[1::2], strict=True):
        name = config.STATISTICS[code]
        named |= {f"{name}_high": high} | ({f"{name}_low": low} if f"{name}_low" in named else {})
    return named
