"""group_advantages in Triton. Statistics are float64: there are few rewards, and every digit is wanted.

Without `from __future__ import annotations`: Triton reads the annotations "fp64" of the kernels' scalars.
"""

import math
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels import segments
from grpo_kernels.triton._aot import EXACT, AotCase

# The order of names in grpo_kernels/config/advantages.py.
MEAN, LEAVE_ONE_OUT, LENGTH, BASELINE, RUNNER_UP = (tl.constexpr(i) for i in range(1, 6))
CENTER_NONE = tl.constexpr(0)
SCALE_STD, SCALE_BATCH_STD, SCALE_MEAN = (tl.constexpr(i) for i in range(1, 4))
SINGLETON_RAW, SINGLETON_PARENT = tl.constexpr(1), tl.constexpr(2)
WHITEN_NONE, WHITEN_ROWS, WHITEN_TOKENS = (tl.constexpr(i) for i in range(3))
GAIN_NONZERO = tl.constexpr(1)

# What a launch writes: everything; the statistics alone; or one column's share of a sum over columns (GDPO).
WRITE_ALL, WRITE_STATISTICS, ADD_COLUMN = (tl.constexpr(i) for i in range(3))

# Rows of segments in one program: what fits in registers as float64, less where row numbers take some too.
_TILE = 512
_SORTED_TILE = 128
_ROWS_PER_PROGRAM = 1024
_MAX_PARTS = 1024


@triton.jit
def _load(values_ptr, order_ptr, first, count, offset, BLOCK: tl.constexpr):
    """A [SEGMENTS, BLOCK] tile of the segments' rows from `offset` on: row numbers, mask, values (NaN outside)."""
    column = offset + tl.arange(0, BLOCK)[None, :]
    inside = column < count[:, None]
    rows = first[:, None] + column
    if order_ptr is not None:
        rows = tl.load(order_ptr + rows, mask=inside, other=0)
    value = tl.load(values_ptr + rows, mask=inside, other=float("nan")).to(tl.float64)
    return rows, inside, value


@triton.jit
def _statistics(values_ptr, lengths_ptr, order_ptr, first, count, ddof, CENTER: tl.constexpr, SEGMENTS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Two passes over the scored rows of each segment: count, mean, std, flat, high, second, length-weighted mean."""
    scored_rows = tl.zeros([SEGMENTS], tl.float64)
    total = tl.zeros([SEGMENTS], tl.float64)
    low = tl.full([SEGMENTS], float("inf"), tl.float64)
    high = tl.full([SEGMENTS], float("-inf"), tl.float64)
    tokens = tl.zeros([SEGMENTS], tl.float64)
    token_total = tl.zeros([SEGMENTS], tl.float64)
    longest = tl.max(count, axis=0)
    for offset in range(0, longest, BLOCK):
        rows, inside, value = _load(values_ptr, order_ptr, first, count, offset, BLOCK)
        scored = value == value
        scored_rows += tl.sum(scored.to(tl.float64), axis=1)
        total += tl.sum(tl.where(scored, value, 0.0), axis=1)
        low = tl.minimum(low, tl.min(tl.where(scored, value, float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(scored, value, float("-inf")), axis=1))
        if CENTER == LENGTH:
            length = tl.load(lengths_ptr + rows, mask=inside, other=0.0)
            tokens += tl.sum(tl.where(scored, length, 0.0), axis=1)
            token_total += tl.sum(tl.where(scored, length * value, 0.0), axis=1)
    flat = (low < high) == 0
    # exact for equal values, whose rounded mean need not be that value
    mean = tl.where(flat, low, total / tl.maximum(scored_rows, 1.0))
    mean = tl.where(scored_rows > 0, mean, 0.0)

    squares = tl.zeros([SEGMENTS], tl.float64)
    winners = tl.zeros([SEGMENTS], tl.float64)
    second = tl.full([SEGMENTS], float("-inf"), tl.float64)
    for offset in range(0, longest, BLOCK):
        rows, inside, value = _load(values_ptr, order_ptr, first, count, offset, BLOCK)
        distance = tl.where(value == value, value - mean[:, None], 0.0)
        squares += tl.sum(distance * distance, axis=1)
        if CENTER == RUNNER_UP:
            winners += tl.sum((value == high[:, None]).to(tl.float64), axis=1)
            below = tl.where(value < high[:, None], value, float("-inf"))
            second = tl.maximum(second, tl.max(below, axis=1))
    second = tl.where(winners > 1, high, second)
    enough = (flat == 0) & (scored_rows > ddof)
    std = tl.where(enough, tl.sqrt(squares / tl.where(enough, scored_rows - ddof, 1.0)), 0.0)
    length_mean = tl.where(tokens > 0, token_total / tl.where(tokens > 0, tokens, 1.0), mean)
    return scored_rows, mean, std, flat, second, length_mean


@triton.jit
def _bounds(starts_ptr, group_size, segment, number):
    """First row and row count of segments; count 0 past the last one."""
    known = segment < number
    if starts_ptr is not None:
        first = tl.load(starts_ptr + segment, mask=known, other=0)
        return first, tl.load(starts_ptr + segment + 1, mask=known, other=0) - first
    first = segment * group_size
    return first, tl.where(known, group_size, 0).to(tl.int64)


@triton.jit
def _parents_kernel(
    values_ptr, lengths_ptr, order_ptr, starts_ptr, parents_ptr, number, ddof: "fp64", CENTER: tl.constexpr,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """parents[5, number]: count, mean, std, flat and length-weighted mean of every group."""
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    first, count = _bounds(starts_ptr, 0, segment, number)
    scored, mean, std, flat, _, length_mean = _statistics(
        values_ptr, lengths_ptr, order_ptr, first, count, ddof, CENTER, SEGMENTS, BLOCK
    )
    known = segment < number
    tl.store(parents_ptr + segment, scored, mask=known)
    tl.store(parents_ptr + number + segment, mean, mask=known)
    tl.store(parents_ptr + 2 * number + segment, std, mask=known)
    tl.store(parents_ptr + 3 * number + segment, flat.to(tl.float64), mask=known)
    tl.store(parents_ptr + 4 * number + segment, length_mean, mask=known)


@triton.jit
def _map(
    scored, mean, std, flat, second, length_mean, parent_ptr, parents_ptr, segment, number, eps, std_floor, shrinkage,
    CENTER: tl.constexpr, SCALE: tl.constexpr, SINGLETON: tl.constexpr,
):  # fmt: skip
    """advantage = (reward - center) * factor where live; and the mean and std to report."""
    alone = scored == 1
    borrows = scored < 0  # nowhere
    count = scored
    if parents_ptr is not None:
        parent = tl.load(parent_ptr + segment, mask=segment < number, other=0)
        parent_count = tl.load(parents_ptr + parent)
        parent_mean = tl.load(parents_ptr + number + parent)
        parent_std = tl.load(parents_ptr + 2 * number + parent)
        parent_flat = tl.load(parents_ptr + 3 * number + parent) > 0
        if SINGLETON == SINGLETON_PARENT:
            borrows = alone & (parent_count > 1)
            length_mean = tl.where(borrows, tl.load(parents_ptr + 4 * number + parent), length_mean)
        count = tl.where(borrows, parent_count, scored)
        blends = (scored > 1) & (shrinkage > 0)
        keep = tl.where(borrows, 0.0, tl.where(blends, scored / (scored + shrinkage), 1.0))
        mean = keep * mean + (1 - keep) * parent_mean
        std = keep * std + (1 - keep) * parent_std
        flat = tl.where(borrows | blends, parent_flat, flat)

    center = tl.zeros_like(mean)
    factor = tl.zeros_like(mean) + 1.0
    if (CENTER == MEAN) | (CENTER == LEAVE_ONE_OUT):
        center = mean
    if CENTER == LEAVE_ONE_OUT:
        factor = count / tl.maximum(count - 1, 1.0)
    if CENTER == LENGTH:
        center = length_mean
    if CENTER == RUNNER_UP:
        center = second
    live = scored > 0
    if ((CENTER != CENTER_NONE) & (CENTER != BASELINE)) | (SCALE == SCALE_STD):
        live = live & (flat == 0)
    if SCALE == SCALE_STD:
        divisor = tl.where(std < std_floor, std_floor, std) + eps
        live = live & (divisor != 0)
        factor = factor / tl.where(divisor != 0, divisor, 1.0)
    if SCALE == SCALE_MEAN:
        live = live & (mean > 0)
        factor = factor / tl.where(mean > 0, mean + eps, 1.0)

    lonely = alone & (borrows == 0)
    raw_factor = tl.zeros_like(mean) + 1.0
    if SCALE == SCALE_STD:
        raw_factor = raw_factor / (raw_factor + eps)
    center = tl.where(lonely, 0.0, center)
    factor = tl.where(lonely, raw_factor, factor)
    live = tl.where(lonely, SINGLETON == SINGLETON_RAW, live)
    std = tl.where(lonely | (scored == 0), 0.0, std)
    mean = tl.where(scored > 0, mean, 0.0)
    return center, factor, live, mean, std


@triton.jit
def _segments_kernel(
    values_ptr, lengths_ptr, baselines_ptr, order_ptr, starts_ptr, parent_ptr, parents_ptr, advantages_ptr, mean_ptr,
    std_ptr, size_ptr, degenerate_ptr, number, group_size, weight: "fp64", ddof: "fp64", eps: "fp64",
    std_floor: "fp64", shrinkage: "fp64", clip: "fp64", CENTER: tl.constexpr, SCALE: tl.constexpr,
    SINGLETON: tl.constexpr, WRITE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    first, count = _bounds(starts_ptr, group_size, segment, number)
    scored, own_mean, own_std, flat, second, length_mean = _statistics(
        values_ptr, lengths_ptr, order_ptr, first, count, ddof, CENTER, SEGMENTS, BLOCK
    )
    center, factor, live, mean, std = _map(
        scored, own_mean, own_std, flat, second, length_mean, parent_ptr, parents_ptr, segment, number, eps, std_floor,
        shrinkage, CENTER, SCALE, SINGLETON,
    )  # fmt: skip
    for offset in range(0, tl.max(count, axis=0), BLOCK):
        rows, inside, value = _load(values_ptr, order_ptr, first, count, offset, BLOCK)
        if WRITE != ADD_COLUMN:
            tl.store(mean_ptr + rows, tl.broadcast_to(mean[:, None], value.shape), mask=inside)
            tl.store(std_ptr + rows, tl.broadcast_to(std[:, None], value.shape), mask=inside)
            size = tl.broadcast_to(scored[:, None], value.shape)
            tl.store(size_ptr + rows, size.to(tl.int32), mask=inside)
        dead = tl.broadcast_to((live == 0)[:, None], value.shape)
        if WRITE == ADD_COLUMN:
            dead = dead & (tl.load(degenerate_ptr + rows, mask=inside, other=0) != 0)
        if WRITE != WRITE_STATISTICS:
            tl.store(degenerate_ptr + rows, dead.to(tl.int8), mask=inside)
            distance = value - center[:, None]
            if CENTER == BASELINE:
                distance = value - tl.load(baselines_ptr + rows, mask=inside, other=0.0).to(tl.float64)
            if CENTER == RUNNER_UP:
                distance = tl.maximum(distance, 0.0)  # only the best row is above the runner-up
            taken = (value == value) & live[:, None]
            advantage = tl.where(taken, distance * factor[:, None], 0.0)
            if WRITE == ADD_COLUMN:
                advantage = weight * advantage + tl.load(advantages_ptr + rows, mask=inside, other=0.0)
            else:
                advantage = tl.where(advantage > clip, clip, tl.where(advantage < -clip, -clip, advantage))
            tl.store(advantages_ptr + rows, advantage, mask=inside)


@triton.jit
def _batch_rows(values_ptr, lengths_ptr, advantages_ptr, size_ptr, degenerate_ptr, row, end, CENTER: tl.constexpr,
                SCALE: tl.constexpr, WHITEN: tl.constexpr, GAIN: tl.constexpr):  # fmt: skip
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
    if CENTER == LEAVE_ONE_OUT:  # undefined for a row alone; a raw reward in its place counts
        alone = tl.load(size_ptr + row, mask=inside, other=0) == 1
        weight = tl.where(alone & (tl.load(degenerate_ptr + row, mask=inside, other=0) != 0), 0.0, weight)
    return weight, tl.where(scored, value, 0.0)


@triton.jit
def _moments_kernel(
    values_ptr, lengths_ptr, advantages_ptr, size_ptr, degenerate_ptr, parts_ptr, number, rows_per_part,
    CENTER: tl.constexpr, SCALE: tl.constexpr, WHITEN: tl.constexpr, GAIN: tl.constexpr, BLOCK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):  # fmt: skip
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
def _finish_kernel(
    values_ptr, advantages_ptr, std_ptr, degenerate_ptr, parts_ptr, result_ptr, number, parts, ddof: "fp64",
    eps: "fp64", std_floor: "fp64", whiten_eps: "fp64", clip: "fp64", SCALE: tl.constexpr, WHITEN: tl.constexpr,
    GAIN: tl.constexpr, BLOCK: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
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


def forward(
    rewards: Tensor,
    groups: Optional[Tensor],
    group_size: int,
    subgroups: Optional[Tensor],
    valid: Optional[Tensor],
    lengths: Optional[Tensor],
    baselines: Optional[Tensor],
    weights: list[float],
    modes: list[int],
    coefficients: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    center, scale, singleton, combine, whiten, gain = modes
    ddof, eps, std_floor, shrinkage, clip, whiten_eps = coefficients
    rows = rewards.shape[0]
    combined, columns = _columns(rewards, weights, valid, subgroups, bool(combine))
    found = segments.sort_rows(rows, groups, group_size, subgroups)
    order, starts, parent, parent_starts = (None, None, None, None) if found is None else found
    number = rows // group_size if starts is None else rows
    # a tile as wide as the groups are; where ids hide their size, 32
    block = min(max(triton.next_power_of_2(group_size), 2), _TILE) if starts is None else 32
    tile = {"SEGMENTS": (_TILE if starts is None else _SORTED_TILE) // block, "BLOCK": block, **EXACT}
    grid = (triton.cdiv(number, tile["SEGMENTS"]),)

    batch = scale == SCALE_BATCH_STD.value or whiten != 0 or gain != 0
    mean, std = rewards.new_empty(rows), rewards.new_empty(rows)
    size = rewards.new_empty(rows, dtype=torch.int32)
    degenerate = rewards.new_empty(rows, dtype=torch.int8)
    advantages = rewards.new_empty(rows)
    if rows == 0:
        return advantages, mean, std, size, degenerate.bool()

    def run(values: Tensor, into: Tensor, write: int, weight: float) -> None:
        parents = None
        if parent is not None and (shrinkage > 0 or singleton == SINGLETON_PARENT.value):
            parents = values.new_empty(5, number, dtype=torch.float64)
            _parents_kernel[grid](values, lengths, order, parent_starts, parents, number, ddof, CENTER=center, **tile)
        _segments_kernel[grid](
            values, lengths, baselines, order, starts, parent, parents, into, mean, std, size, degenerate, number,
            group_size, weight, ddof, eps, std_floor, shrinkage, math.inf if batch else clip, CENTER=center,
            SCALE=scale, SINGLETON=singleton, WRITE=write, **tile,
        )  # fmt: skip

    if columns is None:
        run(combined, advantages, WRITE_ALL.value, 1.0)
    else:
        run(combined, advantages, WRITE_STATISTICS.value, 1.0)
        degenerate.fill_(1)
        sums = torch.zeros(rows, dtype=torch.float64, device=rewards.device)
        for c, column in enumerate(columns):
            run(column, sums, ADD_COLUMN.value, weights[c] if weights else 1.0)
        advantages = sums if batch else sums.clamp(-clip, clip).to(rewards.dtype)
    if batch:
        parts = min(triton.cdiv(rows, _ROWS_PER_PROGRAM), _MAX_PARTS)
        rows_per_part = triton.cdiv(triton.cdiv(rows, parts), _ROWS_PER_PROGRAM) * _ROWS_PER_PROGRAM
        moments = rewards.new_empty(3, _MAX_PARTS, dtype=torch.float64)
        kinds = {
            "SCALE": scale,
            "WHITEN": whiten,
            "GAIN": gain,
            "BLOCK": _ROWS_PER_PROGRAM,
            "MAX_PARTS": _MAX_PARTS,
            **EXACT,
        }
        _moments_kernel[(parts,)](
            combined, lengths, advantages, size, degenerate, moments, rows, rows_per_part, CENTER=center, **kinds
        )
        result = rewards.new_empty(rows)
        _finish_kernel[(triton.cdiv(rows, _ROWS_PER_PROGRAM),)](
            combined, advantages, std, degenerate, moments, result, rows, parts, ddof, eps, std_floor, whiten_eps,
            clip, **kinds,
        )  # fmt: skip
        advantages = result
    return advantages, mean, std, size, degenerate.bool()


def _columns(
    rewards: Tensor,
    weights: list[float],
    valid: Optional[Tensor],
    subgroups: Optional[Tensor],
    by_column: bool,
) -> tuple[Tensor, Optional[list[Tensor]]]:
    """The combined reward of every row, and for GDPO the columns; NaN where a row takes no part or is not scored."""
    if valid is not None or subgroups is not None:
        part = torch.ones_like(rewards[..., 0] if rewards.dim() == 2 else rewards, dtype=torch.bool)
        part = part if valid is None else part & valid
        part = part if subgroups is None else part & (subgroups >= 0)
        rewards = rewards.where(part[:, None] if rewards.dim() == 2 else part, math.nan)
    if rewards.dim() == 1 and not weights and not by_column:
        return rewards, None
    columns = list(rewards.unbind(1)) if rewards.dim() == 2 else [rewards]
    combined = torch.zeros_like(columns[0], dtype=torch.float64)
    scored = torch.zeros_like(columns[0], dtype=torch.bool)
    for c, column in enumerate(columns):
        here = ~column.isnan()
        combined = combined + torch.where(here, column.double() * (weights[c] if weights else 1.0), 0)
        scored = scored | here
    combined = combined.where(scored, math.nan)
    return combined, [column.contiguous() for column in columns] if by_column else None


def _aot_cases() -> tuple[AotCase, ...]:
    doubles = dict.fromkeys(("ddof", "eps", "std_floor", "shrinkage", "clip", "weight"), "fp64")
    pointers = {"values_ptr": "*fp32", "advantages_ptr": "*fp32", "mean_ptr": "*fp32", "std_ptr": "*fp32"}
    pointers |= {"size_ptr": "*i32", "degenerate_ptr": "*i8"}
    sorted_rows = {"order_ptr": "*i64", "starts_ptr": "*i64", "parent_ptr": "*i64", "parents_ptr": "*fp64"}
    nothing = dict.fromkeys(("lengths_ptr", "baselines_ptr"))
    small, wide = {"SEGMENTS": _TILE // 8, "BLOCK": 8}, {"SEGMENTS": _SORTED_TILE // 32, "BLOCK": 32}
    kinds = {"SCALE": 0, "WHITEN": 2, "GAIN": 0, "BLOCK": _ROWS_PER_PROGRAM, "MAX_PARTS": _MAX_PARTS}
    shared = {"values_ptr": "*fp32", "advantages_ptr": "*fp32", "parts_ptr": "*fp64", "number": "i32"}
    finish = dict.fromkeys(("ddof", "eps", "std_floor", "whiten_eps", "clip"), "fp64")
    return (
        AotCase(
            _segments_kernel,
            pointers | doubles | {"number": "i32", "group_size": "i32"},
            {
                "CENTER": 1,
                "SCALE": 1,
                "SINGLETON": 0,
                "WRITE": 0,
                **small,
                **nothing,
                **dict.fromkeys(sorted_rows),
            },
            label="groups of 8",
            options=EXACT,
        ),
        AotCase(
            _segments_kernel,
            pointers | sorted_rows | doubles | {"number": "i32", "group_size": "i32"},
            {"CENTER": 1, "SCALE": 1, "SINGLETON": 2, "WRITE": 0, **wide, **nothing},
            label="subgroups",
            options=EXACT,
        ),
        AotCase(
            _parents_kernel,
            {"values_ptr": "*fp32", "order_ptr": "*i64", "starts_ptr": "*i64", "parents_ptr": "*fp64"}
            | {"number": "i32", "ddof": "fp64"},
            {"lengths_ptr": None, "CENTER": 1, **wide},
            options=EXACT,
        ),
        AotCase(
            _moments_kernel,
            shared | {"lengths_ptr": "*fp64", "size_ptr": "*i32", "degenerate_ptr": "*i8", "rows_per_part": "i32"},
            {"CENTER": 2, **kinds},
            options=EXACT,
        ),
        AotCase(
            _finish_kernel,
            shared | finish | {"std_ptr": "*fp32", "degenerate_ptr": "*i8", "result_ptr": "*fp32", "parts": "i32"},
            kinds,
            options=EXACT,
        ),
    )


AOT_SIGNATURES = _aot_cases()
