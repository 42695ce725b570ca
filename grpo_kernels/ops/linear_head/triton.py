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

# Entries and columns of a program at a time: sixteen numbers for each thread of four warps.
ENTRIES, BLOCK = tl.constexpr(8), tl.constexpr(256)
# Nothing is compiled anew for another length or stride.
_RUNTIME = ["count", "width", "hidden_stride", "weight_stride"]


@triton.jit(do_not_specialize=_RUNTIME)
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


@triton.jit(do_not_specialize=["width", "weight_stride"])
def _to_hidden_kernel(
    by_logits_ptr,
    weight_ptr,
    token_ids_ptr,
    bounds_ptr,
    result_ptr,
    width: "i32",
    weight_stride: "i64",
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
    sum = tl.zeros([BLOCK], tl.float32)
    for first in range(begin, end, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        gradient = tl.load(by_logits_ptr + entry, mask=entry < end, other=0.0)
        token_id = tl.load(token_ids_ptr + entry, mask=entry < end, other=0)
        is_read = (gradient != 0)[:, None] & (column < width)[None, :]
        w = tl.load(weight_ptr + token_id[:, None] * weight_stride + column[None, :], mask=is_read, other=0.0)
        sum += tl.sum(gradient[:, None] * w.to(tl.float32), axis=0)
    tl.store(result_ptr + row * width + column, sum.to(result_ptr.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["count", "width", "hidden_stride"])
def _add_weight_kernel(
    by_logits_ptr,
    hidden_ptr,
    token_ids_ptr,
    rows_ptr,
    order_ptr,
    weight_ptr,
    bias_ptr,
    count: "i64",
    width: "i32",
    hidden_stride: "i64",
):
    """One program per place among the entries by token id; the one at the first entry of an id sums all of them."""
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(order_ptr + place)
    own_id = tl.load(token_ids_ptr + own)
    before = tl.load(order_ptr + tl.maximum(place - 1, 0))
    is_first = (place == 0) | (tl.load(token_ids_ptr + before) != own_id)
    if is_first & (tl.load(rows_ptr + own) >= 0):
        sum = tl.zeros([BLOCK], tl.float32)
        total = tl.zeros([ENTRIES], tl.float32)
        number = ENTRIES
        while number == ENTRIES:
            places = place + tl.arange(0, ENTRIES)
            entry = tl.load(order_ptr + places, mask=places < count, other=0)
            row = tl.load(rows_ptr + entry, mask=places < count, other=-1)
            is_same = (row >= 0) & (tl.load(token_ids_ptr + entry) == own_id)
            gradient = tl.load(by_logits_ptr + entry, mask=is_same, other=0.0)
            is_read = (gradient != 0)[:, None] & (column < width)[None, :]
            hidden_ptrs = hidden_ptr + tl.where(is_same, row, 0)[:, None] * hidden_stride + column[None, :]
            x = tl.load(hidden_ptrs, mask=is_read, other=0.0).to(tl.float32)
            sum += tl.sum(gradient[:, None] * x, axis=0)
            total += gradient
            number = tl.sum(is_same.to(tl.int32), axis=0)
            place += ENTRIES
        if weight_ptr is not None:
            weight_ptrs = weight_ptr + own_id * width + column
            sum += tl.load(weight_ptrs, mask=column < width, other=0.0).to(tl.float32)
            tl.store(weight_ptrs, sum.to(weight_ptr.dtype.element_ty), mask=column < width)
        if bias_ptr is not None:
            is_owner = tl.program_id(1) == 0
            by_bias = tl.load(bias_ptr + own_id, mask=is_owner, other=0.0).to(tl.float32) + tl.sum(total, axis=0)
            tl.store(bias_ptr + own_id, by_bias.to(bias_ptr.dtype.element_ty), mask=is_owner)


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
        blocks = triton.cdiv(width, BLOCK.value)
        _to_hidden_kernel[(rows, blocks)](by_logits, weight, token_ids, bounds, result, width, weight.stride(0))
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
    count, width = len(token_ids), hidden.shape[1]
    if count > 0 and (weight is not None or bias is not None):
        blocks = 1 if weight is None else triton.cdiv(width, BLOCK.value)
        inputs = by_logits, hidden, token_ids, rows, order, weight, bias
        _add_weight_kernel[(count, blocks)](*inputs, count, width, hidden.stride(0))
