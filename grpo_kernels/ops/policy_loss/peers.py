"""Translates the loss settings of TRL, verl and prime-rl into the fields of LossConfig.

The defaults are those of trl.GRPOConfig 1.16 and verl's ActorConfig 0.9.1, which a test compares, and of prime-rl as of
September 2026 (pull requests 3526 and 3586). A field that the peer ignores for a loss (TRL's `epsilon` with "sapo") is
ignored here, too.
"""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown

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

VERL_DEFAULTS: dict[str, Any] = {
    "loss_mode": "vanilla",
    "loss_agg_mode": "token-mean",
    "loss_scale_factor": None,
    "clip_ratio": 0.2,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "dro_beta": None,
    "entropy_coeff": 0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.001,
    "kl_loss_type": "low_var_kl",
}
# loss_mode: (loss, ratio, log_ratio_clamp)
_VERL_LOSSES: dict[str, tuple[str, str, tuple[float, float] | None]] = {
    "vanilla": ("clip", "token", (-20.0, 20.0)),
    "gspo": ("clip", "sequence_token", (float("-inf"), 10.0)),
    "sapo": ("sapo", "token", (-20.0, 20.0)),
    "cispo": ("cispo", "token", (-20.0, 20.0)),
    "gpg": ("reinforce", "token", None),
    "dppo_tv": ("dppo_tv", "token", (-20.0, 20.0)),
    "dppo_kl": ("dppo_kl", "token", (-20.0, 20.0)),
    "geo_mean": ("geo_mean", "token", None),
    "dro": ("dro", "token", None),
}
_VERL_REFUSED = {
    "clip_cov": "it draws random tokens on the host",
    "kl_cov": "it moves all tokens to the host to rank them",
    "bypass_mode": "choose 'vanilla', or LossConfig(loss='reinforce') with is_weights",
}
_VERL_AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
_VERL_KLS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _with_defaults(where: str, fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in defaults:
            raise unknown(where, "field", name, defaults)
    return defaults | fields


def trl_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.trl"
    f = _with_defaults(where, fields, TRL_DEFAULTS)
    kind = f["loss_type"]
    if kind not in _TRL_AGGREGATIONS:
        raise unknown(where, "loss_type", kind, _TRL_AGGREGATIONS)
    level = f["importance_sampling_level"]
    if level not in ("token", "sequence"):
        raise unknown(where, "importance_sampling_level", level, ("token", "sequence"))
    if f["use_adaptive_entropy"]:
        raise ValueError(
            f"{where}: use_adaptive_entropy must be False, got True; its controller belongs to the trainer, which "
            "passes the entropy_coef of the step"
        )
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
    if f["use_vllm"] and f["vllm_importance_sampling_correction"]:
        own |= {
            "correction": f["vllm_importance_sampling_mode"],
            "correction_min": f["vllm_importance_sampling_clip_min"],
            "correction_max": f["vllm_importance_sampling_clip_max"],
        }
        if kind == "vespo" and own["correction"] not in ("token_truncate", "token_mask"):
            raise ValueError(
                f"{where}: vllm_importance_sampling_mode must be token_truncate or token_mask for vespo, "
                f"got {own['correction']!r}"
            )
    return dict(
        ratio=level,
        aggregation=_TRL_AGGREGATIONS[kind],
        entropy_aggregation="local-token-mean",
        max_length=f["max_completion_length"] if kind == "dr_grpo" else None,
        count_empty_rows=True,
        entropy_coef=f["entropy_coef"],
        top_entropy_quantile=f["top_entropy_quantile"],
        off_policy_threshold=f["off_policy_mask_threshold"],
        **own,
    )


def verl_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.verl"
    f = _with_defaults(where, fields, VERL_DEFAULTS)
    mode, aggregation = f["loss_mode"], f["loss_agg_mode"]
    if mode in _VERL_REFUSED:
        raise ValueError(f"{where}: loss_mode {mode!r} is not implemented: {_VERL_REFUSED[mode]}")
    if mode not in _VERL_LOSSES:
        raise unknown(where, "loss_mode", mode, _VERL_LOSSES)
    if aggregation not in _VERL_AGGREGATIONS:
        raise unknown(where, "loss_agg_mode", aggregation, _VERL_AGGREGATIONS)
    if aggregation == "seq-mean-token-sum-norm" and f["loss_scale_factor"] is None:
        raise ValueError(
            f"{where}: loss_scale_factor must be given with seq-mean-token-sum-norm, got None; verl's default is the "
            "padded width, which makes the loss depend on the padding"
        )
    loss, ratio, clamp = _VERL_LOSSES[mode]
    own: dict[str, Any] = {"loss": loss, "ratio": ratio, "log_ratio_clamp": clamp}
    if loss in ("clip", "cispo", "geo_mean", "dppo_tv", "dppo_kl"):
        for side in ("low", "high"):
            value = f[f"clip_ratio_{side}"]
            own[f"clip_{side}"] = f["clip_ratio"] if value is None else value
    if mode == "vanilla":
        own["dual_clip"] = f["clip_ratio_c"]
    if mode.startswith("dppo"):
        own["ratio_cap"] = f["clip_ratio_c"]
    if mode == "sapo":
        own["sapo_temperatures"] = (f["tau_pos"], f["tau_neg"])
    if mode == "dro":
        own["dro_beta"] = f["dro_beta"]
    if f["use_kl_loss"]:
        own |= _verl_kl(where, f["kl_loss_type"], f["kl_loss_coef"])
    forced = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-sum"}.get(mode, aggregation)
    return dict(
        aggregation=forced,
        kl_aggregation=aggregation,
        entropy_aggregation=aggregation,
        max_length=f["loss_scale_factor"] if aggregation == "seq-mean-token-sum-norm" else None,
        entropy_coef=f["entropy_coeff"],
        **own,
    )


def _verl_kl(where: str, name: str, coefficient: float) -> dict[str, Any]:
    base = name.removesuffix("+") if isinstance(name, str) else name
    if base not in _VERL_KLS:
        raise unknown(where, "kl_loss_type", name, [*_VERL_KLS, *(f"{n}+" for n in _VERL_KLS)])
    kl = _VERL_KLS[base]
    straight_through = name.endswith("+") and kl != "k2"  # k2 has its own gradient
    return {
        "kl": f"{kl}+" if straight_through else kl,
        "kl_coef": coefficient,
        "kl_clamp": (20.0, 10.0) if kl == "k3" else None,
    }


PRIME_RL_DEFAULTS: dict[str, dict[str, Any]] = {
    "ipo": {"eps": 0.3, "adv_tau": 1.0, "kl_tau": 0.0},
    "icepop": {"ratio_low": 0.2, "ratio_high": 5.0, "adv_tau": 1.0},
}


def prime_rl_fields(**fields: Any) -> dict[str, Any]:
    where, kind = "LossConfig.prime_rl", fields.pop("type", "ipo")
    if kind not in PRIME_RL_DEFAULTS:
        raise unknown(where, "type", kind, PRIME_RL_DEFAULTS)
    f = _with_defaults(where, fields, PRIME_RL_DEFAULTS[kind])
    if f["adv_tau"] != 1.0:
        raise ValueError(f"{where}: adv_tau must be 1, got {f['adv_tau']!r}; multiply the advantages by it")
    if kind == "icepop":
        return {"loss": "icepop", "clip_low": 1 - f["ratio_low"], "clip_high": f["ratio_high"] - 1}
    own = {"loss": "ipo", "clip_low": f["eps"], "clip_high": f["eps"]}
    # its KL is the squared log ratio, of which k2 is half, to the log-probs that the ratio refers to
    return own | ({"kl": "k2", "kl_coef": 2 * f["kl_tau"]} if f["kl_tau"] else {})
