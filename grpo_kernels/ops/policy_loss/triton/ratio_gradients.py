"""The pass of policy_loss that spreads the derivative by a row's or segment's ratio over its tokens.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

import triton
import triton.language as tl

from grpo_kernels.ops.policy_loss.triton.rows import S_KEPT, S_POLICY, Stats, locate, row_value
from grpo_kernels.ops.policy_loss.triton.terms import (
    GEO_MEAN,
    INTEGERS,
    POLICY,
    SEGMENT,
    SEGMENT_MEAN,
    is_kept,
    load,
    load_advantage,
    load_pair,
    of_kind,
    pessimistic,
    takes_part,
)


@triton.jit(do_not_specialize=INTEGERS)
def ratio_gradients_kernel(
    logprobs_ptr,
    old_ptr,
    advantages_ptr,
    mask_ptr,
    cu_seqlens_ptr,
    segments_ptr,
    kinds_ptr,
    entropy_ptr,
    floor_ptr,
    stats_ptr,
    through_ptr,
    slot_gradient_ptr,
    gradient_ptr,
    rows: "i64",
    width: "i64",
    tokens: "i64",
    chunks: "i64",
    steps: "i32",
    low: "fp64",
    high: "fp64",
    LOSS: tl.constexpr,
    RATIO: tl.constexpr,
    ADVANTAGE_BY_ROW: tl.constexpr,
    PART: tl.constexpr,
):
    """Adds to every token's gradient its share of the derivative by its row's or segment's log ratio."""
    row, start, length, begin = locate(cu_seqlens_ptr, rows, width, tokens, chunks, steps, PART)
    dtype: tl.constexpr = logprobs_ptr.dtype.element_ty
    k = begin + tl.arange(0, PART)
    at = start + k
    valid = takes_part(mask_ptr, segments_ptr, at, k < tl.where(row < rows, length, 0))
    gradient = load(gradient_ptr, at, valid)
    if (RATIO == SEGMENT) | (RATIO == SEGMENT_MEAN):
        slot = start + tl.load(segments_ptr + at, mask=valid, other=0)
        gradient += tl.load(slot_gradient_ptr + slot, mask=valid & (slot < start + length), other=0.0)
    else:
        members: tl.constexpr = S_KEPT if LOSS == GEO_MEAN else S_POLICY
        through = tl.load(through_ptr + row, mask=row < rows, other=0.0)
        each = (through / tl.maximum(row_value(Stats(stats_ptr, row, rows), members), 1.0)).to(dtype)
        takes = of_kind(kinds_ptr, at, valid, POLICY)
        if LOSS == GEO_MEAN:
            lp, old = load_pair(logprobs_ptr, old_ptr, at, valid)
            advantage = load_advantage(advantages_ptr, row, at, valid, ADVANTAGE_BY_ROW)
            limited = pessimistic(lp - old, advantage, tl.full([], low, dtype), tl.full([], high, dtype)) != lp - old
            takes = is_kept(entropy_ptr, floor_ptr, at, valid) & (advantage != 0.0) & (limited == 0)
        gradient += tl.where(takes, each, 0.0)
    tl.store(gradient_ptr + at, gradient, mask=valid)
