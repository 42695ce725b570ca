"""CorrectionConfig: what to do about tokens whose sampler and trainer disagree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from grpo_kernels.checks import boolean, choices, finite, of_peer, peer_fields, unknown
from grpo_kernels.ops.sampling_correction.trl_fields import TRL_DEFAULTS, trl_fields
from grpo_kernels.ops.sampling_correction.verl_fields import VERL_DEFAULTS, verl_fields
from grpo_kernels.plans import CheckedConfig

WEIGHT_LEVELS = ("none", "token", "sequence", "geometric")
LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
ESTIMATORS = ("k1", "k2", "k3", "binary_kl")
STATISTICS = tuple(f"{level}_{estimator}" for level in LEVELS for estimator in ESTIMATORS)

# What is measured of every row, in the order of the table: sums, then minima, then maxima, each followed by
# those of every rejection. Rows without tokens count in "rows" alone.
ROW_SUMS = (
    "rows",
    "active_rows",
    "tokens",
    "scored_tokens",
    "kept_tokens",
    "dropped_rows",
    "weight_sum",
    "weight_square_sum",
    "row_weight_sum",
    "row_weight_square_sum",
    "high_ratios",
    "low_ratios",
    "outside_tokens",
    "high_rows",
    "low_rows",
    "log_ratio_sum",
    "gap_sum",
    "k3_sum",
    "ratio_sum",
    "ratio_square_sum",
    "product_square_sum",
    "old_perplexity_sum",
    "old_log_perplexity_sum",
    "sampling_perplexity_sum",
    "sampling_log_perplexity_sum",
    "log_perplexity_gap_sum",
    "perplexity_ratio_sum",
    "m2_sum",
    "m2_dropped_tokens",
)
ROW_MINIMA = ("weight_min", "row_weight_min", "log_ratio_min", "log_product_min", "log_perplexity_gap_min")
ROW_MAXIMA = ("weight_max", "row_weight_max", "log_ratio_max", "log_product_max", "log_perplexity_gap_max")
REJECTION_SUMS = (
    "sum",
    "clamped_sum",
    "clamped_square_sum",
    "high",
    "low",
    "masked_tokens",
    "masked_rows",
    "row_sum",
    "row_square_sum",
    "high_rows",
    "low_rows",
)
REJECTION_MINIMA = ("min", "row_min")
REJECTION_MAXIMA = ("max", "row_max")

Rejection = tuple[str, float | None, float | None]


def table_names(statistics: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of the sums, minima and maxima in a table with these rejections."""

    def of(base: tuple[str, ...], own: tuple[str, ...]) -> tuple[str, ...]:
        return base + tuple(f"{statistic}/{name}" for statistic in statistics for name in own)

    return of(ROW_SUMS, REJECTION_SUMS), of(ROW_MINIMA, REJECTION_MINIMA), of(ROW_MAXIMA, REJECTION_MAXIMA)


@dataclasses.dataclass(frozen=True)
class CorrectionConfig(CheckedConfig):
    """Importance weights of tokens, and rejections of tokens and sequences whose sampler and trainer disagree.

    The log ratio of a token is old_logprobs - sampling_logprobs. k1 is its negative, k2 half its square,
    k3 = exp(log ratio) - 1 - log ratio, and binary_kl the larger of both KL divergences between the two policies if
    all other tokens are one event.

    Args:
        weights: "none", "token" (exp of the token's log ratio), "sequence" (the product of the row's ratios) or
            "geometric" (their geometric mean)
        weight_min, weight_max: bounds of the weights; None means no bound
        outside: what happens to weights outside of the bounds: "truncate" or "mask" (weight 0; the token stays in the
            mask)
        log_ratio_bound: log ratios are limited to plus and minus this before they are exponentiated, and in the
            statistics of rejections; None means no bound
        batch_normalize: divide the weights by their mean over tokens, or over rows if they are per row
        rejections: (statistic, low, high), each at most once. A statistic is a level, "token", "seq_sum", "seq_mean" or
            "seq_max", an underscore and an estimator, "k1", "k2", "k3" or "binary_kl". A token or row whose statistic
            is outside of [low, high] leaves the mask. None means no bound. "seq_max_k1" is a veto: a row is dropped if
            any of its tokens is outside
        m2_threshold: drop the tokens of largest squared log ratio, over the whole batch, so that the mean of the others
            is below this (M2PO)
    """

    weights: str = "none"
    weight_min: float | None = None
    weight_max: float | None = None
    outside: str = "truncate"
    log_ratio_bound: float | None = 20.0
    batch_normalize: bool = False
    rejections: tuple[Rejection, ...] = ()
    m2_threshold: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        choices(self, weights=WEIGHT_LEVELS, outside=("truncate", "mask"))
        boolean(name, batch_normalize=self.batch_normalize)
        for field in ("weight_min", "weight_max"):
            if getattr(self, field) is not None:
                finite(name, field, getattr(self, field), 0.0)
        for field in ("log_ratio_bound", "m2_threshold"):
            if getattr(self, field) is not None:
                finite(name, field, getattr(self, field), 0.0, open_end=True)
        low, high = self.weight_min, self.weight_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"{name}: weight_min must be at most weight_max, got {low!r} and {high!r}")
        if self.weights == "none" and ((low, high) != (None, None) or self.batch_normalize):
            raise ValueError(
                f"{name}: weights must be chosen for weight_min, weight_max and batch_normalize, got {self.weights!r}"
            )
        object.__setattr__(self, "rejections", _checked_rejections(self.rejections))

    @classmethod
    @peer_fields(VERL_DEFAULTS)
    def verl(cls, **fields: Any) -> CorrectionConfig:
        """The correction that verl's RolloutCorrectionConfig describes with these fields; others have its defaults."""
        return of_peer(cls, "verl", verl_fields, fields)

    @classmethod
    @peer_fields(TRL_DEFAULTS)
    def trl(cls, **fields: Any) -> CorrectionConfig:
        """The correction that the vllm_importance_sampling fields of trl.GRPOConfig describe; likewise."""
        return of_peer(cls, "trl", trl_fields, fields)

    @property
    def weighs_rows(self) -> bool:
        """Whether all tokens of a row have one weight."""
        return self.weights in ("sequence", "geometric")

    @property
    def low(self) -> float:
        """Lower bound of the weights."""
        return _or(self.weight_min, -math.inf)

    @property
    def high(self) -> float:
        """Upper bound of the weights."""
        return _or(self.weight_max, math.inf)

    @property
    def low_mark(self) -> float:
        """Bound below which the metrics count a ratio as low: without weight_min, verl's 1 / weight_max."""
        if self.weight_min is None and self.weight_max:
            return 1 / self.weight_max
        return self.low

    @property
    def bound(self) -> float:
        """Bound of log ratios."""
        return _or(self.log_ratio_bound, math.inf)


def _or(value: float | None, none: float) -> float:
    return none if value is None else float(value)


def _checked_rejections(rejections: Any) -> tuple[Rejection, ...]:
    name = "CorrectionConfig"
    if not isinstance(rejections, tuple | list):
        raise TypeError(f"{name}: rejections must be a tuple of (statistic, low, high), got {rejections!r}")
    result: list[Rejection] = []
    for rejection in rejections:
        if not isinstance(rejection, tuple | list) or len(rejection) != 3:
            raise ValueError(f"{name}: rejections must hold (statistic, low, high), got {rejection!r}")
        statistic, low, high = rejection
        if statistic not in STATISTICS:
            raise unknown(name, "rejections", statistic, STATISTICS)
        if any(statistic == other for other, _, _ in result):
            raise ValueError(f"{name}: rejections must hold each statistic once, got {statistic!r} twice")
        for bound in (low, high):
            if bound is not None:
                finite(name, f"bounds of {statistic}", bound)
        if low is None and high is None:
            raise ValueError(f"{name}: bounds of {statistic} must hold a number, got None and None")
        if low is not None and high is not None and low > high:
            raise ValueError(f"{name}: bounds of {statistic} must ascend, got {low!r} and {high!r}")
        if low is not None and not statistic.endswith("k1"):
            raise ValueError(f"{name}: low must be None for {statistic}, which is never negative, got {low!r}")
        result.append((statistic, None if low is None else float(low), None if high is None else float(high)))
    return tuple(result)
