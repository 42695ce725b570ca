"""Accurate exponentials and masked loads of the kernels of sampling_correction."""

import triton
import triton.language as tl


@triton.jit
def clamp(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def exp(x):
    """Accurate exp: the hardware's exp2 of a float32 multiple of x loses digits with every doubling of |x|."""
    if x.dtype == tl.float64:
        result = tl.exp(x)
    else:
        beyond = (x > 120.0) | (x < -120.0)
        near = tl.where(beyond, 0.0, x)
        power = tl.floor(near * 1.4426950408889634 + 0.5)
        # ln 2 in two parts; the first has so few digits that its product is exact
        rest = (near - power * 0.693359375) + power * 2.12194440e-4
        # the power is split, because 2^128 overflows where the result does not
        value = tl.exp(rest) * 2.0 * tl.exp2(power - 1.0)
        result = tl.where(beyond, tl.where(x > 0.0, float("inf"), 0.0), value)
    return result


@triton.jit
def exp_remainders(x):
    """exp(x) - 1 - x and exp(x) - 1, accurate near 0, where the first is summed as a series."""
    TERMS: tl.constexpr = 16 if x.dtype == tl.float64 else 10
    small = tl.abs(x) < 0.7
    near = tl.where(small, x, 0.0)
    series = near * 0.0 + 1.0
    for k in tl.static_range(TERMS, 2, -1):
        series = 1.0 + series * near * (1.0 / k)
    second = 0.5 * near * near * series
    first = exp(x) - 1.0
    return tl.where(small, second, first - x), tl.where(small, near + second, first)


@triton.jit
def load(values_ptr, at, valid):
    """Loads values, with 0 in slots that take no part, whatever they hold."""
    return tl.load(values_ptr + at, mask=valid, other=0.0)
