"""token_logprobs in Triton: one program per row, in one or two passes over its logits.

Each kernel is compiled once for a dtype and the optional arguments: not for a vocabulary, stride, temperature or
alignment. A row is a body of whole pieces of 16 bytes and the few columns before and after it.

Without `from __future__ import annotations`: Triton reads the annotations "fp64" of the kernels' scalars.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORED = tl.constexpr(-100)
# Below this, exp2 is 0; a finite number in place of -inf, so that 0 times it is 0.
_NO_EXPONENT = tl.constexpr(-10000.0)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# Sums of exponentials from this to its inverse leave room for their squares and for products with small factors.
_LEAST = tl.constexpr(1e-12)

# Loads of 16 bytes per thread at a time; rows within bounds have few columns.
_WARPS, _LOADS, _LOADS_BACKWARD = 8, 2, 2
_LOADS_EXPONENTIALS = 1  # as more would take so many registers that fewer rows are under way
_SHORT_WARPS, _SHORT_LOADS = 1, 2
# Arguments of which no value or alignment is compiled in.
_ROWS = ["logits_ptr", "targets_ptr", "temperatures_ptr", "bounds_ptr", "normalizer_ptr", "entropy_ptr"]
_BACKWARD = ["gradient_ptr", "grad_logprobs_ptr", "grad_entropy_ptr", "gradient_outer_stride", "gradient_inner_stride"]
_EXPONENTIALS = ["logits_ptr", "targets_ptr", "temperatures_ptr", "into_ptr", "logprobs_ptr", "row_scale_ptr"]
_EXPONENTIALS += ["entropy_ptr", "squares_ptr"]
_RUNTIME = ["columns", "inner", "outer_stride", "inner_stride", "factor", "bend"]


@triton.jit
def _span(bounds_ptr, row, columns, inner, outer_stride, inner_stride):
    """Where a row begins, and how many columns it has."""
    start = row // inner * outer_stride + row % inner * inner_stride
    if bounds_ptr is not None:
        start = tl.load(bounds_ptr + row)
        columns = (tl.load(bounds_ptr + row + 1) - start).to(tl.int32)
    return start, columns


@triton.jit
def _factor(temperatures_ptr, row, factor):
    """z = factor * x, or with a softcap factor * tanh(bend * x). NaN if the temperature means nothing."""
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row).to(tl.float64)
        means = (temperature > 0) & (temperature < float("inf"))
        factor = tl.where(means, factor / tl.where(means, temperature, 1.0), float("nan"))
    return factor


@triton.jit
def _unscaled(x, bend, CAPPED: tl.constexpr):
    """Logits before the product with the factor, and their derivative; infinite ones stay so under a softcap."""
    if not CAPPED:
        return x, 1.0
    else:
        u = x * bend
        # tanh(|u|) = 1 - 2 r with r = 1 / (1 + exp(2 |u|)); near 0, where that cancels, a polynomial
        root = tl.rsqrt(1.0 + tl.exp2(tl.abs(u) * (2 * _LOG2_E)))
        r = root * root
        sign = u.to(tl.int32, bitcast=True) & -2147483648
        far = ((1.0 - 2.0 * r).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        square = u * u
        near = -0.00661575 * square + 0.02131274
        near = near * square - 0.05391007
        near = near * square + 0.13333118
        near = near * square - 0.33333332
        near = u * square * near + u
        # the last product is 0, or infinite if x is
        tanh = tl.where(tl.abs(u) < 0.55, near, far) + x * 1.401298464324817e-45
        return tanh, (r - r * r) * (4.0 * bend)


@triton.jit
def _body(pointer, columns, ITEMS: tl.constexpr):
    """Number of columns before a row's first 16-byte boundary, and of those in whole pieces of ITEMS after it."""
    address = pointer.to(tl.int64)
    before = (15 - (address + 15) % 16) // (pointer.dtype.element_ty.primitive_bitwidth // 8)
    before = tl.minimum(before.to(tl.int32), columns)
    return before, (columns - before) // ITEMS * ITEMS


@triton.jit
def _log1p(x):
    """log(1 + x) in float64, exact where x is far below 1."""
    lost = (1.0 + x) - 1.0
    return tl.where(lost == 0, x, tl.log(1.0 + x) * (x / tl.where(lost == 0, 1.0, lost)))


@triton.jit(do_not_specialize=[*_ROWS, "logprobs_ptr", *_RUNTIME])
def _forward_kernel(
    logits_ptr,
    targets_ptr,
    temperatures_ptr,
    bounds_ptr,
    normalizer_ptr,
    entropy_ptr,
    logprobs_ptr,
    columns: "i32",
    inner: "i64",
    outer_stride: "i64",
    inner_stride: "i64",
    factor: "fp64",
    bend: "fp32",
    CAPPED: tl.constexpr,
    LOADS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target == IGNORED:
        tl.store(logprobs_ptr + row, 0.0)
        tl.store(normalizer_ptr + row, 0.0)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, 0.0)
        return
    start, columns = _span(bounds_ptr, row, columns, inner, outer_stride, inner_stride)
    logits_ptr += start
    factor = _factor(temperatures_ptr, row, factor)
    # The largest logits are counted and the others summed, which keeps the digits of a nearly certain row. All threads
    # share the largest so far. Differences are taken before any scaling, where they are exact for equal logits, so that
    # one product serves the scaling and the exponential to base 2.
    ITEMS: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    scale = factor.to(tl.float32) * _LOG2_E
    before, body = _body(logits_ptr, columns, ITEMS)
    lanes = tl.arange(0, LANES)
    edge = tl.where(lanes < before, lanes, lanes + body)
    edge_x = tl.load(logits_ptr + edge, mask=lanes < columns - body, other=float("-inf")).to(tl.float32)
    edge_u = _unscaled(edge_x, bend, CAPPED)[0]
    top = tl.maximum(tl.max(edge_u, axis=0), _LOWEST)
    ties = tl.sum(tl.where(edge_u == top, 1.0, 0.0), axis=0)
    edge_exponent = (tl.where(edge_u == top, float("-inf"), edge_u) - top) * scale
    below = tl.exp2(edge_exponent)
    spread = tl.maximum(edge_exponent, _NO_EXPONENT) * below
    pieces = tl.arange(0, LOADS)[:, None, None] * LANES + lanes[None, :, None]
    places = pieces * ITEMS + tl.arange(0, ITEMS)[None, None, :]
    body_ptr = logits_ptr + before
    for start in range(0, body, LOADS * LANES * ITEMS):
        column = start + places
        x = tl.load(tl.multiple_of(body_ptr + column, [1, 1, 16]), mask=column < body, other=float("-inf"))
        u = _unscaled(x.to(tl.float32), bend, CAPPED)[0]
        tile_top = tl.max(tl.max(tl.max(u, axis=2), axis=0), axis=0)
        if tile_top >= top:
            gap = tl.maximum((top - tile_top) * scale, _NO_EXPONENT)
            decay = tl.exp2(gap)
            is_raised = tile_top > top
            # what was largest so far is one of the others from now on
            sum = below + tl.where(lanes == 0, tl.where(is_raised, ties, 0.0), 0.0)
            spread = (spread + gap * sum) * decay
            below = sum * decay
            is_top = u == tile_top
            ties = tl.where(is_raised, 0.0, ties) + tl.sum(tl.sum(tl.sum(tl.where(is_top, 1.0, 0.0), 2), 0), 0)
            u = tl.where(is_top, float("-inf"), u)
            top = tile_top
        exponent = (u - top) * scale
        term = tl.exp2(exponent)
        below += tl.sum(tl.sum(term, axis=2), axis=0)
        if entropy_ptr is not None:
            spread += tl.sum(tl.sum(tl.maximum(exponent, _NO_EXPONENT) * term, axis=2), axis=0)

    others = (ties.to(tl.float64) - 1.0) + tl.sum(below, axis=0).to(tl.float64)
    log_sum = _log1p(others)
    known = (target >= 0) & (target < columns)
    own = _unscaled(tl.load(logits_ptr + target, mask=known, other=0.0).to(tl.float32), bend, CAPPED)[0]
    # a target that is no column, an overflow, or no number at all
    fails = (known == 0) | (top == float("inf")) | (others < 0)
    spoiled = tl.where(fails, float("nan"), 0.0)
    logprob = (own.to(tl.float64) - top.to(tl.float64)) * factor - log_sum + spoiled
    tl.store(logprobs_ptr + row, tl.where(logprob > 0, 0.0, logprob).to(tl.float32))
    # of no number at all it is what another part of the vocabulary may be added to
    total = top.to(tl.float64) * factor + log_sum + spoiled
    tl.store(normalizer_ptr + row, tl.where((others < 0) & known, float("-inf"), total))
    if entropy_ptr is not None:
        entropy = log_sum - tl.sum(spread, axis=0).to(tl.float64) * _LN_2 / (1.0 + others) + spoiled
        tl.store(entropy_ptr + row, tl.where(entropy < 0, 0.0, entropy).to(tl.float32))


@triton.jit
def _by_logit(x, bend, scale, pivot, shift, constant, by_exponent, CAPPED: tl.constexpr):
    """(constant + by_exponent * log2 p) p du/dx, with log2 p = scale * (u - pivot) + shift."""
    u, slope = _unscaled(x.to(tl.float32), bend, CAPPED)
    exponent = (u - pivot) * scale + shift
    weight = constant
    if by_exponent is not None:
        weight = tl.maximum(exponent, _NO_EXPONENT) * by_exponent + constant
    return tl.exp2(exponent) * weight * slope


@triton.jit(do_not_specialize=[*_ROWS, *_RUNTIME, *_BACKWARD])
def _backward_kernel(
    logits_ptr,
    targets_ptr,
    temperatures_ptr,
    bounds_ptr,
    normalizer_ptr,
    entropy_ptr,
    gradient_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    columns: "i32",
    inner: "i64",
    outer_stride: "i64",
    inner_stride: "i64",
    factor: "fp64",
    bend: "fp32",
    gradient_outer_stride: "i64",
    gradient_inner_stride: "i64",
    CAPPED: tl.constexpr,
    LOADS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    for_logprob = 0.0
    for_entropy = 0.0
    own_entropy = 0.0
    if grad_logprobs_ptr is not None:
        for_logprob = tl.load(grad_logprobs_ptr + row)
    if grad_entropy_ptr is not None:
        for_entropy = tl.load(grad_entropy_ptr + row)
        own_entropy = tl.load(entropy_ptr + row)
    start, _ = _span(bounds_ptr, row, columns, inner, outer_stride, inner_stride)
    logits_ptr += start
    start, columns = _span(bounds_ptr, row, columns, inner, gradient_outer_stride, gradient_inner_stride)
    gradient_ptr += start
    # a row without an upstream gradient is not read, and whatever its logits are, its gradient is 0
    counts = (target != IGNORED) & ((for_logprob != 0) | (for_entropy != 0))
    factor = tl.where(counts, _factor(temperatures_ptr, row, factor), 1.0)
    normalizer = tl.where(counts, tl.load(normalizer_ptr + row), 0.0)
    # differences are taken before any scaling, as in the forward pass
    pivot = (normalizer / factor).to(tl.float32)
    shift = ((pivot.to(tl.float64) * factor - normalizer) * _LOG2_E).to(tl.float32)
    scale = (factor * _LOG2_E).to(tl.float32)
    constant = tl.where(counts, -(for_logprob + for_entropy * own_entropy), 0.0) * factor.to(tl.float32)
    by_exponent = None
    if grad_entropy_ptr is not None:
        by_exponent = tl.where(counts, -for_entropy * _LN_2, 0.0) * factor.to(tl.float32)

    dtype = gradient_ptr.dtype.element_ty
    ITEMS: tl.constexpr = 128 // dtype.primitive_bitwidth  # at least 16 bytes of the logits
    before, body = _body(gradient_ptr, columns, ITEMS)
    if (logits_ptr + before).to(tl.int64) % 16 != 0:  # logits that are aligned differently are read one at a time
        body = 0
    known = counts & (target >= 0) & (target < columns)
    # for the target g (1 - p) - h p (log p + H), without cancellation where p is nearly 1
    own, slope = _unscaled(tl.load(logits_ptr + target, mask=known, other=0.0).to(tl.float32), bend, CAPPED)
    log_p = own.to(tl.float64) * factor - normalizer
    rest = tl.where(log_p > -1e-5, -log_p * (1.0 + 0.5 * log_p), 1.0 - tl.exp(log_p))
    surprise = tl.where(log_p < _NO_EXPONENT, _NO_EXPONENT, log_p) + own_entropy
    own_gradient = (for_logprob * rest - for_entropy * tl.exp(log_p) * surprise).to(tl.float32)
    own_gradient *= slope * factor.to(tl.float32)
    tl.debug_barrier()  # in place: all threads have read the target before one overwrites it
    lanes = tl.arange(0, LANES)
    for start in range(0, columns - body, LANES * ITEMS):
        edge = start + tl.arange(0, LANES * ITEMS)
        inside = edge < columns - body
        column = edge + tl.where(edge < before, 0, body)
        x = tl.load(logits_ptr + column, mask=inside & counts, other=0.0)
        dx = _by_logit(x, bend, scale, pivot, shift, constant, by_exponent, CAPPED)
        tl.store(gradient_ptr + column, dx.to(dtype), mask=inside)
    logits_ptr += before
    gradients_ptr = gradient_ptr + before
    pieces = tl.arange(0, LOADS)[:, None, None] * LANES + lanes[None, :, None]
    places = pieces * ITEMS + tl.arange(0, ITEMS)[None, None, :]
    for start in range(0, body, LOADS * LANES * ITEMS):
        column = start + places
        x = tl.load(tl.multiple_of(logits_ptr + column, [1, 1, 16]), mask=(column < body) & counts, other=0.0)
        dx = _by_logit(x, bend, scale, pivot, shift, constant, by_exponent, CAPPED)
        tl.store(tl.multiple_of(gradients_ptr + column, [1, 1, 16]), dx.to(dtype), mask=column < body)
    tl.debug_barrier()  # the target's own gradient replaces that of the loop
    tl.store(gradient_ptr + target, own_gradient.to(dtype), mask=known)


@triton.jit
def _exponential(x, is_other, bend, scale, pivot, CAPPED: tl.constexpr):
    """u, the exponent to base 2 and its power, but for the target, and du/dx."""
    u, slope = _unscaled(x.to(tl.float32), bend, CAPPED)
    exponent = tl.where(is_other, (u - pivot) * scale, float("-inf"))
    return u, exponent, tl.exp2(exponent), slope


@triton.jit
def _sweep(
    logits_ptr,
    into_ptr,
    entropy_ptr,
    squares_ptr,
    columns,
    own_column,
    reads,
    scale,
    pivot,
    bend,
    CAPPED: tl.constexpr,
    LOADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Writes the exponentials of a row, and returns their sum, that of their products with the exponents and of their
    squares, all without the target, and the largest u. A row that is not read gets zeros."""
    dtype = into_ptr.dtype.element_ty
    ITEMS: tl.constexpr = 128 // dtype.primitive_bitwidth  # at least 16 bytes of the logits
    before, body = _body(into_ptr, columns, ITEMS)
    if (logits_ptr + before).to(tl.int64) % 16 != 0:  # logits that are aligned differently are read one at a time
        body = 0
    top = pivot
    edge_sum = 0.0
    edge_spread = 0.0
    edge_squares = 0.0
    for start in range(0, columns - body, LANES * ITEMS):
        edge = start + tl.arange(0, LANES * ITEMS)
        inside = edge < columns - body
        column = edge + tl.where(edge < before, 0, body)
        x = tl.load(logits_ptr + column, mask=inside & reads, other=float("-inf"))
        u, exponent, term, slope = _exponential(x, column != own_column, bend, scale, pivot, CAPPED)
        tl.store(into_ptr + column, (term * slope).to(dtype), mask=inside)
        top = tl.maximum(top, tl.max(u, axis=0))
        edge_sum += tl.sum(term, axis=0)
        if entropy_ptr is not None:
            edge_spread += tl.sum(tl.maximum(exponent, _NO_EXPONENT) * term, axis=0)
        if squares_ptr is not None:
            edge_squares += tl.sum(term * term, axis=0)
    lanes = tl.arange(0, LANES)
    pieces = tl.arange(0, LOADS)[:, None, None] * LANES + lanes[None, :, None]
    places = pieces * ITEMS + tl.arange(0, ITEMS)[None, None, :]
    sums = tl.zeros([LANES], tl.float32)
    spreads = tl.zeros([LANES], tl.float32)
    sums_of_squares = tl.zeros([LANES], tl.float32)
    highest = tl.zeros([LANES], tl.float32) + top
    for start in range(0, body, LOADS * LANES * ITEMS):
        column = before + start + places
        inside = start + places < body
        x = tl.load(tl.multiple_of(logits_ptr + column, [1, 1, 16]), mask=inside & reads, other=float("-inf"))
        u, exponent, term, slope = _exponential(x, column != own_column, bend, scale, pivot, CAPPED)
        tl.store(tl.multiple_of(into_ptr + column, [1, 1, 16]), (term * slope).to(dtype), mask=inside)
        highest = tl.maximum(highest, tl.max(tl.max(u, axis=2), axis=0))
        sums += tl.sum(tl.sum(term, axis=2), axis=0)
        if entropy_ptr is not None:
            spreads += tl.sum(tl.sum(tl.maximum(exponent, _NO_EXPONENT) * term, axis=2), axis=0)
        if squares_ptr is not None:
            sums_of_squares += tl.sum(tl.sum(term * term, axis=2), axis=0)
    others = edge_sum.to(tl.float64) + tl.sum(sums, axis=0).to(tl.float64)
    spread = edge_spread.to(tl.float64) + tl.sum(spreads, axis=0).to(tl.float64)
    squares = edge_squares.to(tl.float64) + tl.sum(sums_of_squares, axis=0).to(tl.float64)
    return others, spread, squares, tl.max(highest, axis=0)


@triton.jit(do_not_specialize=[*_EXPONENTIALS, "columns", "stride", "into_stride", "factor", "bend"])
def _exponentials_kernel(
    logits_ptr,
    targets_ptr,
    temperatures_ptr,
    into_ptr,
    logprobs_ptr,
    row_scale_ptr,
    entropy_ptr,
    squares_ptr,
    columns: "i32",
    stride: "i64",
    into_stride: "i64",
    factor: "fp64",
    bend: "fp32",
    CAPPED: tl.constexpr,
    LOADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Measures a row and writes exp(z - o) du/dx for its gradient, in one read, with the target's z as the offset o.

    Where that is so far from the log-sum-exp that numbers could overflow, the row is read again, with its largest z.
    Rows that do not count, or hold what is no number, get zeros.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logits_ptr += row * stride
    into_ptr += row * into_stride
    factor = _factor(temperatures_ptr, row, factor)
    counts = target != IGNORED
    reads = counts & (target >= 0) & (target < columns)
    own, own_slope = _unscaled(tl.load(logits_ptr + target, mask=reads, other=0.0).to(tl.float32), bend, CAPPED)
    own_column = tl.where(reads, target, -1).to(tl.int32)

    turn = 0
    pivot = tl.where(reads, own, 0.0)
    is_good = False & counts
    others = factor * 0
    spread = factor * 0
    squares = factor * 0
    own_exponent = factor * 0
    while turn < 3:
        scale = tl.where(reads, factor * _LOG2_E, 1.0).to(tl.float32)
        others, spread, squares, top = _sweep(
            logits_ptr,
            into_ptr,
            entropy_ptr,
            squares_ptr,
            columns,
            own_column,
            reads,
            scale,
            pivot,
            bend,
            CAPPED,
            LOADS,
            LANES,
        )
        own_exponent = (own.to(tl.float64) - pivot.to(tl.float64)) * factor
        total = tl.exp(own_exponent) + others
        is_good = reads & (total > _LEAST) & (total < 1 / _LEAST)
        turn = tl.where(is_good | (reads == 0), 3, turn + 1)
        reads = reads & (turn != 2)
        pivot = tl.where(is_good, pivot, tl.where(reads, top, 0.0))
    tl.debug_barrier()  # the target's own replaces that of the loop
    own_value = (-others).to(tl.float32) * own_slope
    tl.store(into_ptr + target, own_value.to(into_ptr.dtype.element_ty), mask=is_good)

    own_term = tl.exp(own_exponent)  # 1, or nearly nothing beside the others
    total = tl.where(is_good, own_term + others, 1.0)
    log_total = _log1p(tl.where(is_good, others + (own_term - 1.0), 0.0))
    spoiled = tl.where(counts, float("nan"), 0.0)
    tl.store(logprobs_ptr + row, tl.where(is_good, own_exponent - log_total, spoiled).to(tl.float32))
    tl.store(row_scale_ptr + row, tl.where(is_good, -factor / total, spoiled).to(tl.float32))
    if entropy_ptr is not None:
        entropy = log_total - spread * _LN_2 / total
        tl.store(entropy_ptr + row, tl.where(is_good, tl.maximum(entropy, 0.0), spoiled).to(tl.float32))
    if squares_ptr is not None:
        squares = (own_term * own_term + squares) / (total * total)
        tl.store(squares_ptr + row, tl.where(is_good, squares, spoiled).to(tl.float32))


def _arguments(
    logits: Tensor, bounds: Optional[Tensor], temperature: float, softcap: Optional[float], scale: float, loads: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The common arguments of both kernels: run-time values and constexprs."""
    shape, strides = (logits.shape[1:], logits.stride()[:2]) if bounds is None else ((1, 0), (0, 0))
    factor, bend = (scale, 0.0) if softcap is None else (softcap, scale / softcap)
    warps, loads = (_WARPS, loads) if bounds is None else (_SHORT_WARPS, _SHORT_LOADS)
    constants = {"CAPPED": softcap is not None, "LOADS": loads, "LANES": 32 * warps, "num_warps": warps}
    return (shape[1], shape[0], *strides, factor / temperature, bend), constants


def forward(
    logits: Tensor,
    targets: Tensor,
    row_temperature: Optional[Tensor],
    temperature: float,
    softcap: Optional[float],
    logit_scale: float,
    want_entropy: bool,
    bounds: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and log-sum-exps of rows [outer, inner, columns], or one after the other within `bounds`."""
    logprobs = logits.new_empty(targets.shape, dtype=torch.float32)
    entropy = torch.empty_like(logprobs) if want_entropy else logprobs.new_empty(0)
    normalizer = torch.empty_like(logprobs, dtype=torch.float64)
    if targets.numel() > 0:
        arguments, constants = _arguments(logits, bounds, temperature, softcap, logit_scale, _LOADS)
        rows = logits, targets, row_temperature, bounds, normalizer, entropy if want_entropy else None, logprobs
        _forward_kernel[(targets.numel(),)](*rows, *arguments, **constants)
    return logprobs, entropy, normalizer


def backward(
    grad_logprobs: Optional[Tensor],
    grad_entropy: Optional[Tensor],
    normalizer: Tensor,
    entropy: Optional[Tensor],
    logits: Tensor,
    *rest: Any,
) -> Tensor:
    gradient = logits.new_empty(logits.shape)
    backward_into(gradient, grad_logprobs, grad_entropy, normalizer, entropy, logits, *rest)
    return gradient


def backward_into(
    gradient: Tensor,
    grad_logprobs: Optional[Tensor],
    grad_entropy: Optional[Tensor],
    normalizer: Tensor,
    entropy: Optional[Tensor],
    logits: Tensor,
    targets: Tensor,
    row_temperature: Optional[Tensor],
    temperature: float,
    softcap: Optional[float],
    logit_scale: float,
    bounds: Optional[Tensor] = None,
) -> None:
    """Writes the gradient by the logits, perhaps over them."""
    if targets.numel() > 0:
        arguments, constants = _arguments(logits, bounds, temperature, softcap, logit_scale, _LOADS_BACKWARD)
        strides = gradient.stride()[:2] if bounds is None else (0, 0)
        rows = logits, targets, row_temperature, bounds, normalizer, entropy, gradient, grad_logprobs, grad_entropy
        _backward_kernel[(targets.numel(),)](*rows, *arguments, *strides, **constants)


def exponentials(
    into: Tensor,
    logits: Tensor,
    targets: Tensor,
    row_temperature: Optional[Tensor],
    temperature: float,
    softcap: Optional[float],
    logit_scale: float,
    want_entropy: bool,
    want_squares: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, row scales, entropies and sums of squared probabilities of rows [rows, columns], in one read.

    The gradient by the logits is that by the log-prob, times the row's scale, times what is written `into`.
    """
    logprobs = logits.new_empty(targets.shape, dtype=torch.float32)
    row_scale = torch.empty_like(logprobs)
    entropy, squares = (torch.empty_like(logprobs) if want else None for want in (want_entropy, want_squares))
    if targets.numel() > 0:
        (*_, factor, bend), constants = _arguments(
            logits[None], None, temperature, softcap, logit_scale, _LOADS_EXPONENTIALS
        )
        rows = logits, targets, row_temperature, into, logprobs, row_scale, entropy, squares
        strides = logits.shape[1], logits.stride(0), into.stride(0)
        _exponentials_kernel[(targets.numel(),)](*rows, *strides, factor, bend, **constants)
    absent = logprobs.new_empty(0)
    return logprobs, row_scale, absent if entropy is None else entropy, absent if squares is None else squares
