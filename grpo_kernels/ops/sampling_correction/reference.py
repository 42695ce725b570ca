"""sampling_correction in plain torch, on every device. In float64 it is the specification."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows, packed_bounds
from grpo_kernels.ops.sampling_correction.config import LEVELS, CorrectionConfig, table_names

# Tokens of the rows that a CPU works on at a time. Four million at once take twice the time, in fresh memory. Smaller
# blocks are little faster, and each of torch's operations ends when all threads have: beside busy processes that is a
# wait of milliseconds.
_BLOCK = 2**20
# Probabilities of binary_kl stay this far from 0 and 1, where the divergence is infinite.
_LEAST_PROBABILITY = 1e-6

Table = dict[str, Tensor]  # measurements of rows by name


class Batch(NamedTuple):
    """The tensors of a call: contiguous, without gradients, of one dtype."""

    old_logprobs: Tensor
    sampling_logprobs: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None


def correct(batch: Batch, m2_ceiling: Tensor | None, config: CorrectionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, kept tokens, and a float64 table of the rows' sums, minima and maxima in the order of table_names.

    Args:
        m2_ceiling: a float32 scalar, the largest squared log ratio that is kept; None means any
    """
    tokens = batch.old_logprobs
    if torch.compiler.is_compiling() or tokens.device.type != "cpu" or tokens.numel() <= _BLOCK:
        return _correct(batch, m2_ceiling, config)
    parts = [_correct(part, m2_ceiling, config) for part in _blocks(batch)]
    weights, kept, table = (torch.cat(results) for results in zip(*parts, strict=True))
    return weights, kept, table


def _blocks(batch: Batch) -> Iterator[Batch]:
    """The rows of a batch on a CPU in blocks of about _BLOCK tokens. The last has the tokens after the last row."""
    old, sampling, mask, bounds = batch
    if bounds is None:
        starts = torch.arange(len(old) + 1) * old.shape[1]
    else:
        starts = packed_bounds("sampling_correction", bounds, len(old))
    sizes = torch.unique_consecutive(starts[:-1] // _BLOCK, return_counts=True)[1].tolist()
    for first, last in itertools.pairwise([0, *itertools.accumulate(sizes or [0])]):
        part, own = slice(first, last), None
        if bounds is not None:
            part = slice(int(starts[first]), len(old) if last == len(starts) - 1 else int(starts[last]))
            own = starts[first : last + 1] - starts[first]
        yield Batch(old[part], sampling[part], None if mask is None else mask[part], own)


class _Tokens(NamedTuple):
    """One entry per token, 0 where a token takes no part or has no log-prob of the sampler."""

    rows: TokenRows
    valid: Tensor  # takes part
    scored: Tensor  # and has a log-prob of the sampler
    old: Tensor
    sampling: Tensor
    log_ratio: Tensor
    limited: Tensor  # log ratio within the bound
    k3: Tensor
    # of each row
    count: Tensor
    active: Tensor  # has tokens that take part
    size: Tensor  # the number of them, at least 1
    product: Tensor  # sum of log ratios


def _total(rows: TokenRows, values: Tensor) -> Tensor:
    return rows.sum(values.double())


def _tokens(batch: Batch, bound: float) -> _Tokens:
    old, sampling, mask, cu_seqlens = batch
    rows = TokenRows("sampling_correction", old.shape, cu_seqlens, old.device)
    old, sampling = old.reshape(-1), sampling.reshape(-1)
    valid = rows.within(torch.ones_like(old, dtype=torch.bool) if mask is None else mask.reshape(-1))
    scored = valid & ~(old - sampling).isnan()
    old, sampling = torch.where(scored, old, 0), torch.where(scored, sampling, 0)
    log_ratio = old - sampling
    limited = log_ratio.clamp(-bound, bound)
    count = rows.counts(valid)
    k3 = torch.where(limited == math.inf, math.inf, torch.expm1(limited) - limited)
    most = math.sqrt(torch.finfo(old.dtype).max)  # so that impossible tokens of both sides are no NaN
    product = _total(rows, log_ratio.clamp(-most, most))
    return _Tokens(
        rows, valid, scored, old, sampling, log_ratio, limited, k3, count, count > 0, count.clamp(min=1), product
    )


def _correct(batch: Batch, m2_ceiling: Tensor | None, config: CorrectionConfig) -> tuple[Tensor, Tensor, Tensor]:
    tokens = _tokens(batch, config.bound)
    rows, valid = tokens.rows, tokens.valid
    table = _divergences(tokens, config.bound)
    weights, of_weights = (_token_weights if config.weights == "token" else _row_weights)(tokens, config)
    kept, squares = valid, tokens.log_ratio.square()
    table |= of_weights | {"m2_sum": _total(rows, squares), "m2_dropped_tokens": torch.zeros_like(tokens.count)}
    if m2_ceiling is not None:
        dropped = tokens.scored & (squares.float() > m2_ceiling)  # compared in float32
        kept, table["m2_dropped_tokens"] = kept & ~dropped, rows.counts(dropped)
    for name, low, high in config.rejections:
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        rejected, measured = _rejection(tokens, name, low, high)
        kept = kept & ~rejected
        table |= {f"{name}/{key}": value for key, value in measured.items()}
    weights = torch.where(kept, weights, 0)
    table["kept_tokens"] = rows.counts(kept)
    table["dropped_rows"] = (table["kept_tokens"] < table["tokens"]).double()
    statistics = tuple(name for name, *_ in config.rejections)
    columns = [table[name] for names in table_names(statistics) for name in names]
    shape = batch.old_logprobs.shape
    return weights.view(shape), kept.view(shape), torch.stack(columns, 1)


def _ends(active: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One value per row as its own minimum and maximum."""
    return torch.where(active, values, math.inf), torch.where(active, values, -math.inf)


def _token_weights(tokens: _Tokens, config: CorrectionConfig) -> tuple[Tensor, Table]:
    rows, valid = tokens.rows, tokens.valid
    raw = torch.where(valid, tokens.limited.exp(), 0)
    above, below = raw > config.high, valid & (raw < config.low_mark)
    outside = above if config.weight_min is None else above | below
    if config.outside == "mask":
        weights = torch.where(outside, 0, raw)
    elif config.weight_min is None:
        weights = raw.clamp(max=config.high)
    else:
        weights = torch.where(valid, raw.clamp(config.low, config.high), 0)
    wide = weights.double()
    total, raw_mean = rows.sum(wide), _total(rows, raw) / tokens.size
    lightest, heaviest = rows.extremes(weights, valid)
    return weights, {
        "weight_sum": total,
        "weight_square_sum": rows.sum(wide.square()),
        "high_ratios": rows.counts(above),
        "low_ratios": rows.counts(below),
        "outside_tokens": rows.counts(outside),
        "weight_min": lightest.double(),
        "weight_max": heaviest.double(),
    } | _of_rows(tokens, raw_mean, total / tokens.size, config)


def _row_weights(tokens: _Tokens, config: CorrectionConfig) -> tuple[Tensor, Table]:
    """The weights of tokens that share that of their row."""
    active, count, product = tokens.active, tokens.count, tokens.product
    raw, dtype = torch.ones_like(product), tokens.old.dtype
    if config.weighs_rows:
        log_weight = product / tokens.size if config.weights == "geometric" else product
        raw = log_weight.clamp(-config.bound, config.bound).exp().to(dtype).double()
    outside = (raw > config.high) | (raw < config.low)
    weight = torch.where(outside, 0, raw) if config.outside == "mask" else raw.clamp(config.low, config.high)
    weight = weight.to(dtype).double()
    lightest, heaviest = _ends(active, weight)
    return tokens.rows.spread(weight.to(dtype)), {
        "weight_sum": count * weight,
        "weight_square_sum": count * weight.square(),
        "high_ratios": (active & (raw > config.high)).double(),
        "low_ratios": (active & (raw < config.low_mark)).double(),
        "outside_tokens": torch.where(outside, count, 0),
        "weight_min": lightest,
        "weight_max": heaviest,
    } | _of_rows(tokens, raw, weight, config)


def _of_rows(tokens: _Tokens, raw_mean: Tensor, mean: Tensor, config: CorrectionConfig) -> Table:
    """Measurements of the mean weights of rows, 0 where a row has no tokens."""
    active, mean = tokens.active, torch.where(tokens.active, mean, 0)
    row_least, row_most = _ends(active, mean)
    return {
        "row_weight_sum": mean,
        "row_weight_square_sum": mean.square(),
        "high_rows": (active & (raw_mean > config.high)).double(),
        "low_rows": (active & (raw_mean < config.low_mark)).double(),
        "row_weight_min": row_least,
        "row_weight_max": row_most,
    }


def _divergences(tokens: _Tokens, bound: float) -> Table:
    """Measurements of the mismatch, over the scored tokens."""
    rows, scored, active, product = tokens.rows, tokens.scored, tokens.active, tokens.product
    scored_count = rows.counts(scored)
    size = scored_count.clamp(min=1)
    old, sampling = (-_total(rows, values) / size for values in (tokens.old, tokens.sampling))
    gap = old - sampling
    ratio = torch.where(scored, tokens.limited.exp(), 0).double()
    smallest, largest = rows.extremes(tokens.log_ratio, scored)
    gap_min, gap_max = _ends(active, gap)
    product_min, product_max = _ends(active, product)

    def of_active(values: Tensor) -> Tensor:
        return torch.where(active, values, 0)

    return {
        "rows": torch.ones_like(product),
        "active_rows": active.double(),
        "tokens": tokens.count,
        "scored_tokens": scored_count,
        "log_ratio_sum": product,
        "gap_sum": _total(rows, tokens.log_ratio.abs()),
        "k3_sum": _total(rows, tokens.k3),
        "ratio_sum": rows.sum(ratio),
        "ratio_square_sum": rows.sum(ratio.square()),
        "product_square_sum": of_active((2 * product.clamp(-bound, bound)).exp()),
        "old_perplexity_sum": of_active(old.exp()),
        "old_log_perplexity_sum": old,
        "sampling_perplexity_sum": of_active(sampling.exp()),
        "sampling_log_perplexity_sum": sampling,
        "log_perplexity_gap_sum": gap.abs(),
        "perplexity_ratio_sum": of_active(gap.exp()),
        "log_ratio_min": smallest.double(),
        "log_ratio_max": largest.double(),
        "log_product_min": product_min,
        "log_product_max": product_max,
        "log_perplexity_gap_min": gap_min,
        "log_perplexity_gap_max": gap_max,
    }


def _estimate(tokens: _Tokens, estimator: str) -> Tensor:
    """The estimator of every token, 0 where the sampler has no log-prob."""
    if estimator == "k1":
        return -tokens.limited
    if estimator == "k2":
        return 0.5 * tokens.limited.square()
    if estimator == "k3":
        return tokens.k3
    assert estimator == "binary_kl"
    logs, others = [], []
    for logprob in (tokens.old, tokens.sampling):
        logs.append(logprob.clamp(math.log(_LEAST_PROBABILITY), math.log1p(-_LEAST_PROBABILITY)))
        others.append((-torch.expm1(logprob)).clamp(_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY))
    by_token, by_others = logs[0] - logs[1], others[0].log() - others[1].log()
    forward_kl = logs[0].exp() * by_token + others[0] * by_others
    backward_kl = -(logs[1].exp() * by_token + others[1] * by_others)
    return torch.where(tokens.scored, torch.maximum(forward_kl, backward_kl), 0)


def _rejection(tokens: _Tokens, name: str, low: float, high: float) -> tuple[Tensor, Table]:
    """Tokens that a rejection drops, and what is measured of it."""
    level, estimator = next((level, name.removeprefix(f"{level}_")) for level in LEVELS if name.startswith(level))
    values = _estimate(tokens, estimator)
    if level == "token":
        return _token_rejection(tokens, values, low, high)
    rows, active = tokens.rows, tokens.active
    if level == "seq_max":  # of k1 the value farthest from 0; a row without scored tokens has none
        smallest, largest = (end.double() for end in rows.extremes(values, tokens.scored))
        by_row = torch.where(smallest + largest < 0, smallest, largest)
        by_row = torch.where(largest > -math.inf, by_row, 0)
        above, below = active & (largest > high), active & (smallest < low)
    else:
        by_row = _total(rows, values)
        by_row = by_row / tokens.size if level == "seq_mean" else by_row
        above, below = active & (by_row > high), active & (by_row < low)
    clamped, count = by_row.clamp(low, high), tokens.count
    least, most = _ends(active, by_row)
    return tokens.valid & rows.spread(above | below), {
        "sum": count * by_row,
        "clamped_sum": count * clamped,
        "clamped_square_sum": count * clamped.square(),
        "high": above.double(),
        "low": below.double(),
        "masked_tokens": torch.where(above | below, count, 0),
        "masked_rows": (above | below).double(),
        "min": least,
        "max": most,
    } | _rejected_rows(tokens, by_row, above, below)


def _token_rejection(tokens: _Tokens, values: Tensor, low: float, high: float) -> tuple[Tensor, Table]:
    rows, scored = tokens.rows, tokens.scored
    above, below = scored & (values > high), scored & (values < low)
    clamped = torch.where(scored, values.clamp(low, high), 0).double()
    total, masked = _total(rows, values), rows.counts(above | below)
    smallest, largest = rows.extremes(values, scored)
    by_row = total / tokens.size
    return above | below, {
        "sum": total,
        "clamped_sum": rows.sum(clamped),
        "clamped_square_sum": rows.sum(clamped.square()),
        "high": rows.counts(above),
        "low": rows.counts(below),
        "masked_tokens": masked,
        "masked_rows": (masked > 0).double(),
        "min": smallest.double(),
        "max": largest.double(),
    } | _rejected_rows(tokens, by_row, tokens.active & (by_row > high), tokens.active & (by_row < low))


def _rejected_rows(tokens: _Tokens, by_row: Tensor, above: Tensor, below: Tensor) -> Table:
    least, most = _ends(tokens.active, by_row)
    by_row = torch.where(tokens.active, by_row, 0)
    return {
        "row_sum": by_row,
        "row_square_sum": by_row.square(),
        "high_rows": above.double(),
        "low_rows": below.double(),
        "row_min": least,
        "row_max": most,
    }
