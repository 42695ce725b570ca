"""Log-probs over a support in Triton: gathered dot products, and sums by token id."""

# without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.ops.token_logprobs.triton import backward as logprobs_backward
from grpo_kernels.ops.token_logprobs.triton import forward as logprobs

__all__ = ["add_weight", "logits", "logprobs", "logprobs_backward", "to_hidden"]

# Entries and columns of a dot product at a time; eight lanes hold the columns of an entry in bfloat16.
ENTRIES, BLOCK = tl.constexpr(32), tl.constexpr(64)
# Entries and columns of a sum of rows at a time; a thread has its columns of all entries, so none waits for others.
SUMMED, COLUMNS = tl.constexpr(8), tl.constexpr(1024)
# Entries of one id that one program adds up: thousands of rows may keep an id, more than one program should read.
PIECE = tl.constexpr(256)


# Widths and strides are compiled in only as multiples of 16 or not: the former are loaded 16 bytes at a time.
@triton.jit(do_not_specialize=["count"])
def _logits_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    token_ids_ptr,
    rows_ptr,
    logits_ptr,
    count: "i64",
    width: "i32",
    hidden_stride: "i64",
    weight_stride: "i64",
):
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    token_id = tl.load(token_ids_ptr + entry, mask=inside, other=0)
    row = tl.load(rows_ptr + entry, mask=inside, other=-1)
    takes_part = row >= 0
    hidden_ptrs = hidden_ptr + tl.where(takes_part, row, 0)[:, None] * hidden_stride
    weight_ptrs = weight_ptr + token_id[:, None] * weight_stride
    sum = tl.zeros([ENTRIES, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_read = takes_part[:, None] & (column < width)[None, :]
        x = tl.load(hidden_ptrs + column[None, :], mask=is_read, other=0.0).to(tl.float32)
        w = tl.load(weight_ptrs + column[None, :], mask=is_read, other=0.0).to(tl.float32)
        sum += x * w
    logit = tl.sum(sum, axis=1)
    if bias_ptr is not None:
        logit += tl.load(bias_ptr + token_id, mask=takes_part, other=0.0).to(tl.float32)
    tl.store(logits_ptr + entry, logit, mask=inside)


@triton.jit(do_not_specialize=["begins_ptr", "ends_ptr"])
def _sums_kernel(
    factors_ptr,
    matrix_ptr,
    rows_ptr,
    begins_ptr,
    ends_ptr,
    ids_ptr,
    pieces_ptr,
    result_ptr,
    width: "i32",
    stride: "i64",
):
    """Writes the sum of the entries within two bounds. With ids, adds it to the row of their id, whole pieces first."""
    place = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(begins_ptr + place), tl.load(ends_ptr + place)
    if ids_ptr is not None:
        place = tl.load(ids_ptr + begin, mask=begin < end, other=-1)
        if place < 0:  # there are fewer runs than programs, or this run takes no part
            return
    for start in range(tl.program_id(1) * COLUMNS, width, tl.num_programs(1) * COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        result_ptrs = result_ptr + place * width + column
        sum = tl.zeros([COLUMNS], tl.float32)
        rest = begin
        if ids_ptr is not None:
            piece, pieces = begin // PIECE, (end - begin) // PIECE
            for whole in range(piece, piece + pieces):
                sum += tl.load(pieces_ptr + whole * width + column, mask=inside, other=0.0)
            rest += pieces * PIECE
        for first in range(rest, end, SUMMED):
            entry = first + tl.arange(0, SUMMED)
            factor = tl.load(factors_ptr + entry, mask=entry < end, other=0.0)
            row = tl.load(rows_ptr + entry, mask=entry < end, other=0)
            is_read = (factor != 0)[:, None] & inside[None, :]
            x = tl.load(matrix_ptr + row[:, None] * stride + column[None, :], mask=is_read, other=0.0)
            sum += tl.sum(factor[:, None] * x.to(tl.float32), axis=0)
        if ids_ptr is not None:
            sum += tl.load(result_ptrs, mask=inside, other=0.0).to(tl.float32)
        tl.store(result_ptrs, sum.to(result_ptr.dtype.element_ty), mask=inside)


def logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    token_ids: Tensor,
    rows: Tensor,
    bounds: Tensor,
    order: Tensor,
) -> Tensor:
    result = hidden.new_empty(token_ids.shape, dtype=torch.float32)
    count, width = len(token_ids), hidden.shape[1]
    if count > 0:
        strides = hidden.stride(0), weight.stride(0)
        blocks = triton.cdiv(count, ENTRIES.value)
        _logits_kernel[(blocks,)](hidden, weight, bias, token_ids, rows, result, count, width, *strides)
    return result


def to_hidden(by_logits: Tensor, weight: Tensor, token_ids: Tensor, bounds: Tensor) -> Tensor:
    rows, width = len(bounds) - 1, weight.shape[1]
    result = weight.new_empty(rows, width)
    if rows > 0:
        grid = rows, triton.cdiv(width, COLUMNS.value)
        inputs = by_logits, weight, token_ids, bounds[:-1], bounds[1:], None, None
        _sums_kernel[grid](*inputs, result, width, weight.stride(0))
    return result


def add_weight(
    by_logits: Tensor,
    hidden: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    order: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
) -> None:
    ids = torch.where(rows >= 0, token_ids, -1)[order]
    if weight is not None:
        _add_sums(weight, by_logits[order], hidden, rows[order], ids)
    if bias is not None:  # a column of the weight that is multiplied by 1
        _add_sums(bias[:, None], by_logits[order], hidden.new_ones(len(hidden), 1), rows[order], ids)


def _add_sums(result: Tensor, factors: Tensor, matrix: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Adds sums over runs of entries of one id, whose number the host does not know; -1 is the id of the last run.

    Whole pieces of a run, counted from its start, are added up first, by a program each. Among the entries i * PIECE to
    (i + 1) * PIECE - 1 at most one starts a piece, which then has the last of them.
    """
    count, width, size = len(ids), matrix.shape[1], PIECE.value
    if count == 0:
        return
    entries, sizes = (factors, matrix, rows), (width, matrix.stride(0))
    runs = torch.cat((ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)))
    most = min(count, len(result) + 1)
    bounds = torch.searchsorted(runs, torch.arange(most + 1, device=ids.device))
    pieces = factors.new_empty(count // size, width)
    if len(pieces) > 0:
        last = torch.arange(1, len(pieces) + 1, device=ids.device) * size - 1
        begins = last - (last - bounds[runs[last]]) % size
        is_whole = (begins + size <= bounds[runs[last] + 1]) & (ids[last] >= 0)
        ends = torch.where(is_whole, begins + size, begins)
        grid = len(pieces), triton.cdiv(width, COLUMNS.value)
        _sums_kernel[grid](*entries, begins, ends, None, None, pieces, *sizes)
    _sums_kernel[(most, 1)](*entries, bounds[:-1], bounds[1:], ids, pieces, result, *sizes)
