"""Log-probs over a support in Triton: gathered dot products, and sums by row and by token id."""

# without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.ops.token_logprobs import triton as token_logprobs

# Entries and columns of a dot product at a time; eight lanes hold the columns of an entry in
# bfloat16.
ENTRIES, BLOCK = tl.constexpr(32), tl.constexpr(64)
# Entries and columns of a sum of rows at a time; a thread has its columns of all entries, so none
# waits for others.
SUMMED, COLUMNS = tl.constexpr(8), tl.constexpr(1024)
# Entries of one id that one program adds up: thousands of rows may keep an id, more than one program
# should read.
PIECE = tl.constexpr(256)
ELSEWHERE = tl.constexpr(-2)  # as in reference.py, which this file may not import


# The width is compiled in only as a multiple of 16 or not: the former is loaded 16 bytes at a time.
@triton.jit(do_not_specialize=["count"])
def _logits_kernel(
    hidden_ptr,
    weight_ptr,
    token_ids_ptr,
    rows_ptr,
    logits_ptr,
    count: "i64",
    width: "i32",
):
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < count
    token_id = tl.load(token_ids_ptr + entry, mask=inside, other=0)
    row = tl.load(rows_ptr + entry, mask=inside, other=-1)
    hidden_ptrs = hidden_ptr + row[:, None] * width
    weight_ptrs = weight_ptr + token_id[:, None] * width
    sum = tl.zeros([ENTRIES, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = (start + tl.arange(0, BLOCK))[None, :]
        is_read = (row >= 0)[:, None] & (column < width)
        x = tl.load(hidden_ptrs + column, mask=is_read, other=0.0)
        w = tl.load(weight_ptrs + column, mask=is_read, other=0.0)
        sum += x.to(tl.float32) * w.to(tl.float32)
    tl.store(logits_ptr + entry, tl.where(row == ELSEWHERE, float("-inf"), tl.sum(sum, axis=1)), mask=inside)


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
):
    """Writes the sum of the entries within two bounds.

    With ids, it is added to the row of their id, whole pieces first.
    """
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
            x = tl.load(matrix_ptr + row[:, None] * width + column[None, :], mask=is_read, other=0.0)
            sum += tl.sum(factor[:, None] * x.to(tl.float32), axis=0)
        if ids_ptr is not None:
            sum += tl.load(result_ptrs, mask=inside, other=0.0).to(tl.float32)
        tl.store(result_ptrs, sum.to(result_ptr.dtype.element_ty), mask=inside)


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    token_ids: Tensor,
    rows: Tensor,
    bounds: Tensor,
    order: Tensor,
    *measured: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results of the rows, and logits; places and scaling are those of token_logprobs."""
    logits = hidden.new_empty(rows.shape, dtype=torch.float32)
    grid = (triton.cdiv(len(rows), ENTRIES.value),)
    _logits_kernel[grid](hidden, weight, token_ids, rows, logits, len(rows), hidden.shape[1])
    if bias is not None:
        logits = torch.where(rows >= 0, logits + bias, logits).float()
    logprobs, entropy, normalizer = token_logprobs.forward(logits, *measured, True, bounds)
    return logprobs, normalizer, entropy, logits


def backward(
    by_hidden: Optional[Tensor],
    by_weight: Optional[Tensor],
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    logits: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    token_ids: Tensor,
    rows: Tensor,
    bounds: Tensor,
    order: Tensor,
    *measured: Any,
) -> Tensor:
    upstream = grad_logprobs, grad_entropy, normalizer, entropy
    by_logits = token_logprobs.backward(*upstream, logits, *measured, bounds)
    by_logits = torch.where(rows >= 0, by_logits, 0)  # also if an upstream gradient is infinite
    if by_hidden is not None:
        grid = len(hidden), triton.cdiv(hidden.shape[1], COLUMNS.value)
        inputs = by_logits, weight, token_ids, bounds[:-1], bounds[1:], None, None
        _sums_kernel[grid](*inputs, by_hidden, hidden.shape[1])
    if by_weight is not None:
        _add_by_id(by_weight, hidden, by_logits[order], rows[order], token_ids[order])
    return by_logits


def _add_by_id(total: Tensor, matrix: Tensor, factors: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Adds to the row of each id the sum of its entries, which is a run, by a program for each run.

    The host does not know how many there are. Whole pieces of a run, counted from its start, are
    added up first, by a program each. Among the entries i * PIECE to (i + 1) * PIECE - 1 at most
    one starts a piece, which then has the last of them.
    """
    entries, count, width, size = (factors, matrix, rows), len(ids), matrix.shape[1], PIECE.value
    runs = torch.cat((ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)))
    most = min(count, len(total))
    bounds = torch.searchsorted(runs, torch.arange(most + 1, device=ids.device))
    pieces = factors.new_empty(count // size, width)
    last = torch.arange(1, len(pieces) + 1, device=ids.device) * size - 1
    begins = last - (last - bounds[runs[last]]) % size
    ends = torch.where(begins + size <= bounds[runs[last] + 1], begins + size, begins)
    grid = len(pieces), triton.cdiv(width, COLUMNS.value)
    _sums_kernel[grid](*entries, begins, ends, None, None, pieces, width)
    _sums_kernel[(most, 1)](*entries, bounds[:-1], bounds[1:], ids, pieces, total, width)
