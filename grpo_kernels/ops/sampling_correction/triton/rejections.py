"""The tokens of a row, and the rejections of both: shared by the parts of the kernel of sampling_correction."""

from collections import namedtuple

import triton
import triton.language as tl

from grpo_kernels.ops.sampling_correction import config
from grpo_kernels.ops.sampling_correction.triton.numbers import clamp, exp, exp_remainders, load

# Kernels read module-level names only as constexprs.
K1, K2, K3 = tl.constexpr(config.K1), tl.constexpr(config.K2), tl.constexpr(config.K3)
LEVEL_MAX, LEVEL_SUM = tl.constexpr(config.LEVEL_MAX), tl.constexpr(config.LEVEL_SUM)
ROW_SUMS, ROW_EXTREMES = tl.constexpr(len(config.ROW_SUMS)), tl.constexpr(len(config.ROW_MINIMA))
REJECTION_SUMS = tl.constexpr(len(config.REJECTION_SUMS))
REJECTION_EXTREMES = tl.constexpr(len(config.REJECTION_MINIMA))

# The arrays of a row's tokens.
Row = namedtuple("Row", "old sampling mask weights kept start length there")
Token = namedtuple("Token", "valid scored old sampling log_ratio limited")
# The place of a row's record: its first column, and whether the program has a row.
Record = namedtuple("Record", "ptr there")


@triton.jit
def load_token(row, k, bound):
    inside, at = (k < row.length) & row.there, row.start + k
    valid = inside
    if row.mask is not None:
        valid = valid & (tl.load(row.mask + at, mask=inside, other=0) != 0)
    old, sampling = load(row.old, at, valid), load(row.sampling, at, valid)
    log_ratio = old - sampling
    scored = valid & (log_ratio == log_ratio)
    old, sampling = tl.where(scored, old, 0.0), tl.where(scored, sampling, 0.0)
    log_ratio = tl.where(scored, log_ratio, 0.0)
    return Token(valid, scored, old, sampling, log_ratio, clamp(log_ratio, -bound, bound))


@triton.jit
def outcomes(logprob):
    """Logarithms of the probabilities of "this token" and "another", 1e-6 away from 0 and 1, and both themselves."""
    least = tl.full([], 1e-6, logprob.dtype)
    one = tl.full([], 1.0, logprob.dtype)
    _, minus_other = exp_remainders(logprob)
    log = clamp(logprob, tl.full([], -13.815510557964274, logprob.dtype), -least)
    other = clamp(-minus_other, least, one - least)
    return log, tl.log(other), exp(log), other


@triton.jit
def estimate(token, ESTIMATOR: tl.constexpr):
    """The estimator of every token, 0 where the sampler has no log-prob."""
    if ESTIMATOR == K1:
        value = -token.limited
    elif ESTIMATOR == K2:
        value = 0.5 * token.limited * token.limited
    elif ESTIMATOR == K3:
        value, _ = exp_remainders(token.limited)
    else:
        log, log_other, old, other = outcomes(token.old)
        sampling_log, sampling_log_other, sampling, sampling_other = outcomes(token.sampling)
        by_token, by_other = log - sampling_log, log_other - sampling_log_other
        from_sampling = -(sampling * by_token + sampling_other * by_other)
        value = tl.maximum(old * by_token + other * by_other, from_sampling)
        value = tl.where(token.scored, value, 0.0)
    return value


@triton.jit
def put(record, column, value):
    tl.store(record.ptr + column, value, mask=record.there)


@triton.jit
def put_rejection(record, columns, slot, COUNT: tl.constexpr):
    """Writes the record of a rejection: its sums, minima and maxima, in the order of the table."""
    for i in tl.static_range(REJECTION_SUMS):
        put(record, ROW_SUMS + slot * REJECTION_SUMS + i, columns[i])
    first: tl.constexpr = ROW_SUMS + COUNT * REJECTION_SUMS + ROW_EXTREMES
    for i in tl.static_range(REJECTION_EXTREMES):
        minimum = first + slot * REJECTION_EXTREMES + i
        put(record, minimum, columns[REJECTION_SUMS + i])
        maximum = minimum + ROW_EXTREMES + COUNT * REJECTION_EXTREMES
        put(record, maximum, columns[REJECTION_SUMS + REJECTION_EXTREMES + i])


@triton.jit
def or_extreme(there, value):
    """A row's value as its own minimum and maximum."""
    return tl.where(there, value, float("inf")), tl.where(there, value, float("-inf"))


@triton.jit
def judge_row(record, sums, low, high, slot, LEVEL: tl.constexpr, ESTIMATOR: tl.constexpr, COUNT: tl.constexpr):
    """Writes the record of a rejection of rows; returns whether it drops this one."""
    active = sums.tokens > 0
    size = tl.maximum(sums.tokens, 1.0)
    if ESTIMATOR == K1:
        total, least, most = -sums.limited, -sums.high, -sums.low
    elif ESTIMATOR == K2:
        total, least = sums.k2, sums.k2 * 0.0
        most = 0.5 * tl.maximum(sums.low * sums.low, sums.high * sums.high)
    elif ESTIMATOR == K3:  # convex in the log ratio
        at_low, _ = exp_remainders(sums.low)
        at_high, _ = exp_remainders(sums.high)
        total, least, most = sums.k3, sums.k3 * 0.0, tl.maximum(at_low, at_high)
    else:
        total, least, most = sums.kl, sums.kl * 0.0, sums.kl_max
    if LEVEL == LEVEL_MAX:
        value = tl.where(least + most < 0.0, least, most)
        value = tl.where(sums.scored > 0, value, 0.0)
        above = active & (sums.scored > 0) & (most > high)
        below = active & (sums.scored > 0) & (least < low)
    else:
        value = total if LEVEL == LEVEL_SUM else total / size
        above, below = active & (value > high), active & (value < low)
    clamped = clamp(value, low, high)
    dropped = above | below
    minimum, maximum = or_extreme(active, value)
    is_above, is_below = above.to(tl.float64), below.to(tl.float64)
    masked = tl.where(dropped, sums.tokens, 0.0)
    known = tl.where(active, value, 0.0)
    columns = (
        sums.tokens * value,
        sums.tokens * clamped,
        sums.tokens * clamped * clamped,
        is_above,
        is_below,
        masked,
        dropped.to(tl.float64),
        known,
        known * known,
        is_above,
        is_below,
        minimum,
        minimum,
        maximum,
        maximum,
    )
    put_rejection(record, columns, slot, COUNT)
    return dropped


@triton.jit
def measure_tokens(
    record, row, bound, low, high, tokens, slot, ESTIMATOR: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the record of a rejection of tokens, from another walk over the row, which is in the cache."""
    nothing = tl.zeros([BLOCK], tl.float64)
    total, clamped_sum, squares = nothing, nothing, nothing
    above, below = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    least, most = nothing + float("inf"), nothing - float("inf")
    for offset in range(0, row.length, BLOCK):
        token = load_token(row, offset + tl.arange(0, BLOCK), bound)
        value = estimate(token, ESTIMATOR)
        above += (token.scored & (value > high.to(value.dtype))).to(tl.int32)
        below += (token.scored & (value < low.to(value.dtype))).to(tl.int32)
        wide = value.to(tl.float64)
        clamped = tl.where(token.scored, clamp(wide, low, high), 0.0)
        total += wide
        clamped_sum += clamped
        squares += clamped * clamped
        least = tl.minimum(least, tl.where(token.scored, wide, float("inf")))
        most = tl.maximum(most, tl.where(token.scored, wide, float("-inf")))
    total = tl.sum(total, axis=0)
    is_above, is_below = tl.sum(above, axis=0).to(tl.float64), tl.sum(below, axis=0).to(tl.float64)
    active = tokens > 0
    value = total / tl.maximum(tokens, 1.0)
    minimum, maximum = or_extreme(active, value)
    columns = (
        total,
        tl.sum(clamped_sum, axis=0),
        tl.sum(squares, axis=0),
        is_above,
        is_below,
        is_above + is_below,
        (is_above + is_below > 0).to(tl.float64),
        value,
        value * value,
        (active & (value > high)).to(tl.float64),
        (active & (value < low)).to(tl.float64),
        tl.min(least, axis=0),
        minimum,
        tl.max(most, axis=0),
        maximum,
    )
    put_rejection(record, columns, slot, COUNT)
