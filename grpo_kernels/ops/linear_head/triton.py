"""Matrix products of the LM head's backward that leave idle rows out: those without a gradient.

The products know on the device which rows those are. One program lists the blocks of rows with a live one, and the
products read the list's length. Blocks that are not listed are neither read nor multiplied.

Without `from __future__ import annotations`: Triton reads the annotations "i64" of the kernels' scalars.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 64  # rows that are left out together, and the step of to_weight
_M, _N, _K = 128, 256, 64  # tile of the result, and step of to_hidden; two warpgroups share a tile
_WARPS = 8  # stages are the default of the backend: three on NVIDIA, two on AMD, whose shared memory is smaller
# Sums over the vocabulary are split, so that the tiles of few live rows occupy the whole GPU. As the number of live
# rows is known on the device only, so is the number of parts; items, which are tiles times parts, bound the memory.
_MAX_PARTS, _ITEMS_PER_SM = 16, 8
_GROUP = 16  # rows of tiles that run together, for reuse in L2
_REST = 16  # columns of a step behind the last whole one
_ROWS = 8  # of a tile, whose parts one program adds
_BLOCKS_AT_ONCE = 64
_INTERPRETED_SMS = 4

# Offsets in a plan: how many blocks are live, into how many parts sums are split, and the live blocks, ascending.
COUNT, PARTS, LIST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["rows", "tiles_n", "steps", "sms", "max_items"])
def plan_kernel(
    is_live_ptr,
    plan_ptr,
    rows: "i32",
    tiles_n: "i32",
    steps: "i32",
    sms: "i32",
    max_items: "i32",
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Lists the blocks with a live row, and chooses the parts of to_hidden's sums that keep all SMs busy."""
    count = 0
    for start in range(0, tl.cdiv(rows, BLOCK), AT_ONCE):
        block = start + tl.arange(0, AT_ONCE)
        row = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        is_live = tl.load(is_live_ptr + row, mask=row < rows, other=0).to(tl.int32)
        flag = tl.max(is_live, axis=1)
        position = count + tl.cumsum(flag, axis=0) - flag
        tl.store(plan_ptr + LIST + position, block, mask=flag != 0)
        count += tl.sum(flag, axis=0)
    # steps of the busiest SM, and an eighth of a step for each part of a tile that is written and read again
    tiles = tl.cdiv(count * BLOCK, M) * tiles_n
    best = 1
    least = tl.cdiv(tiles, sms) * steps
    for parts in tl.static_range(2, MAX_PARTS + 1):
        cost = tl.cdiv(tiles * parts, sms) * tl.cdiv(steps, parts) + tiles * parts // 8
        is_better = (cost < least) & (tiles * parts <= max_items)
        best = tl.where(is_better, parts, best)
        least = tl.where(is_better, cost, least)
    tl.store(plan_ptr + COUNT, count)
    tl.store(plan_ptr + PARTS, best)


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile; those of GROUP rows of tiles are neighbours, column by column."""
    first_m = tile // (GROUP * tiles_n) * GROUP
    group_m = tl.minimum(tiles_m - first_m, GROUP)
    return first_m + tile % (GROUP * tiles_n) % group_m, tile % (GROUP * tiles_n) // group_m


@triton.jit
def _live_rows(plan_ptr, is_live_ptr, first, count, rows, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Rows of the listed blocks from row `first` of all their rows on, and which of them are live."""
    at = first + tl.arange(0, SIZE)
    listed = at // BLOCK < count
    block = tl.load(plan_ptr + LIST + at // BLOCK, mask=listed, other=0)
    row = block * BLOCK + at % BLOCK
    listed = listed & (row < rows)
    return row, listed & (tl.load(is_live_ptr + row, mask=listed, other=0) != 0)


@triton.jit
def _multiply(left, right, sums, IS_INTERPRETED: tl.constexpr):
    if IS_INTERPRETED:  # whose products take bfloat16 for integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    return tl.dot(left, right, sums)


@triton.jit
def _add_rest(
    sums,
    by_logits_ptr,
    weight_ptr,
    row,
    is_live,
    n,
    start,
    stop,
    width,
    by_logits_stride,
    REST: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Adds columns up to `stop`, in steps so short that comparing each column takes few registers."""
    k = tl.arange(0, REST)
    row_ptrs = by_logits_ptr + row.to(tl.int64)[:, None] * by_logits_stride + k[None, :]
    of_weight = k[:, None] * width + n[None, :]
    for _ in tl.range(0, tl.cdiv(stop - start, REST), num_stages=1):
        left = stop - start
        by_logits = tl.load(row_ptrs + start, mask=is_live[:, None] & (k[None, :] < left), other=0.0)
        inside = (k[:, None] < left) & (n[None, :] < width)
        weight = tl.load(weight_ptr + start * width + of_weight, mask=inside, other=0.0)
        sums = _multiply(by_logits, weight, sums, IS_INTERPRETED)
        start += REST
    return sums


@triton.jit(do_not_specialize=["rows"])
def to_hidden_kernel(
    by_logits_ptr,
    weight_ptr,
    is_live_ptr,
    plan_ptr,
    partial_ptr,
    rows: "i32",
    columns,
    width,
    by_logits_stride,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_REST: tl.constexpr,
    REST: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    count = tl.load(plan_ptr + COUNT)
    parts = tl.load(plan_ptr + PARTS)
    tiles_m = tl.cdiv(count * BLOCK, M)
    tiles_n = tl.cdiv(width, N)
    item = tl.program_id(0)
    if item >= tiles_m * tiles_n * parts:
        return
    # the tiles of one part run together, as they read the same steps of both factors
    part = item // (tiles_m * tiles_n)
    tile = item % (tiles_m * tiles_n)
    tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)

    row, is_live = _live_rows(plan_ptr, is_live_ptr, tile_m * M, count, rows, BLOCK, M)
    n = tile_n * N + tl.arange(0, N)
    k = tl.arange(0, K)
    steps = tl.cdiv(columns, K)
    begin = part * tl.cdiv(steps, parts)
    end = tl.minimum(begin + tl.cdiv(steps, parts), steps)
    row_ptrs = by_logits_ptr + row.to(tl.int64)[:, None] * by_logits_stride + k[None, :]
    of_weight = k[:, None] * width + n[None, :]
    inside = n[None, :] < width
    sums = tl.zeros([M, N], tl.float32)
    # whole steps need no comparison with the number of columns
    start = begin.to(tl.int64) * K
    for _ in range(begin, tl.minimum(end, columns // K)):
        by_logits = tl.load(row_ptrs + start, mask=is_live[:, None], other=0.0)
        weight = tl.load(weight_ptr + start * width + of_weight, mask=inside, other=0.0)
        sums = _multiply(by_logits, weight, sums, IS_INTERPRETED)
        start += K
    if HAS_REST:
        stop = tl.where(end * K > columns, columns, start)
        sums = _add_rest(
            sums,
            by_logits_ptr,
            weight_ptr,
            row,
            is_live,
            n,
            start,
            stop,
            width,
            by_logits_stride,
            REST,
            IS_INTERPRETED,
        )

    # also if there is only one part: a kernel that stored that to `out` would be twice as long and spill registers
    of_tile = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(partial_ptr + item.to(tl.int64) * (M * N) + of_tile, sums)


@triton.jit(do_not_specialize=["rows"])
def sum_parts_kernel(
    is_live_ptr,
    plan_ptr,
    partial_ptr,
    out_ptr,
    rows: "i32",
    width,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the parts of ROWS rows of a tile in their order."""
    count = tl.load(plan_ptr + COUNT)
    parts = tl.load(plan_ptr + PARTS)
    tiles_m = tl.cdiv(count * BLOCK, M)
    tiles_n = tl.cdiv(width, N)
    tile = tl.program_id(0) // (M // ROWS)
    first = tl.program_id(0) % (M // ROWS) * ROWS
    if tile >= tiles_m * tiles_n:
        return
    tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP)

    row, is_live = _live_rows(plan_ptr, is_live_ptr, tile_m * M + first, count, rows, BLOCK, ROWS)
    n = tl.arange(0, N)
    of_tile = (first + tl.arange(0, ROWS))[:, None] * N + n[None, :]
    sums = tl.zeros([ROWS, N], tl.float32)
    for part in range(parts):
        item = (part * tiles_m * tiles_n + tile).to(tl.int64)
        sums += tl.load(partial_ptr + item * (M * N) + of_tile)
    n += tile_n * N
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=is_live[:, None] & (n[None, :] < width))


@triton.jit
def _store_sums(sums, total_ptr, first_m, first_n, columns, width, ADD: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    total_ptrs = total_ptr + first_m.to(tl.int64) * width + first_n + (m[:, None] * width + n[None, :])
    inside = (m[:, None] < columns - first_m) & (n[None, :] < width - first_n)
    if ADD:
        sums += tl.load(total_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptrs, sums.to(total_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def to_weight_kernel(
    by_logits_ptr,
    hidden_ptr,
    plan_ptr,
    total_ptr,
    rows: "i32",
    columns,
    width,
    by_logits_stride,
    ADD: tl.constexpr,
    IS_PADDED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    count = tl.load(plan_ptr + COUNT)
    if ADD and count == 0:
        return
    # all tiles of the same columns of by_logits run together, so that those are read once; hidden stays in L2
    tiles_n = tl.cdiv(width, N)
    first_m = tl.program_id(0) // tiles_n * M
    first_n = tl.program_id(0) % tiles_n * N
    m = first_m + tl.arange(0, M)
    n = first_n + tl.arange(0, N)
    k = tl.arange(0, K)
    row_ptrs = by_logits_ptr + k.to(tl.int64)[:, None] * by_logits_stride + m[None, :]
    of_hidden = k[:, None] * width + n[None, :]
    # a comparison with a multiple of 16 keeps the loads wide; sums of padding are not stored
    readable = tl.cdiv(columns, 16) * 16 if IS_PADDED else columns
    is_column = m[None, :] < readable
    inside = n[None, :] < width
    sums = tl.zeros([M, N], tl.float32)
    # the next block is looked up a step early; behind the last one the list has room for a number that is not used
    block = tl.load(plan_ptr + LIST)
    for at in range(count):
        start = block.to(tl.int64) * K
        block = tl.load(plan_ptr + LIST + 1 + at)
        is_row = k[:, None] < rows - start
        by_logits = tl.load(row_ptrs + start * by_logits_stride, mask=is_row & is_column, other=0.0)
        hidden = tl.load(hidden_ptr + start * width + of_hidden, mask=is_row & inside, other=0.0)
        sums = _multiply(tl.trans(by_logits), hidden, sums, IS_INTERPRETED)

    # one half after the other, for want of registers
    left, right = tl.split(tl.permute(tl.reshape(sums, [M, 2, N // 2]), [0, 2, 1]))
    _store_sums(left, total_ptr, first_m, first_n, columns, width, ADD, M, N // 2)
    _store_sums(right, total_ptr, first_m, first_n + N // 2, columns, width, ADD, M, N // 2)


_IS_INTERPRETED = not isinstance(plan_kernel, triton.JITFunction)


def _sms(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else _INTERPRETED_SMS


def _plan(is_live: Tensor, tiles_n: int, steps: int, sms: int, max_items: int) -> Tensor:
    rows = len(is_live)
    # one more than can be listed, because to_weight looks one ahead
    plan = is_live.new_empty(2 + triton.cdiv(rows, BLOCK_ROWS) + 1, dtype=torch.int32)
    plan_kernel[(1,)](
        is_live.view(torch.uint8),
        plan,
        rows,
        tiles_n,
        steps,
        sms,
        max_items,
        BLOCK=BLOCK_ROWS,
        M=_M,
        MAX_PARTS=_MAX_PARTS,
        AT_ONCE=_BLOCKS_AT_ONCE,
    )
    return plan


def to_hidden(by_logits: Tensor, weight: Tensor, is_live: Tensor, out: Tensor) -> None:
    rows, columns = by_logits.shape
    width = weight.shape[1]
    out.zero_()
    if rows == 0 or columns == 0 or width == 0:
        return
    tiles_n, steps, sms = triton.cdiv(width, _N), triton.cdiv(columns, _K), _sms(out)
    tiles = triton.cdiv(triton.cdiv(rows, BLOCK_ROWS) * BLOCK_ROWS, _M) * tiles_n
    max_items = max(tiles, min(_ITEMS_PER_SM * sms, _MAX_PARTS * tiles))
    plan = _plan(is_live, tiles_n, steps, sms, max_items)
    is_live = is_live.view(torch.uint8)
    partial = out.new_empty((max_items, _M, _N), dtype=torch.float32)
    to_hidden_kernel[(max_items,)](
        by_logits,
        weight,
        is_live,
        plan,
        partial,
        rows,
        columns,
        width,
        by_logits.stride(0),
        BLOCK=BLOCK_ROWS,
        M=_M,
        N=_N,
        K=_K,
        GROUP=_GROUP,
        HAS_REST=columns % _K != 0,
        REST=_REST,
        IS_INTERPRETED=_IS_INTERPRETED,
        num_warps=_WARPS,
    )
    sum_parts_kernel[(tiles * (_M // _ROWS),)](
        is_live,
        plan,
        partial,
        out,
        rows,
        width,
        BLOCK=BLOCK_ROWS,
        M=_M,
        N=_N,
        GROUP=_GROUP,
        ROWS=_ROWS,
    )


def to_weight(by_logits: Tensor, hidden: Tensor, is_live: Tensor, total: Tensor, add: bool) -> None:
    rows, columns = by_logits.shape
    width = hidden.shape[1]
    if rows == 0 and not add:
        total.zero_()
    if rows == 0 or columns == 0 or width == 0:
        return
    stride = by_logits.stride(0)
    readable = by_logits.untyped_storage().nbytes() // by_logits.element_size() - by_logits.storage_offset()
    to_weight_kernel[(triton.cdiv(columns, _M) * triton.cdiv(width, _N),)](
        by_logits,
        hidden,
        _plan(is_live, 1, 1, 1, 1),
        total,
        rows,
        columns,
        width,
        stride,
        ADD=add,
        IS_PADDED=stride % 16 == 0 and (rows - 1) * stride + triton.cdiv(columns, 16) * 16 <= readable,
        M=_M,
        N=_N,
        K=BLOCK_ROWS,
        IS_INTERPRETED=_IS_INTERPRETED,
        num_warps=_WARPS,
    )
