"""The loss settings of ms-swift 4.6.0's GRPO arguments."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown, with_defaults

SWIFT_DEFAULTS: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.04,
    "kl_in_reward": False,
    "max_completion_length": 512,
    "top_entropy_quantile": 1.0,
    "off_policy_sequence_mask_delta": None,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "real_tau": 0.5,
    "fipo_decay_rate": 32.0,
    "fipo_clip_range": 0.2,
    "fipo_clip_high_only": True,
    "fipo_safety_threshold": 4.0,
}
_AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "real": "token-mean",
    "fipo": "token-mean",
}
SWIFT_LOSS_TYPES = tuple(_AGGREGATIONS)


def swift_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.swift"
    f = with_defaults(where, fields, SWIFT_DEFAULTS)
    kind, level = f["loss_type"], f["importance_sampling_level"]
    if kind not in _AGGREGATIONS:
        raise unknown(where, "loss_type", kind, _AGGREGATIONS)
    if level not in ("token", "sequence", "sequence_token"):
        raise unknown(where, "importance_sampling_level", level, ("token", "sequence", "sequence_token"))
    if f["off_policy_sequence_mask_delta"] is not None:
        raise ValueError(
            f"{where}: off_policy_sequence_mask_delta must be None, got {f['off_policy_sequence_mask_delta']!r}; "
            "ms-swift drops such rows from the mask itself, which changes the mean: leave them out of the mask, or use "
            "LossConfig(off_policy_threshold=...), which keeps them in the mean"
        )
    if kind in ("real", "fipo") and level != "token":
        raise ValueError(f"{where}: importance_sampling_level must be token for loss_type {kind!r}, got {level!r}")
    has_kl = f["beta"] != 0 and not f["kl_in_reward"]
    kl = {"kl": "k3", "kl_coef": f["beta"], "kl_clamp": (20.0, 10.0)} if has_kl else {}
    return dict(
        ratio=level,
        aggregation=_AGGREGATIONS[kind],
        max_length=f["max_completion_length"] if kind == "dr_grpo" else None,
        count_empty_rows=True,
        top_entropy_quantile=f["top_entropy_quantile"],
        **kl,
        **_loss(kind, f),
    )


def _loss(kind: str, f: dict[str, Any]) -> dict[str, Any]:
    high = f["epsilon"] if f["epsilon_high"] is None else f["epsilon_high"]
    if kind == "real":
        return {"loss": "real", "real_tau": f["real_tau"]}
    if kind == "cispo":  # its upper bound is that of the ratio itself
        return {"loss": "cispo", "clip_low": None, "clip_high": high - 1}
    if kind == "sapo":
        return {"loss": "sapo", "sapo_temperatures": (f["tau_pos"], f["tau_neg"])}
    clip = {"clip_low": f["epsilon"], "clip_high": high, "delta": f["delta"]}
    if kind != "fipo":
        return clip
    reach = f["fipo_clip_range"]
    return clip | {
        "future_kl_half_life": f["fipo_decay_rate"],
        "future_kl_clip": (1.0 if f["fipo_clip_high_only"] else 1 - reach, 1 + reach) if reach else None,
        "future_kl_cap": f["delta"],
        "future_kl_safety": f["fipo_safety_threshold"],
    }
