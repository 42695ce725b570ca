"""The pass of policy_loss over tokens: terms, gradients and metrics.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

from collections import namedtuple

import triton
import triton.language as tl

from grpo_kernels.ops.policy_loss.triton.rows import (
    S_ADVANTAGE,
    S_FACTOR,
    S_FAR,
    S_LAST_KEPT,
    S_LOG_RATIO,
    S_PHI_OTHER,
    S_PHI_POSITIVE,
    S_TERMS,
    S_TOKENS,
    Segments,
    Stats,
    locate,
    row_value,
)
from grpo_kernels.ops.policy_loss.triton.sums import (
    LOCAL_TOKEN_MEAN,
    M_CROSS_ENTROPY,
    M_ENTROPY,
    M_ENTROPY_SUM,
    M_GAP,
    M_GAP_COUNT,
    M_GAP_MAX,
    M_KL,
    M_KL_SUM,
    M_LOG_RATIO,
    M_OFF_POLICY,
    M_PHI,
    M_POLICY,
    M_RATIO,
    M_RATIO_MIN,
    M_RATIO_SPREAD,
    M_THROUGH,
    RECORD,
    ROW_TOKEN_MEAN,
    T_ENTROPY,
    T_KL,
    T_POLICY,
    empty_record,
    put,
    put_counts,
    put_extremes,
    put_sum,
    put_weights,
)
from grpo_kernels.ops.policy_loss.triton.terms import (
    AVERAGE,
    CROSS_ENTROPY,
    GEO_MEAN,
    INTEGERS,
    KL_NONE,
    POLICY,
    REFERENCE_KL,
    SEGMENT,
    SEGMENT_MEAN,
    SELECTED,
    SEQUENCE,
    SEQUENCE_TOKEN,
    TOKEN,
    TOKEN_MASK,
    TOKEN_TRUNCATE,
    VESPO,
    Limits,
    is_kept,
    kl_term,
    load,
    load_advantage,
    load_pair,
    mixed_ratio,
    of_kind,
    policy_term,
    takes_part,
    token_weight,
)

# The tokens of a part of a row: where they are, which of them have which terms, and their weights.
Tokens = namedtuple("Tokens", "at inside policy regularized imitated kept weight")


@triton.jit
def _share_of(totals_ptr, stats, weights_ptr, total: tl.constexpr, members: tl.constexpr, AGGREGATION: tl.constexpr):
    """Weight of each token or term of a row, unless explicit weights replace it."""
    share = tl.load(totals_ptr + total)
    if weights_ptr is not None and AGGREGATION != LOCAL_TOKEN_MEAN:
        share = share * 0.0 + 1.0
    elif AGGREGATION == ROW_TOKEN_MEAN:
        share = share / tl.maximum(row_value(stats, members), 1.0)
    return share


@triton.jit
def _entropies(entropy_ptr, by_entropy_ptr, record, tokens, share, coef, AGGREGATION: tl.constexpr):
    """Adds the entropy to the record and writes its gradient."""
    entropy = load(entropy_ptr, tokens.at, tokens.regularized)
    weight = tokens.weight
    if AGGREGATION == LOCAL_TOKEN_MEAN:
        weight = tokens.kept.to(entropy.dtype)
    record = put_sum(record, M_ENTROPY_SUM, entropy)
    record = put(record, M_ENTROPY, tl.sum((entropy * weight).to(tl.float64), axis=0) * share)
    if by_entropy_ptr is not None:
        slope = (share * -coef).to(entropy.dtype)
        tl.store(by_entropy_ptr + tokens.at, tl.where(tokens.regularized, weight * slope, 0.0), mask=tokens.inside)
    return record


@triton.jit
def _mismatch(
    sampling_ptr,
    is_weights_ptr,
    record,
    old,
    at,
    valid,
    row_factor,
    least,
    most,
    LOSS: tl.constexpr,
    CORRECTION: tl.constexpr,
    IS_WEIGHTS_BY_ROW: tl.constexpr,
):
    """Importance weight of the policy term for rollout mismatch, and its metrics."""
    if sampling_ptr is not None:
        gap = tl.abs(old - load(sampling_ptr, at, valid))
        scored = valid & (gap == gap)
        record = put_sum(record, M_GAP, tl.where(scored, gap, 0.0))
        record = put(record, M_GAP_MAX, tl.max(tl.where(scored, gap, float("-inf")), axis=0))
        record = put_sum(record, M_GAP_COUNT, scored)
    by_token: tl.constexpr = (CORRECTION == TOKEN_TRUNCATE) | (CORRECTION == TOKEN_MASK)
    weight = tl.full(old.shape, 0.0, old.dtype) + row_factor
    if by_token or (is_weights_ptr is not None and IS_WEIGHTS_BY_ROW == 0):
        own = token_weight(is_weights_ptr, sampling_ptr, old, at, valid, least, most, CORRECTION, IS_WEIGHTS_BY_ROW)
        record = put_weights(record, own, valid & (own == own))
        # VESPO and GMPO have combined the tokens' weights into one per row
        if (LOSS != VESPO) & (LOSS != GEO_MEAN):
            weight = own
    return weight, record


@triton.jit
def _kl(
    weights_ptr, record, tokens, value, slope, term, share, coef, KL_UNBIASED: tl.constexpr, AGGREGATION: tl.constexpr
):
    """Gradient of the KL term, and its part that flows through the ratio."""
    valid, weight = tokens.regularized, tokens.weight
    if AGGREGATION == LOCAL_TOKEN_MEAN:
        weight = tokens.kept.to(value.dtype)
    scale = weight * (share * coef).to(value.dtype)
    counts = tl.full([], coef, tl.float64) != 0.0  # a KL that is only measured may overflow
    through = tl.full(value.shape, 0.0, value.dtype)
    if KL_UNBIASED:
        value, slope = value * term.ratio, slope * term.ratio
        through = tl.where(term.inside & valid, tl.where(counts, value, 0.0), 0.0) * scale
    value = tl.where(valid, value, 0.0)
    total = tl.sum(value.to(tl.float64), axis=0)
    record = put(record, M_KL_SUM, total)
    if weights_ptr is not None or AGGREGATION == LOCAL_TOKEN_MEAN:
        total = tl.sum((value * weight).to(tl.float64), axis=0)
    return tl.where(valid, tl.where(counts, slope, 0.0), 0.0) * scale, through, put(record, M_KL, total * share)


@triton.jit
def _cross_entropy(logprobs_ptr, normalizers_ptr, record, tokens, share, coef):
    """Adds the cross-entropy to the record; its gradient."""
    if normalizers_ptr is not None:
        count = tl.load(normalizers_ptr + 3)
        share = tl.where(count == count, 1.0 / count, share)
    weight = tl.where(tokens.imitated, tokens.weight, 0.0)
    nll = -load(logprobs_ptr, tokens.at, tokens.imitated)
    record = put(record, M_CROSS_ENTROPY, tl.sum((nll * weight).to(tl.float64), axis=0) * share)
    return -weight * (share * coef).to(weight.dtype), record


@triton.jit
def _kinds_of(kinds_ptr, at, counted):
    """Tokens with a policy term, with a KL and an entropy term, and with a cross-entropy."""
    policy = of_kind(kinds_ptr, at, counted, POLICY)
    regularized, imitated = policy, policy
    if kinds_ptr is not None:
        regularized = policy | of_kind(kinds_ptr, at, counted, REFERENCE_KL)
        imitated = of_kind(kinds_ptr, at, counted, CROSS_ENTROPY)
    return policy, regularized, imitated


@triton.jit
def _tally(record, valid, here, distance, advantage, term, low, high, LOSS: tl.constexpr, RATIO: tl.constexpr):
    """Adds what is measured of the terms to the record."""
    ratio = term.ratio
    is_low, is_high, is_clipped, is_dual = term.is_low, term.is_high, term.is_clipped, term.is_dual
    where = here
    if LOSS == GEO_MEAN:  # counted where tokens are clipped, not where the row has its term
        where = valid
        below, above = distance < -low, distance > high
        better, worse = advantage > 0.0, advantage < 0.0
        is_low, is_high = below & worse, above & better
        # verl counts tokens outside on either side, apart for better and worse rows
        is_clipped, is_dual = (below | above) & better, (below | above) & worse
    record = put_counts(record, is_low & where, is_high & where, is_clipped & where, is_dual & where)
    log_ratio = distance
    if (RATIO == TOKEN) & (LOSS != GEO_MEAN):
        log_ratio = term.limited
    record = put_sum(record, M_LOG_RATIO, tl.where(valid, log_ratio, 0.0))
    record = put_sum(record, M_RATIO, tl.where(here & (ratio == ratio), ratio, 0.0))
    off = tl.where(here & (ratio == ratio), ratio - 1.0, 0.0)
    record = put_sum(record, M_RATIO_SPREAD, off * off)
    if LOSS == VESPO:
        record = put_sum(record, M_PHI, tl.where(here, term.weight, 0.0))
    return put_extremes(record, M_RATIO_MIN, ratio, here)


@triton.jit
def _term_place(
    pointers, segments_ptr, stats, start, length, k, valid, lp, distance, LOSS: tl.constexpr, RATIO: tl.constexpr
):
    """Mask of tokens with a term, its log ratio and log-prob, the slot of its segment's values, and the part of the
    derivative by the log ratio that is the token's own."""
    here, log_ratio, score, slot = valid, distance, lp, start + k
    own_share = distance * 0.0
    if (RATIO == SEQUENCE) | (RATIO == SEQUENCE_TOKEN) | (LOSS == GEO_MEAN):
        log_ratio = tl.full(lp.shape, 0.0, lp.dtype) + row_value(stats, S_LOG_RATIO).to(lp.dtype)
    if RATIO >= AVERAGE:
        log_ratio, own_share = mixed_ratio(distance, row_value(stats, S_LOG_RATIO).to(lp.dtype), RATIO)
    if LOSS == GEO_MEAN:
        here = valid & (k.to(tl.float64) == row_value(stats, S_LAST_KEPT))
    if (RATIO == SEGMENT) | (RATIO == SEGMENT_MEAN):
        slot = start + tl.load(segments_ptr + start + k, mask=valid, other=0)
        # wrong numbers are reported only after the launch, and must not lead out of the row
        here = valid & (tl.load(pointers.last + slot, mask=valid & (slot < start + length), other=-1) == k)
        log_ratio = tl.load(pointers.joint + slot, mask=here, other=0.0).to(lp.dtype)
        if pointers.score is not None:
            score = tl.load(pointers.score + slot, mask=here, other=0.0).to(lp.dtype)
    return here, log_ratio, score, slot, own_share


@triton.jit(do_not_specialize=INTEGERS)
def tokens_kernel(
    logprobs_ptr,
    old_ptr,
    advantages_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    segments_ptr,
    kinds_ptr,
    ref_ptr,
    sampling_ptr,
    is_weights_ptr,
    entropy_ptr,
    floor_ptr,
    weights_ptr,
    normalizers_ptr,
    joint_ptr,
    score_ptr,
    size_ptr,
    last_ptr,
    stats_ptr,
    totals_ptr,
    gradient_ptr,
    slot_gradient_ptr,
    by_entropy_ptr,
    records_ptr,
    rows: "i64",
    width: "i64",
    tokens: "i64",
    chunks: "i64",
    steps: "i32",
    low: "fp64",
    high: "fp64",
    dual_clip: "fp64",
    cap: "fp64",
    sapo_pos: "fp64",
    sapo_neg: "fp64",
    dro_beta: "fp64",
    cov_kl_coef: "fp64",
    clamp_low: "fp64",
    clamp_high: "fp64",
    kl_coef: "fp64",
    kl_clamp_in: "fp64",
    kl_clamp_out: "fp64",
    entropy_coef: "fp64",
    cross_entropy_coef: "fp64",
    correction_min: "fp64",
    correction_max: "fp64",
    LOSS: tl.constexpr,
    RATIO: tl.constexpr,
    KL: tl.constexpr,
    KL_STRAIGHT: tl.constexpr,
    KL_UNBIASED: tl.constexpr,
    AGGREGATION: tl.constexpr,
    KL_AGGREGATION: tl.constexpr,
    ENTROPY_AGGREGATION: tl.constexpr,
    CORRECTION: tl.constexpr,
    OFF_POLICY: tl.constexpr,
    ADVANTAGE_BY_ROW: tl.constexpr,
    IS_WEIGHTS_BY_ROW: tl.constexpr,
    PART: tl.constexpr,
):
    """Gradient and record of one part of a row. The gradient through a joint ratio is left to the next kernel."""
    row, start, length, begin = locate(cu_seqlens_ptr, rows, width, tokens, chunks, steps, PART)
    dtype: tl.constexpr = logprobs_ptr.dtype.element_ty
    stats = Stats(stats_ptr, row, rows)
    k = begin + tl.arange(0, PART)
    at = start + k
    inside = k < length
    counted = takes_part(mask_ptr, segments_ptr, at, k < tl.where(row < rows, length, 0))
    valid, regularized, imitated = _kinds_of(kinds_ptr, at, counted)
    kept = is_kept(entropy_ptr, floor_ptr, at, valid)
    lp, old = load_pair(logprobs_ptr, old_ptr, at, regularized)
    own_advantage = load_advantage(advantages_ptr, row, at, valid, ADVANTAGE_BY_ROW)
    advantage = own_advantage
    if LOSS == GEO_MEAN:
        advantage = tl.full(lp.shape, 0.0, lp.dtype) + row_value(stats, S_ADVANTAGE).to(dtype)
    zero = tl.full(lp.shape, 0.0, lp.dtype)
    weight = zero + 1.0
    if weights_ptr is not None:
        weight = load(weights_ptr, at, regularized | imitated)
    these = Tokens(at, inside, valid, regularized, imitated, kept, weight)
    pointers = Segments(joint_ptr, score_ptr, size_ptr, last_ptr)
    here, log_ratio, score, slot, own_share = _term_place(
        pointers, segments_ptr, stats, start, length, k, valid, lp, lp - old, LOSS, RATIO
    )
    phi_positive, phi_other = zero, zero
    if LOSS == VESPO:
        phi_positive += row_value(stats, S_PHI_POSITIVE).to(dtype)
        phi_other += row_value(stats, S_PHI_OTHER).to(dtype)
    selected = valid
    if kinds_ptr is not None:
        selected = of_kind(kinds_ptr, at, counted, SELECTED)
    limits = Limits(low, high, dual_clip, cap, sapo_pos, sapo_neg, dro_beta, cov_kl_coef, clamp_low, clamp_high)
    term = policy_term(lp, old, advantage, log_ratio, score, phi_positive, phi_other, selected, limits, LOSS)

    low, high = tl.full([], low, dtype), tl.full([], high, dtype)
    record = _tally(empty_record(), valid, here, lp - old, own_advantage, term, low, high, LOSS, RATIO)
    factor = row_value(stats, S_FACTOR).to(dtype)
    least, most = tl.full([], correction_min, dtype), tl.full([], correction_max, dtype)
    factor, record = _mismatch(
        sampling_ptr, is_weights_ptr, record, old, at, valid, factor, least, most, LOSS, CORRECTION, IS_WEIGHTS_BY_ROW
    )
    counts = here
    if LOSS != GEO_MEAN:
        counts = counts & kept
    if OFF_POLICY:
        far = row_value(stats, S_FAR) > 0.0
        dropped = valid & (own_advantage < tl.where(far, 0.0, float("-inf")))
        record = put_sum(record, M_OFF_POLICY, dropped)
        counts = counts & (dropped == 0)
    factor = tl.where(counts, factor * weight, 0.0)
    share = _share_of(totals_ptr, stats, weights_ptr, T_POLICY, S_TERMS, AGGREGATION)
    policy = tl.sum((tl.where(counts, term.value, 0.0) * factor).to(tl.float64), axis=0)
    record = put(record, M_POLICY, policy * share)
    scale = factor * share.to(dtype)
    gradient = tl.where(counts, term.by_score, 0.0) * scale
    if kinds_ptr is not None:
        of_cross_entropy, record = _cross_entropy(
            logprobs_ptr, normalizers_ptr, record, these, share, cross_entropy_coef
        )
        gradient += of_cross_entropy
    through = tl.where(counts, term.by_ratio, 0.0) * scale
    of_kl = zero
    if ref_ptr is not None and KL != KL_NONE:
        share = _share_of(totals_ptr, stats, weights_ptr, T_KL, S_TOKENS, KL_AGGREGATION)
        distance = lp - load(ref_ptr, at, regularized)
        value, slope = kl_term(
            distance, tl.full([], kl_clamp_in, dtype), tl.full([], kl_clamp_out, dtype), KL, KL_STRAIGHT
        )
        of_kl, kl_through, record = _kl(
            weights_ptr, record, these, value, slope, term, share, kl_coef, KL_UNBIASED, KL_AGGREGATION
        )
        through += kl_through
    if entropy_ptr is not None:
        share = _share_of(totals_ptr, stats, weights_ptr, T_ENTROPY, S_TOKENS, ENTROPY_AGGREGATION)
        record = _entropies(entropy_ptr, by_entropy_ptr, record, these, share, entropy_coef, ENTROPY_AGGREGATION)
    if (RATIO == SEGMENT) | (RATIO == SEGMENT_MEAN):
        size = tl.load(size_ptr + slot, mask=here, other=1.0).to(dtype)
        tl.store(slot_gradient_ptr + slot, (gradient + through) / size, mask=here)
        gradient = of_kl
    elif (RATIO == SEQUENCE) | (RATIO >= AVERAGE) | (LOSS == GEO_MEAN):
        if RATIO >= AVERAGE:
            gradient += through * own_share
            through -= through * own_share
        record = put_sum(record, M_THROUGH, through)
        gradient += of_kl
    else:
        gradient += through + of_kl
    tl.store(gradient_ptr + at, gradient, mask=inside)
    tl.store(records_ptr + tl.program_id(0).to(tl.int64) * RECORD + tl.arange(0, RECORD), record)
