"""token_logprobs in Triton: one program per row, a running maximum and running sums in every lane.

Without `from __future__ import annotations`: Triton reads the annotations "fp64" of the kernels' scalars.
"""

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

IGNORED = tl.constexpr(-100)
# Below this, exp is 0; a finite number in place of -inf, so that 0 times it is 0.
_NO_EXPONENT = tl.constexpr(-10000.0)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)

# A row's columns at a time, in bytes: two loads of 16 per thread, the fastest of 1 to 4 on an H200. A row of a small
# vocabulary goes to a single warp.
_BLOCK_BYTES, _WARPS = 8192, 8
_SMALL_BLOCK, _SMALL_WARPS = 256, 1
# Nothing is compiled anew for another length, stride, temperature or coefficient; what alignment allows is a constexpr.
_RUNTIME = ["columns", "inner", "outer_stride", "inner_stride", "temperature", "numerator", "bend"]
_RUNTIME_BACKWARD = [*_RUNTIME, "gradient_outer_stride", "gradient_inner_stride"]


@triton.jit
def _row_start(row, inner, outer_stride, inner_stride):
    return row // inner * outer_stride + row % inner * inner_stride


@triton.jit
def _factor(temperatures_ptr, row, temperature, numerator):
    """z = factor * x, or with a softcap factor * tanh(bend * x). NaN if the temperature means nothing."""
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row).to(tl.float64)
    means = (temperature > 0) & (temperature < float("inf"))
    return tl.where(means, numerator / tl.where(means, temperature, 1.0), float("nan")).to(tl.float32)


@triton.jit
def _bent(u):
    """tanh(u) and 1 - tanh(u)^2. The polynomial, interpolated at Chebyshev's points, is exact to 6e-10 below 0.625."""
    square = u * u
    near = 0.00229280719276
    near = near * square - 0.00834400056095
    near = near * square + 0.02176893546
    near = near * square - 0.0539592616426
    near = near * square + 0.133333035656
    near = near * square - 0.333333331722
    near = u + u * square * near
    decay = tl.exp(-2 * tl.abs(u))
    far = (1 - decay) / (1 + decay)
    far = tl.where(u < 0, -far, far)
    return tl.where(tl.abs(u) < 0.625, near, far), 4 * decay / ((1 + decay) * (1 + decay))


@triton.jit
def _unscaled(x, bend, CAPPED: tl.constexpr):
    """Logits before the product with the factor; infinite ones stay what they are under a softcap."""
    if CAPPED:
        tanh, _ = _bent(x * bend)
        return tl.where(tl.abs(x) == float("inf"), x, tanh)
    return x


@triton.jit
def _mapped(x, factor, bend, CAPPED: tl.constexpr):
    """z and dz/dx of logits; infinite ones stay what they are under a softcap."""
    if CAPPED:
        tanh, slope = _bent(x * bend)
        return tl.where(tl.abs(x) == float("inf"), x, tanh * factor), slope * (bend * factor)
    return x * factor, tl.zeros_like(x) + factor


@triton.jit
def _log1p(x):
    """For float64; exact where x is far below 1."""
    sum = 1.0 + x
    lost = sum - 1.0
    return tl.where(lost == 0, x, tl.log(sum) * (x / tl.where(lost == 0, 1.0, lost)))


@triton.jit
def _measure_row(
    logits_ptr,
    target,
    columns,
    factor,
    bend,
    row,
    logprobs_ptr,
    entropy_ptr,
    normalizer_ptr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log-prob, entropy and log-sum-exp of the row of logits at `logits_ptr`."""
    # As in csrc/token_logprobs/softmax.h, the largest logits are counted and the others summed. Differences are taken
    # before any scaling, where they are exact for equal logits, so that one product serves the scaling and the
    # exponential to base 2. A lane takes 16 bytes of logits at a time, and scales its sums once for all of them.
    ITEMS: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = BLOCK // ITEMS
    places = tl.arange(0, LANES)[:, None] * ITEMS + tl.arange(0, ITEMS)[None, :]
    scale = factor * _LOG2_E
    top = tl.full([LANES], _LOWEST, tl.float32)
    ties = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)
    spread = tl.zeros([LANES], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + places
        x = tl.load(logits_ptr + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        u = _unscaled(x, bend, CAPPED)
        new_top = tl.maximum(top, tl.max(u, axis=1))
        is_top = tl.where(u == new_top[:, None], 1.0, 0.0)
        exponent = (u - new_top[:, None]) * scale
        term = tl.exp2(exponent) - is_top
        gap = tl.where(new_top == top, 0.0, tl.maximum((top - new_top) * scale, _NO_EXPONENT))
        decay = tl.exp2(gap)
        sum = ties + below
        if entropy_ptr is not None:
            exponent = tl.where(exponent < _NO_EXPONENT, _NO_EXPONENT, exponent)
            spread = (spread - gap * sum) * decay - tl.sum(exponent * term, axis=1)
        below = tl.where(new_top == top, below, sum * decay) + tl.sum(term, axis=1)
        ties = tl.where(new_top == top, ties, 0.0) + tl.sum(is_top, axis=1)
        top = new_top

    row_top = tl.max(top, axis=0)
    at_top = top == row_top
    gap = tl.where(at_top, 0.0, tl.maximum((top - row_top) * scale, _NO_EXPONENT))
    decay = tl.exp2(gap)
    sum = ties + below
    number = tl.sum(tl.where(at_top, ties, 0.0), axis=0).to(tl.float64)
    others = (number - 1.0) + tl.sum(tl.where(at_top, below, sum * decay), axis=0).to(tl.float64)
    log_sum = _log1p(others)
    known = (target >= 0) & (target < columns)
    x = tl.load(logits_ptr + tl.where(known, target, 0)).to(tl.float32)
    u = _unscaled(x, bend, CAPPED)
    # a target that is no column, an overflow, or no number at all
    fails = (known == 0) | (row_top == float("inf")) | (others < 0)
    spoiled = tl.where(fails, float("nan"), 0.0)
    logprob = (u.to(tl.float64) - row_top.to(tl.float64)) * factor.to(tl.float64) - log_sum + spoiled
    tl.store(logprobs_ptr + row, tl.where(logprob > 0, 0.0, logprob).to(tl.float32))
    # of no number at all it is what another part of the vocabulary may be added to
    total = (row_top * factor).to(tl.float64) + log_sum + spoiled
    tl.store(normalizer_ptr + row, tl.where((others < 0) & known, float("-inf"), total))
    if entropy_ptr is not None:
        spreads = tl.sum((spread - gap * sum) * decay, axis=0).to(tl.float64) * _LN_2
        entropy = log_sum + spreads / (1.0 + others) + spoiled
        tl.store(entropy_ptr + row, tl.where(entropy < 0, 0.0, entropy).to(tl.float32))


@triton.jit(do_not_specialize=_RUNTIME)
def _forward_kernel(
    logits_ptr,
    targets_ptr,
    temperatures_ptr,
    logprobs_ptr,
    entropy_ptr,
    normalizer_ptr,
    columns: "i32",
    inner: "i64",
    outer_stride: "i64",
    inner_stride: "i64",
    temperature: "fp64",
    numerator: "fp64",
    bend: "fp32",
    CAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target == IGNORED:
        tl.store(logprobs_ptr + row, 0.0)
        tl.store(normalizer_ptr + row, 0.0)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, 0.0)
    else:
        start_of_row = _row_start(row, inner, outer_stride, inner_stride)
        if ALIGNED:  # tl.multiple_of would be lost: on an argument, and on a result of a function that is inlined
            start_of_row = start_of_row // 16 * 16
            columns = columns // 16 * 16
        logits_ptr += start_of_row
        factor = _factor(temperatures_ptr, row, temperature, numerator)
        _measure_row(
            logits_ptr, target, columns, factor, bend, row, logprobs_ptr, entropy_ptr, normalizer_ptr, CAPPED, BLOCK
        )


@triton.jit
def _target_gradient(
    logits_ptr, target, columns, factor, bend, high, low, for_logprob, for_entropy, own_entropy, CAPPED: tl.constexpr
):
    """g (1 - p) - h p (log p + H), without cancellation where p is nearly 1."""
    known = (target >= 0) & (target < columns)
    x = tl.load(logits_ptr + tl.where(known, target, 0)).to(tl.float32)
    z, slope = _mapped(x, factor, bend, CAPPED)
    log_p = (z.to(tl.float64) - high.to(tl.float64)) - low.to(tl.float64)
    rest = tl.where(log_p > -1e-5, -log_p * (1.0 + 0.5 * log_p), 1.0 - tl.exp(log_p))
    surprise = tl.where(log_p < _NO_EXPONENT, _NO_EXPONENT, log_p) + own_entropy
    return (for_logprob * rest - for_entropy * tl.exp(log_p) * surprise).to(tl.float32) * slope


@triton.jit
def _differentiate_row(
    logits_ptr,
    gradient_ptr,
    target,
    columns,
    factor,
    bend,
    row,
    normalizer_ptr,
    entropy_ptr,
    for_logprob,
    for_entropy,
    HAS_ENTROPY: tl.constexpr,
    CAPPED: tl.constexpr,
    INPLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the gradient of the row of logits at `logits_ptr` to `gradient_ptr`."""
    dtype = gradient_ptr.dtype.element_ty
    normalizer = tl.load(normalizer_ptr + row)
    high = normalizer.to(tl.float32)
    low = (normalizer - high.to(tl.float64)).to(tl.float32)
    own_entropy = 0.0
    if HAS_ENTROPY:
        own_entropy = tl.load(entropy_ptr + row)

    own = _target_gradient(
        logits_ptr, target, columns, factor, bend, high, low, for_logprob, for_entropy, own_entropy, CAPPED
    )
    if INPLACE:
        tl.debug_barrier()  # all threads have read the target before one overwrites it
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(logits_ptr + column, mask=inside, other=0.0).to(tl.float32)
        z, slope = _mapped(x, factor, bend, CAPPED)
        log_p = (z - high) - low
        p = tl.exp(log_p)
        weight = tl.zeros_like(p) + for_logprob
        if HAS_ENTROPY:
            weight += for_entropy * (tl.where(log_p < _NO_EXPONENT, _NO_EXPONENT, log_p) + own_entropy)
        dx = tl.where(column == target, own, -(p * weight) * slope)
        tl.store(gradient_ptr + column, dx.to(dtype), mask=inside)


@triton.jit(do_not_specialize=_RUNTIME_BACKWARD)
def _backward_kernel(
    logits_ptr,
    gradient_ptr,
    targets_ptr,
    temperatures_ptr,
    normalizer_ptr,
    entropy_ptr,
    grad_logprobs_ptr,
    grad_entropy_ptr,
    columns: "i32",
    inner: "i64",
    outer_stride: "i64",
    inner_stride: "i64",
    temperature: "fp64",
    numerator: "fp64",
    bend: "fp32",
    gradient_outer_stride: "i64",
    gradient_inner_stride: "i64",
    CAPPED: tl.constexpr,
    ALIGNED: tl.constexpr,
    INPLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    for_logprob = 0.0
    for_entropy = 0.0
    if grad_logprobs_ptr is not None:
        for_logprob = tl.load(grad_logprobs_ptr + row)
    if grad_entropy_ptr is not None:
        for_entropy = tl.load(grad_entropy_ptr + row)
    start_of_row = _row_start(row, inner, outer_stride, inner_stride)
    start_of_gradient = _row_start(row, inner, gradient_outer_stride, gradient_inner_stride)
    if ALIGNED:  # as in the forward pass
        start_of_row = start_of_row // 16 * 16
        start_of_gradient = start_of_gradient // 16 * 16
        columns = columns // 16 * 16
    logits_ptr += start_of_row
    gradient_ptr += start_of_gradient
    dtype = gradient_ptr.dtype.element_ty
    if (target == IGNORED) | ((for_logprob == 0) & (for_entropy == 0)):
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(gradient_ptr + column, tl.zeros([BLOCK], dtype), mask=column < columns)
    else:
        factor = _factor(temperatures_ptr, row, temperature, numerator)
        _differentiate_row(
            logits_ptr,
            gradient_ptr,
            target,
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
            INPLACE,
            BLOCK,
        )


def _launch_options(
    logits: Tensor, temperature: float, softcap: Optional[float], logit_scale: float, gradient_strides: tuple[int, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The last arguments of both kernels: run-time values and constexprs."""
    columns = logits.shape[2]
    outer_stride, inner_stride = logits.stride(0), logits.stride(1)
    numerator, bend = (logit_scale, 0.0) if softcap is None else (softcap, logit_scale / softcap)
    small = columns <= 4 * _SMALL_BLOCK
    arguments = columns, logits.shape[1], outer_stride, inner_stride, temperature, numerator, bend
    return arguments, {
        "CAPPED": softcap is not None,
        "ALIGNED": all(number % 16 == 0 for number in (columns, outer_stride, inner_stride, *gradient_strides)),
        "BLOCK": _SMALL_BLOCK if small else _BLOCK_BYTES // logits.itemsize,
        "num_warps": _SMALL_WARPS if small else _WARPS,
    }


def forward(
    logits: Tensor,
    targets: Tensor,
    row_temperature: Optional[Tensor],
    temperature: float,
    softcap: Optional[float],
    logit_scale: float,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.new_empty(targets.shape, dtype=torch.float32)
    entropy = torch.empty_like(logprobs) if want_entropy else logprobs.new_empty(0)
    normalizer = torch.empty_like(logprobs, dtype=torch.float64)
    if targets.numel() > 0:
        arguments, constants = _launch_options(logits, temperature, softcap, logit_scale, ())
        _forward_kernel[(targets.numel(),)](
            logits,
            targets,
            row_temperature,
            logprobs,
            entropy if want_entropy else None,
            normalizer,
            *arguments,
            **constants,
        )
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
) -> None:
    """Writes the gradient by the logits, perhaps over them."""
    if targets.numel() == 0:
        return
    strides = gradient.stride(0), gradient.stride(1)
    arguments, constants = _launch_options(logits, temperature, softcap, logit_scale, strides)
    _backward_kernel[(targets.numel(),)](
        logits,
        gradient,
        targets,
        row_temperature,
        normalizer,
        entropy,
        grad_logprobs,
        grad_entropy,
        *arguments,
        *strides,
        INPLACE=gradient.data_ptr() == logits.data_ptr(),
        **constants,
    )
