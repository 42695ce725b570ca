"""Functions shared by the kernels of policy_loss: the terms of one token with their derivatives, and array access.

Per-token arithmetic is in the dtype of the log-probs, sums are in float64. Kernels cast scalar arguments with tl.full,
because the interpreter passes Python floats, which tl.where would take as float32.
"""

from collections import namedtuple

import triton
import triton.language as tl

from grpo_kernels.ops.policy_loss import config

# Kernels read module-level names only as constexprs.
CLIP = tl.constexpr(config.CLIP)
CISPO = tl.constexpr(config.CISPO)
SAPO = tl.constexpr(config.SAPO)
VESPO = tl.constexpr(config.VESPO)
GEO_MEAN = tl.constexpr(config.GEO_MEAN)
DPPO_TV = tl.constexpr(config.DPPO_TV)
DPPO_KL = tl.constexpr(config.DPPO_KL)
REINFORCE = tl.constexpr(config.REINFORCE)
DRO = tl.constexpr(config.DRO)
IPO = tl.constexpr(config.IPO)
ICEPOP = tl.constexpr(config.ICEPOP)
TOPR = tl.constexpr(config.TOPR)
CLIP_COV = tl.constexpr(config.CLIP_COV)
KL_COV = tl.constexpr(config.KL_COV)
TOKEN = tl.constexpr(config.TOKEN)
SEQUENCE = tl.constexpr(config.SEQUENCE)
SEQUENCE_TOKEN = tl.constexpr(config.SEQUENCE_TOKEN)
SEGMENT = tl.constexpr(config.SEGMENT)
SEGMENT_MEAN = tl.constexpr(config.SEGMENT_MEAN)
AVERAGE = tl.constexpr(config.AVERAGE)
GEOMETRIC_AVERAGE = tl.constexpr(config.GEOMETRIC_AVERAGE)
KL_NONE = tl.constexpr(config.KL_NONE)
K1 = tl.constexpr(config.K1)
K2 = tl.constexpr(config.K2)
K3 = tl.constexpr(config.K3)
KL_ABS = tl.constexpr(config.KL_ABS)
TOKEN_TRUNCATE = tl.constexpr(config.TOKEN_TRUNCATE)
TOKEN_MASK = tl.constexpr(config.TOKEN_MASK)
SEQUENCE_TRUNCATE = tl.constexpr(config.SEQUENCE_TRUNCATE)
GEOMETRIC_TRUNCATE = tl.constexpr(config.GEOMETRIC_TRUNCATE)

POLICY = tl.constexpr(config.POLICY)
CROSS_ENTROPY = tl.constexpr(config.CROSS_ENTROPY)
REFERENCE_KL = tl.constexpr(config.REFERENCE_KL)
POLICY_CROSS_ENTROPY = tl.constexpr(config.POLICY_CROSS_ENTROPY)
SELECTED = tl.constexpr(config.SELECTED)

# Integer arguments that change from batch to batch. Specialising on their values would recompile the kernels;
# floating-point arguments are never specialised.
INTEGERS = ("rows", "width", "tokens", "chunks", "parts", "rows_per_block", "blocks", "steps")

# A kernel's scalar arguments that policy_term reads.
Limits = namedtuple("Limits", "low high dual_clip cap sapo_pos sapo_neg dro_beta cov_kl_coef clamp_low clamp_high")
# A term's value, its derivatives by the score and by the log ratio, and what is measured of it.
Term = namedtuple("Term", "value by_score by_ratio ratio limited inside weight is_low is_high is_clipped is_dual")


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
def takes_part(mask_ptr, segments_ptr, at, inside):
    valid = inside
    if mask_ptr is not None:
        valid = valid & (tl.load(mask_ptr + at, mask=inside, other=0) != 0)
    if segments_ptr is not None:
        valid = valid & (tl.load(segments_ptr + at, mask=inside, other=-1) >= 0)
    return valid


@triton.jit
def of_kind(kinds_ptr, at, valid, kind: tl.constexpr):
    """The valid tokens of this kind, alone or with others; without kinds, all tokens have a policy term."""
    if kinds_ptr is not None:
        own = tl.load(kinds_ptr + at, mask=valid, other=-1)
        is_kind = own == kind
        if kind == POLICY:
            is_kind = is_kind | (own == SELECTED)
        if (kind == POLICY) | (kind == CROSS_ENTROPY):
            is_kind = is_kind | (own == POLICY_CROSS_ENTROPY)
        valid = valid & is_kind
    return valid


@triton.jit
def load(values_ptr, at, valid):
    """Loads values, with 0 in slots that take no part, whatever they hold."""
    return tl.load(values_ptr + at, mask=valid, other=0.0)


@triton.jit
def load_pair(logprobs_ptr, old_ptr, at, valid):
    lp = load(logprobs_ptr, at, valid)
    old = lp
    if old_ptr is not None:
        old = load(old_ptr, at, valid)
    return lp, old


@triton.jit
def load_advantage(advantages_ptr, row, at, valid, BY_ROW: tl.constexpr):
    if BY_ROW:
        at = at * 0 + row  # masked like the rest: behind the last row there is no value either
    return load(advantages_ptr, at, valid)


@triton.jit
def is_kept(entropy_ptr, floor_ptr, at, valid):
    """Participating tokens whose entropy reaches the floor."""
    if floor_ptr is not None:
        valid = valid & (load(entropy_ptr, at, valid) >= tl.load(floor_ptr))
    return valid


@triton.jit
def sampler_gap(old, sampling):
    """A token that the sampler could not score says nothing: 0."""
    gap = old - sampling
    return tl.where(gap == gap, gap, 0.0)


@triton.jit
def mismatch_weight(gap, least, most, CORRECTION: tl.constexpr):
    """The weight for rollout mismatch of a token, or of a row from the sum or mean of its gaps."""
    ratio = exp(gap)
    if (CORRECTION == TOKEN_TRUNCATE) | (CORRECTION == SEQUENCE_TRUNCATE) | (CORRECTION == GEOMETRIC_TRUNCATE):
        return clamp(ratio, least, most)
    else:
        return tl.where((ratio < least) | (ratio > most), 0.0, ratio)


@triton.jit
def token_weight(
    is_weights_ptr, sampling_ptr, old, at, valid, least, most, CORRECTION: tl.constexpr, IS_WEIGHTS_BY_ROW: tl.constexpr
):
    """The tokens' own weights for rollout mismatch; 1 where there are none, or rows have them."""
    if is_weights_ptr is not None and IS_WEIGHTS_BY_ROW == 0:
        weight = tl.load(is_weights_ptr + at, mask=valid, other=1.0)
    elif (CORRECTION == TOKEN_TRUNCATE) | (CORRECTION == TOKEN_MASK):
        weight = mismatch_weight(sampler_gap(old, load(sampling_ptr, at, valid)), least, most, CORRECTION)
        weight = tl.where(valid, weight, 1.0)
    else:
        weight = tl.full(old.shape, 1.0, old.dtype)
    return weight


@triton.jit
def mixed_ratio(of_token, of_row, RATIO: tl.constexpr):
    """The log of a mean of the token's ratio and its row's, and the share of its derivative through the token's."""
    if RATIO == GEOMETRIC_AVERAGE:
        log_ratio = 0.5 * (of_token + of_row)
        own_share = of_token * 0.0 + 0.5
    else:
        # In the larger one's terms, so that nothing overflows. The digits that exp2 loses of a small decay are lost to
        # the sum anyway.
        decay = tl.exp(-tl.abs(of_token - of_row))
        log_ratio = tl.maximum(of_token, of_row) + tl.log(0.5 * (1.0 + decay))
        own_share = tl.where(of_token < of_row, decay, 1.0) / (1.0 + decay)
    return log_ratio, own_share


@triton.jit
def pessimistic(distance, advantage, low, high):
    """GMPO's log ratio of a token: limited where that lowers the objective."""
    limited = tl.where(advantage < 0.0, tl.maximum(distance, -low), tl.minimum(distance, high))
    return tl.where(advantage == 0.0, 0.0, limited)


@triton.jit
def _clip(ratio, advantage, inside, low, high, dual_clip, cap):
    loss = -advantage
    negative = advantage < 0.0
    capped, below, above = ratio > cap, ratio < low, ratio > high
    limited = tl.where(capped, cap, ratio)
    plain, clipped = loss * limited, loss * clamp(ratio, low, high)
    takes_plain = plain >= clipped
    value = tl.where(takes_plain, plain, clipped)
    ceiling = loss * dual_clip
    # an infinite bound times an advantage of 0 is NaN, which is above nothing
    dual = negative & (value > ceiling)
    flat = dual | (takes_plain & capped) | ((takes_plain == 0) & (below | above))
    by_ratio = tl.where(flat | (inside == 0), 0.0, loss * ratio)
    value = tl.where(dual, ceiling, value)
    return value, by_ratio, (limited < low) & negative, (limited > high) & (advantage > 0.0), dual


@triton.jit
def _sapo(ratio, advantage, inside, sapo_pos, sapo_neg):
    tau = tl.where(advantage > 0.0, sapo_pos, sapo_neg)
    decay = exp(tau * (1.0 - ratio))
    gate = 1.0 / (1.0 + decay)
    # decay is at most e^tau, and 0 where the ratio is so large that the product with it would be 0 * infinity
    slope = tl.where((decay > 0.0) & inside, 4.0 * gate * (decay * gate) * ratio, 0.0)
    return -advantage * gate * (4.0 / tau), -advantage * slope


@triton.jit
def _trusted(lp, old, advantage, low, high, LOSS: tl.constexpr):
    """DPPO: tokens whose probability moved little, or back, as seen by the two outcomes "this token" and "another"."""
    now, before = exp(lp), exp(old)
    if LOSS == DPPO_TV:
        upward, downward = now - before <= high, now - before >= -low
    else:
        others = (1.0 - before) * tl.log((1.0 - before + 1e-8) / (1.0 - now + 1e-8))
        divergence = before * (old - lp) + others
        upward = (divergence <= high) | (now <= before)
        downward = (divergence <= low) | (now >= before)
    return tl.where(advantage > 0.0, upward, downward)


@triton.jit
def policy_term(lp, old, advantage, log_ratio, score, phi_positive, phi_other, selected, limits, LOSS: tl.constexpr):
    """The Term of each token, row or segment.

    log_ratio and score may be those of a row or a segment. Every loss but clip, SAPO, GMPO, IPO and IcePop is the
    score (for DRO, nearly) times a weight without derivative.
    """
    low, high = tl.full([], limits.low, lp.dtype), tl.full([], limits.high, lp.dtype)
    dual_clip, cap = tl.full([], limits.dual_clip, lp.dtype), tl.full([], limits.cap, lp.dtype)
    dro_beta, cov_kl_coef = tl.full([], limits.dro_beta, lp.dtype), tl.full([], limits.cov_kl_coef, lp.dtype)
    sapo_pos, sapo_neg = tl.full([], limits.sapo_pos, lp.dtype), tl.full([], limits.sapo_neg, lp.dtype)
    clamp_low, clamp_high = tl.full([], limits.clamp_low, lp.dtype), tl.full([], limits.clamp_high, lp.dtype)
    limited = clamp(log_ratio, clamp_low, clamp_high)
    inside = (log_ratio >= clamp_low) & (log_ratio <= clamp_high)
    # an infinite ratio would make NaN of terms that are clipped or have no advantage
    top = 709.0 if lp.dtype == tl.float64 else 88.0
    ratio = exp(tl.where(limited > top, tl.full(limited.shape, top, limited.dtype), limited))
    zero = tl.full(ratio.shape, 0.0, ratio.dtype)
    by_score, by_ratio, weight = zero, zero, zero + 1.0
    none = zero > 0.0
    is_low, is_high, is_clipped, is_dual = none, none, none, none
    if (LOSS == CLIP) | (LOSS == CLIP_COV):
        value, by_ratio, is_low, is_high, is_dual = _clip(ratio, advantage, inside, low, high, dual_clip, cap)
        is_clipped = is_low | is_high
        if LOSS == CLIP_COV:
            is_clipped = selected
            value, by_ratio = tl.where(selected, 0.0, value), tl.where(selected, 0.0, by_ratio)
    elif LOSS == KL_COV:
        limited = tl.abs(log_ratio)
        sign = tl.where(log_ratio > 0.0, 1.0, tl.where(log_ratio < 0.0, -1.0, 0.0)).to(lp.dtype)
        by_ratio = -advantage * ratio
        by_score = tl.where(selected, cov_kl_coef * sign, 0.0)
        value = by_ratio + tl.where(selected, cov_kl_coef * limited, 0.0)
    elif LOSS == SAPO:
        value, by_ratio = _sapo(ratio, advantage, inside, sapo_pos, sapo_neg)
    elif LOSS == GEO_MEAN:
        value = -advantage * ratio
        by_ratio = value
    elif (LOSS == IPO) | (LOSS == ICEPOP):
        position = exp(lp) - exp(old) if LOSS == IPO else ratio
        is_low = position < (-low if LOSS == IPO else low)
        is_high = position > high
        is_clipped = is_low | is_high
        value = tl.where(is_clipped, 0.0, -advantage * ratio)
        by_ratio = tl.where(inside, value, 0.0)
    elif LOSS == DRO:
        pull = dro_beta * (lp - old)
        value = 0.5 * pull * (lp - old) - lp * advantage
        by_score = pull - advantage
    else:
        if LOSS == CISPO:
            weight = clamp(ratio, low, high)
            is_clipped = weight != ratio
            is_low = (ratio < low) & (advantage < 0.0)
            is_high = (ratio > high) & (advantage > 0.0)
        if (LOSS == DPPO_TV) | (LOSS == DPPO_KL):
            trusted = _trusted(lp, old, advantage, low, high, LOSS)
            weight = tl.where(trusted, tl.where(ratio > cap, cap, ratio), 0.0)
            is_clipped = trusted == 0
            is_dual = trusted & (ratio > cap)
        if LOSS == TOPR:
            is_clipped = (advantage <= 0.0) & (ratio > cap)
            weight = tl.where(advantage > 0.0, weight, tl.where(ratio > cap, cap, ratio))
        if LOSS == VESPO:
            weight = tl.where(advantage >= 0.0, phi_positive, phi_other)
        by_score = -weight * advantage
        value = by_score * score
    return Term(value, by_score, by_ratio, ratio, limited, inside, weight, is_low, is_high, is_clipped, is_dual)


@triton.jit
def kl_term(distance, bound, top, KL: tl.constexpr, KL_STRAIGHT: tl.constexpr):
    """The estimate from the log ratio to the reference policy, and its derivative; straight-through: that of k2."""
    d = clamp(distance, -bound, bound)
    if KL == K1:
        value, slope = d, tl.full(d.shape, 1.0, d.dtype)
    elif KL == K2:
        value, slope = 0.5 * d * d, d
    elif KL == K3:
        value, slope = exp_remainders(-d)
        slope = -slope
    else:
        value, slope = tl.abs(d), tl.where(d > 0.0, 1.0, tl.where(d < 0.0, -1.0, 0.0)).to(d.dtype)
    if KL_STRAIGHT:
        slope = distance
    else:
        within = (tl.abs(distance) <= bound) & (tl.abs(value) <= top)
        slope = tl.where(within, slope, 0.0)
    return clamp(value, -top, top), slope
