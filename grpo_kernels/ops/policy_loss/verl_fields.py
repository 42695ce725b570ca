"""The loss settings of verl 0.9.1's ActorConfig and PolicyLossConfig. A test compares the defaults."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown, with_defaults

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
VERL_LOSSES: dict[str, tuple[str, str, tuple[float, float] | None]] = {
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
VERL_REFUSED = {
    "bypass_mode": "choose 'vanilla', or LossConfig(loss='reinforce') with is_weights",
    "clip_cov": "take LossConfig(clip_low=..., clip_high=...) with is_weights=gk.variants.clip_cov_weights(...)",
    "kl_cov": "take LossConfig(clip_low=None, clip_high=None), and add gk.variants.kl_cov_penalty(...)",
}
_VERL_AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)
_VERL_KLS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def verl_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.verl"
    for mode, way_out in VERL_REFUSED.items():
        if fields.get("loss_mode") == mode:  # before its own fields are refused
            raise ValueError(f"{where}: loss_mode {mode!r} is not implemented: {way_out}")
    f = with_defaults(where, fields, VERL_DEFAULTS)
    mode, aggregation = f["loss_mode"], f["loss_agg_mode"]
    if mode not in VERL_LOSSES:
        raise unknown(where, "loss_mode", mode, VERL_LOSSES)
    if aggregation not in _VERL_AGGREGATIONS:
        raise unknown(where, "loss_agg_mode", aggregation, _VERL_AGGREGATIONS)
    if aggregation == "seq-mean-token-sum-norm" and f["loss_scale_factor"] is None:
        raise ValueError(
            f"{where}: loss_scale_factor must be given with seq-mean-token-sum-norm, got None; verl's default is the "
            "padded width, which makes the loss depend on the padding"
        )
    bounds = f["clip_ratio_low"], f["clip_ratio_high"]
    if (
        "clip_ratio" in fields
        and not {"clip_ratio_low", "clip_ratio_high"} & set(fields)
        and f["clip_ratio"] not in bounds
    ):
        raise ValueError(
            f"{where}: clip_ratio must be given with clip_ratio_low=None, clip_ratio_high=None or both, got "
            f"{f['clip_ratio']!r} alone; verl reads it only where they are None, and by default they are {bounds[0]}"
        )
    loss, ratio, clamp = VERL_LOSSES[mode]
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
