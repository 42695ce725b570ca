"""The mismatch between sampler and trainer: importance weights, a smaller mask, metrics."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.groups import TokenRows
from grpo_kernels.ops.policy_loss.arguments import Layout
from grpo_kernels.ops.sampling_correction.config import CorrectionConfig, table_names
from grpo_kernels.ops.sampling_correction.m2 import find_m2_ceiling
from grpo_kernels.ops.sampling_correction.metrics import CorrectionMetrics
from grpo_kernels.ops.sampling_correction.reference import Batch, correct
from grpo_kernels.rollouts import JoinedRows

_OP = "sampling_correction"
_TABLE_ROWS = table_names(())[0].index("rows")
_LEAST_MEAN = 1e-8  # weights with a smaller mean are not normalized, as in verl


class SamplingCorrection(NamedTuple):
    """The result of sampling_correction.

    Attributes:
        weights: importance weights, in the shape of the log-probs and 0 where `mask` is False; [B, 1] where the tokens
            of a row share theirs ("sequence", "geometric"), and 0 for a row of which the mask holds no token
        mask: bool, the tokens of the input's mask that no rejection dropped
        metrics: measurements of this call, copied to the host only when one is read
    """

    weights: Tensor
    mask: Tensor
    metrics: CorrectionMetrics


def sampling_correction(
    old_logprobs: Tensor,
    sampling_logprobs: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rollouts: Tensor | None = None,
    config: CorrectionConfig | None = None,
    process_group: Any = None,
    backend: str | None = None,
) -> SamplingCorrection:
    """Weighs and rejects tokens by the ratio of the trainer's probabilities to the sampler's. Nothing has a gradient.

    Args:
        old_logprobs: log-probs by the trainer, padded [B, T] or packed [M] with `cu_seqlens`; NaN is an error on a CPU
        sampling_logprobs: log-probs by the sampler, in the same shape; a token with NaN has ratio 1, is not rejected by
            itself, and is left out of the metrics of the mismatch
        mask: tokens that take part; None means all. Masked slots may hold NaN
        cu_seqlens: int32 or int64 [B + 1], bounds of the rows of packed input
        rollouts: integer ids [B]; the rows of one id are weighed, rejected and counted as one row, and must all be here
        config: weights and rejections; None means neither, only the metrics
        process_group: a torch.distributed process group whose batches count as one for m2_threshold and
            batch_normalize; None means this batch alone
        backend: "kernel" or "reference", as for every op; both are plain torch, on every device

    Returns:
        SamplingCorrection: importance weights, the mask that is left, and metrics
    """
    config = _checked_config(config)
    backends.check_choice(_OP, backend)
    layout = Layout.of(_OP, old_logprobs, cu_seqlens, name="old_logprobs")
    old = layout.number(old_logprobs, detach=True)
    checks.tensor(_OP, "sampling_logprobs", sampling_logprobs, checks.FLOATS)
    sampling = layout.floats("sampling_logprobs", sampling_logprobs)
    valid = layout.flags("mask", mask)
    assert sampling is not None
    bounds = None if cu_seqlens is None else cu_seqlens.long().contiguous()
    _check_old(old, valid, bounds)
    if bounds is not None:
        checks.no_token_left_out(_OP, bounds, len(old), valid)
    for name, value in (("old_logprobs", old), ("sampling_logprobs", sampling)):
        checks.log_probs(_OP, name, value, valid)
    batch = Batch(old, sampling, valid, bounds)
    joined = None if rollouts is None else JoinedRows(_OP, rollouts, old, bounds)
    if joined is not None:
        mask = None if valid is None else joined.join(valid)
        batch = Batch(joined.join(old), joined.join(sampling), mask, joined.cu_seqlens)
    ceiling = None if config.m2_threshold is None else _m2_ceiling(batch, config.m2_threshold, process_group)
    weights, kept, table = correct(batch, ceiling, config)
    if joined is not None:
        weights, kept = joined.split(weights), joined.split(kept)
        table[:, _TABLE_ROWS] = joined.exists.double()
    if config.weighs_rows:
        weights = _of_rows(weights, kept, bounds)
    metrics = CorrectionMetrics(_reduce(table, config), config)
    if config.batch_normalize:
        weights = weights / _mean_weight(metrics, config, process_group).to(weights.dtype)
    return SamplingCorrection(weights, kept, metrics)


def _of_rows(weights: Tensor, kept: Tensor, bounds: Tensor | None) -> Tensor:
    """The weight that the kept tokens of each row share, [B, 1]."""
    rows = TokenRows(_OP, weights.shape, bounds, weights.device)
    flags = kept.reshape(-1)
    _, of_row = rows.extremes(weights.reshape(-1), flags)
    return torch.where(rows.counts(flags) > 0, of_row, 0)[:, None]


def _check_old(old: Tensor, valid: Tensor | None, bounds: Tensor | None) -> None:
    """Refuses NaN among the trainer's log-probs, which would count as unscored by the sampler. On the CPU alone."""
    if old.device.type != "cpu" or torch.compiler.is_compiling() or not bool(old.sum().isnan()):
        return
    counts = torch.ones_like(old, dtype=torch.bool) if valid is None else valid
    if bounds is not None:
        counts = counts & (torch.arange(len(old), device=old.device) < bounds[-1])
    checks.values(_OP, "old_logprobs", "not be NaN where a token takes part", old.isnan() & counts, old)


def _checked_config(config: CorrectionConfig | None) -> CorrectionConfig:
    if config is None:
        return _MEASURE
    if not isinstance(config, CorrectionConfig):
        raise TypeError(
            f"{_OP}: config must be a CorrectionConfig, got {type(config).__name__} {config!r}; truncated importance "
            "sampling is CorrectionConfig(weights='token', weight_max=2.0)"
        )
    return config


def _m2_ceiling(batch: Batch, threshold: float, group: Any) -> Tensor:
    log_ratio = batch.old_logprobs - batch.sampling_logprobs
    scored = batch.mask
    if batch.cu_seqlens is not None:
        is_of_row = torch.arange(log_ratio.numel(), device=log_ratio.device) < batch.cu_seqlens[-1]
        scored = is_of_row if scored is None else scored & is_of_row
    return find_m2_ceiling(log_ratio, scored, threshold, group)


def _reduce(table: Tensor, config: CorrectionConfig) -> Tensor:
    """Sums, minima and maxima over the rows of the table."""
    names = table_names(tuple(name for name, *_ in config.rejections))
    parts = torch.split(table, [len(own) for own in names], dim=1)
    if table.shape[0] == 0:
        ends = (0.0, float("inf"), float("-inf"))
        return torch.cat([part.new_full((part.shape[1],), end) for part, end in zip(parts, ends, strict=True)])
    sums, minima, maxima = parts
    return torch.cat((sums.sum(0), minima.amin(0), maxima.amax(0)))


def _mean_weight(metrics: CorrectionMetrics, config: CorrectionConfig, group: Any) -> Tensor:
    """The divisor of the weights."""
    names = ("row_weight_sum", "active_rows") if config.weighs_rows else ("weight_sum", "tokens")
    total = torch.stack([metrics[name] for name in names])
    if group is not None:
        torch.distributed.all_reduce(total, torch.distributed.ReduceOp.SUM, group)
    mean = total[0] / total[1].clamp(min=1)
    return torch.where(mean > _LEAST_MEAN, mean, 1.0)


# Built once, because torch.compile can read a config but not trace its construction.
_MEASURE = CorrectionConfig()
