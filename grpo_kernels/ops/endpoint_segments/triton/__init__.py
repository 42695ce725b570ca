"""endpoint_segments in Triton: a program walks each row, from its end for what tokens are worth, from its start to cut.

Six launches: advantages of tokens, their scale, the cuts, advantages of segments, the moments that normalise these (not
for norm="none"), the results. Without values two go before them: returns of rows, and their means over groups. Rows
are independent but for those numbers, which are added up in a fixed order; a row with a number that is not finite is
left out of them.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.aot import EXACT
from grpo_kernels.groups import packed_bounds, sort_rows
from grpo_kernels.ops.endpoint_segments import config
from grpo_kernels.ops.endpoint_segments.config import Plan
from grpo_kernels.ops.endpoint_segments.triton.walks import (
    close_segment,
    count_tokens,
    cut_terms,
    first_from,
    first_of,
    hand_back,
    is_finite,
    load_values,
    row_bounds,
    weigh,
)

BROADCAST = tl.constexpr(config.BROADCAST)
NORM_NONE = tl.constexpr(config.NORM_NONE)
NORM_PROMPT = tl.constexpr(config.NORM_PROMPT)

_TILE, _NARROWEST, _TILE_WARPS = 512, 32, 8
_WINDOW = 32  # tokens among which one warp looks for the ends of segments
_ROWS_AT_ONCE, _GROUP_ROWS = 1024, 32
_MOST_CHUNKS = 64  # programs that write the results of one row
_RUNTIME = ("rows", "width", "total", "most")


@triton.jit(do_not_specialize=_RUNTIME)
def _returns_kernel(
    rewards_ptr, mask_ptr, bounds_ptr, row_returns_ptr, width: "i64", gamma: "fp64", BLOCK: tl.constexpr
):
    """Discounted return of every row; NaN for a row without tokens."""
    gamma = tl.full([], gamma, tl.float64)
    row = tl.program_id(0).to(tl.int64)
    begin, end = row_bounds(bounds_ptr, row, width)
    place = tl.arange(0, BLOCK)
    num_known = tl.zeros([BLOCK], tl.int32)
    carry = tl.zeros([], tl.float64)
    for tile in range(tl.cdiv(end - begin, BLOCK) - 1, -1, -1):
        token = begin + tile * BLOCK + place
        counts = count_tokens(mask_ptr, token, end)
        reward = tl.load(rewards_ptr + token, mask=counts, other=0.0).to(tl.float64)
        carry = first_of(hand_back(reward, reward, counts, 1.0, gamma, carry), BLOCK)
        num_known += counts.to(tl.int32)
    is_known = (tl.sum(num_known, axis=0) > 0) & is_finite(carry)
    tl.store(row_returns_ptr + row, tl.where(is_known, carry, float("nan")))


@triton.jit
def _group(starts_ptr, rows):
    """First row of the program's group in sorted order, and its number of rows; without groups all rows are one."""
    if starts_ptr is not None:
        first = tl.load(starts_ptr + tl.program_id(0))
        return first, tl.load(starts_ptr + tl.program_id(0) + 1) - first
    return tl.zeros([], tl.int64), rows


@triton.jit
def _group_rows(order_ptr, first, offset, count, BLOCK: tl.constexpr):
    place = offset + tl.arange(0, BLOCK)
    row = first + place
    if order_ptr is not None:
        row = tl.load(order_ptr + row, mask=place < count, other=0)
    return row, place < count


@triton.jit(do_not_specialize=_RUNTIME)
def _baselines_kernel(row_returns_ptr, order_ptr, starts_ptr, baselines_ptr, rows: "i64", BLOCK: tl.constexpr):
    first, count = _group(starts_ptr, rows)
    total = tl.zeros([BLOCK], tl.float64)
    known = tl.zeros([BLOCK], tl.float64)
    for offset in range(0, count, BLOCK):
        row, inside = _group_rows(order_ptr, first, offset, count, BLOCK)
        value = tl.load(row_returns_ptr + row, mask=inside, other=float("nan"))
        total += tl.where(value == value, value, 0.0)
        known += (value == value).to(tl.float64)
    mean = tl.sum(total, axis=0) / tl.maximum(tl.sum(known, axis=0), 1.0)
    for offset in range(0, count, BLOCK):
        row, inside = _group_rows(order_ptr, first, offset, count, BLOCK)
        tl.store(baselines_ptr + row, tl.zeros([BLOCK], tl.float64) + mean, mask=inside)


@triton.jit(do_not_specialize=_RUNTIME)
def _tokens_kernel(
    rewards_ptr,
    logprobs_ptr,
    old_ptr,
    values_ptr,
    baselines_ptr,
    mask_ptr,
    bounds_ptr,
    advantages_ptr,
    returns_ptr,
    sums_ptr,
    rows: "i64",
    width: "i64",
    gamma: "fp64",
    lam: "fp64",
    BLOCK: tl.constexpr,
):
    """sums[2, rows]: how many tokens count, and the squares of their advantages; NaN where something is not finite."""
    gamma, lam = tl.full([], gamma, tl.float64), tl.full([], lam, tl.float64)
    row = tl.program_id(0).to(tl.int64)
    begin, end = row_bounds(bounds_ptr, row, width)
    place = tl.arange(0, BLOCK)
    tokens = tl.zeros([BLOCK], tl.int32)
    squares = tl.zeros([BLOCK], tl.float64)
    carry = tl.zeros([], tl.float64)
    for tile in range(tl.cdiv(end - begin, BLOCK) - 1, -1, -1):
        token = begin + tile * BLOCK + place
        follows = count_tokens(mask_ptr, token + 1, end)
        reward = tl.load(rewards_ptr + token + 1, mask=follows, other=0.0).to(tl.float64)
        value = load_values(values_ptr, baselines_ptr, row, token + 1, follows)
        handed = hand_back(reward, value, follows, lam, gamma, carry)
        carry = first_of(handed, BLOCK)

        counts = count_tokens(mask_ptr, token, end)
        reward = tl.load(rewards_ptr + token, mask=counts, other=0.0).to(tl.float64)
        following = reward + gamma * handed
        advantage = following - load_values(values_ptr, baselines_ptr, row, token, counts)
        now = tl.load(logprobs_ptr + token, mask=counts, other=0.0).to(tl.float64)
        old = tl.load(old_ptr + token, mask=counts, other=0.0).to(tl.float64)
        tl.store(advantages_ptr + token, advantage, mask=counts)
        tl.store(returns_ptr + token, tl.where(counts, following, 0.0), mask=token < end)
        square = tl.where(is_finite(now) & is_finite(old), advantage * advantage, float("nan"))
        squares += tl.where(counts, square, 0.0)
        tokens += counts.to(tl.int32)
    tl.store(sums_ptr + row, tl.sum(tokens, axis=0).to(tl.float64))
    tl.store(sums_ptr + rows + row, tl.sum(squares, axis=0))


@triton.jit(do_not_specialize=_RUNTIME)
def _scale_kernel(sums_ptr, scale_ptr, rows: "i64", epsilon: "fp64", BLOCK: tl.constexpr):
    """The root mean square of all advantages; of rows that are finite."""
    tokens = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    for offset in range(0, rows, BLOCK):
        row = offset + tl.arange(0, BLOCK)
        of_row = tl.load(sums_ptr + rows + row, mask=row < rows, other=float("nan"))
        squares += tl.where(is_finite(of_row), of_row, 0.0)
        tokens += tl.where(is_finite(of_row), tl.load(sums_ptr + row, mask=row < rows, other=0.0), 0.0)
    scale = tl.sqrt(tl.sum(squares, axis=0) / tl.maximum(tl.sum(tokens, axis=0), 1.0))
    tl.store(scale_ptr, tl.maximum(scale, tl.full([], epsilon, tl.float64)))


@triton.jit(do_not_specialize=_RUNTIME)
def _cuts_kernel(
    logprobs_ptr,
    old_ptr,
    mask_ptr,
    bounds_ptr,
    advantages_ptr,
    scale_ptr,
    threshold_ptr,
    ids_ptr,
    numbers_ptr,
    width: "i64",
    most: "i32",
    epsilon: "fp64",
    RULE: tl.constexpr,
    PROXY: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """ids: the number of every token's segment in its row, -1 where it does not count."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = row_bounds(bounds_ptr, row, width)
    per_scale, tau = 1 / tl.load(scale_ptr), tl.load(threshold_ptr)
    place = tl.arange(0, WINDOW)
    number = tl.zeros([], tl.int32)
    length = tl.zeros([], tl.int32)
    moved = tl.zeros([], tl.float64)
    seen = tl.zeros([], tl.float64)
    for window in range(begin, end, WINDOW):
        token = window + place
        counts = count_tokens(mask_ptr, token, end)
        advantage = tl.load(advantages_ptr + token, mask=counts, other=0.0) * per_scale
        now = tl.load(logprobs_ptr + token, mask=counts, other=0.0).to(tl.float64)
        old = tl.load(old_ptr + token, mask=counts, other=0.0).to(tl.float64)
        plus, weight = cut_terms(advantage, weigh(now, old), PROXY)
        places = tl.where(counts, place, WINDOW)
        ids = tl.full([WINDOW], -1, tl.int32)
        # not a constant to begin with, which Triton 3.7 for AMD would take for the value in every round
        first = tl.where(length > 0, 0, first_from(places, 0, WINDOW))
        while first < WINDOW:
            behind, ends, moved, seen, length = close_segment(
                places, plus, weight, advantage, first, moved, seen, length, tau, epsilon, most, RULE, PROXY, WINDOW
            )
            ids = tl.where((place >= first) & (place < behind), number, ids)
            number += ends.to(tl.int32)
            first = first_from(places, behind, WINDOW)
        tl.store(ids_ptr + token, ids, mask=token < end)
    tl.store(numbers_ptr + row, number + (length > 0).to(tl.int32))


@triton.jit(do_not_specialize=_RUNTIME)
def _credits_kernel(
    rewards_ptr,
    values_ptr,
    baselines_ptr,
    bounds_ptr,
    ids_ptr,
    sums_ptr,
    credits_ptr,
    moments_ptr,
    rows: "i64",
    width: "i64",
    gamma: "fp64",
    lam: "fp64",
    BLOCK: tl.constexpr,
):
    """credits: from a row's first token on its segments' advantages, in order.

    moments[5, rows]: how many they are, mean, squared distances from it, lowest, highest; none of a row that is not
    finite.
    """
    gamma, lam = tl.full([], gamma, tl.float64), tl.full([], lam, tl.float64)
    row = tl.program_id(0).to(tl.int64)
    begin, end = row_bounds(bounds_ptr, row, width)
    place = tl.arange(0, BLOCK)
    number = tl.zeros([BLOCK], tl.float64)
    mean = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    carry = tl.zeros([], tl.float64)
    for tile in range(tl.cdiv(end - begin, BLOCK) - 1, -1, -1):
        token = begin + tile * BLOCK + place
        own = tl.load(ids_ptr + token, mask=token < end, other=-1)
        next_id = tl.load(ids_ptr + token + 1, mask=token + 1 < end, other=-1)
        reward = tl.load(rewards_ptr + token + 1, mask=next_id >= 0, other=0.0).to(tl.float64)
        value = load_values(values_ptr, baselines_ptr, row, token + 1, next_id >= 0)
        # inside a segment only rewards are added up; values come in where one ends
        handed = hand_back(reward, value, next_id >= 0, tl.where(own == next_id, 1.0, lam), gamma, carry)
        carry = first_of(handed, BLOCK)

        before = tl.load(ids_ptr + token - 1, mask=(token > begin) & (token < end), other=-1)
        opens = (own >= 0) & (own != before)
        reward = tl.load(rewards_ptr + token, mask=opens, other=0.0).to(tl.float64)
        credit = reward + gamma * handed - load_values(values_ptr, baselines_ptr, row, token, opens)
        tl.store(credits_ptr + begin + own, credit, mask=opens)
        number += opens.to(tl.float64)
        apart = tl.where(opens, credit - mean, 0.0)
        mean += apart / tl.maximum(number, 1.0)
        squares += apart * tl.where(opens, credit - mean, 0.0)
        low = tl.where(opens, tl.minimum(low, credit), low)
        high = tl.where(opens, tl.maximum(high, credit), high)
    together = tl.sum(number, axis=0)
    row_mean = tl.sum(number * mean, axis=0) / tl.maximum(together, 1.0)
    apart = mean - row_mean
    is_whole = is_finite(tl.load(sums_ptr + rows + row))
    tl.store(moments_ptr + row, tl.where(is_whole, together, 0.0))
    tl.store(moments_ptr + rows + row, row_mean)
    tl.store(moments_ptr + 2 * rows + row, tl.sum(squares + number * apart * apart, axis=0))
    tl.store(moments_ptr + 3 * rows + row, tl.min(low, axis=0))
    tl.store(moments_ptr + 4 * rows + row, tl.max(high, axis=0))


@triton.jit(do_not_specialize=_RUNTIME)
def _moments_kernel(moments_ptr, order_ptr, starts_ptr, norms_ptr, rows: "i64", epsilon: "fp64", BLOCK: tl.constexpr):
    """norms[2, rows]: what is taken from a row's advantages, and what they are divided by; 0 if they become 0."""
    first, count = _group(starts_ptr, rows)
    number = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    for offset in range(0, count, BLOCK):
        row, inside = _group_rows(order_ptr, first, offset, count, BLOCK)
        of_row = tl.load(moments_ptr + row, mask=inside, other=0.0)
        has_some = of_row > 0
        number += of_row
        total += of_row * tl.load(moments_ptr + rows + row, mask=has_some, other=0.0)
        low = tl.minimum(low, tl.load(moments_ptr + 3 * rows + row, mask=has_some, other=float("inf")))
        high = tl.maximum(high, tl.load(moments_ptr + 4 * rows + row, mask=has_some, other=float("-inf")))
    together = tl.sum(number, axis=0)
    mean = tl.sum(total, axis=0) / tl.maximum(together, 1.0)
    squares = tl.zeros([BLOCK], tl.float64)
    for offset in range(0, count, BLOCK):
        row, inside = _group_rows(order_ptr, first, offset, count, BLOCK)
        of_row = tl.load(moments_ptr + row, mask=inside, other=0.0)
        apart = tl.load(moments_ptr + rows + row, mask=of_row > 0, other=0.0) - mean
        own = tl.load(moments_ptr + 2 * rows + row, mask=of_row > 0, other=0.0)
        squares += tl.where(of_row > 0, own + of_row * apart * apart, 0.0)
    # one endpoint, or only equal ones, have nothing to be compared with
    differ = (together >= 2) & (tl.min(low, axis=0) < tl.max(high, axis=0))
    std = tl.sqrt(tl.sum(squares, axis=0) / tl.maximum(together - 1, 1.0))
    divisor = tl.where(differ, std + tl.full([], epsilon, tl.float64), 0.0)
    for offset in range(0, count, BLOCK):
        row, inside = _group_rows(order_ptr, first, offset, count, BLOCK)
        tl.store(norms_ptr + row, tl.zeros([BLOCK], tl.float64) + mean, mask=inside)
        tl.store(norms_ptr + rows + row, tl.zeros([BLOCK], tl.float64) + divisor, mask=inside)


@triton.jit(do_not_specialize=_RUNTIME)
def _results_kernel(
    bounds_ptr,
    credits_ptr,
    sums_ptr,
    norms_ptr,
    ids_ptr,
    advantages_ptr,
    returns_ptr,
    ends_ptr,
    rows: "i64",
    width: "i64",
    total: "i64",
    CREDIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Everything of tokens that is not written yet. The last row also writes what lies behind it."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = row_bounds(bounds_ptr, row, width)
    is_whole = is_finite(tl.load(sums_ptr + rows + row) + tl.zeros([BLOCK], tl.float64))
    last = tl.where(row == rows - 1, total, end)
    for offset in range(begin + tl.program_id(1) * BLOCK, last, tl.num_programs(1) * BLOCK):
        token = offset + tl.arange(0, BLOCK)
        written = token < last
        inside = token < end
        own = tl.load(ids_ptr + token, mask=inside, other=-1)
        next_id = tl.load(ids_ptr + token + 1, mask=inside & (token + 1 < end), other=-1)
        counts = own >= 0
        ends = counts & (own != next_id)
        has_credit = ends & is_whole
        if CREDIT == BROADCAST:
            has_credit = counts & is_whole
        credit = tl.load(credits_ptr + begin + own, mask=has_credit, other=0.0)
        if norms_ptr is not None:
            divisor = tl.load(norms_ptr + rows + row) + tl.zeros([BLOCK], tl.float64)
            credit = (credit - tl.load(norms_ptr + row)) / tl.where(divisor > 0, divisor, 1.0)
            has_credit = has_credit & (divisor > 0)
        credit = tl.where(has_credit, credit, 0.0)
        spoilt = counts & (is_whole == 0)
        tl.store(advantages_ptr + token, tl.where(spoilt, float("nan"), credit), mask=written)
        tl.store(ends_ptr + token, ends.to(tl.int8), mask=written)
        tl.store(returns_ptr + token, tl.where(spoilt, float("nan"), 0.0), mask=written & (spoilt | (inside == 0)))
        tl.store(ids_ptr + token, own, mask=written & (inside == 0))


def forward(
    rewards: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    values: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    groups: Optional[Tensor],
    threshold: Tensor,
    modes: list[int],
    coefficients: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rule, proxy, credit, norm, max_size, epsilon, gamma, lam = Plan(*modes, *coefficients)
    total = rewards.numel()
    rows, width = rewards.shape if cu_seqlens is None else (cu_seqlens.shape[0] - 1, 0)
    bounds = None if cu_seqlens is None else packed_bounds("endpoint_segments", cu_seqlens, total)
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    ends, ids = torch.empty_like(mask), torch.empty_like(mask, dtype=torch.int32)
    numbers = rewards.new_empty(rows, dtype=torch.int32)
    results = advantages, returns, ends, ids, numbers
    if rows == 0:
        return advantages.zero_(), returns.zero_(), ends.zero_(), ids.fill_(-1), numbers

    def doubles(*shape: int) -> Tensor:
        return rewards.new_empty(shape, dtype=torch.float64)

    order = starts = None
    if values is None or norm == config.NORM_PROMPT:
        sorted_rows = sort_rows(rows, groups, 0, None)
        assert sorted_rows is not None
        order, starts = sorted_rows.order, sorted_rows.starts
    counted, per_row = mask.view(torch.uint8), (rows,)
    tile = min(max(int(triton.next_power_of_2(width or total)), _NARROWEST), _TILE)
    tiles: dict[str, Any] = {"BLOCK": tile, "num_warps": max(tile // _TILE * _TILE_WARPS, 1), **EXACT}
    credits, sums, scale, moments = doubles(total), doubles(2, rows), doubles(1), doubles(5, rows)
    baselines = norms = None
    if values is None:
        row_returns, baselines = doubles(2, rows)
        _returns_kernel[per_row](rewards, counted, bounds, row_returns, width, gamma, **tiles)
        _baselines_kernel[per_row](row_returns, order, starts, baselines, rows, BLOCK=_GROUP_ROWS, num_warps=1, **EXACT)
    arrays = rewards, logprobs, old_logprobs, values, baselines, counted, bounds
    _tokens_kernel[per_row](*arrays, credits, returns, sums, rows, width, gamma, lam, **tiles)
    _scale_kernel[(1,)](sums, scale, rows, epsilon, BLOCK=_ROWS_AT_ONCE, **EXACT)
    arrays = logprobs, old_logprobs, counted, bounds, credits, scale, threshold, ids, numbers
    rules = {"RULE": rule, "PROXY": proxy, "WINDOW": _WINDOW}
    _cuts_kernel[per_row](*arrays, width, min(max_size, 2**31 - 1), epsilon, **rules, num_warps=1, **EXACT)
    # the cuts are done with the advantages of tokens: their memory is free for those of segments
    _credits_kernel[per_row](
        rewards, values, baselines, bounds, ids, sums, credits, moments, rows, width, gamma, lam, **tiles
    )
    if norm != config.NORM_NONE:
        norms = doubles(2, rows)
        by_prompt = norm == config.NORM_PROMPT
        if not by_prompt:
            order = starts = None
        block = {"BLOCK": _GROUP_ROWS, "num_warps": 1} if by_prompt else {"BLOCK": _ROWS_AT_ONCE, "num_warps": 4}
        _moments_kernel[per_row if by_prompt else (1,)](moments, order, starts, norms, rows, epsilon, **block, **EXACT)
    chunks = min(max(triton.cdiv(triton.cdiv(total, rows), tile), 1), _MOST_CHUNKS)
    arrays = bounds, credits, sums, norms, ids, advantages, returns, ends.view(torch.int8)
    _results_kernel[(rows, chunks)](*arrays, rows, width, total, CREDIT=credit, **tiles)
    return results
