"""The settings of verl 0.9.1's RolloutCorrectionConfig. A test compares the defaults."""

from __future__ import annotations

import math
from typing import Any

from grpo_kernels.checks import unknown, with_defaults

# Log ratios beyond it count as it in verl.
SAFETY_BOUND = 20.0

VERL_DEFAULTS: dict[str, Any] = {
    "rollout_is": "sequence",
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
}
VERL_STATISTICS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)


def verl_fields(**fields: Any) -> dict[str, Any]:
    where = "CorrectionConfig.verl"
    f = with_defaults(
        where,
        fields,
        VERL_DEFAULTS,
        unchecked=("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"),
    )
    if f["bypass_mode"]:
        raise ValueError(
            f"{where}: bypass_mode must be False, got True; it takes the sampler's log-probs for the old ones, which "
            "leaves nothing to correct before the loss"
        )
    own: dict[str, Any] = {"log_ratio_bound": SAFETY_BOUND}
    level, threshold = f["rollout_is"], f["rollout_is_threshold"]
    if level is not None and threshold is not None:
        if level not in ("token", "sequence"):
            raise unknown(where, "rollout_is", level, ("token", "sequence"))
        low, high = _pair(where, "rollout_is_threshold", threshold)
        own |= {
            "weights": level,
            "weight_min": low,
            "weight_max": high,
            "outside": "truncate" if low is None else "mask",
            "batch_normalize": bool(f["rollout_is_batch_normalize"]),
        }
    if f["rollout_rs"] is not None:
        own["rejections"] = _verl_rejections(where, f["rollout_rs"], f["rollout_rs_threshold"])
    return own


def _verl_rejections(where: str, options: Any, thresholds: Any) -> tuple[tuple[str, float | None, float], ...]:
    if not isinstance(options, str):
        raise TypeError(f"{where}: rollout_rs must be a str, got {options!r}")
    names = list(dict.fromkeys(name.strip() for name in options.split(",") if name.strip()))
    if not names:
        raise ValueError(f"{where}: rollout_rs must name at least one statistic, got {options!r}")
    for name in names:
        if name not in VERL_STATISTICS:
            raise unknown(where, "rollout_rs", name, VERL_STATISTICS)
    parts = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if thresholds is None or len(parts) not in (1, len(names)):
        raise ValueError(
            f"{where}: rollout_rs_threshold must hold one value, or one for each of {', '.join(names)}, "
            f"got {thresholds!r}"
        )
    rejections: list[tuple[str, float | None, float]] = []
    for name, part in zip(names, parts * len(names) if len(parts) == 1 else parts, strict=True):
        low, high = _pair(where, "rollout_rs_threshold", part)
        if name.endswith("k1"):  # bounds of the ratio of the sampler to the trainer
            rejections.append((name, math.log(1 / high if low is None else low), math.log(high)))
        elif low is not None:
            raise ValueError(f"{where}: rollout_rs_threshold of {name} must be one number, got {part!r}")
        else:
            rejections.append((name, None, high))
    return tuple(rejections)


def _pair(where: str, field: str, threshold: Any) -> tuple[float | None, float]:
    """The bounds that verl writes as 5.0, "5.0" or "0.5_5.0"."""
    problem = ValueError(
        f"{where}: {field} must be a positive number or 'low_high' with low <= high, got {threshold!r}"
    )
    if isinstance(threshold, bool) or not isinstance(threshold, int | float | str):
        raise problem
    low, has_low, high = str(threshold).strip().rpartition("_")
    try:
        bounds = (float(low) if has_low else None, float(high))
    except ValueError:
        raise problem from None
    if not 0 < bounds[1] < math.inf or (bounds[0] is not None and not 0 < bounds[0] <= bounds[1]):
        raise problem
    return bounds
