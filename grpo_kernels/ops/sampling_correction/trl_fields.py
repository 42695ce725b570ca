"""The vllm_importance_sampling settings of trl.GRPOConfig 1.16. A test compares the defaults."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown, with_defaults

TRL_DEFAULTS: dict[str, Any] = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
}
TRL_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


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
