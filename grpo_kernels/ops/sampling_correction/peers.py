"""Translates the settings of verl, TRL and SkyRL into the fields of CorrectionConfig.

The defaults are those of verl's RolloutCorrectionConfig 0.9.1 and trl.GRPOConfig 1.16, which a test compares, and of
SkyRL's OffPolicyCorrectionConfig 0.3.
"""

from __future__ import annotations

import math
from typing import Any

from grpo_kernels.checks import finite, unknown, with_defaults

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
TRL_DEFAULTS: dict[str, Any] = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
}
TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SKYRL_DEFAULTS: dict[str, Any] = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_high": 1.01,
    "geo_mask_low": 0.99,
    "product_mask_high": 2.0,
    "product_mask_low": 0.5,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}


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


def trl_fields(**fields: Any) -> dict[str, Any]:
    where = "CorrectionConfig.trl"
    f = with_defaults(where, fields, TRL_DEFAULTS)
    mode = f["vllm_importance_sampling_mode"]
    if mode not in TRL_MODES:
        raise unknown(where, "vllm_importance_sampling_mode", mode, TRL_MODES)
    if not f["vllm_importance_sampling_correction"]:
        return {"log_ratio_bound": None}
    level, _, outside = mode.partition("_")
    return {
        "weights": level,
        "outside": outside,
        "weight_min": f["vllm_importance_sampling_clip_min"],
        "weight_max": f["vllm_importance_sampling_clip_max"],
        "log_ratio_bound": None,
    }


def skyrl_fields(**fields: Any) -> dict[str, Any]:
    where = "CorrectionConfig.skyrl"
    f = with_defaults(where, fields, SKYRL_DEFAULTS, unchecked=("tis_ratio_type", "sequence_mask_metric"))
    # SkyRL bounds ratios at e^20, where its caps leave no difference, but not the log ratios that it sums over a row
    own: dict[str, Any] = {"log_ratio_bound": None}
    level, metric = f["tis_ratio_type"], f["sequence_mask_metric"]
    if level not in (None, "token", "sequence"):
        raise unknown(where, "tis_ratio_type", level, ("token", "sequence"))
    if metric not in (None, "product", "geometric"):
        raise unknown(where, "sequence_mask_metric", metric, ("product", "geometric"))
    if level is not None:
        own |= {"weights": level, "weight_max": f[f"{level}_tis_ratio_clip_high"]}

    def on_ratio(statistic: str, bounds: str) -> tuple[str, float | None, float | None]:
        """A rejection by bounds of the ratio of the trainer to the sampler; k1 is the negative of its logarithm."""
        log_low, log_high = (_log(where, f"{bounds}_{end}", f[f"{bounds}_{end}"]) for end in ("low", "high"))
        return statistic, None if log_high is None else -log_high, None if log_low is None else -log_low

    rejections = []
    low, high = f["outlier_token_is_threshold_low"], f["outlier_token_is_threshold_high"]
    if low is not None or high is not None:
        rejections.append(on_ratio("seq_max_k1", "outlier_token_is_threshold"))
    low, high = f["token_mask_is_threshold_low"], f["token_mask_is_threshold_high"]
    if low is not None and high is not None:
        if level == "sequence" or metric is not None:
            raise ValueError(
                f"{where}: token_mask_is_threshold_low and _high must be left out with tis_ratio_type='sequence' or a "
                f"sequence_mask_metric, got {low!r} and {high!r}; SkyRL takes the row's ratio over the tokens that are "
                "left, so call twice, the second time with the mask of the first"
            )
        rejections.append(on_ratio("token_k1", "token_mask_is_threshold"))
    if metric == "product":
        rejections.append(on_ratio("seq_sum_k1", "product_mask"))
    if metric == "geometric":
        rejections.append(on_ratio("seq_mean_k1", "geo_mask"))
    return own | {"rejections": tuple(rejections)}


def _log(where: str, field: str, bound: float | None) -> float | None:
    if bound is None:
        return None
    finite(where, field, bound, 0.0, open_end=True)
    return math.log(bound)
