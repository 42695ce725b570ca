"""Log-probs over a support in Triton: gathered dot products, rows of several lengths, and sums by token id.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.ops.token_logprobs.triton import IGNORED, _differentiate_row, _factor, _measure_row

# Entries and columns of a program at a time: sixteen numbers a thread.
_ENTRIES, _BLOCK, _WARPS = 8, 256, 4
_ROW_BLOCK, _ROW_WARPS = 256, 1  # kept ids of a row at a time
# Nothing is compiled anew for another length, stride, temperature or coefficient.
_RUNTIME = ["count", "width", "hidden_stride", "weight_stride"]
_ROW_RUNTIME = ["temperature", "numerator", "bend"]


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
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
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
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
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
    dtype = result_ptr.dtype.element_ty
    tl.store(result_ptr + row * width + column, sum.to(dtype), mask=column < width)


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
    ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
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


@triton.jit(do_not_specialize=_ROW_RUNTIME)
def _logprobs_kernel(
    logits_ptr,
    places_ptr,
    bounds_ptr,
    temperatures_ptr,
    logprobs_ptr,
    entropy_ptr,
    normalizer_ptr,
    temperature: "fp64",
    numerator: "fp64",
    bend: "fp32",
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + row)
    begin = tl.load(bounds_ptr + row)
    columns = (tl.load(bounds_ptr + row + 1) - begin).to(tl.int32)
    if (place == IGNORED) | (columns == 0):
        nothing = tl.where(place == IGNORED, 0.0, float("nan"))  # a row that counts, but keeps no id
        tl.store(logprobs_ptr + row, nothing)
        tl.store(normalizer_ptr + row, nothing)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, nothing)
    else:
        factor = _factor(temperatures_ptr, row, temperature, numerator)
        logits_ptr += begin
        _measure_row(
            logits_ptr, place, columns, factor, bend, row, logprobs_ptr, entropy_ptr, normalizer_ptr, CAPPED, BLOCK
        )


@triton.jit(do_not_specialize=_ROW_RUNTIME)
def _logprobs_backward_kernel(
    logits_ptr,
    gradient_ptr,
    places_ptr,
    bounds_ptr,
    temperatures_ptr,
    normalizer_ptr,
    entropy_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    temperature: "fp64",
    numerator: "fp64",
    bend: "fp32",
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + row)
    begin = tl.load(bounds_ptr + row)
    columns = (tl.load(bounds_ptr + row + 1) - begin).to(tl.int32)
    for_logprob = 0.0
    for_entropy = 0.0
    if grad_logprobs_ptr is not None:
        for_logprob = tl.load(grad_logprobs_ptr + row)
    if grad_entropy_ptr is not None:
        for_entropy = tl.load(grad_entropy_ptr + row)
    logits_ptr += begin
    gradient_ptr += begin
    if (place == IGNORED) | ((for_logprob == 0) & (for_entropy == 0)) | (columns == 0):
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(gradient_ptr + column, tl.zeros([BLOCK], tl.float32), mask=column < columns)
    else:
        factor = _factor(temperatures_ptr, row, temperature, numerator)
        _differentiate_row(
            logits_ptr,
            gradient_ptr,
            place,
            columns,
            factor,
            bend,
            row,
            normalizer_ptr,
            entropy_ptr,
            for_logprob,
            for_entropy,
            grad_entropy_ptr is not None,
            CAPPED,
            False,
            BLOCK,
        )


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
        constants: dict[str, Any] = {"ENTRIES": _ENTRIES, "BLOCK": _BLOCK, "num_warps": _WARPS}
        _logits_kernel[(triton.cdiv(count, _ENTRIES),)](
            hidden, weight, bias, token_ids, rows, result, count, width, *strides, **constants
        )
    return result


def to_hidden(by_logits: Tensor, weight: Tensor, token_ids: Tensor, bounds: Tensor) -> Tensor:
    rows, width = len(bounds) - 1, weight.shape[1]
    result = weight.new_empty(rows, width)
    if rows > 0:
        constants: dict[str, Any] = {"ENTRIES": _ENTRIES, "BLOCK": _BLOCK, "num_warps": _WARPS}
        _to_hidden_kernel[(rows, triton.cdiv(width, _BLOCK))](
            by_logits, weight, token_ids, bounds, result, width, weight.stride(0), **constants
        )
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
        blocks = 1 if weight is None else triton.cdiv(width, _BLOCK)
        constants: dict[str, Any] = {"ENTRIES": _ENTRIES, "BLOCK": _BLOCK, "num_warps": _WARPS}
        _add_weight_kernel[(count, blocks)](
            by_logits, hidden, token_ids, rows, order, weight, bias, count, width, hidden.stride(0), **constants
        )


def _row_options(
    temperature: float, softcap: Optional[float], logit_scale: float
) -> tuple[tuple[float, float, float], dict[str, Any]]:
    """The last arguments of both kernels of rows: run-time values and constexprs."""
    numerator, bend = (logit_scale, 0.0) if softcap is None else (softcap, logit_scale / softcap)
    constants = {"CAPPED": softcap is not None, "BLOCK": _ROW_BLOCK, "num_warps": _ROW_WARPS}
    return (temperature, numerator, bend), constants


def logprobs(
    logits: Tensor,
    places: Tensor,
    bounds: Tensor,
    row_temperature: Optional[Tensor],
    temperature: float,
    softcap: Optional[float],
    logit_scale: float,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    results = logits.new_empty(places.shape)
    entropy = torch.empty_like(results) if want_entropy else results.new_empty(0)
    normalizer = torch.empty_like(results, dtype=torch.float64)
    if len(places) > 0:
        arguments, constants = _row_options(temperature, softcap, logit_scale)
        _logprobs_kernel[(len(places),)](
            logits,
            places,
            bounds,
            row_temperature,
            results,
            entropy if want_entropy else None,
            normalizer,
            *arguments,
            **constants,
        )
    return results, entropy, normalizer


def logprobs_backward(
    grad_logprobs: Optional[Tensor],
    grad_entropy: Optional[Tensor],
    logits: Tensor,
    places: Tensor,
    bounds: Tensor,
    normalizer: Tensor,
    entropy: Optional[Tensor],
    row_temperature: Optional[Tensor],
    temperature: float,
    softcap: Optional[float],
    logit_scale: float,
) -> Tensor:
    gradient = torch.empty_like(logits)
    if len(places) > 0:
        arguments, constants = _row_options(temperature, softcap, logit_scale)
        _logprobs_backward_kernel[(len(places),)](
            logits,
            gradient,
            places,
            bounds,
            row_temperature,
            normalizer,
            entropy,
            grad_logprobs,
            grad_entropy,
            *arguments,
            **constants,
        )
    return gradient
