"""Errors of sampling_correction, CorrectionConfig, its constructors for peers and its metrics."""

from __future__ import annotations

from typing import Any

import torch

import grpo_kernels as gk
from tests.ops.error_rows import Call, Errors, Rows, each

OLD = -torch.ones(3, 4)
NOT_A_NUMBER = torch.where(torch.arange(12).view(3, 4) == 6, torch.nan, OLD)
PACKED = {"old_logprobs": OLD[0], "sampling_logprobs": OLD[0]}
METRICS = gk.sampling_correction(OLD, OLD).metrics
CALLS = {
    "sampling_correction": Call(gk.sampling_correction, {"old_logprobs": OLD, "sampling_logprobs": OLD}),
    "CorrectionConfig": Call(gk.CorrectionConfig, {}),
    "CorrectionConfig.verl": Call(gk.CorrectionConfig.verl, {}),
    "CorrectionConfig.trl": Call(gk.CorrectionConfig.trl, {}),
    "CorrectionMetrics.merged": Call(METRICS.merged, {"rows": [METRICS]}),
}


def rejecting(*rejection: Any) -> dict[str, Any]:
    return {"rejections": (rejection,)}


def verl(statistics: Any, threshold: Any = None) -> dict[str, Any]:
    return {"rollout_rs": statistics, "rollout_rs_threshold": threshold}


TOKENS = {"weights": "token"}
CONFIG: Rows = {
    "weights must be one of none, token ... did you mean 'token'?": {"weights": "tokens"},
    "weight_min must be at most weight_max, got 2.0 and 1.0": {
        "weights": "token",
        "weight_min": 2.0,
        "weight_max": 1.0,
    },
    "weight_min must be ... at least 0 ... -1.0": {"weights": "token", "weight_min": -1.0},
    "log_ratio_bound must be ... above 0": {"log_ratio_bound": 0.0},
    "m2_threshold must be ... above 0": {"m2_threshold": 0.0},
    "rejections must hold (statistic, low, high), got ('token_k1', 1.0)": rejecting("token_k1", 1.0),
    "rejections must be one of ... did you mean": rejecting("seq_max_k4", None, 1.0),
    "rejections must hold each statistic once, got 'token_k1' twice": {"rejections": (("token_k1", None, 1.0),) * 2},
    "bounds of token_k1 must hold a number": rejecting("token_k1", None, None),
    "bounds of token_k1 must ascend, got 2.0 and 1.0": rejecting("token_k1", 2.0, 1.0),
    "low must be None for seq_sum_k2 ... 0.1": rejecting("seq_sum_k2", 0.1, 1.0),
    "bounds of token_k2 must be a finite": rejecting("token_k2", None, float("nan")),
}
for name, value in {"weight_min": 1.0, "weight_max": 1.0, "batch_normalize": True}.items():
    CONFIG[f"weights must be chosen for weight_min, ... {name} ... 'none'"] = {name: value}
VERL: Rows = {
    "rollout_is must be one of token, sequence, got 'geometric'": {"rollout_is": "geometric"},
    **each("rollout_is_threshold", "must be a positive number ... got {}", "2_1", "0_1", -1, 0, True, "a"),
    "rollout_rs must name at least one": verl(" , "),
    "rollout_rs must be one of token_k1": verl("token_k4", 1),
    "rollout_rs_threshold of token_k2 must be one number, got '0.1_0.2'": verl("token_k2", "0.1_0.2"),
    "rollout_rs_threshold must hold one value": verl("token_k1"),
    "rollout_rs_threshold must hold ... got '1,2'": verl("token_k1,token_k2,token_k3", "1,2"),
    "bypass_mode must be False, got True": {"bypass_mode": True},
    "field must ... did you mean 'rollout_is'?": {"rollout_iss": "token"},
}
ERRORS = [
    Errors(
        "sampling_correction",
        ValueError,
        {
            "sampling_logprobs must have the shape of old_logprobs, [3, 4], got [2, 4]": {"sampling_logprobs": OLD[:2]},
            "old_logprobs must have shape [B, T], or [M] with cu_seqlens, got [4]": {"old_logprobs": OLD[0]},
            "cu_seqlens must have shape [B + 1], got [0]": PACKED | {"cu_seqlens": torch.zeros(0).long()},
            "old_logprobs must not be NaN ... got nan at [1, 2]": {"old_logprobs": NOT_A_NUMBER},
            "backend must be one of ... 'gpu'": {"backend": "gpu"},
        },
    ),
    Errors(
        "sampling_correction",
        TypeError,
        {"config must be a CorrectionConfig, got str ... (weights='token', weight_max": {"config": "verl"}},
    ),
    Errors("CorrectionConfig", ValueError, CONFIG),
    Errors(
        "CorrectionConfig",
        TypeError,
        {
            "rejections must be a tuple ... 'token_k1'": {"rejections": "token_k1"},
            "bounds of token_k2 must be a number ... '1'": rejecting("token_k2", None, "1"),
        },
    ),
    Errors("CorrectionConfig.verl", ValueError, VERL),
    Errors("CorrectionConfig.verl", TypeError, {"rollout_rs must be a str, got 1": verl(1)}),
    Errors(
        "CorrectionConfig.trl",
        ValueError,
        {
            "vllm_importance_sampling_mode must be one of token_truncate": {
                "vllm_importance_sampling_mode": "geometric_mask"
            },
            "weight_max must ... weight_max is made from vllm_imp": {"vllm_importance_sampling_clip_max": -1},
        },
    ),
    Errors("CorrectionMetrics.merged", ValueError, {"rows must be ... [2]": {"rows": torch.ones(2)}}),
]
