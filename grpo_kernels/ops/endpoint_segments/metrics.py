"""Metrics of endpoint segments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.groups import packed_bounds
from grpo_kernels.ops.endpoint_segments import EndpointSegments

_NAME = "segment_metrics"
_PREFIX = "group/"
_SHOWN_PROMPTS = 5  # the first prompts, each with metrics of its own


def segment_metrics(
    result: EndpointSegments,
    groups: int | Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    seconds: tuple[float, float] | None = None,
    peak_bytes: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Computes metrics to log, each named "group/..."; docs/ops/endpoint_segments.md defines them.

    Waits for the device once. Metrics that follow from counts alone and were not measured end in _est. A metric without
    a value (the spread of one number, the mean of none) is NaN.

    Args:
        result: of endpoint_segments
        groups: prompt of each row, as an int (that many consecutive rows) or integer ids [B]; None omits the metrics of
            prompts
        cu_seqlens: as in endpoint_segments
        seconds: measured duration of a step with the loss on all tokens, and on endpoints alone; gives speedup_factor
            and compute_savings
        peak_bytes: likewise the peak of memory; gives memory_saved_ratio

    Returns:
        numbers by name
    """
    if not isinstance(result, EndpointSegments):
        raise TypeError(f"{_NAME}: result must be EndpointSegments, got {type(result).__name__}")
    rows = len(result.num_segments)
    endpoints, tokens, ids, sums = _counts(result, _ids(groups, result.num_segments), cu_seqlens)
    metrics = _of_batch(endpoints, tokens) | _of_rows(endpoints, tokens) | _of_advantages(sums, float(tokens.sum()))
    metrics["threshold"] = sums[0]
    if groups is not None:
        metrics |= _of_prompts(endpoints, tokens, ids) if rows else {"total_groups": 0.0}
    metrics |= _measured(seconds, peak_bytes)
    return {_PREFIX + name: value for name, value in metrics.items()}


def _ids(groups: int | Tensor | None, of_rows: Tensor) -> Tensor:
    rows = len(of_rows)
    if isinstance(groups, Tensor):
        return checks.per_row(_NAME, "groups", groups, checks.INTEGERS, of_rows).long()
    if groups is None:
        return torch.zeros(rows, dtype=torch.int64, device=of_rows.device)
    return torch.arange(rows, device=of_rows.device) // checks.group_size(_NAME, groups, rows)


def _counts(
    result: EndpointSegments, ids: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """Endpoints, tokens and prompt of each row, and sums over advantages, copied to the host in one wait."""
    valid = result.segment_ids >= 0
    rows = len(result.num_segments)
    if (cu_seqlens is None) != (valid.dim() == 2):
        got = "None" if cu_seqlens is None else "a tensor"
        raise ValueError(f"{_NAME}: cu_seqlens must be given for packed tokens [M] and for no others, got {got}")
    if cu_seqlens is None:
        tokens = valid.sum(1)
    else:
        checks.shaped(_NAME, "cu_seqlens", cu_seqlens, (torch.int64, torch.int32), valid.device, [rows + 1])
        until = torch.cat((valid.new_zeros(1, dtype=torch.int64), valid.cumsum(0)))
        tokens = until[packed_bounds(_NAME, cu_seqlens.long(), len(valid))].diff()
    advantages = torch.where(valid, result.advantages, 0).double()
    nonzero = advantages != 0
    count = nonzero.sum()
    total = advantages.sum()
    squares = torch.where(nonzero, advantages - total / count, 0).square().sum()
    positive, negative = (advantages > 0).sum(), (advantages < 0).sum()
    sums = torch.stack(
        [result.threshold, count.double(), total, squares, advantages.abs().sum(), positive.double(), negative.double()]
    )
    together = torch.cat((result.num_segments.long(), tokens, ids, sums.view(torch.int64))).cpu()
    endpoints, tokens, ids = together[: 3 * rows].view(3, rows)
    return endpoints.double(), tokens.double(), ids, together[3 * rows :].view(torch.float64).tolist()


def _of_batch(endpoints: Tensor, tokens: Tensor) -> dict[str, float]:
    rows, total, ends = len(tokens), float(tokens.sum()), float(endpoints.sum())
    compression = 1 - ends / max(total, 1)
    per_endpoint = 1 / (1 - compression + 1e-8)
    health = max(0.0, compression - 0.1) / 0.9
    return {
        "compression_ratio": compression,
        "efficiency_gain": per_endpoint,
        "algorithm_effectiveness": health,
        "kpi_compression": compression,
        "kpi_efficiency": per_endpoint,
        "kpi_health": health,
        "memory_saved_ratio_est": compression,
        "memory_savings_est": 0.8 * compression,
        "compute_savings_est": _ratio(total - ends, total),
        "speedup_factor_est": 1 / (1 - 0.7 * compression),
        "total_tokens": total,
        "total_endpoints": ends,
        "total_sequences": float(rows),
        "avg_endpoints_per_sequence": _ratio(ends, rows),
        "avg_tokens_per_sequence": _ratio(total, rows),
        "single_endpoint_ratio": _ratio(float((endpoints == 1).sum()), rows),
    }


def _of_rows(endpoints: Tensor, tokens: Tensor) -> dict[str, float]:
    compression = 1 - endpoints / tokens.clamp(min=1)
    quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=endpoints.device)
    percentiles = endpoints.quantile(quarters).tolist() if len(endpoints) else [math.nan] * 3
    return (
        _spread("endpoint_count", endpoints)
        | dict(zip(("endpoint_count_p25", "endpoint_count_p50", "endpoint_count_p75"), percentiles, strict=True))
        | _spread("compression_ratio", compression)
    )


def _of_advantages(sums: list[float], tokens: float) -> dict[str, float]:
    _, count, total, squares, absolute, positive, negative = sums
    return {
        "advantage_sparsity": 1 - _ratio(count, tokens),
        "advantage_mean": _ratio(total, count),
        "advantage_std": math.sqrt(_ratio(squares, count - 1)),
        "advantage_abs_mean": _ratio(absolute, count),
        "advantage_positive_ratio": _ratio(positive, count),
        "advantage_negative_ratio": _ratio(negative, count),
    }


def _of_prompts(endpoints: Tensor, tokens: Tensor, ids: Tensor) -> dict[str, float]:
    _, prompt, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
    sizes = sizes.double()
    mean = torch.zeros_like(sizes).index_add_(0, prompt, endpoints) / sizes
    spread = (torch.zeros_like(sizes).index_add_(0, prompt, (endpoints - mean[prompt]).square()) / sizes).sqrt()
    # rows without an endpoint agree as well
    consistency = (1 - torch.where(mean > 0, spread / mean, 0)).clamp(min=0)[sizes > 1]
    metrics = {
        "total_groups": float(len(sizes)),
        "avg_group_size": _ratio(len(ids), len(sizes)),
        "group_balance_score": 1 - float(sizes.std(correction=0) / sizes.mean()),
        "grouping_consistency": float(consistency.mean()) if len(consistency) else 1.0,
    } | _spread("group_size", sizes)
    for number, p in enumerate(list(dict.fromkeys(prompt.tolist()))[:_SHOWN_PROMPTS]):
        rows = prompt == p
        own_tokens, own_ends = float(tokens[rows].sum()), float(endpoints[rows].sum())
        metrics |= {
            f"group_{number}_size": float(rows.sum()),
            f"group_{number}_compression": 1 - own_ends / max(own_tokens, 1),
            f"group_{number}_tokens": own_tokens,
            f"group_{number}_endpoints": own_ends,
        }
    return metrics


def _measured(seconds: tuple[float, float] | None, peak_bytes: tuple[float, float] | None) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, pair in (("seconds", seconds), ("peak_bytes", peak_bytes)):
        if pair is None:
            continue
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(v, int | float) for v in pair):
            raise TypeError(f"{_NAME}: {name} must be two numbers, of all tokens and of endpoints, got {pair!r}")
        if not all(0 < v < math.inf for v in pair):
            raise ValueError(f"{_NAME}: {name} must be positive and finite, got {pair!r}")
        saved = "compute_savings" if name == "seconds" else "memory_saved_ratio"
        metrics[saved] = 1 - pair[1] / pair[0]
        if name == "seconds":
            metrics["speedup_factor"] = pair[0] / pair[1]
    return metrics


def _spread(name: str, values: Tensor) -> dict[str, float]:
    if len(values) == 0:
        return dict.fromkeys((f"{name}_{part}" for part in ("mean", "std", "min", "max")), math.nan)
    figures = (values.mean(), values.std(correction=0), values.min(), values.max())
    return {f"{name}_{part}": float(x) for part, x in zip(("mean", "std", "min", "max"), figures, strict=True)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
