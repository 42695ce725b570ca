"""Metrics of sampling_correction, under its own names and those of verl and TRL."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_kernels.checks import metric_rows
from grpo_kernels.ops.sampling_correction.config import CorrectionConfig, table_names


class CorrectionMetrics:
    """Metrics of one call as a small float64 `tensor` on the device; metrics["tokens"] is one of its elements.

    `names` lists the elements: sums and counts, then minima, then maxima, which are infinite where there is no value.
    trl(), verl() and to_dict() return Python floats, and the first call of any of them waits for the device once. Sums
    are those of this call: combine micro-batches and ranks with merged() before dividing.
    """

    def __init__(self, tensor: Tensor, config: CorrectionConfig) -> None:
        self.tensor, self._config = tensor, config
        sums, minima, maxima = table_names(tuple(name for name, *_ in config.rejections))
        self.names = sums + minima + maxima
        self._ends = len(sums), len(sums) + len(minima)
        self._on_host: dict[str, float] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(f"CorrectionMetrics: {name!r} is none of {', '.join(self.names)}")
        return self.tensor[self.names.index(name)]

    def to_dict(self) -> dict[str, float]:
        if self._on_host is None:
            self._on_host = dict(zip(self.names, self.tensor.tolist(), strict=True))
        return dict(self._on_host)

    def trl(self) -> dict[str, float]:
        """TRL's metrics of its vLLM correction, by TRL's keys; a row without tokens counts with ratio 1, as there."""
        return _trl(self.to_dict(), self._config)

    def verl(self) -> dict[str, float]:
        """verl's metrics of its rollout correction, by verl's keys; a row without tokens counts as it does there."""
        return _verl(self.to_dict(), self._config)

    def merged(self, rows: Tensor | Sequence[CorrectionMetrics]) -> CorrectionMetrics:
        """The metrics of several micro-batches or ranks, from all of them or their `tensor`s as rows."""
        rows = metric_rows("CorrectionMetrics.merged", rows, len(self.names))
        sums, minima, maxima = rows.tensor_split(self._ends, dim=1)
        total = torch.cat((sums.sum(0), minima.amin(0), maxima.amax(0)))
        return CorrectionMetrics(total, self._config)

    def __repr__(self) -> str:
        return f"CorrectionMetrics({', '.join(self.names)})"


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _spread(square_sum: float, total: float, count: float) -> float:
    """Standard deviation of a sample."""
    return math.sqrt(max(square_sum - total * total / count, 0.0) / (count - 1)) if count > 1 else 0.0


def _deviation(square_sum: float, total: float, count: float) -> float:
    """Standard deviation of a population."""
    return math.sqrt(max(square_sum / count - (total / count) ** 2, 0.0)) if count > 1 else 0.0


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def _verl(m: dict[str, float], config: CorrectionConfig) -> dict[str, float]:
    """verl's metrics. A batch without tokens, which verl refuses, has none."""
    if m["tokens"] == 0:
        return {}
    own = _verl_weights(m, config) if config.weights != "none" else {}
    for rejection in config.rejections:
        own |= _verl_rejection(m, rejection[0])
    if config.rejections or config.m2_threshold is not None:
        own["rollout_rs_masked_fraction"] = 1 - m["kept_tokens"] / m["tokens"]
        own["rollout_rs_seq_masked_fraction"] = m["dropped_rows"] / m["rows"]
    own |= _verl_mismatch(m)
    return {f"rollout_corr/{name}": value for name, value in own.items()}


def _verl_weights(m: dict[str, float], config: CorrectionConfig) -> dict[str, float]:
    tokens, rows, empty = m["tokens"], m["rows"], m["rows"] - m["active_rows"]
    high, low = config.high, config.low_mark
    mean = m["weight_sum"] / tokens
    prefix = "rollout_is"
    own = {f"{prefix}_mean": mean, f"{prefix}_max": m["weight_max"], f"{prefix}_min": m["weight_min"]}
    compared = rows if config.weighs_rows else tokens
    # a row without tokens has a product of 1 and a mean of 0
    high_ratios, low_ratios = m["high_ratios"], m["low_ratios"]
    if config.weighs_rows:
        high_ratios, low_ratios = high_ratios + empty * (high < 1), low_ratios + empty * (low > 1)
        largest, smallest = m["log_product_max"], m["log_product_min"]
        if empty:
            largest, smallest = max(largest, 0.0), min(smallest, 0.0)
        bound = math.inf if config.log_ratio_bound is None else config.log_ratio_bound
        own |= {f"{prefix}_max": _exp(min(largest, bound)), f"{prefix}_min": _exp(smallest)}
    own |= {
        f"{prefix}_ratio_fraction_high": high_ratios / compared,
        f"{prefix}_ratio_fraction_low": low_ratios / compared,
        f"{prefix}_std": _deviation(m["weight_square_sum"], m["weight_sum"], tokens),
        f"{prefix}_eff_sample_size": _ratio((mean + 1e-8) ** 2, m["weight_square_sum"] / tokens),
    }
    smallest = min(m["row_weight_min"], 0.0) if empty else m["row_weight_min"]
    largest = max(m["row_weight_max"], 0.0) if empty else m["row_weight_max"]
    own |= {
        f"{prefix}_seq_mean": m["row_weight_sum"] / rows,
        f"{prefix}_seq_std": _spread(m["row_weight_square_sum"], m["row_weight_sum"], rows),
        f"{prefix}_seq_max": largest,
        f"{prefix}_seq_min": smallest,
        f"{prefix}_seq_max_deviation": max(abs(largest - 1), abs(smallest - 1)),
        f"{prefix}_seq_fraction_high": m["high_rows"] / rows,
        f"{prefix}_seq_fraction_low": (m["low_rows"] + empty * (low > 0)) / rows,
    }
    if config.outside == "mask":
        own[f"{prefix}_oob_ratio"] = m["outside_tokens"] / tokens
    if config.batch_normalize:
        by_row = m["row_weight_sum"] / m["active_rows"]
        divisor = by_row if config.weighs_rows else mean
        own[f"{prefix}_batch_norm_factor"] = divisor if divisor > 1e-8 else 1.0
    return own


def _verl_rejection(m: dict[str, float], name: str) -> dict[str, float]:
    r = {key.partition("/")[2]: value for key, value in m.items() if key.startswith(f"{name}/")}
    tokens, rows = m["tokens"], m["active_rows"]
    # every statistic is of scored tokens, those of rows of all their tokens
    counted = m["scored_tokens"] if name.startswith("token") else tokens
    compared = counted if name.startswith("token") else rows
    prefix = f"rollout_rs_{name}"
    own = {
        f"{prefix}_mean": _ratio(r["sum"], counted),
        f"{prefix}_max": r["max"],
        f"{prefix}_min": r["min"],
        f"{prefix}_fraction_high": _ratio(r["high"], compared),
        f"{prefix}_fraction_low": _ratio(r["low"], compared),
        f"{prefix}_std": _deviation(r["clamped_square_sum"], r["clamped_sum"], counted) if tokens > 1 else 0.0,
        f"{prefix}_seq_mean": r["row_sum"] / rows,
        f"{prefix}_seq_std": _spread(r["row_square_sum"], r["row_sum"], rows),
        f"{prefix}_seq_max": r["row_max"],
        f"{prefix}_seq_min": r["row_min"],
        f"{prefix}_seq_max_deviation": max(abs(r["row_max"]), abs(r["row_min"])),
        f"{prefix}_seq_fraction_high": r["high_rows"] / rows,
        f"{prefix}_masked_fraction": r["masked_tokens"] / tokens,
        f"{prefix}_seq_masked_fraction": r["masked_rows"] / rows,
    }
    if name.endswith("k1"):
        own[f"{prefix}_seq_fraction_low"] = r["low_rows"] / rows
    return own


def _verl_mismatch(m: dict[str, float]) -> dict[str, float]:
    rows, scored, empty = m["rows"], m["scored_tokens"], m["rows"] - m["active_rows"]
    least, most = m["log_perplexity_gap_min"], m["log_perplexity_gap_max"]
    if empty:
        least, most = min(least, 0.0), max(most, 0.0)
    old, sampling = m["old_log_perplexity_sum"] / rows, m["sampling_log_perplexity_sum"] / rows
    return {
        "training_ppl": (m["old_perplexity_sum"] + empty) / rows,
        "training_log_ppl": old,
        "kl": -_ratio(m["log_ratio_sum"], scored),
        "k3_kl": _ratio(m["k3_sum"], scored),
        "rollout_ppl": (m["sampling_perplexity_sum"] + empty) / rows,
        "rollout_log_ppl": sampling,
        "log_ppl_diff": old - sampling,
        "log_ppl_abs_diff": m["log_perplexity_gap_sum"] / rows,
        "log_ppl_diff_max": most,
        "log_ppl_diff_min": least,
        "ppl_ratio": (m["perplexity_ratio_sum"] + empty) / rows,
        "chi2_token": _ratio(m["ratio_square_sum"], scored) - 1,
        "chi2_seq": (m["product_square_sum"] + empty) / rows - 1,
    }


def _trl(m: dict[str, float], config: CorrectionConfig) -> dict[str, float]:
    scored = m["scored_tokens"]
    gap = max(abs(m["log_ratio_min"]), abs(m["log_ratio_max"])) if scored else 0.0
    own = {
        "sampling/sampling_logp_difference/mean": _ratio(m["gap_sum"], scored),
        "sampling/sampling_logp_difference/max": gap,
    }
    if config.weights == "none":
        return own
    total, count, least, most = m["weight_sum"], m["tokens"], m["weight_min"], m["weight_max"]
    if config.weighs_rows:
        total, count, least, most = m["row_weight_sum"], m["active_rows"], m["row_weight_min"], m["row_weight_max"]
        if empty := m["rows"] - count:  # a row without tokens has ratio 1
            one = min(max(1.0, config.low), config.high)
            one = one if config.outside == "truncate" or one == 1 else 0.0
            total, count, least, most = total + empty * one, m["rows"], min(least, one), max(most, one)
    prefix = "sampling/importance_sampling_ratio"
    least, most = (least, most) if count else (0.0, 0.0)
    return own | {f"{prefix}/min": least, f"{prefix}/mean": _ratio(total, count), f"{prefix}/max": most}
