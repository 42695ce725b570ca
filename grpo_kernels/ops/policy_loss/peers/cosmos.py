"""The loss settings of cosmos-rl 0.4.7's GrpoConfig."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import finite, unknown, with_defaults

COSMOS_DEFAULTS: dict[str, Any] = {
    "variant": "grpo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "lower_bound_ratio": 3.0,
    "aipo_rho": None,
    "loss_type": "token-mean",
    "unbiased_loss_max_tokens": None,
    "kl_beta": 0.0,
    "unbiased_kl_estimate": False,
    "off_policy_masking_delta": None,
    "behav_imp_weight_cap": None,
}
COSMOS_VARIANTS = ("grpo", "dapo", "gspo")
_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def cosmos_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.cosmos"
    f = with_defaults(where, fields, COSMOS_DEFAULTS)
    variant, aggregation = f["variant"], f["loss_type"]
    if variant not in COSMOS_VARIANTS:
        raise unknown(where, "variant", variant, COSMOS_VARIANTS)
    if aggregation not in _AGGREGATIONS:
        raise unknown(where, "loss_type", aggregation, _AGGREGATIONS)
    length = f["unbiased_loss_max_tokens"]
    is_normed = aggregation == "seq-mean-token-mean" and length is not None
    is_gspo, rho = variant == "gspo", f["aipo_rho"]
    own: dict[str, Any] = {
        "ratio": "sequence" if is_gspo else "token",
        "log_ratio_clamp": (float("-inf"), 10.0) if is_gspo else (-20.0, 20.0),
    }
    if rho is not None:  # both branches of the clip end at rho
        own |= {"clip_low": None, "clip_high": rho - 1, "delta": rho}
    else:
        for side in ("low", "high"):
            bound = f[f"epsilon_{side}"]
            finite(where, f"epsilon_{side}", bound)
            own[f"clip_{side}"] = bound if bound >= 0 else None
        own["dual_clip"] = None if is_gspo else f["lower_bound_ratio"]
    if f["kl_beta"] != 0:
        own |= {"kl": "k3", "kl_coef": f["kl_beta"], "kl_unbiased": f["unbiased_kl_estimate"], "kl_clamp": (20.0, 10.0)}
    if f["behav_imp_weight_cap"] is not None:
        own |= {"correction": "token_mask", "correction_max": f["behav_imp_weight_cap"]}
    return dict(
        aggregation="seq-mean-token-sum-norm" if is_normed else aggregation,
        max_length=length if is_normed else None,
        count_empty_rows=True,
        off_policy_threshold=f["off_policy_masking_delta"],
        **own,
    )
