"""Log-probs over a support in Triton: gathered dot products, and sums by token id; terms of a distillation."""

# without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.ops.token_logprobs.triton import backward as logprobs_backward
from grpo_kernels.ops.token_logprobs.triton import forward as logprobs

__all__ = ["add_weight", "logits", "logprobs", "logprobs_backward", "terms", "to_hidden"]

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


@triton.jit
def _log(x):
    """-inf for 0, without a warning of the interpreter."""
    return tl.where(x != 0, tl.log(tl.where(x != 0, x, 1.0)), -float("inf"))


@triton.jit
def _logsumexp(values):
    top = tl.max(values, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    return _log(tl.sum(tl.exp(values - top), 0)) + top


@triton.jit
def _logaddexp(a, b):
    top = tl.maximum(a, b)
    top = tl.where(top == -float("inf"), 0.0, top)
    return _log(tl.exp(a - top) + tl.exp(b - top)) + top


@triton.jit
def _part_and_slope(log_p, log_q, beta, KIND: tl.constexpr):
    """The part of a category in the divergence, and the derivative by the student's log-probability; 0 without it."""
    exists, has_any = log_p != -float("inf"), log_q != -float("inf")
    log_p, finite = tl.where(exists, log_p, 0.0), tl.where(has_any & exists, log_q, 0.0)
    p, q = tl.exp(log_p), tl.where(has_any | ~exists, tl.exp(finite), 0.0)
    if KIND == "forward_kl":
        part, slope = p * (log_p - tl.where(exists, log_q, 0.0)), -p
    elif KIND == "reverse_kl":
        part, slope = q * (finite - log_p), q * (finite - log_p + 1)
    else:
        log_m = _logaddexp(log_p + tl.log(beta), tl.where(exists, log_q, 0.0) + tl.log(1 - beta))
        slope = (1 - beta) * q * (finite - log_m)
        part = beta * p * (log_p - log_m) + slope
    return tl.where(exists, part, 0.0), tl.where(exists, slope, 0.0)


@triton.jit
def _terms_kernel(
    others_ptr,
    scaled_ptr,
    ids_ptr,
    teacher_logprobs_ptr,
    shares_ptr,
    values_ptr,
    mass_ptr,
    by_rest_ptr,
    by_id_ptr,
    beta: "fp64",
    count: "i32",
    stride: "i64",
    KIND: tl.constexpr,
    TAIL: tl.constexpr,
    LEAST_REST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The formulas of divergence.py for one token."""
    token = tl.program_id(0).to(tl.int64)
    id = tl.arange(0, COUNT)
    inside = id < count
    share = tl.load(shares_ptr + token)
    others = tl.load(others_ptr + token).to(tl.float64)
    scaled = tl.load(scaled_ptr + token * stride + id, mask=inside, other=-float("inf"))
    is_used = tl.load(ids_ptr + token * count + id, mask=inside, other=-1) >= 0
    log_p = tl.load(teacher_logprobs_ptr + token * count + id, mask=is_used, other=-float("inf"))

    among = _logsumexp(scaled)
    total = _logaddexp(among, others)
    log_rest = others - total
    if TAIL == "renormalise":
        has_any = among != -float("inf")
        log_p -= tl.where(has_any, _logsumexp(log_p), 0.0)
        log_q = scaled - tl.where(has_any, among, 0.0)
    else:
        log_q = scaled - total
    parts, slopes = _part_and_slope(log_p, log_q, beta, KIND)
    value, sum = tl.sum(parts, 0), tl.sum(slopes, 0)
    has_rest = others != -float("inf")
    by_rest = 0.0
    if TAIL == "bucket":
        left = tl.log(tl.maximum(1 - tl.exp(_logsumexp(log_p)), LEAST_REST))
        part, by_rest = _part_and_slope(
            tl.where(has_rest, left, -float("inf")), tl.where(has_rest, log_rest, -float("inf")), beta, KIND
        )
        value, sum = value + part, sum + by_rest
    if TAIL != "renormalise":
        by_rest = tl.where(has_rest, share * (sum * tl.exp(log_rest) - by_rest), 0.0)
    by_id = share * (slopes - sum * tl.exp(log_q))
    counts = share != 0
    tl.store(values_ptr + token, tl.where(counts, value, 0.0))
    tl.store(mass_ptr + token, tl.where(counts, tl.exp(among - total), 0.0))
    tl.store(by_rest_ptr + token, tl.where(counts, by_rest, 0.0))
    tl.store(by_id_ptr + token * count + id, tl.where(counts, by_id, 0.0), mask=inside)


def terms(
    others: Tensor,
    scaled: Tensor,
    ids: Tensor,
    teacher_logprobs: Tensor,
    shares: Tensor,
    kind: str,
    tail: str,
    beta: float,
    least_rest: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divergence and mass of each token, and gradients as distillation_op's: of the rest and of ids' scaled logits.

    One kernel in place of some 80 of torch's for each chunk, which the host could not launch in time.
    """
    count, scaled = ids.shape[1], scaled.contiguous()
    values, mass, by_rest = (torch.empty_like(shares) for _ in range(3))
    by_id = torch.empty_like(teacher_logprobs)
    inputs, results = (others.contiguous(), scaled, ids, teacher_logprobs, shares), (values, mass, by_rest, by_id)
    width = triton.next_power_of_2(count)
    constants, warps = (kind, tail, least_rest, width), min(8, max(1, width // 128))
    if len(shares) > 0:
        _terms_kernel[(len(shares),)](*inputs, *results, beta, count, scaled.stride(0), *constants, num_warps=warps)
    return results
