"""The loss settings of ROLL's workers, as of August 2026."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown, with_defaults

ROLL_DEFAULTS: dict[str, Any] = {
    "pg_variant": "vanilla",
    "pg_clip": 0.2,
    "use_pg_clip_range": False,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "dual_clip_loss": False,
    "tis_lower_bound": 0.0,
    "tis_upper_bound": 1.0,
    "topr_positive_weight": 1.0,
    "topr_negative_weight": 1.0,
    "cispo_epsilon_low": 0.1,
    "cispo_epsilon_high": 0.1,
    "cispo_use_unified_mask": False,
    "kimi15_tau": 0.1,
    "loss_agg_mode": "seq-mean-token-mean",
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "entropy_loss_coef": 0.0,
}
ROLL_VARIANTS = ("vanilla", "ppo", "tis", "topr", "cispo", "kimi15")
_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


def roll_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.roll"
    f = with_defaults(where, fields, ROLL_DEFAULTS)
    variant, aggregation = f["pg_variant"], f["loss_agg_mode"]
    if variant not in ROLL_VARIANTS:
        raise unknown(where, "pg_variant", variant, ROLL_VARIANTS)
    if aggregation == "seq-mean-token-sum-norm":
        raise ValueError(
            f"{where}: loss_agg_mode 'seq-mean-token-sum-norm' divides by the padded width, so that the loss depends "
            "on the padding; use LossConfig(aggregation='seq-mean-token-sum-norm', max_length=...)"
        )
    if aggregation not in _AGGREGATIONS:
        raise unknown(where, "loss_agg_mode", aggregation, _AGGREGATIONS)
    for name, only in (("topr_positive_weight", 1.0), ("topr_negative_weight", 1.0), ("cispo_use_unified_mask", False)):
        if f[name] != only:
            raise ValueError(f"{where}: {name} must be {only}, got {f[name]!r}")
    kl = {"kl": "k3", "kl_coef": f["kl_loss_coef"], "kl_clamp": (700.0, 10.0)} if f["use_kl_loss"] else {}
    return dict(aggregation=aggregation, entropy_coef=f["entropy_loss_coef"], **kl, **_loss(variant, f))


def _loss(variant: str, f: dict[str, Any]) -> dict[str, Any]:
    if variant == "ppo":
        ranged = f["use_pg_clip_range"]
        return {
            "clip_low": f["pg_clip_low"] if ranged else f["pg_clip"],
            "clip_high": f["pg_clip_high"] if ranged else f["pg_clip"],
            "dual_clip": 1 + 2 * f["pg_clip"] if f["dual_clip_loss"] else None,
        }
    if variant == "tis":  # CISPO with bounds of the ratio itself
        return {"loss": "cispo", "clip_low": 1 - f["tis_lower_bound"], "clip_high": f["tis_upper_bound"] - 1}
    if variant == "cispo":
        return {"loss": "cispo", "clip_low": f["cispo_epsilon_low"], "clip_high": f["cispo_epsilon_high"]}
    if variant == "kimi15":
        return {"loss": "dro", "dro_beta": f["kimi15_tau"]}
    return {"loss": "topr" if variant == "topr" else "reinforce"}
