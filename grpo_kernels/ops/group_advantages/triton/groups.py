"""Kernels that compute the statistics of each group or subgroup and the advantages of its rows.

Without `from __future__ import annotations`: Triton reads the annotations "fp64" of the kernels' scalars.
"""

from collections import namedtuple

import triton
import triton.language as tl

from grpo_kernels.ops.group_advantages import config

CENTER_NONE = tl.constexpr(config.CENTER_NONE)
CENTER_MEAN = tl.constexpr(config.CENTER_MEAN)
CENTER_LEAVE_ONE_OUT = tl.constexpr(config.CENTER_LEAVE_ONE_OUT)
CENTER_LENGTH = tl.constexpr(config.CENTER_LENGTH)
CENTER_BASELINE = tl.constexpr(config.CENTER_BASELINE)
CENTER_RUNNER_UP = tl.constexpr(config.CENTER_RUNNER_UP)
SCALE_STD = tl.constexpr(config.SCALE_STD)
SCALE_MEAN = tl.constexpr(config.SCALE_MEAN)
SCALE_LEAVE_ONE_OUT_STD = tl.constexpr(config.SCALE_LEAVE_ONE_OUT_STD)
SINGLETON_RAW = tl.constexpr(config.SINGLETON_RAW)
SINGLETON_PARENT = tl.constexpr(config.SINGLETON_PARENT)

# Of a group's scored rows; `second` is the runner-up, and length_mean the mean weighted by length.
Statistics = namedtuple("Statistics", "scored mean std flat second length_mean")

# Outputs of a launch: everything, the statistics alone, or one column's share of a sum over columns (GDPO).
WRITE_ALL, WRITE_STATISTICS, ADD_COLUMN = (tl.constexpr(i) for i in range(3))


@triton.jit
def _load(values_ptr, order_ptr, first, count, offset, BLOCK: tl.constexpr):
    """A [GROUPS, BLOCK] tile of the groups' rows from `offset` on: row numbers, mask, values (NaN outside)."""
    column = offset + tl.arange(0, BLOCK)[None, :]
    inside = column < count[:, None]
    rows = first[:, None] + column
    if order_ptr is not None:
        rows = tl.load(order_ptr + rows, mask=inside, other=0)
    value = tl.load(values_ptr + rows, mask=inside, other=float("nan")).to(tl.float64)
    return rows, inside, value


@triton.jit
def _statistics(
    values_ptr,
    lengths_ptr,
    order_ptr,
    first,
    count,
    ddof,
    CENTER: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of each group, in two passes."""
    scored_rows = tl.zeros([GROUPS], tl.float64)
    total = tl.zeros([GROUPS], tl.float64)
    low = tl.full([GROUPS], float("inf"), tl.float64)
    high = tl.full([GROUPS], float("-inf"), tl.float64)
    tokens = tl.zeros([GROUPS], tl.float64)
    token_total = tl.zeros([GROUPS], tl.float64)
    longest = tl.max(count, axis=0)
    for offset in range(0, longest, BLOCK):
        rows, inside, value = _load(values_ptr, order_ptr, first, count, offset, BLOCK)
        scored = value == value
        scored_rows += tl.sum(scored.to(tl.float64), axis=1)
        total += tl.sum(tl.where(scored, value, 0.0), axis=1)
        low = tl.minimum(low, tl.min(tl.where(scored, value, float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(scored, value, float("-inf")), axis=1))
        if CENTER == CENTER_LENGTH:
            length = tl.load(lengths_ptr + rows, mask=inside, other=0.0)
            tokens += tl.sum(tl.where(scored, length, 0.0), axis=1)
            token_total += tl.sum(tl.where(scored, length * value, 0.0), axis=1)
    flat = (low < high) == 0
    # exact for equal values, whose rounded mean need not be that value
    mean = tl.where(flat, low, total / tl.maximum(scored_rows, 1.0))
    mean = tl.where(scored_rows > 0, mean, 0.0)

    squares = tl.zeros([GROUPS], tl.float64)
    winners = tl.zeros([GROUPS], tl.float64)
    second = tl.full([GROUPS], float("-inf"), tl.float64)
    for offset in range(0, longest, BLOCK):
        rows, inside, value = _load(values_ptr, order_ptr, first, count, offset, BLOCK)
        distance = tl.where(value == value, value - mean[:, None], 0.0)
        squares += tl.sum(distance * distance, axis=1)
        if CENTER == CENTER_RUNNER_UP:
            winners += tl.sum((value == high[:, None]).to(tl.float64), axis=1)
            below = tl.where(value < high[:, None], value, float("-inf"))
            second = tl.maximum(second, tl.max(below, axis=1))
    second = tl.where(winners > 1, high, second)
    enough = (flat == 0) & (scored_rows > ddof)
    std = tl.where(enough, tl.sqrt(squares / tl.where(enough, scored_rows - ddof, 1.0)), 0.0)
    length_mean = tl.where(tokens > 0, token_total / tl.where(tokens > 0, tokens, 1.0), mean)
    return Statistics(scored_rows, mean, std, flat, second, length_mean)


@triton.jit
def _bounds(starts_ptr, group_size, group, number):
    """First row and row count of groups; count 0 past the last one."""
    known = group < number
    if starts_ptr is not None:
        first = tl.load(starts_ptr + group, mask=known, other=0)
        return first, tl.load(starts_ptr + group + 1, mask=known, other=0) - first
    first = group * group_size
    return first, tl.where(known, group_size, 0).to(tl.int64)


@triton.jit
def parents_kernel(
    values_ptr,
    lengths_ptr,
    order_ptr,
    starts_ptr,
    parents_ptr,
    number,
    ddof: "fp64",
    CENTER: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """parents[5, number]: count, mean, std, flat and length-weighted mean of every group."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    first, count = _bounds(starts_ptr, 0, group, number)
    own = _statistics(values_ptr, lengths_ptr, order_ptr, first, count, ddof, CENTER, GROUPS, BLOCK)
    known = group < number
    tl.store(parents_ptr + group, own.scored, mask=known)
    tl.store(parents_ptr + number + group, own.mean, mask=known)
    tl.store(parents_ptr + 2 * number + group, own.std, mask=known)
    tl.store(parents_ptr + 3 * number + group, own.flat.to(tl.float64), mask=known)
    tl.store(parents_ptr + 4 * number + group, own.length_mean, mask=known)


@triton.jit
def _map(
    own,
    parent_ptr,
    parents_ptr,
    group,
    number,
    eps,
    std_floor,
    shrinkage,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    SINGLETON: tl.constexpr,
):
    """advantage = (reward - center) * factor where live; and the mean and std to report."""
    scored, mean, std, flat, length_mean = own.scored, own.mean, own.std, own.flat, own.length_mean
    alone = scored == 1
    borrows = scored < 0  # nowhere
    count = scored
    if parents_ptr is not None:
        parent = tl.load(parent_ptr + group, mask=group < number, other=0)
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
    if (CENTER == CENTER_MEAN) | (CENTER == CENTER_LEAVE_ONE_OUT):
        center = mean
    if CENTER == CENTER_LEAVE_ONE_OUT:
        factor = count / tl.maximum(count - 1, 1.0)
    if CENTER == CENTER_LENGTH:
        center = length_mean
    if CENTER == CENTER_RUNNER_UP:
        center = own.second
    live = scored > 0
    if ((CENTER != CENTER_NONE) & (CENTER != CENTER_BASELINE)) | (SCALE == SCALE_STD):
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
def _against_others(distance, own, ddof, eps, std_floor):
    """The distance from the group's mean over the deviation of the other rows, which may be equal."""
    count = own.scored[:, None]
    all_squares = (own.std * own.std * (own.scored - ddof))[:, None]
    squares = all_squares - distance * distance * (count / tl.maximum(count - 1, 1.0))
    differ = (squares > 1e-12 * all_squares) & (count - 1 > ddof)
    std = tl.sqrt(tl.where(differ, squares / tl.maximum(count - 1 - ddof, 1.0), 0.0))
    divisor = tl.where(std < std_floor, std_floor, std) + eps
    return distance / tl.where(differ, divisor, 1.0)


@triton.jit
def groups_kernel(
    values_ptr,
    lengths_ptr,
    baselines_ptr,
    order_ptr,
    starts_ptr,
    parent_ptr,
    parents_ptr,
    advantages_ptr,
    mean_ptr,
    std_ptr,
    size_ptr,
    degenerate_ptr,
    number,
    group_size,
    weight: "fp64",
    ddof: "fp64",
    eps: "fp64",
    std_floor: "fp64",
    shrinkage: "fp64",
    clip: "fp64",
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    SINGLETON: tl.constexpr,
    WRITE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    first, count = _bounds(starts_ptr, group_size, group, number)
    own = _statistics(values_ptr, lengths_ptr, order_ptr, first, count, ddof, CENTER, GROUPS, BLOCK)
    center, factor, live, mean, std = _map(
        own, parent_ptr, parents_ptr, group, number, eps, std_floor, shrinkage, CENTER, SCALE, SINGLETON
    )
    for offset in range(0, tl.max(count, axis=0), BLOCK):
        rows, inside, value = _load(values_ptr, order_ptr, first, count, offset, BLOCK)
        if WRITE != ADD_COLUMN:
            tl.store(mean_ptr + rows, tl.broadcast_to(mean[:, None], value.shape), mask=inside)
            tl.store(std_ptr + rows, tl.broadcast_to(std[:, None], value.shape), mask=inside)
            size = tl.broadcast_to(own.scored[:, None], value.shape)
            tl.store(size_ptr + rows, size.to(tl.int32), mask=inside)
        dead = tl.broadcast_to((live == 0)[:, None], value.shape)
        if WRITE == ADD_COLUMN:
            dead = dead & (tl.load(degenerate_ptr + rows, mask=inside, other=0) != 0)
        if WRITE != WRITE_STATISTICS:
            tl.store(degenerate_ptr + rows, dead.to(tl.int8), mask=inside)
            distance = value - center[:, None]
            if CENTER == CENTER_BASELINE:
                distance = value - tl.load(baselines_ptr + rows, mask=inside, other=0.0).to(tl.float64)
            if CENTER == CENTER_RUNNER_UP:
                distance = tl.maximum(distance, 0.0)  # only the best row is above the runner-up
            if SCALE == SCALE_LEAVE_ONE_OUT_STD:
                distance = _against_others(distance, own, ddof, eps, std_floor)
            taken = (value == value) & live[:, None]
            advantage = tl.where(taken, distance * factor[:, None], 0.0)
            if WRITE == ADD_COLUMN:
                advantage = weight * advantage + tl.load(advantages_ptr + rows, mask=inside, other=0.0)
            else:
                advantage = tl.where(advantage > clip, clip, tl.where(advantage < -clip, -clip, advantage))
            tl.store(advantages_ptr + rows, advantage, mask=inside)
