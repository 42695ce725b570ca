"""The loss settings of trl.GRPOConfig 1.16. A test compares the defaults."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import finite, unknown, with_defaults

TRL_DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "max_completion_length": 512,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
}
_TRL_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "luspo": "seq-mean-token-sum",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "vespo": "token-mean",
}
TRL_LOSS_TYPES = tuple(_TRL_AGGREGATIONS)


def trl_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.trl"
    f = with_defaults(where, fields, TRL_DEFAULTS)
    kind = f["loss_type"]
    if kind not in _TRL_AGGREGATIONS:
        gspo = "GSPO is importance_sampling_level='sequence'" if kind == "gspo" else None
        raise unknown(where, "loss_type", kind, _TRL_AGGREGATIONS, gspo)
    level = f["importance_sampling_level"]
    if level not in ("token", "sequence"):
        raise unknown(where, "importance_sampling_level", level, ("token", "sequence"))
    if f["use_adaptive_entropy"]:
        raise ValueError(
            f"{where}: use_adaptive_entropy must be False, got True; its controller belongs to the trainer, which "
            "passes the entropy_coef of the step"
        )
    _check_composed(where, f)
    finite(where, "epsilon", f["epsilon"])
    high = f["epsilon"] if f["epsilon_high"] is None else f["epsilon_high"]
    own: dict[str, Any] = {
        "cispo": {"loss": "cispo", "clip_low": None, "clip_high": high - 1},
        "sapo": {"loss": "sapo", "sapo_temperatures": (f["sapo_temperature_pos"], f["sapo_temperature_neg"])},
        "vespo": {
            "loss": "vespo",
            "vespo_shape": (f["vespo_k_pos"], f["vespo_lambda_pos"], f["vespo_k_neg"], f["vespo_lambda_neg"]),
        },
    }.get(kind, {"loss": "clip", "clip_low": f["epsilon"], "clip_high": high, "delta": f["delta"]})
    if f["beta"] != 0.0:
        own |= {"kl": "k3", "kl_coef": f["beta"], "kl_unbiased": f["use_bias_correction_kl"]}
    return dict(
        ratio=level,
        aggregation=_TRL_AGGREGATIONS[kind],
        entropy_aggregation="local-token-mean",
        max_length=f["max_completion_length"] if kind == "dr_grpo" else None,
        count_empty_rows=True,
        entropy_coef=f["entropy_coef"],
        **own,
    )


def _check_composed(where: str, f: dict[str, Any]) -> None:
    """Refuses settings that are no part of the loss, but of its arguments."""
    if f["use_vllm"] and f["vllm_importance_sampling_correction"]:
        raise ValueError(
            f"{where}: use_vllm must be False with vllm_importance_sampling_correction, got True; pass is_weights="
            "gk.sampling_correction(..., config=gk.CorrectionConfig.trl(...)).weights"
        )
    if f["top_entropy_quantile"] != 1.0:
        raise ValueError(
            f"{where}: top_entropy_quantile must be 1, got {f['top_entropy_quantile']!r}; pass policy_mask="
            "gk.variants.high_entropy_mask(...)"
        )
    if f["off_policy_mask_threshold"] is not None:
        raise ValueError(
            f"{where}: off_policy_mask_threshold must be None, got {f['off_policy_mask_threshold']!r}; pass "
            "policy_mask=gk.variants.off_policy_mask(...)"
        )
