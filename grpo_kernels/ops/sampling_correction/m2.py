"""M2PO: finds the squared log ratio above which tokens are dropped, on the device and without a sort or a host wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A nonnegative float32 orders as its bits: 8 bits of the exponent, 23 of the mantissa, which the second pass halves.
_MANTISSA, _FIRST_HALF, _SECOND_HALF = 23, 12, 11
_EXPONENTS = 256
_INFINITY = 0x7F800000


def find_m2_ceiling(log_ratio: Tensor, scored: Tensor, threshold: float, group: Any) -> Tensor:
    """The largest squared log ratio that is kept, a float32 scalar.

    Tokens are dropped from the largest square down until the mean of the others is below `threshold`; tokens of equal
    squares are dropped together, except that those of the smallest square stay.

    Three passes count the tokens per exponent, then per half of the mantissa. Within an exponent the sum of the
    mantissas is an integer, so the result is exact, and the same in any order of the tokens and on any number of ranks.

    Args:
        log_ratio: [N], any value where not scored
        scored: [N], the tokens that take part
        group: a process group whose batches are one, with one all-reduce for each pass; None means this batch alone
    """
    scored = scored.reshape(-1)
    squares = torch.where(scored, log_ratio.reshape(-1).square(), 0).float()
    bits = squares.view(torch.int32).long()
    exponent = bits >> _MANTISSA
    mantissa = (bits & ((1 << _MANTISSA) - 1)) | (exponent > 0).long() << _MANTISSA
    counts, sums = _histogram(exponent, mantissa, scored, _EXPONENTS, group)
    exponents = torch.arange(_EXPONENTS, device=bits.device)
    # 2 to the power of max(exponent, 1) - 150, from its bits
    units = (exponents.clamp(min=1) - 150 + 1023 << 52).view(torch.float64)
    below = exponents[:, None] > exponents  # a sum over a triangle: a cumulative sum of floats may vary
    totals, before = sums.double() * units, torch.where(below, sums.double() * units, 0).sum(1)
    chosen, fails = _first_above(counts, counts.cumsum(0), before + totals, threshold)
    kept, total, unit = _below(chosen, counts.cumsum(0), counts), before.take(chosen), units.take(chosen)

    first = (bits >> _SECOND_HALF) & ((1 << _FIRST_HALF) - 1)
    inside = scored & (exponent == chosen)
    counts, sums = _histogram(first, mantissa, inside, 1 << _FIRST_HALF, group)
    until_counts, until_sums = counts.cumsum(0), sums.cumsum(0)
    high, _ = _first_above(counts, kept + until_counts, total + until_sums * unit, threshold)
    kept, whole = kept + _below(high, until_counts, counts), _below(high, until_sums, sums)

    second = bits & ((1 << _SECOND_HALF) - 1)
    counts, sums = _histogram(second, mantissa, inside & (first == high), 1 << _SECOND_HALF, group)
    until_counts, until_sums = kept + counts.cumsum(0), whole + sums.cumsum(0)
    low, _ = _first_above(counts, until_counts, total + until_sums * unit, threshold)

    under = (chosen << _MANTISSA | high << _SECOND_HALF | low) - 1
    least = torch.where(scored, bits, _INFINITY).amin() if bits.numel() else torch.full_like(under, _INFINITY)
    if group is not None:
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group)
    ceiling = torch.where(fails, torch.maximum(under, least), _INFINITY)
    return ceiling.int().view(torch.float32)


def _histogram(index: Tensor, mantissa: Tensor, where: Tensor, bins: int, group: Any) -> tuple[Tensor, Tensor]:
    """Number of tokens and sum of mantissas per bin, as integers."""
    both = torch.stack((where.long(), torch.where(where, mantissa, 0)))
    totals = both.new_zeros(2, bins).scatter_add(1, index.expand(2, -1), both)
    if group is not None:
        torch.distributed.all_reduce(totals, torch.distributed.ReduceOp.SUM, group)
    return totals[0], totals[1]


def _first_above(counts: Tensor, until_counts: Tensor, until_sums: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The first bin in use that brings the mean to the threshold, and whether there is one."""
    fails = (counts > 0) & ~(until_sums / until_counts < threshold)
    return fails.long().argmax(), fails.any()


def _below(chosen: Tensor, until: Tensor, values: Tensor) -> Tensor:
    """The sum over the bins before the chosen one."""
    return (until - values).take(chosen)  # an index of no dimensions would be read by the host
