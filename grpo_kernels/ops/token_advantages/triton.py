"""token_advantages in Triton: a program scans a row in tiles from its end, with a carry between the tiles.

Launches: the advantages; with whitening, the norm of the batch and the advantages again. Sums run in a fixed order.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

# A product fused into a sum rounds once less, and equal advantages would differ.
EXACT = {"enable_fp_fusion": False}
_NARROWEST, _WIDEST, _TOKENS_PER_WARP = 32, 512, 128
_ROWS_AT_ONCE = 512
_RUNTIME = ("rows", "width", "total")


@triton.jit
def _row_bounds(bounds_ptr, row, width):
    if bounds_ptr is not None:
        return tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
    return row * width, (row + 1) * width


@triton.jit
def _load_counts(mask_ptr, token, begin, end):
    return tl.load(mask_ptr + token, mask=(token >= begin) & (token < end), other=0) != 0


@triton.jit
def _load_values(values_ptr, token, counts):
    if values_ptr is not None:
        return tl.load(values_ptr + token, mask=counts, other=0.0).to(tl.float64)
    return (token * 0).to(tl.float64)


@triton.jit
def _at(tile, place, BLOCK: tl.constexpr):
    """The element of a tile at this place."""
    return tl.sum(tl.where(tl.arange(0, BLOCK) == place, tile, 0), axis=0)


@triton.jit
def _latest(earlier, later):
    return tl.where(later >= 0, later, earlier)


@triton.jit
def _until_next(later_next, later_reward, next_token, reward):
    """The next token that counts, or -1, and the sum of rewards up to it."""
    has_next = next_token >= 0
    return tl.where(has_next, next_token, later_next), tl.where(has_next, reward, later_reward + reward)


@triton.jit
def _compose(first_factor, first_shift, factor, shift):
    """The second map after the first, both x -> factor * x + shift."""
    return factor * first_factor, factor * first_shift + shift


@triton.jit
def _merge(count, mean, squares, other_count, other_mean, other_squares):
    """Moments of two sets: count, mean and squared distances from it, which are exactly 0 where all are equal."""
    both = count + other_count
    share = other_count / tl.where(both > 0, both, 1.0)
    distance = tl.where((count > 0) & (other_count > 0), other_mean - mean, 0.0)
    mean = tl.where(count > 0, mean, other_mean) + distance * share
    return both, mean, squares + other_squares + distance * distance * count * share


@triton.jit
def _spread_turns(mask_ptr, turns_ptr, advantages_ptr, returns_ptr, begin, end, BLOCK: tl.constexpr):
    """Gives every token of a turn what its first token has."""
    latest, latest_first = tl.full([], -1, tl.int64), tl.full([], -1, tl.int64)
    for tile in range(begin, end, BLOCK):
        token = tile + tl.arange(0, BLOCK)
        counts = _load_counts(mask_ptr, token, begin, end)
        before = tl.where(_load_counts(mask_ptr, token - 1, begin, end), token - 1, -1)
        before = _latest(latest, tl.associative_scan(before, 0, _latest))
        latest = _at(before, BLOCK - 1, BLOCK)
        turn = tl.load(turns_ptr + token, mask=counts, other=-1)
        is_first = turn != tl.load(turns_ptr + before, mask=counts & (before >= 0), other=-1)
        first = tl.associative_scan(tl.where(is_first, token, -1), 0, _latest)
        first = _latest(latest_first, first)
        latest_first = _at(first, BLOCK - 1, BLOCK)
        # nothing writes what a first token has
        is_later = counts & (is_first == 0)
        tl.store(advantages_ptr + token, tl.load(advantages_ptr + first, mask=is_later), mask=is_later)
        tl.store(returns_ptr + token, tl.load(returns_ptr + first, mask=is_later), mask=is_later)


@triton.jit
def _store_moments(mask_ptr, advantages_ptr, moments_ptr, rows, begin, end, BLOCK: tl.constexpr):
    """moments[3, rows] of the advantages between the bounds, as they are stored."""
    zeros = tl.zeros([BLOCK], tl.float64)
    moments = zeros, zeros, zeros
    for tile in range(begin, end, BLOCK):
        token = tile + tl.arange(0, BLOCK)
        counts = _load_counts(mask_ptr, token, begin, end)
        advantage = tl.load(advantages_ptr + token, mask=counts, other=0.0).to(tl.float64)
        moments = _merge(*moments, counts.to(tl.float64), advantage, zeros)
    count, mean, squares = tl.reduce(moments, 0, _merge)
    tl.store(moments_ptr + tl.program_id(0), count)
    tl.store(moments_ptr + rows + tl.program_id(0), mean)
    tl.store(moments_ptr + 2 * rows + tl.program_id(0), squares)


@triton.jit(do_not_specialize=_RUNTIME)
def _walk_kernel(
    rewards_ptr,
    values_ptr,
    mask_ptr,
    turns_ptr,
    bounds_ptr,
    advantages_ptr,
    returns_ptr,
    moments_ptr,
    rows: "i64",
    width: "i64",
    total: "i64",
    gamma: "fp64",
    lam: "fp64",
    CARRY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advantages and returns of a row, and the moments of its advantages; of none where the row is not scored.

    A token's return is a map of the return of the next token that counts. The last row also writes what lies after it.
    """
    gamma = tl.full([], gamma, tl.float64)
    by_return, by_value = gamma * lam, gamma * (1 - lam)
    row = tl.program_id(0).to(tl.int64)
    begin, end = _row_bounds(bounds_ptr, row, width)
    after = tl.where(row == rows - 1, total, end)
    place = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.float64)
    next_place = tl.full([], -1, tl.int32)  # in its row
    next_reward, next_return = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    num_missing = tl.zeros([], tl.int32)
    for tile in range(tl.cdiv(after - begin, BLOCK) - 1, -1, -1):
        token = begin + tile * BLOCK + place
        counts = _load_counts(mask_ptr, token, begin, end)
        reward = tl.load(rewards_ptr + token, mask=(token < end) & (counts | CARRY), other=0.0).to(tl.float64)
        reward = tl.where(counts | (reward - reward == 0), reward, 0.0)  # what is no number is padding
        num_missing += tl.sum((reward != reward).to(tl.int32), axis=0)
        next_counts = _load_counts(mask_ptr, token + 1, begin, end)
        following = tl.where(next_counts, tile * BLOCK + place + 1, -1).to(tl.int32)
        if CARRY:
            entry = tl.associative_scan((following, reward), 0, _until_next, reverse=True)
            following, reward = _until_next(next_place, next_reward, *entry)
            next_reward = _at(reward, 0, BLOCK)
        else:
            following = _latest(next_place, tl.associative_scan(following, 0, _latest, reverse=True))
        next_place = _at(following, 0, BLOCK)
        has_next = counts & (following >= 0)
        following = begin + following
        factor = tl.where(counts, by_return, 1.0)
        entering = by_value * _load_values(values_ptr, following, has_next)
        if turns_ptr is not None:
            turn = tl.load(turns_ptr + token, mask=counts, other=-1)
            is_same = has_next & (turn == tl.load(turns_ptr + following, mask=has_next, other=-1))
            factor, entering = tl.where(is_same, 1.0, factor), tl.where(is_same, 0.0, entering)
        maps = factor, tl.where(counts, reward + entering, 0.0)
        factor, shift = tl.associative_scan(maps, 0, _compose, reverse=True)
        token_return = factor * next_return + shift
        next_return = _at(token_return, 0, BLOCK)
        advantage = token_return - _load_values(values_ptr, token, counts)
        tl.store(advantages_ptr + token, tl.where(counts, advantage, 0.0), mask=token < after)
        tl.store(returns_ptr + token, tl.where(counts, token_return, 0.0), mask=token < after)
    scored_end = end
    if num_missing > 0:
        scored_end = begin
        for tile in range(begin, end, BLOCK):
            token = tile + place
            counts = _load_counts(mask_ptr, token, begin, end)
            tl.store(advantages_ptr + token, zeros, mask=counts)
            tl.store(returns_ptr + token, _load_values(values_ptr, token, counts), mask=counts)
    if turns_ptr is not None:
        tl.debug_barrier()
        _spread_turns(mask_ptr, turns_ptr, advantages_ptr, returns_ptr, begin, end, BLOCK)
    if moments_ptr is not None:
        tl.debug_barrier()
        _store_moments(mask_ptr, advantages_ptr, moments_ptr, rows, begin, scored_end, BLOCK)


@triton.jit(do_not_specialize=_RUNTIME)
def _norm_kernel(moments_ptr, norm_ptr, rows: "i64", epsilon: "fp64", BLOCK: tl.constexpr):
    """norm[2]: what is subtracted from advantages, and the factor; 0 for a single token, and where all are equal."""
    zeros = tl.zeros([BLOCK], tl.float64)
    moments = zeros, zeros, zeros
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        count = tl.load(moments_ptr + row, mask=row < rows, other=0.0)
        mean = tl.load(moments_ptr + rows + row, mask=row < rows, other=0.0)
        squares = tl.load(moments_ptr + 2 * rows + row, mask=row < rows, other=0.0)
        moments = _merge(*moments, count, mean, squares)
    count, mean, squares = tl.reduce(moments, 0, _merge)
    root = tl.sqrt(squares / tl.maximum(count - 1, 1.0) + tl.full([], epsilon, tl.float64))
    tl.store(norm_ptr, mean)
    tl.store(norm_ptr + 1, tl.where(squares > 0, 1 / root, 0.0))


@triton.jit(do_not_specialize=_RUNTIME)
def _whiten_kernel(mask_ptr, bounds_ptr, moments_ptr, norm_ptr, advantages_ptr, width: "i64", BLOCK: tl.constexpr):
    """Rows that are not scored have no moments, and keep their zeros."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = _row_bounds(bounds_ptr, row, width)
    end = tl.where(tl.load(moments_ptr + row) > 0, end, begin)
    for tile in range(begin, end, BLOCK):
        token = tile + tl.arange(0, BLOCK)
        counts = _load_counts(mask_ptr, token, begin, end)
        advantage = tl.load(advantages_ptr + token, mask=counts, other=0.0).to(tl.float64)
        tl.store(advantages_ptr + token, (advantage - tl.load(norm_ptr)) * tl.load(norm_ptr + 1), mask=counts)


def forward(
    rewards: Tensor,
    values: Optional[Tensor],
    mask: Tensor,
    bounds: Optional[Tensor],
    turns: Optional[Tensor],
    whitens: bool,
    carry: bool,
    gamma: float,
    lam: float,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of padded rewards [B, T], or of packed ones [M] with bounds [B + 1] within them."""
    total = rewards.numel()
    rows, width = rewards.shape if bounds is None else (bounds.shape[0] - 1, 0)
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    if rows == 0 or total == 0:
        return advantages.zero_(), returns.zero_()
    tile = min(max(int(triton.next_power_of_2(width or triton.cdiv(total, rows))), _NARROWEST), _WIDEST)
    tiles: dict[str, Any] = {"BLOCK": tile, "num_warps": max(tile // _TOKENS_PER_WARP, 1), **EXACT}
    moments = rewards.new_empty((3, rows), dtype=torch.float64) if whitens else None
    mask = mask.view(torch.uint8)
    arrays = rewards, values, mask, turns, bounds, advantages, returns, moments
    _walk_kernel[(rows,)](*arrays, rows, width, total, gamma, lam, CARRY=carry, **tiles)
    if whitens:
        norm = rewards.new_empty(2, dtype=torch.float64)
        _norm_kernel[(1,)](moments, norm, rows, epsilon, BLOCK=_ROWS_AT_ONCE, **EXACT)
        _whiten_kernel[(rows,)](mask, bounds, moments, norm, advantages, width, **tiles)
    return advantages, returns
