"""Kernels for the steps over the whole batch: its moments, and the normalisation by them.

Without `from __future__ import annotations`: Triton reads the annotations "fp64" of the kernels' scalars.
"""

import triton
import triton.language as tl

from grpo_kernels.ops.group_advantages import config

CENTER_LEAVE_ONE_OUT = tl.constexpr(config.CENTER_LEAVE_ONE_OUT)
SCALE_BATCH_STD = tl.constexpr(config.SCALE_BATCH_STD)
WHITEN_NONE = tl.constexpr(config.WHITEN_NONE)
WHITEN_TOKENS = tl.constexpr(config.WHITEN_TOKENS)
GAIN_NONZERO = tl.constexpr(config.GAIN_NONZERO)


@triton.jit
def _batch_rows(
    values_ptr,
    lengths_ptr,
    advantages_ptr,
    size_ptr,
    degenerate_ptr,
    row,
    end,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WHITEN: tl.constexpr,
    GAIN: tl.constexpr,
):
    """Weight and value of rows in the batch's moments."""
    inside = row < end
    reward = tl.load(values_ptr + row, mask=inside, other=float("nan")).to(tl.float64)
    scored = reward == reward
    value = tl.load(advantages_ptr + row, mask=inside, other=0.0).to(tl.float64)
    if SCALE == SCALE_BATCH_STD:
        value = reward
    if GAIN == GAIN_NONZERO:
        value = (reward != 0).to(tl.float64)
    weight = scored.to(tl.float64)
    if WHITEN == WHITEN_TOKENS:
        weight = tl.where(scored, tl.load(lengths_ptr + row, mask=inside, other=0.0), 0.0)
    if CENTER == CENTER_LEAVE_ONE_OUT:  # undefined for a row alone; a raw reward in its place counts
        alone = tl.load(size_ptr + row, mask=inside, other=0) == 1
        weight = tl.where(alone & (tl.load(degenerate_ptr + row, mask=inside, other=0) != 0), 0.0, weight)
    return weight, tl.where(scored, value, 0.0)


@triton.jit
def moments_kernel(
    values_ptr,
    lengths_ptr,
    advantages_ptr,
    size_ptr,
    degenerate_ptr,
    parts_ptr,
    number,
    rows_per_part,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WHITEN: tl.constexpr,
    GAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """parts[3, MAX_PARTS]: weight, mean and sum of squared distances of one share of the rows; two passes."""
    part = tl.program_id(0).to(tl.int64)
    begin = part * rows_per_part
    end = tl.minimum(begin + rows_per_part, number)
    total = tl.zeros([BLOCK], tl.float64)
    weights = tl.zeros([BLOCK], tl.float64)
    for offset in range(0, rows_per_part, BLOCK):
        row = begin + offset + tl.arange(0, BLOCK)
        weight, value = _batch_rows(
            values_ptr, lengths_ptr, advantages_ptr, size_ptr, degenerate_ptr, row, end, CENTER, SCALE, WHITEN, GAIN
        )
        weights += weight
        total += weight * value
    all_weight = tl.sum(weights, axis=0)
    mean = tl.sum(total, axis=0) / tl.where(all_weight > 0, all_weight, 1.0)
    squares = tl.zeros([BLOCK], tl.float64)
    for offset in range(0, rows_per_part, BLOCK):
        row = begin + offset + tl.arange(0, BLOCK)
        weight, value = _batch_rows(
            values_ptr, lengths_ptr, advantages_ptr, size_ptr, degenerate_ptr, row, end, CENTER, SCALE, WHITEN, GAIN
        )
        squares += weight * (value - mean) * (value - mean)
    tl.store(parts_ptr + part, all_weight)
    tl.store(parts_ptr + MAX_PARTS + part, mean)
    tl.store(parts_ptr + 2 * MAX_PARTS + part, tl.sum(squares, axis=0))


@triton.jit
def finish_kernel(
    values_ptr,
    advantages_ptr,
    std_ptr,
    degenerate_ptr,
    parts_ptr,
    result_ptr,
    number,
    parts,
    ddof: "fp64",
    eps: "fp64",
    std_floor: "fp64",
    whiten_eps: "fp64",
    clip: "fp64",
    SCALE: tl.constexpr,
    WHITEN: tl.constexpr,
    GAIN: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """The last step over the batch: result = clip((advantage - shift) / divisor) for live rows, else 0."""
    part = tl.arange(0, MAX_PARTS)
    weights = tl.load(parts_ptr + part, mask=part < parts, other=0.0)
    means = tl.load(parts_ptr + MAX_PARTS + part, mask=part < parts, other=0.0)
    squares = tl.load(parts_ptr + 2 * MAX_PARTS + part, mask=part < parts, other=0.0)
    weight = tl.sum(weights, axis=0)
    mean = tl.sum(weights * means, axis=0) / tl.where(weight > 0, weight, 1.0)
    distances = tl.sum(squares + weights * (means - mean) * (means - mean), axis=0)
    enough = (weight > ddof) & (distances != 0)
    variance = tl.where(enough, distances / tl.where(enough, weight - ddof, 1.0), 0.0)
    std = tl.sqrt(variance)

    shift = mean * 0.0
    divisor = shift + 1.0
    if SCALE == SCALE_BATCH_STD:
        divisor = tl.where(std < std_floor, std_floor, std) + eps
    if WHITEN != WHITEN_NONE:
        shift = mean
        divisor = tl.sqrt(variance + whiten_eps) if WHITEN == WHITEN_TOKENS else std + whiten_eps
    if GAIN == GAIN_NONZERO:  # the moments are those of (reward != 0)
        divisor = tl.maximum(mean * weight, 1.0) / tl.maximum(weight, 1.0)
    factor = 1 / tl.where(divisor != 0, divisor, 1.0)
    if (WHITEN != WHITEN_NONE) | (SCALE == SCALE_BATCH_STD):
        factor = tl.where(variance != 0, factor, 0.0)

    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < number
    reward = tl.load(values_ptr + row, mask=inside, other=float("nan"))
    live = (reward == reward) & (tl.load(degenerate_ptr + row, mask=inside, other=1) == 0)
    advantage = (tl.load(advantages_ptr + row, mask=inside, other=0.0).to(tl.float64) - shift) * factor
    advantage = tl.where(advantage > clip, clip, tl.where(advantage < -clip, -clip, advantage))
    tl.store(result_ptr + row, tl.where(live, advantage, 0.0), mask=inside)
    if SCALE == SCALE_BATCH_STD:
        tl.store(std_ptr + row, tl.zeros([BLOCK], tl.float64) + std, mask=inside)
