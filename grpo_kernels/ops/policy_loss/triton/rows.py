"""The pass of policy_loss over rows, before that over tokens: counts, ratios of rows and segments, weights.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

from collections import namedtuple

import triton
import triton.language as tl

from grpo_kernels.ops.policy_loss.triton.terms import (
    AVERAGE,
    GEO_MEAN,
    GEOMETRIC_TRUNCATE,
    INTEGERS,
    POLICY,
    SEGMENT_MEAN,
    SEQUENCE,
    SEQUENCE_TOKEN,
    SEQUENCE_TRUNCATE,
    VESPO,
    clamp,
    is_kept,
    load,
    load_advantage,
    load_pair,
    mismatch_weight,
    of_kind,
    pessimistic,
    sampler_gap,
    takes_part,
    token_weight,
)

# Columns of stats[STATS, rows], all float64. IS is the importance weight as measured, FACTOR as applied.
STATS = 13
(
    S_TOKENS,
    S_KEPT,
    S_TERMS,
    S_WRONG,
    S_LOG_RATIO,
    S_IS,
    S_FACTOR,
    S_FAR,
    S_PHI_POSITIVE,
    S_PHI_OTHER,
    S_ADVANTAGE,
    S_LAST_KEPT,
    S_POLICY,
) = (tl.constexpr(i) for i in range(13))

# Where the statistics of one row are: stats_ptr, the row and the number of rows.
Stats = namedtuple("Stats", "ptr row rows")
# Sums over segments, or pointers to them, where each segment has the slot at its row's start plus its number.
Segments = namedtuple("Segments", "joint score size last")
# Sums over the tokens of a row that have a policy term.
Sums = namedtuple("Sums", "tokens kept ratio gaps drift logs advantages last_kept")
# The numbers of a plan that are applied to the sums over a row.
Numbers = namedtuple("Numbers", "k_pos lambda_pos k_neg lambda_neg correction_min correction_max off_policy_threshold")


@triton.jit
def bounds(cu_seqlens_ptr, row, rows, width, tokens):
    """First token and length of a row; tokens behind the last row are row number `rows`."""
    if cu_seqlens_ptr is None:
        start = row * width
        length = width
    else:
        start = tl.load(cu_seqlens_ptr + row)
        length = tl.load(cu_seqlens_ptr + row + 1, mask=row < rows, other=tokens) - start
    return start, length


@triton.jit
def first_part(cu_seqlens_ptr, row, rows, chunks, PART: tl.constexpr):
    """The first part of a row. Packed rows get one for each multiple of PART that they hold and one more."""
    if cu_seqlens_ptr is None:
        first = row * chunks
    else:
        first = tl.load(cu_seqlens_ptr + row, mask=row <= rows, other=0) // PART + row
    return first


@triton.jit
def locate(cu_seqlens_ptr, rows, width, tokens, chunks, steps, PART: tl.constexpr):
    """Row of this program's part of a row, the row's first token and length, and the part's own place in it."""
    part = tl.program_id(0).to(tl.int64)
    if cu_seqlens_ptr is None:
        row = part // chunks
    else:
        row, last = part * 0, part * 0 + rows
        for _ in range(steps):
            middle = (row + last + 1) // 2
            reached = first_part(cu_seqlens_ptr, middle, rows, chunks, PART) <= part
            row, last = tl.where(reached, middle, row), tl.where(reached, last, middle - 1)
    start, length = bounds(cu_seqlens_ptr, row, rows, width, tokens)
    return row, start, length, (part - first_part(cu_seqlens_ptr, row, rows, chunks, PART)) * PART


@triton.jit
def row_value(stats, column: tl.constexpr):
    return tl.load(stats.ptr + column * stats.rows + stats.row, mask=stats.row < stats.rows, other=0.0)


@triton.jit
def _set(stats, column: tl.constexpr, value):
    tl.store(stats.ptr + column * stats.rows + stats.row, value)


@triton.jit
def _write_segments(pointers, slot, sums, mask, RATIO: tl.constexpr):
    divisor = sums.size * 0.0 + 1.0
    if RATIO == SEGMENT_MEAN:
        divisor = tl.maximum(sums.size, 1.0)
    tl.store(pointers.joint + slot, sums.joint / divisor, mask=mask)
    if pointers.score is not None:
        tl.store(pointers.score + slot, sums.score / divisor, mask=mask)
    tl.store(pointers.size + slot, divisor, mask=mask)
    tl.store(pointers.last + slot, sums.last, mask=mask)


@triton.jit
def _join_segments(
    logprobs_ptr, old_ptr, mask_ptr, segments_ptr, pointers, start, length, RATIO: tl.constexpr, TILE: tl.constexpr
):
    """Sums over the segments of a row, written at its start plus their number; how many, and what is wrong with them.

    A segment's tokens are the equal numbers of a tile, and of the tiles before it while no higher number came: its sums
    until now are carried, and written when a higher one does come. No differences of running sums, which would lose
    digits and let one infinite token spoil its neighbours.
    """
    open_number = (length * 0 - 1).to(tl.int32)
    open_last, final = open_number, open_number
    open_joint = length.to(tl.float64) * 0.0
    open_score, open_size, terms, wrong = open_joint, open_joint, open_joint, open_joint
    for offset in range(0, length, TILE):
        k = offset + tl.arange(0, TILE)
        position = k.to(tl.int32)
        valid = takes_part(mask_ptr, segments_ptr, start + k, k < length)
        number = tl.load(segments_ptr + start + k, mask=valid, other=-1)
        lp, old = load_pair(logprobs_ptr, old_ptr, start + k, valid)
        distance = lp - old
        same = (number[:, None] == number[None, :]) & valid[None, :]
        goes_on = valid & (number == open_number)
        joint = tl.sum(tl.where(same, distance[None, :], 0.0).to(tl.float64), axis=1) + tl.where(
            goes_on, open_joint, 0.0
        )
        sum_score = joint
        if pointers.score is not None:  # otherwise no score is asked for, and what stands for it is never written
            sum_score = tl.sum(tl.where(same, lp[None, :], 0.0).to(tl.float64), axis=1) + tl.where(
                goes_on, open_score, 0.0
            )
        size = tl.sum(same.to(tl.int32), axis=1).to(tl.float64) + tl.where(goes_on, open_size, 0.0)
        last = tl.max(tl.where(same, position[None, :], -1), axis=1)
        earlier = position[None, :] < position[:, None]
        highest = tl.maximum(tl.max(tl.where(earlier, number[None, :], -1), axis=1), open_number)
        wrong += tl.sum((valid & (number < highest)).to(tl.int32), axis=0)

        top = tl.maximum(tl.max(number, axis=0), open_number)
        ended = valid & (position == last) & (number < top)
        sums = Segments(joint, sum_score, size, last)
        _write_segments(pointers, start + number, sums, ended & (number < length), RATIO)
        was_open = (open_number >= 0) & (top > open_number) & (tl.max(goes_on.to(tl.int32), axis=0) == 0)
        sums = Segments(open_joint, open_score, open_size, open_last)
        _write_segments(pointers, start + open_number, sums, was_open & (open_number < length), RATIO)
        terms += tl.sum(ended.to(tl.int32), axis=0) + was_open.to(tl.int32)

        stays = top == open_number
        at_top = valid & (number == top)
        open_joint = tl.where(stays, open_joint, 0.0) + tl.sum(tl.where(at_top, distance, 0.0).to(tl.float64), axis=0)
        if pointers.score is not None:
            open_score = tl.where(stays, open_score, 0.0) + tl.sum(tl.where(at_top, lp, 0.0).to(tl.float64), axis=0)
        open_size = tl.where(stays, open_size, 0.0) + tl.sum(at_top.to(tl.int32), axis=0)
        open_last = tl.maximum(tl.where(stays, open_last, -1), tl.max(tl.where(at_top, position, -1), axis=0))
        open_number = top
        final = tl.maximum(final, tl.max(tl.where(valid, position, -1), axis=0))
    is_open = open_number >= 0
    sums = Segments(open_joint, open_score, open_size, open_last)
    _write_segments(pointers, start + open_number, sums, is_open & (open_number < length), RATIO)
    # the numbers count from 0, so none is above the place of the row's last token
    return terms + is_open.to(tl.int32), wrong + (open_number > final).to(tl.int32)


@triton.jit
def _limit(log_weight):
    """VESPO's bounds of logarithms of weights: log 1e-8 and 20."""
    # a bare number in tl.where is a float32
    zero = tl.full(log_weight.shape, 0.0, log_weight.dtype)
    return clamp(log_weight, zero - 18.420680743952367, zero + 20.0)


@triton.jit
def _log_weight(weight, LOSS: tl.constexpr):
    """The logarithm of a mismatch weight as VESPO and GMPO add it up over a row."""
    if LOSS == VESPO:
        return _limit(tl.log(weight))
    else:
        return tl.log(weight + 1e-10)


@triton.jit
def _vespo_weight(log_weight, k, rate):
    weight = tl.exp(rate + k * log_weight - rate * tl.exp(log_weight))
    return tl.where(weight == float("inf"), 0.0, weight)


@triton.jit
def _tell_row(
    stats,
    sums,
    is_weights_ptr,
    numbers,
    LOSS: tl.constexpr,
    RATIO: tl.constexpr,
    CORRECTION: tl.constexpr,
    OFF_POLICY: tl.constexpr,
    IS_WEIGHTS_BY_ROW: tl.constexpr,
):
    """From the sums over a row to what its tokens have to know of it."""
    of_sequence: tl.constexpr = (RATIO == SEQUENCE) | (RATIO == SEQUENCE_TOKEN) | (RATIO >= AVERAGE)
    corrects_row: tl.constexpr = CORRECTION >= SEQUENCE_TRUNCATE
    is_of_row: tl.constexpr = corrects_row or (is_weights_ptr is not None and IS_WEIGHTS_BY_ROW)
    divisor = tl.maximum(sums.tokens, 1.0)
    factor = sums.tokens * 0.0 + 1.0
    if is_of_row:
        if corrects_row:
            least = tl.full([], numbers.correction_min, tl.float64)
            most = tl.full([], numbers.correction_max, tl.float64)
            gap = sums.gaps / divisor if CORRECTION >= GEOMETRIC_TRUNCATE else sums.gaps
            factor = mismatch_weight(gap, least, most, CORRECTION)
        else:
            factor = tl.load(is_weights_ptr + stats.row).to(tl.float64)
        measured = factor
        if not corrects_row:  # of a row without tokens nothing is measured
            measured = tl.where(sums.tokens > 0, factor, float("nan"))
        _set(stats, S_IS, measured)
    if of_sequence:
        _set(stats, S_LOG_RATIO, sums.ratio / divisor)
    if LOSS == VESPO:
        factor = divisor * 0.0 + 1.0
        logs = _limit(sums.logs)
        _set(stats, S_PHI_POSITIVE, _vespo_weight(logs, numbers.k_pos, numbers.lambda_pos))
        _set(stats, S_PHI_OTHER, _vespo_weight(logs, numbers.k_neg, numbers.lambda_neg))
    if LOSS == GEO_MEAN:
        if not is_of_row:
            factor = tl.exp(sums.logs / divisor)
        _set(stats, S_LOG_RATIO, sums.ratio / tl.maximum(sums.kept, 1.0))
        _set(stats, S_ADVANTAGE, sums.advantages / divisor)
        _set(stats, S_LAST_KEPT, sums.last_kept.to(tl.float64))
    _set(stats, S_FACTOR, factor)
    if OFF_POLICY:
        far = (sums.drift / divisor <= numbers.off_policy_threshold) == 0
        _set(stats, S_FAR, far.to(tl.float64))


@triton.jit(do_not_specialize=INTEGERS)
def rows_kernel(
    logprobs_ptr,
    old_ptr,
    advantages_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    segments_ptr,
    kinds_ptr,
    sampling_ptr,
    is_weights_ptr,
    entropy_ptr,
    floor_ptr,
    joint_ptr,
    score_ptr,
    size_ptr,
    last_ptr,
    stats_ptr,
    rows: "i64",
    width: "i64",
    tokens: "i64",
    low: "fp64",
    high: "fp64",
    k_pos: "fp64",
    lambda_pos: "fp64",
    k_neg: "fp64",
    lambda_neg: "fp64",
    correction_min: "fp64",
    correction_max: "fp64",
    off_policy_threshold: "fp64",
    LOSS: tl.constexpr,
    RATIO: tl.constexpr,
    CORRECTION: tl.constexpr,
    OFF_POLICY: tl.constexpr,
    ADVANTAGE_BY_ROW: tl.constexpr,
    IS_WEIGHTS_BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """stats[STATS, rows], one program per row; segments are joined on the way."""
    row = tl.program_id(0).to(tl.int64)
    stats = Stats(stats_ptr, row, rows)
    start, length = bounds(cu_seqlens_ptr, row, rows, width, tokens)
    dtype: tl.constexpr = logprobs_ptr.dtype.element_ty
    of_sequence: tl.constexpr = (RATIO == SEQUENCE) | (RATIO == SEQUENCE_TOKEN) | (RATIO >= AVERAGE)
    corrects_row: tl.constexpr = CORRECTION >= SEQUENCE_TRUNCATE
    collects: tl.constexpr = (LOSS == VESPO) | (LOSS == GEO_MEAN)
    has_is: tl.constexpr = is_weights_ptr is not None or CORRECTION != 0
    is_of_row: tl.constexpr = corrects_row or (is_weights_ptr is not None and IS_WEIGHTS_BY_ROW)
    count = tl.zeros([BLOCK], tl.int32)
    kept_count = count
    policy_count = count
    last_kept = count - 1
    nothing = tl.zeros([BLOCK], tl.float64)
    ratio, gaps, drift, logs, advantages = nothing, nothing, nothing, nothing, nothing
    for offset in range(0, length, BLOCK):
        k = offset + tl.arange(0, BLOCK)
        at = start + k
        counted = takes_part(mask_ptr, segments_ptr, at, k < length)
        valid = of_kind(kinds_ptr, at, counted, POLICY)
        kept = is_kept(entropy_ptr, floor_ptr, at, valid)
        count += counted.to(tl.int32)
        policy_count += valid.to(tl.int32)
        kept_count += kept.to(tl.int32)
        if of_sequence | corrects_row | collects | OFF_POLICY:
            lp, old = load_pair(logprobs_ptr, old_ptr, at, valid)
        if of_sequence:
            ratio += (lp - old).to(tl.float64)
        if LOSS == GEO_MEAN:
            advantage = load_advantage(advantages_ptr, row, at, valid, ADVANTAGE_BY_ROW)
            advantages += advantage.to(tl.float64)
            shortened = pessimistic(lp - old, advantage, tl.full([], low, dtype), tl.full([], high, dtype))
            ratio += tl.where(kept, shortened, 0.0).to(tl.float64)
            last_kept = tl.where(kept, k.to(tl.int32), last_kept)
        if LOSS == VESPO:
            logs += clamp((lp - old).to(tl.float64), -20.0, 20.0)
        if collects and has_is and not is_of_row:
            least, most = tl.full([], correction_min, dtype), tl.full([], correction_max, dtype)
            weight = token_weight(
                is_weights_ptr, sampling_ptr, old, at, valid, least, most, CORRECTION, IS_WEIGHTS_BY_ROW
            )
            logs += tl.where(valid, _log_weight(weight.to(tl.float64), LOSS), 0.0)
        if corrects_row:
            gaps += sampler_gap(old, load(sampling_ptr, at, valid)).to(tl.float64)
        if OFF_POLICY:
            sampled = old
            if sampling_ptr is not None:
                sampled = load(sampling_ptr, at, valid)
            drift += sampler_gap(sampled, lp).to(tl.float64)
    here = tl.sum(count, axis=0).to(tl.float64)
    kept_here = tl.sum(kept_count, axis=0).to(tl.float64)
    policy_here = here
    if kinds_ptr is not None:
        policy_here = tl.sum(policy_count, axis=0).to(tl.float64)
    terms = here
    if LOSS == GEO_MEAN:
        terms = tl.where(kept_here > 0, 1.0, kept_here)
    if joint_ptr is not None:
        pointers = Segments(joint_ptr, score_ptr, size_ptr, last_ptr)
        segment_terms, wrong = _join_segments(
            logprobs_ptr, old_ptr, mask_ptr, segments_ptr, pointers, start, length, RATIO, TILE
        )
        terms = segment_terms.to(tl.float64)
        _set(stats, S_WRONG, wrong.to(tl.float64))
    _set(stats, S_TOKENS, here)
    _set(stats, S_KEPT, kept_here)
    _set(stats, S_TERMS, terms)
    _set(stats, S_POLICY, policy_here)

    ratio, gaps, drift = tl.sum(ratio, axis=0), tl.sum(gaps, axis=0), tl.sum(drift, axis=0)
    logs, advantages, last_kept = tl.sum(logs, axis=0), tl.sum(advantages, axis=0), tl.max(last_kept, axis=0)
    row_sums = Sums(policy_here, kept_here, ratio, gaps, drift, logs, advantages, last_kept)
    numbers = Numbers(k_pos, lambda_pos, k_neg, lambda_neg, correction_min, correction_max, off_policy_threshold)
    _tell_row(stats, row_sums, is_weights_ptr, numbers, LOSS, RATIO, CORRECTION, OFF_POLICY, IS_WEIGHTS_BY_ROW)
