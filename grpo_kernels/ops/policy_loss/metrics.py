"""Metrics of policy_loss, under its own names and those of TRL and verl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.checks import metric_rows
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.reference.metrics import METRICS


class PolicyLossMetrics:
    """Metrics of one call as a small float64 `tensor` on the device; metrics["kl_sum"] is one of its elements.

    `names` lists the elements. trl(), verl() and to_dict() return Python floats, and the first call of any of them
    waits for the device once. Sums and counts are those of this call: add them over micro-batches and ranks before
    dividing, for example with merged(), which leaves out what is of this call alone: `distillation`, the
    DistillationLoss of a teacher, and with linear_policy_loss `logprobs`, `entropy` and `sum_pi_squared`, those of its
    tokens.
    """

    names = METRICS
    distillation: Any = None
    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    _on_host: dict[str, float] | None = None

    def __init__(self, tensor: Tensor, config: LossConfig, advantages_by_row: bool, has_entropy: bool) -> None:
        self.tensor = tensor
        self._config, self._by_row, self._has_entropy = config, advantages_by_row, has_entropy

    def __getitem__(self, name: str) -> Tensor:
        if name not in METRICS:
            raise KeyError(f"PolicyLossMetrics: {name!r} is none of {', '.join(METRICS)}")
        return self.tensor[METRICS.index(name)]

    def to_dict(self) -> dict[str, float]:
        if self._on_host is None:
            self._on_host = dict(zip(METRICS, self.tensor.tolist(), strict=True))
        return dict(self._on_host)

    @staticmethod
    def merge(rows: Tensor) -> Tensor:
        """Combines the `tensor`s of several micro-batches or ranks, one per row of `rows`.

        Sums are added and extremes compared. The extreme of no value is NaN, and a NaN never hides another row's value.
        """
        total = rows.sum(0)
        for i, name in enumerate(METRICS):
            if name.endswith(("_min", "_max")):
                column, sign = rows[:, i], -1 if name.endswith("_min") else 1
                extreme = sign * torch.where(column.isnan(), -math.inf, sign * column).amax()
                total[i] = torch.where(column.isnan().all(), math.nan, extreme)
        return total

    def merged(self, rows: Tensor | Sequence[PolicyLossMetrics]) -> PolicyLossMetrics:
        """The metrics of several micro-batches or ranks, from all of them or from the `tensor` of each as a row."""
        checked = metric_rows("PolicyLossMetrics.merged", rows, len(METRICS))
        return PolicyLossMetrics(self.merge(checked), self._config, self._by_row, self._has_entropy)

    def trl(self) -> dict[str, float]:
        """The metrics of TRL's GRPOTrainer that this loss has, by TRL's keys."""
        m, config = self.to_dict(), self._config
        tokens, rows, empty = max(m["tokens"], 1), max(m["rows"], 1), m["rows"] - m["active_rows"]
        # TRL has one value per row and a mean over rows if ratio and advantage are per row
        is_per_row = config.ratio == "sequence" and self._by_row
        result = {}
        if config.kl_coef != 0:
            result["kl"] = m["kl_sum"] / tokens
        if self._has_entropy:
            result["entropy"] = m["entropy_sum"] / tokens
        if config.entropy_coef != 0:
            result["policy_loss"] = m["policy_loss"] + config.kl_coef * m["kl_loss"]
            result["entropy_coef"] = config.entropy_coef
        clippable = self._clippable(m)
        low = m["low_clipped_rows"] / rows if is_per_row else m["low_clipped"] / clippable
        high = m["high_clipped_rows"] / rows if is_per_row else m["high_clipped"] / clippable
        if config.loss in ("clip", "geo_mean"):
            result |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
            result["clip_ratio/low_min"] = 0.0 if is_per_row and empty else m["low_clipped_min"]
            result["clip_ratio/high_max"] = 0.0 if is_per_row and empty == rows else m["high_clipped_max"]
        if config.loss == "cispo":
            result["cispo_clip_ratio"] = high
        if config.loss == "vespo":  # a row without tokens has ratio 1, and phi(1) = 1
            result["vespo/phi_seq_mean"] = (m["phi_rows"] + empty) / rows if self._by_row else m["phi_sum"] / tokens
        return result

    def verl(self) -> dict[str, float]:
        """The metrics of verl's actor that this loss has, by verl's keys."""
        m, config = self.to_dict(), self._config
        tokens = m["tokens"] if m["tokens"] > 0 else math.inf
        result = {"actor/pg_loss": m["policy_loss"]}
        if config.loss != "reinforce":
            result["actor/ppo_kl"] = -m["log_ratio_sum"] / tokens
        if config.loss not in ("reinforce", "dro"):
            result["actor/pg_clipfrac"] = m["clipped"] / self._clippable(m)
            result["actor/pg_clipfrac_lower"] = m["dual_clipped"] / self._clippable(m)
        if self._has_entropy:
            result["actor/entropy_loss"] = m["entropy_loss"]
        if config.kl != "none":
            result |= {"kl_loss": m["kl_loss"], "kl_coef": config.kl_coef}
        return result

    def _clippable(self, m: dict[str, float]) -> float:
        """Number of ratios that may be clipped: of segments where these have one, otherwise of tokens."""
        return max(m["terms"] if self._config.ratio.startswith("segment") else m["tokens"], 1)

    def __repr__(self) -> str:
        return f"PolicyLossMetrics({', '.join(METRICS)})"
