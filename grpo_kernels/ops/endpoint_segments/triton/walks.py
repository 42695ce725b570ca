"""Operations of the endpoint_segments kernels on a tile of a row's tokens."""

import triton
import triton.language as tl

from grpo_kernels.ops.endpoint_segments import config

BOUNDED = tl.constexpr(config.BOUNDED)
LITERAL = tl.constexpr(config.LITERAL)
COHERENT = tl.constexpr(config.COHERENT)
UNCORRELATED = tl.constexpr(config.UNCORRELATED)

_MOST_LOG_RATIO = tl.constexpr(20.0)


@triton.jit
def row_bounds(bounds_ptr, row, width):
    """A row's first token, and the one behind its last."""
    if bounds_ptr is not None:
        return tl.load(bounds_ptr + row), tl.load(bounds_ptr + row + 1)
    return row * width, (row + 1) * width


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def count_tokens(mask_ptr, token, end):
    """Mask of the tokens that count."""
    return tl.load(mask_ptr + token, mask=token < end, other=0) != 0


@triton.jit
def load_values(values_ptr, baselines_ptr, row, token, counts):
    """The critic's values of tokens, or the baseline of their row."""
    if values_ptr is not None:
        values = tl.load(values_ptr + token, mask=counts, other=0.0).to(tl.float64)
    else:
        values = tl.where(counts, tl.load(baselines_ptr + row), 0.0)
    return values


@triton.jit
def _then(first_factor, first_shift, factor, shift):
    """Composes two maps x -> factor * x + shift."""
    return factor * first_factor, factor * first_shift + shift


@triton.jit
def hand_back(reward, value, counts, lam, gamma, carry):
    """Computes what each token of a tile passes to the one before it, which adds gamma times that to its own return.

    That is the token's value and the return from it on, blended by lam; a token that does not count hands back what it
    is handed, the last token `carry`.
    """
    factor = tl.where(counts, lam * gamma, 1.0)
    shift = tl.where(counts, (1 - lam) * value + lam * reward, 0.0)
    factor, shift = tl.associative_scan((factor, shift), 0, _then, reverse=True)
    return factor * carry + shift


@triton.jit
def first_of(tile, BLOCK: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BLOCK) == 0, tile, 0.0), axis=0)


@triton.jit
def weigh(now, old):
    """A stand-in for the length of the token's score gradient: the ratio times how far from certain the token is."""
    log_ratio = tl.minimum(tl.maximum(now - old, -_MOST_LOG_RATIO), _MOST_LOG_RATIO)
    logprob = tl.minimum(now, 0.0)
    probability = tl.exp(logprob)
    # exp rounds where the token is all but certain; its logarithm tells by how much
    is_rounded = (probability < 1) & (logprob > -1)
    by_how_much = logprob / tl.log(tl.where(is_rounded, probability, 0.5))
    doubt = tl.where(probability == 1, -logprob, (1 - probability) * tl.where(is_rounded, by_how_much, 1.0))
    return tl.exp(log_ratio) * doubt


@triton.jit
def cut_terms(advantage, weight, PROXY: tl.constexpr):
    """Contribution of a token to P and to Q."""
    if PROXY == COHERENT:
        return weight * advantage, weight
    return weight * weight * advantage * advantage, weight * weight


@triton.jit
def cut_variances(moved, seen, advantage, PROXY: tl.constexpr):
    """With a token: the segment's variance if each keeps its own advantage, and if all have this token's.

    Not divided by the tokens of the row, as nothing they are compared with is.
    """
    if PROXY == COHERENT:
        shared = seen * advantage
        return moved * moved, shared * shared
    return moved, seen * advantage * advantage


@triton.jit
def first_from(places, begin, WINDOW: tl.constexpr):
    """First place of the window from `begin` on that counts; WINDOW if there is none."""
    return tl.min(tl.where(places >= begin, places, WINDOW), axis=0)


@triton.jit
def close_segment(
    places,
    plus,
    weight,
    advantage,
    first,
    moved,
    seen,
    length,
    tau,
    epsilon,
    most,
    RULE: tl.constexpr,
    PROXY: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The segment that is open, or opens, at place `first` of the window; `places` are WINDOW where no token counts.

    Returns the place behind its last token in the window, whether it ends there, and what is known of it so far: P, Q
    and length, all 0 if it ends. `moved`, `seen` and `length` are those of its tokens before the window.
    """
    place = tl.arange(0, WINDOW)
    here = place >= first
    p = moved + tl.cumsum(tl.where(here, plus, 0.0), axis=0)
    q = seen + tl.cumsum(tl.where(here, weight, 0.0), axis=0)
    n = length + place - first + 1
    ppo, grpo = cut_variances(p, q, advantage, PROXY)
    # at a token the segment ends before it or with it
    before = places == WINDOW
    with_it = n == most
    if RULE == BOUNDED:
        before = before | (grpo > tau * ppo + epsilon)
    else:
        with_it = with_it | ((n >= 2) & (n * tau * (ppo + epsilon) >= grpo))
    before = before & (n > 1)
    stop = tl.min(tl.where(here & (before | with_it), place, WINDOW), axis=0)
    ends = stop < WINDOW
    behind = stop + tl.sum(tl.where((place == stop) & (before == 0), 1, 0), axis=0)
    is_last = place == WINDOW - 1
    moved = tl.where(ends, 0.0, tl.sum(tl.where(is_last, p, 0.0), axis=0))
    seen = tl.where(ends, 0.0, tl.sum(tl.where(is_last, q, 0.0), axis=0))
    length = tl.where(ends, 0, length + WINDOW - first)
    return behind, ends, moved, seen, length
