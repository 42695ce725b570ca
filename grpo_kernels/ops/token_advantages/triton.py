"""token_advantages in Triton: a program walks a row, or a chunk of one, from its end, in scans of affine maps.

Launches: with turns, the roles of tokens; with several chunks a row, their maps; the advantages; with turns, those of
their tokens; with whitening, the norm of the batch and the advantages again. Sums run in a fixed order.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

# A product fused into a sum rounds once less, and equal advantages would differ.
EXACT = {"enable_fp_fusion": False}
_TILE, _NARROWEST, _TILE_WARPS = 512, 32, 4
_MAX_CHUNKS = 32  # of a row
_WANTED_PROGRAMS = 512  # few long rows are cut into chunks, so that every multiprocessor has work
_RECORDS_AT_ONCE = 1024
_RUNTIME = ("rows", "width", "total", "records", "chunks")

# Roles of tokens with turns; 0 for tokens that do not count. Without turns the mask holds them: each token is a step.
FIRST_OF_TURN, LATER_OF_TURN = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _row_bounds(bounds_ptr, row, width):
    if bounds_ptr is not None:
        return tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
    return row * width, (row + 1) * width


@triton.jit
def _chunk_bounds(begin, end, BLOCK: tl.constexpr):
    """First token of the program's chunk, and the one after its last: whole tiles but for the row's last."""
    tiles = tl.cdiv(end - begin, BLOCK)
    size = tl.cdiv(tiles, tl.num_programs(1)) * BLOCK
    first = tl.minimum(begin + tl.program_id(1) * size, end)
    return first, tl.minimum(first + size, end)


@triton.jit
def _compose(first_factor, first_shift, factor, shift):
    """The second map after the first, both x -> factor * x + shift."""
    return factor * first_factor, factor * first_shift + shift


@triton.jit
def _latest(earlier, later):
    return tl.where(later >= 0, later, earlier)


@triton.jit
def _at(tile, place, BLOCK: tl.constexpr):
    """The element of a tile at this place."""
    return tl.sum(tl.where(tl.arange(0, BLOCK) == place, tile, 0), axis=0)


@triton.jit
def _load_steps(rewards_ptr, values_ptr, roles_ptr, token, inside, CARRY: tl.constexpr):
    """Roles, rewards and values of tokens; 0 where a token does not count, but for rewards that are carried."""
    role = tl.load(roles_ptr + token, mask=inside, other=0)
    reward = tl.load(rewards_ptr + token, mask=inside if CARRY else role != 0, other=0.0).to(tl.float64)
    if CARRY:  # what is no number is padding
        reward = tl.where((role != 0) | (reward - reward == 0), reward, 0.0)
    value = tl.zeros_like(reward)
    if values_ptr is not None:
        value = tl.load(values_ptr + token, mask=role != 0, other=0.0).to(tl.float64)
    return role, reward, value


@triton.jit
def _step_maps(role, reward, value, gamma, lam):
    """The map from what a token receives to what it passes to the one before it.

    The first token of a step passes gamma * ((1 - lam) * value + lam * return), the others their return.
    """
    factor = tl.where(role == FIRST_OF_TURN, gamma * lam, 1.0)
    passed = gamma * (1 - lam) * value + gamma * lam * reward
    return factor, tl.where(role == FIRST_OF_TURN, passed, reward)


@triton.jit(do_not_specialize=_RUNTIME)
def _roles_kernel(mask_ptr, turns_ptr, bounds_ptr, roles_ptr, width: "i64", BLOCK: tl.constexpr):
    begin, end = _row_bounds(bounds_ptr, tl.program_id(0).to(tl.int64), width)
    place = tl.arange(0, BLOCK)
    latest = tl.full([], -1, tl.int32)
    for tile in range(begin, end, BLOCK):
        token = tile + place
        counted = tl.load(mask_ptr + token - 1, mask=(token > begin) & (token < end), other=0) != 0
        before = tl.associative_scan(tl.load(turns_ptr + token - 1, mask=counted, other=-1), 0, _latest)
        before = tl.where(before >= 0, before, latest)
        latest = _at(before, BLOCK - 1, BLOCK)
        counts = tl.load(mask_ptr + token, mask=token < end, other=0) != 0
        turn = tl.load(turns_ptr + token, mask=counts, other=-1)
        role = tl.where(turn == before, LATER_OF_TURN, FIRST_OF_TURN)
        tl.store(roles_ptr + token, tl.where(counts, role, 0).to(tl.uint8), mask=token < end)


@triton.jit(do_not_specialize=_RUNTIME)
def _maps_kernel(
    rewards_ptr,
    values_ptr,
    mask_ptr,
    bounds_ptr,
    chunks_ptr,
    rows: "i64",
    width: "i64",
    gamma: "fp64",
    lam: "fp64",
    CARRY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """chunks[3, rows, programs]: factor and shift of the chunk's map, and whether every reward is a number."""
    gamma, lam = tl.full([], gamma, tl.float64), tl.full([], lam, tl.float64)
    row = tl.program_id(0).to(tl.int64)
    begin, end = _row_bounds(bounds_ptr, row, width)
    first, last = _chunk_bounds(begin, end, BLOCK)
    place = tl.arange(0, BLOCK)
    chunk_factor = tl.full([], 1.0, tl.float64)
    chunk_shift = tl.zeros([], tl.float64)
    num_missing = tl.zeros([BLOCK], tl.int32)
    for tile in range(tl.cdiv(last - first, BLOCK) - 1, -1, -1):
        token = first + tile * BLOCK + place
        role, reward, value = _load_steps(rewards_ptr, values_ptr, mask_ptr, token, token < last, CARRY)
        maps = _step_maps(role, reward, value, gamma, lam)
        factor, shift = tl.associative_scan(maps, 0, _compose, reverse=True)
        factor, shift = _at(factor, 0, BLOCK), _at(shift, 0, BLOCK)
        chunk_factor, chunk_shift = _compose(chunk_factor, chunk_shift, factor, shift)
        num_missing += (reward != reward).to(tl.int32)
    record = row * tl.num_programs(1) + tl.program_id(1)
    records = rows * tl.num_programs(1)
    tl.store(chunks_ptr + record, chunk_factor)
    tl.store(chunks_ptr + records + record, chunk_shift)
    tl.store(chunks_ptr + 2 * records + record, (tl.sum(num_missing, axis=0) == 0).to(tl.float64))


@triton.jit
def _after_chunk(chunks_ptr, row, records, CHUNKS: tl.constexpr):
    """The value that the program's last token receives from later chunks, and whether its row is scored."""
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < tl.num_programs(1)
    after = inside & (chunk > tl.program_id(1))
    record = row * tl.num_programs(1) + chunk
    factor = tl.load(chunks_ptr + record, mask=after, other=1.0)
    shift = tl.load(chunks_ptr + records + record, mask=after, other=0.0)
    factor, shift = tl.associative_scan((factor, shift), 0, _compose, reverse=True)
    scored = tl.load(chunks_ptr + 2 * records + record, mask=inside, other=1.0)
    return _at(shift, 0, CHUNKS), tl.min(scored, axis=0) > 0


@triton.jit
def _add(count, pivot, total, squares, low, high, x, counts):
    """Adds to the sums of each lane, which are about its first element: that keeps their difference exact enough."""
    pivot = tl.where((count == 0) & counts, x, pivot)
    distance = tl.where(counts, x - pivot, 0.0)
    low = tl.where(counts, tl.minimum(low, x), low)
    high = tl.where(counts, tl.maximum(high, x), high)
    return count + counts.to(tl.float64), pivot, total + distance, squares + distance * distance, low, high


@triton.jit
def _store_moments(moments_ptr, record, records, count, pivot, total, squares, low, high):
    """moments[5, records]: count, mean, squared distances from it, lowest, highest."""
    lane_mean = pivot + total / tl.maximum(count, 1.0)
    lane_squares = tl.maximum(squares - total * (total / tl.maximum(count, 1.0)), 0.0)
    number = tl.sum(count, axis=0)
    mean = tl.sum(count * lane_mean, axis=0) / tl.maximum(number, 1.0)
    distance = tl.where(count > 0, lane_mean - mean, 0.0)
    tl.store(moments_ptr + record, number)
    tl.store(moments_ptr + records + record, mean)
    tl.store(moments_ptr + 2 * records + record, tl.sum(lane_squares + count * distance * distance, axis=0))
    tl.store(moments_ptr + 3 * records + record, tl.min(low, axis=0))
    tl.store(moments_ptr + 4 * records + record, tl.max(high, axis=0))


@triton.jit(do_not_specialize=_RUNTIME)
def _walk_kernel(
    rewards_ptr,
    values_ptr,
    roles_ptr,
    bounds_ptr,
    chunks_ptr,
    advantages_ptr,
    returns_ptr,
    moments_ptr,
    rows: "i64",
    width: "i64",
    total: "i64",
    gamma: "fp64",
    lam: "fp64",
    CARRY: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advantages and returns as if each token were the first of its turn, and the moments of a chunk's advantages.

    moments_ptr[record] is 0 for a row that is not scored. The last row also writes what lies after it.
    """
    gamma, lam = tl.full([], gamma, tl.float64), tl.full([], lam, tl.float64)
    row = tl.program_id(0).to(tl.int64)
    begin, end = _row_bounds(bounds_ptr, row, width)
    first, last = _chunk_bounds(begin, end, BLOCK)
    place = tl.arange(0, BLOCK)
    record = row * tl.num_programs(1) + tl.program_id(1)
    records = rows * tl.num_programs(1)
    carry = tl.zeros([], tl.float64)
    is_scored = tl.full([], 1, tl.int1)
    if chunks_ptr is not None:
        carry, is_scored = _after_chunk(chunks_ptr, row, records, CHUNKS)
    count = tl.zeros([BLOCK], tl.float64)
    pivot = tl.zeros([BLOCK], tl.float64)
    sums = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    num_missing = tl.zeros([BLOCK], tl.int32)
    for tile in range(tl.cdiv(last - first, BLOCK) - 1, -1, -1):
        token = first + tile * BLOCK + place
        role, reward, value = _load_steps(rewards_ptr, values_ptr, roles_ptr, token + 1, token + 1 < last, CARRY)
        maps = _step_maps(role, reward, value, gamma, lam)
        factor, shift = tl.associative_scan(maps, 0, _compose, reverse=True)
        entering = factor * carry + shift
        carry = _at(entering, 0, BLOCK)
        role, reward, value = _load_steps(rewards_ptr, values_ptr, roles_ptr, token, token < last, CARRY)
        token_return = reward + entering
        advantage = tl.where(role != 0, token_return - value, 0.0)
        token_return = tl.where(role != 0, token_return, 0.0)
        tl.store(advantages_ptr + token, advantage, mask=token < last)
        tl.store(returns_ptr + token, token_return, mask=token < last)
        rounded = advantage.to(advantages_ptr.dtype.element_ty).to(tl.float64)
        count, pivot, sums, squares, low, high = _add(count, pivot, sums, squares, low, high, rounded, role != 0)
        num_missing += (reward != reward).to(tl.int32)
    is_scored = is_scored & (tl.sum(num_missing, axis=0) == 0)
    _store_moments(moments_ptr, record, records, count, pivot, sums, squares, low, high)
    if is_scored == 0:
        tl.store(moments_ptr + record, 0.0)
        for tile in range(first, last, BLOCK):
            token = tile + place
            role, _, value = _load_steps(rewards_ptr, values_ptr, roles_ptr, token, token < last, CARRY)
            tl.store(advantages_ptr + token, tl.zeros([BLOCK], tl.float64), mask=token < last)
            tl.store(returns_ptr + token, value, mask=token < last)
    after = tl.where(row == rows - 1, total, end)
    for tile in range(end + tl.program_id(1) * BLOCK, after, tl.num_programs(1) * BLOCK):
        token = tile + place
        tl.store(advantages_ptr + token, tl.zeros([BLOCK], tl.float64), mask=token < after)
        tl.store(returns_ptr + token, tl.zeros([BLOCK], tl.float64), mask=token < after)


@triton.jit(do_not_specialize=_RUNTIME)
def _turns_kernel(
    roles_ptr, bounds_ptr, advantages_ptr, returns_ptr, moments_ptr, rows: "i64", width: "i64", BLOCK: tl.constexpr
):
    """Gives every token of a turn what its first token has, and computes the moments of a row's advantages."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = _row_bounds(bounds_ptr, row, width)
    place = tl.arange(0, BLOCK)
    is_scored = tl.load(moments_ptr + row) + tl.zeros([BLOCK], tl.float64) > 0
    latest = tl.full([], -1, tl.int64)
    count = tl.zeros([BLOCK], tl.float64)
    pivot = tl.zeros([BLOCK], tl.float64)
    sums = tl.zeros([BLOCK], tl.float64)
    squares = tl.zeros([BLOCK], tl.float64)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    for tile in range(begin, end, BLOCK):
        token = tile + place
        role = tl.load(roles_ptr + token, mask=token < end, other=0)
        first = tl.associative_scan(tl.where(role == FIRST_OF_TURN, token, -1), 0, _latest)
        first = tl.where(first >= 0, first, latest)
        latest = _at(first, BLOCK - 1, BLOCK)
        # nothing writes what a first token has
        advantage = tl.load(advantages_ptr + first, mask=role != 0, other=0.0)
        token_return = tl.load(returns_ptr + first, mask=role != 0, other=0.0)
        tl.store(advantages_ptr + token, advantage, mask=role == LATER_OF_TURN)
        tl.store(returns_ptr + token, token_return, mask=role == LATER_OF_TURN)
        count, pivot, sums, squares, low, high = _add(
            count, pivot, sums, squares, low, high, advantage.to(tl.float64), (role != 0) & is_scored
        )
    _store_moments(moments_ptr, row, rows, count, pivot, sums, squares, low, high)


@triton.jit(do_not_specialize=_RUNTIME)
def _norm_kernel(moments_ptr, norm_ptr, records: "i64", epsilon: "fp64", BLOCK: tl.constexpr):
    """norm[2]: what is subtracted from advantages, and the factor; 0 for a single token, and where all are equal."""
    number = tl.zeros([BLOCK], tl.float64)
    total = tl.zeros([BLOCK], tl.float64)
    low = tl.full([BLOCK], float("inf"), tl.float64)
    high = tl.full([BLOCK], float("-inf"), tl.float64)
    for offset in range(0, records, BLOCK):
        record = offset + tl.arange(0, BLOCK)
        count = tl.load(moments_ptr + record, mask=record < records, other=0.0)
        number += count
        total += count * tl.load(moments_ptr + records + record, mask=count > 0, other=0.0)
        low = tl.minimum(low, tl.load(moments_ptr + 3 * records + record, mask=count > 0, other=float("inf")))
        high = tl.maximum(high, tl.load(moments_ptr + 4 * records + record, mask=count > 0, other=float("-inf")))
    together = tl.sum(number, axis=0)
    mean = tl.sum(total, axis=0) / tl.maximum(together, 1.0)
    squares = tl.zeros([BLOCK], tl.float64)
    for offset in range(0, records, BLOCK):
        record = offset + tl.arange(0, BLOCK)
        count = tl.load(moments_ptr + record, mask=record < records, other=0.0)
        distance = tl.load(moments_ptr + records + record, mask=count > 0, other=0.0) - mean
        own = tl.load(moments_ptr + 2 * records + record, mask=count > 0, other=0.0)
        squares += tl.where(count > 0, own + count * distance * distance, 0.0)
    variance = tl.sum(squares, axis=0) / tl.maximum(together - 1, 1.0)
    differ = (together >= 2) & (tl.min(low, axis=0) != tl.max(high, axis=0))
    root = tl.sqrt(variance + tl.full([], epsilon, tl.float64))
    tl.store(norm_ptr, mean)
    tl.store(norm_ptr + 1, tl.where(differ, 1 / tl.where(differ, root, 1.0), 0.0))


@triton.jit(do_not_specialize=_RUNTIME)
def _whiten_kernel(
    mask_ptr,
    bounds_ptr,
    moments_ptr,
    norm_ptr,
    advantages_ptr,
    width: "i64",
    chunks: "i64",
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`chunks` is the number of a row's moments. Rows that are not scored have none, and keep their zeros."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    counts = tl.load(moments_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    begin, end = _row_bounds(bounds_ptr, row, width)
    first, last = _chunk_bounds(begin, end, BLOCK)
    last = tl.where(tl.max(counts, axis=0) > 0, last, first)
    for tile in range(first, last, BLOCK):
        token = tile + tl.arange(0, BLOCK)
        counted = tl.load(mask_ptr + token, mask=token < last, other=0) != 0
        advantage = tl.load(advantages_ptr + token, mask=counted, other=0.0).to(tl.float64)
        whitened = (advantage - tl.load(norm_ptr)) * tl.load(norm_ptr + 1)
        tl.store(advantages_ptr + token, whitened, mask=counted)


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

    def doubles(*shape: int) -> Tensor:
        return rewards.new_empty(shape, dtype=torch.float64)

    tile = min(max(int(triton.next_power_of_2(width or triton.cdiv(total, rows))), _NARROWEST), _TILE)
    tiles: dict[str, Any] = {"BLOCK": tile, "num_warps": max(tile // _TILE * _TILE_WARPS, 1), **EXACT}
    # turns may cross any cut
    wanted = min(triton.cdiv(_WANTED_PROGRAMS, rows), total // rows // tile, _MAX_CHUNKS)
    chunks = 1 if turns is not None else max(wanted, 1)
    records, grid = rows * chunks, (rows, chunks)
    moments, maps, roles = doubles(5, records), None, mask.view(torch.uint8)
    if turns is not None:
        roles = torch.empty_like(roles)
        _roles_kernel[(rows,)](mask.view(torch.uint8), turns, bounds, roles, width, **tiles)
    if chunks > 1:
        maps = doubles(3, records)
        _maps_kernel[grid](rewards, values, roles, bounds, maps, rows, width, gamma, lam, CARRY=carry, **tiles)
    arrays = rewards, values, roles, bounds, maps, advantages, returns, moments
    _walk_kernel[grid](*arrays, rows, width, total, gamma, lam, CARRY=carry, CHUNKS=_MAX_CHUNKS, **tiles)
    if turns is not None:
        _turns_kernel[(rows,)](roles, bounds, advantages, returns, moments, rows, width, **tiles)
    if whitens:
        norm = doubles(2)
        _norm_kernel[(1,)](moments, norm, records, epsilon, BLOCK=_RECORDS_AT_ONCE, **EXACT)
        arrays = mask.view(torch.uint8), bounds, moments, norm, advantages
        _whiten_kernel[grid](*arrays, width, chunks, CHUNKS=_MAX_CHUNKS, **tiles)
    return advantages, returns
