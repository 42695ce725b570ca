"""M2PO: finds the squared log ratio above which tokens are dropped, on the device and without a sort or a host wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Bits to the right of the digit of each pass, and its width. With some bits of the mantissa in the first digit few
# tokens are left for the others.
PASSES = ((19, 12), (9, 10), (0, 9))
# A nonnegative float32 orders as its bits: 8 bits of the exponent, 23 of the mantissa.
_MANTISSA, _EXPONENTS = 23, 256
_INFINITY = 0x7F800000


def find_m2_ceiling(log_ratio: Tensor, scored: Tensor | None, threshold: float, group: Any) -> Tensor:
    """The largest squared log ratio that is kept, a float32 scalar.

    Tokens are dropped from the largest square down until the mean of the others is below `threshold`; tokens of equal
    squares are dropped together, except that those of the smallest square stay.

    Three passes count the tokens per digit of their bits, of which the first begins with the exponent. Within an
    exponent the sum of the mantissas is an integer, so the result is exact, and the same in any order of the tokens and
    on any number of ranks.

    Args:
        log_ratio: [N], any value where not scored; NaN takes no part
        scored: [N], the tokens that take part; None means all
        group: a process group whose batches are one, with one all-reduce for each pass; None means this batch alone
    """
    squares = log_ratio.reshape(-1).square().float()
    if scored is not None:
        squares = torch.where(scored.reshape(-1), squares, torch.nan)
    bits = squares.view(torch.int32)
    prefix = torch.zeros((), dtype=torch.int64, device=bits.device)

    def histogram(level: int) -> tuple[Tensor, Tensor]:
        nonlocal bits
        if level > 0 and bits.device.type == "cpu" and not torch.compiler.is_compiling():
            bits = bits[bits >> sum(PASSES[level]) == prefix]  # of many tokens few are left
        totals = _histogram(bits, prefix.int(), level)
        if group is not None:
            torch.distributed.all_reduce(totals, torch.distributed.ReduceOp.SUM, group)
        return totals[0], totals[1]

    digits = [values.view(_EXPONENTS, -1) for values in histogram(0)]
    counts, sums = (values.sum(1) for values in digits)
    exponents = torch.arange(len(counts), device=bits.device)
    # 2 to the power of max(exponent, 1) - 150, from its bits
    units = (exponents.clamp(min=1) - 150 + 1023 << 52).view(torch.float64)
    below = exponents[:, None] > exponents  # a sum over a triangle: a cumulative sum of floats may vary
    totals, before = sums.double() * units, torch.where(below, sums.double() * units, 0).sum(1)
    prefix, fails = _first_above(counts, counts.cumsum(0), before + totals, threshold)
    kept, total, unit = _below(prefix, counts.cumsum(0), counts), _element(before, prefix), _element(units, prefix)
    whole = torch.zeros_like(kept)  # the mantissas of the exponent that are kept
    digits = [_element(values, prefix) for values in digits]

    for level, (shift, width) in enumerate(PASSES):
        counts, sums = histogram(level) if level > 0 else digits
        until_counts, until_sums = counts.cumsum(0), sums.cumsum(0)
        means = total + (whole + until_sums) * unit
        digit, _ = _first_above(counts, kept + until_counts, means, threshold)
        kept, whole = kept + _below(digit, until_counts, counts), whole + _below(digit, until_sums, sums)
        prefix = (prefix << (width if level > 0 else _MANTISSA - shift)) | digit

    under = torch.where(kept > 0, prefix - 1, prefix)  # the smallest square stays
    return torch.where(fails, under, _INFINITY).int().view(torch.float32)


def _histogram(bits: Tensor, prefix: Tensor, level: int) -> Tensor:
    """Number of tokens and sum of mantissas per digit, as integers, of the tokens whose bits begin with `prefix`.

    Args:
        bits: int32 [N], of squares; of NaN where a token takes no part
        prefix: int32 scalar, the digits before this one; not read at level 0
        level: which of PASSES
    """
    shift, width = PASSES[level]
    counts = bits >> shift + width == prefix if level > 0 else (bits >= 0) & (bits <= _INFINITY)
    others = 1 << width  # a digit of tokens that do not count
    digit = torch.where(counts, (bits >> shift) & others - 1, others).long()
    leading = (bits >> _MANTISSA).clamp(max=1) << _MANTISSA  # the bit that only normal numbers have
    values = torch.stack((torch.ones_like(bits), (bits & (1 << _MANTISSA) - 1) | leading)).long()
    return values.new_zeros(2, others + 1).scatter_add(1, digit.expand(2, -1), values)[:, :-1].contiguous()


def _first_above(counts: Tensor, until_counts: Tensor, until_sums: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The first bin in use that brings the mean to the threshold, and whether there is one."""
    fails = (counts > 0) & ~(until_sums / until_counts < threshold)
    return fails.long().argmax(), fails.any()


def _below(chosen: Tensor, until: Tensor, values: Tensor) -> Tensor:
    """The sum over the bins before the chosen one."""
    return _element(until - values, chosen)


def _element(values: Tensor, place: Tensor) -> Tensor:
    """An element at a place that the host does not read, as it would for an index of no dimensions."""
    return values.index_select(0, place.view(1))[0]
