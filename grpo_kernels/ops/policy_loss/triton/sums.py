"""Sums of policy_loss over the batch: counts for the shares, and the reduction of parts of rows to the metrics.

Without `from __future__ import annotations`: Triton reads the annotations of the kernels' scalars.
"""

import triton
import triton.language as tl

from grpo_kernels.ops.policy_loss import config
from grpo_kernels.ops.policy_loss.triton.rows import S_IS, S_KEPT, S_POLICY, S_TERMS, S_TOKENS, S_WRONG, first_part
from grpo_kernels.ops.policy_loss.triton.terms import GEO_MEAN, INTEGERS, SEGMENT, SEGMENT_MEAN, VESPO

TOKEN_MEAN = tl.constexpr(config.TOKEN_MEAN)
TOKEN_SUM = tl.constexpr(config.TOKEN_SUM)
ROW_TOKEN_MEAN = tl.constexpr(config.ROW_TOKEN_MEAN)
ROW_TOKEN_SUM = tl.constexpr(config.ROW_TOKEN_SUM)
ROW_TOKEN_NORM = tl.constexpr(config.ROW_TOKEN_NORM)
LOCAL_TOKEN_MEAN = tl.constexpr(config.LOCAL_TOKEN_MEAN)

# totals[TOTALS] of the batch; the shares still lack the divisor of a token's own row.
TOTALS = 9
T_ACTIVE, T_TOKENS, T_TERMS, T_KEPT, T_POLICY_TOKENS, T_WRONG_SEGMENTS, T_POLICY, T_KL, T_ENTROPY = (
    tl.constexpr(i) for i in range(9)
)

# A record holds the metrics of a part of a row in the order of METRICS in config.py: sums, and extremes as maxima, a
# minimum as the maximum of the negative.
METRICS = tl.constexpr(len(config.METRICS))
RECORD = tl.constexpr(64)


def _metric(name):
    return tl.constexpr(config.METRICS.index(name))


M_LOSS = _metric("loss")
M_POLICY = _metric("policy_loss")
M_KL = _metric("kl_loss")
M_ENTROPY = _metric("entropy_loss")
M_ROWS = _metric("rows")
M_ACTIVE = _metric("active_rows")
M_TOKENS = _metric("tokens")
M_TERMS = _metric("terms")
M_KEPT = _metric("kept_tokens")
M_LOW = _metric("low_clipped")
M_HIGH = _metric("high_clipped")
M_CLIPPED = _metric("clipped")
M_DUAL = _metric("dual_clipped")
M_LOW_ROWS = _metric("low_clipped_rows")
M_HIGH_ROWS = _metric("high_clipped_rows")
M_LOW_MIN = _metric("low_clipped_min")
M_HIGH_MAX = _metric("high_clipped_max")
M_LOG_RATIO = _metric("log_ratio_sum")
M_KL_SUM = _metric("kl_sum")
M_ENTROPY_SUM = _metric("entropy_sum")
M_RATIO = _metric("ratio_sum")
M_RATIO_SPREAD = _metric("ratio_spread_sum")
M_RATIO_MIN = _metric("ratio_min")
M_RATIO_MAX = _metric("ratio_max")
M_PHI = _metric("phi_sum")
M_PHI_ROWS = _metric("phi_rows")
M_IS = _metric("is_sum")
M_IS_SQUARE = _metric("is_square_sum")
M_IS_MIN = _metric("is_min")
M_IS_MAX = _metric("is_max")
M_IS_COUNT = _metric("is_count")
M_GAP = _metric("gap_sum")
M_GAP_MAX = _metric("gap_max")
M_GAP_COUNT = _metric("gap_count")
M_OFF_POLICY = _metric("off_policy_tokens")
M_CROSS_ENTROPY = _metric("cross_entropy_loss")
M_POLICY_TOKENS = _metric("policy_tokens")
M_THROUGH = tl.constexpr(len(config.METRICS))  # derivative by the row's log ratio, not a metric

# Columns that hold a minimum, and those that hold a maximum, as bit masks that replace a comparison with each.
_LOWEST = tl.constexpr(sum(1 << column.value for column in (M_LOW_MIN, M_RATIO_MIN, M_IS_MIN)))
_HIGHEST = tl.constexpr(sum(1 << column.value for column in (M_HIGH_MAX, M_RATIO_MAX, M_IS_MAX, M_GAP_MAX)))


@triton.jit
def _is_extreme(column):
    place = column.to(tl.int64)
    none = place * 0
    return (((none + _LOWEST) >> place) & 1) != 0, (((none + _HIGHEST) >> place) & 1) != 0


@triton.jit
def empty_record():
    lowest, highest = _is_extreme(tl.arange(0, RECORD))
    return tl.where(lowest | highest, float("-inf"), 0.0).to(tl.float64)


@triton.jit
def put(record, column: tl.constexpr, value):
    return tl.where(tl.arange(0, RECORD) == column, value.to(tl.float64), record)


@triton.jit
def put_sum(record, column: tl.constexpr, values):
    # not through put(), because nested calls are slowest in the interpreter
    return tl.where(tl.arange(0, RECORD) == column, tl.sum(values.to(tl.float64), axis=0), record)


@triton.jit
def put_counts(record, is_low, is_high, is_clipped, is_dual):
    """Four counts, which stand side by side in a record, as one sum: none reaches 2^16."""
    flags = is_low.to(tl.int64) + (is_high.to(tl.int64) << 16)
    flags += (is_clipped.to(tl.int64) << 32) + (is_dual.to(tl.int64) << 48)
    column = tl.arange(0, RECORD)
    ours = (column >= M_LOW) & (column <= M_DUAL)
    place = tl.where(ours, column - M_LOW, 0).to(tl.int64) * 16
    return tl.where(ours, ((tl.sum(flags, axis=0) >> place) & 65535).to(tl.float64), record)


@triton.jit
def put_extremes(record, least: tl.constexpr, values, there):
    """The least and, in the next column, the largest; values that are no numbers are neither."""
    is_number = there & (values == values)
    column = tl.arange(0, RECORD)
    negative = tl.max(tl.where(is_number, -values, float("-inf")), axis=0).to(tl.float64)
    largest = tl.max(tl.where(is_number, values, float("-inf")), axis=0).to(tl.float64)
    return tl.where(column == least, negative, tl.where(column == least + 1, largest, record))


@triton.jit
def put_weights(record, weight, there):
    """Adds the importance weights of tokens or rows to a record."""
    weights = tl.where(there, weight, 0.0).to(tl.float64)
    record = put_sum(record, M_IS, weights)
    record = put_sum(record, M_IS_SQUARE, weights * weights)
    record = put_sum(record, M_IS_COUNT, there)
    return put_extremes(record, M_IS_MIN, weight, there)


@triton.jit
def _column(records, column: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, RECORD)[None, :] == column, records, 0.0), axis=1)


@triton.jit
def _known_or(known, counted):
    """A count of the whole batch if the caller gave one (not NaN), else the count of this call."""
    return tl.where(known == known, known, tl.maximum(counted, 1.0))


@triton.jit
def _share(known, counted, known_rows, counted_rows, max_length, AGGREGATION: tl.constexpr):
    if AGGREGATION == TOKEN_SUM:
        share = counted * 0.0 + 1.0
    elif AGGREGATION == TOKEN_MEAN:
        share = 1.0 / _known_or(known, counted)
    else:
        share = 1.0 / _known_or(known_rows, counted_rows)
    if AGGREGATION == ROW_TOKEN_NORM:
        share = share / max_length
    return share


@triton.jit
def _given(normalizers_ptr, index: tl.constexpr, number):
    number = tl.full([], number, tl.float64)
    if normalizers_ptr is not None:
        value = tl.load(normalizers_ptr + index)
        number = tl.where(value == value, value, number)
    return number


@triton.jit(do_not_specialize=INTEGERS)
def totals_kernel(
    stats_ptr,
    normalizers_ptr,
    totals_ptr,
    rows: "i64",
    known_tokens: "fp64",
    known_rows: "fp64",
    known_segments: "fp64",
    max_length: "fp64",
    LOSS: tl.constexpr,
    RATIO: tl.constexpr,
    AGGREGATION: tl.constexpr,
    KL_AGGREGATION: tl.constexpr,
    ENTROPY_AGGREGATION: tl.constexpr,
    COUNT_EMPTY_ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    """totals[TOTALS], in one program."""
    by_segment: tl.constexpr = (RATIO == SEGMENT) | (RATIO == SEGMENT_MEAN)
    nothing = tl.zeros([ROW_BLOCK], tl.float64)
    active, count, terms, kept, of_policy, wrong = nothing, nothing, nothing, nothing, nothing, nothing
    for offset in range(0, rows, ROW_BLOCK):
        row = offset + tl.arange(0, ROW_BLOCK).to(tl.int64)
        known = row < rows
        here = tl.load(stats_ptr + S_TOKENS * rows + row, mask=known, other=0.0)
        active += (here > 0.0).to(tl.float64)
        count += here
        terms += tl.load(stats_ptr + S_TERMS * rows + row, mask=known, other=0.0)
        kept += tl.load(stats_ptr + S_KEPT * rows + row, mask=known, other=0.0)
        of_policy += tl.load(stats_ptr + S_POLICY * rows + row, mask=known, other=0.0)
        if by_segment:
            wrong += tl.load(stats_ptr + S_WRONG * rows + row, mask=known, other=0.0)
    total_active, total = tl.sum(active, axis=0), tl.sum(count, axis=0)
    total_terms, total_kept = tl.sum(terms, axis=0), tl.sum(kept, axis=0)
    tl.store(totals_ptr + T_ACTIVE, total_active)
    tl.store(totals_ptr + T_TOKENS, total)
    tl.store(totals_ptr + T_TERMS, total_terms)
    tl.store(totals_ptr + T_KEPT, total_kept)
    tl.store(totals_ptr + T_POLICY_TOKENS, tl.sum(of_policy, axis=0))
    tl.store(totals_ptr + T_WRONG_SEGMENTS, tl.sum(wrong, axis=0))

    all_rows = rows.to(tl.float64)
    counted = all_rows if COUNT_EMPTY_ROWS else total_active
    of_terms = all_rows if LOSS == GEO_MEAN else counted
    given_tokens = _given(normalizers_ptr, 0, known_tokens)
    given_rows = _given(normalizers_ptr, 1, known_rows)
    given_terms = _given(normalizers_ptr, 2, known_segments) if by_segment else given_tokens
    tl.store(totals_ptr + T_POLICY, _share(given_terms, total_terms, given_rows, of_terms, max_length, AGGREGATION))
    of_kl = _share(given_tokens, total, given_rows, counted, max_length, KL_AGGREGATION)
    of_entropy = _share(given_tokens, total, given_rows, counted, max_length, ENTROPY_AGGREGATION)
    local = 1.0 / tl.maximum(total_kept, 1.0)
    tl.store(totals_ptr + T_KL, local if KL_AGGREGATION == LOCAL_TOKEN_MEAN else of_kl)
    tl.store(totals_ptr + T_ENTROPY, local if ENTROPY_AGGREGATION == LOCAL_TOKEN_MEAN else of_entropy)


@triton.jit(do_not_specialize=INTEGERS)
def gather_kernel(
    records_ptr,
    stats_ptr,
    cu_seqlens_ptr,
    through_ptr,
    blocks_ptr,
    rows: "i64",
    chunks: "i64",
    parts: "i64",
    rows_per_block: "i64",
    LOSS: tl.constexpr,
    RATIO: tl.constexpr,
    HAS_ROW_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    """From the records of parts to those of rows, to one of a block of rows; what is measured by row is added."""
    column = tl.arange(0, RECORD)
    lowest, highest = _is_extreme(column)
    extreme = lowest | highest
    total = empty_record()
    block = tl.program_id(0).to(tl.int64)
    for offset in range(0, rows_per_block, ROWS):
        row = block * rows_per_block + offset + tl.arange(0, ROWS).to(tl.int64)
        known = (row < rows) & (offset + tl.arange(0, ROWS) < rows_per_block)
        first = first_part(cu_seqlens_ptr, row, rows, chunks, PART)
        count = tl.where(known, first_part(cu_seqlens_ptr, row + 1, rows, chunks, PART) - first, 0)
        row_record = tl.zeros([ROWS, RECORD], tl.float64) + empty_record()[None, :]
        # in order, so that parts without tokens behind a row's last one do not change how the others are added
        for part in range(0, tl.max(count, axis=0)):
            there = ((part < count) & (first + part < parts))[:, None]
            record = tl.load(records_ptr + (first + part)[:, None] * RECORD + column[None, :], mask=there, other=0.0)
            merged = tl.where(extreme[None, :], tl.maximum(row_record, record), row_record + record)
            row_record = tl.where(there, merged, row_record)
        if through_ptr is not None:
            tl.store(through_ptr + row, _column(row_record, M_THROUGH), mask=known)

        members: tl.constexpr = S_TERMS if (RATIO == SEGMENT) | (RATIO == SEGMENT_MEAN) else S_POLICY
        terms = tl.load(stats_ptr + members * rows + row, mask=known, other=0.0)
        divisor = tl.maximum(terms, 1.0)
        place = column[None, :]
        low, high = (_column(row_record, M_LOW) / divisor)[:, None], (_column(row_record, M_HIGH) / divisor)[:, None]
        counted = (terms > 0.0)[:, None]
        row_record = tl.where(place == M_LOW_ROWS, low, tl.where(place == M_HIGH_ROWS, high, row_record))
        row_record = tl.where((place == M_LOW_MIN) & counted, -low, row_record)
        row_record = tl.where((place == M_HIGH_MAX) & counted, high, row_record)
        if LOSS == VESPO:
            row_record = tl.where(place == M_PHI_ROWS, (_column(row_record, M_PHI) / divisor)[:, None], row_record)
        if HAS_ROW_WEIGHT:
            weight = tl.load(stats_ptr + S_IS * rows + row, mask=known, other=float("nan"))[:, None]
            is_measured = weight == weight
            row_record = tl.where((place == M_IS) & is_measured, weight, row_record)
            row_record = tl.where((place == M_IS_SQUARE) & is_measured, weight * weight, row_record)
            row_record = tl.where((place == M_IS_COUNT) & is_measured, 1.0, row_record)
            row_record = tl.where((place == M_IS_MIN) & is_measured, -weight, row_record)
            row_record = tl.where((place == M_IS_MAX) & is_measured, weight, row_record)
        block_record = tl.where(extreme, tl.max(row_record, axis=0), tl.sum(row_record, axis=0))
        total = tl.where(extreme, tl.maximum(total, block_record), total + block_record)
    tl.store(blocks_ptr + block * RECORD + column, total)


@triton.jit(do_not_specialize=INTEGERS)
def finish_kernel(
    blocks_ptr,
    totals_ptr,
    metrics_ptr,
    loss_ptr,
    rows: "i64",
    blocks: "i64",
    kl_coef: "fp64",
    entropy_coef: "fp64",
    cross_entropy_coef: "fp64",
    BLOCKS: tl.constexpr,
):
    column = tl.arange(0, RECORD)
    lowest, highest = _is_extreme(column)
    extreme = lowest | highest
    total = empty_record()
    for offset in range(0, blocks, BLOCKS):
        block = offset + tl.arange(0, BLOCKS)
        there = (block < blocks)[:, None]
        record = tl.load(blocks_ptr + block[:, None] * RECORD + column[None, :], mask=there, other=0.0)
        most = tl.max(tl.where(there, record, float("-inf")), axis=0)
        total = tl.where(extreme, tl.maximum(total, most), total + tl.sum(record, axis=0))
    policy = tl.sum(tl.where(column == M_POLICY, total, 0.0), axis=0)
    kl = tl.sum(tl.where(column == M_KL, total, 0.0), axis=0)
    entropy = tl.sum(tl.where(column == M_ENTROPY, total, 0.0), axis=0)
    bonus = tl.where(tl.full([], entropy_coef, tl.float64) != 0.0, entropy_coef * entropy, 0.0)
    penalty = tl.where(tl.full([], kl_coef, tl.float64) != 0.0, kl_coef * kl, 0.0)  # what is only measured may overflow
    cross_entropy = tl.sum(tl.where(column == M_CROSS_ENTROPY, total, 0.0), axis=0)
    is_imitated = tl.full([], cross_entropy_coef, tl.float64) != 0.0
    loss = policy + penalty - bonus + tl.where(is_imitated, cross_entropy_coef * cross_entropy, 0.0)
    # The least is infinite where there is nothing, and where everything is infinite: the largest tells.
    ratio_max = tl.max(tl.where(column == M_RATIO_MAX, total, float("-inf")), axis=0)
    is_max = tl.max(tl.where(column == M_IS_MAX, total, float("-inf")), axis=0)
    evidence = tl.where(column == M_RATIO_MIN, ratio_max, tl.where(column == M_IS_MIN, is_max, total))
    total = tl.where(lowest, -total, total)
    total = tl.where(extreme & (evidence == float("-inf")), float("nan"), total)
    total = put(total, M_LOSS, loss)
    total = put(total, M_ROWS, rows)
    total = put(total, M_ACTIVE, tl.load(totals_ptr + T_ACTIVE))
    total = put(total, M_TOKENS, tl.load(totals_ptr + T_TOKENS))
    total = put(total, M_TERMS, tl.load(totals_ptr + T_TERMS))
    total = put(total, M_KEPT, tl.load(totals_ptr + T_KEPT))
    total = put(total, M_POLICY_TOKENS, tl.load(totals_ptr + T_POLICY_TOKENS))
    tl.store(metrics_ptr + column, total, mask=column < METRICS)
    tl.store(loss_ptr, loss.to(loss_ptr.dtype.element_ty))
