"""The loss settings of SkyRL 0.3.0's AlgorithmConfig. Its groups of settings are dicts here."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown, with_defaults

SKYRL_DEFAULTS: dict[str, Any] = {
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "max_seq_len": None,
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.2,
    "clip_ratio_c": 3.0,
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "cispo": {"cispo_eps_clip_low": 0.0, "cispo_eps_clip_high": 5.0},
    "dppo": {"dppo_type": "binary_tv", "delta_low": 0.2, "delta_high": 0.2},
    "clip_cov": {"clip_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_frac": 0.2, "ppo_kl_coef": 1.0},
    "off_policy_correction": {
        "tis_ratio_type": None,
        "token_tis_ratio_clip_high": 2.0,
        "sequence_tis_ratio_clip_high": 5.0,
    },
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "kl_estimator_type": "k3",
    "use_entropy_loss": False,
    "entropy_loss_coef": 0.01,
}
SKYRL_LOSSES = (
    "regular",
    "dual_clip",
    "sapo",
    "gspo",
    "cispo",
    "rollout_is",
    "dppo",
    "clip_cov",
    "kl_cov",
    "importance_sampling",
)
SKYRL_REFUSED = {"cross_entropy": "it has neither advantages nor ratios"}
_AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
_CLAMP = (-20.0, 20.0)


def skyrl_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.skyrl"
    f = with_defaults(where, fields, SKYRL_DEFAULTS)
    groups = [name for name, default in SKYRL_DEFAULTS.items() if isinstance(default, dict)]
    f |= {
        name: with_defaults(f"{where}: {name}", f[name], SKYRL_DEFAULTS[name], ("tis_ratio_type",)) for name in groups
    }
    kind, reduction = f["policy_loss_type"], f["loss_reduction"]
    if kind in SKYRL_REFUSED:
        raise ValueError(f"{where}: policy_loss_type {kind!r} is not implemented: {SKYRL_REFUSED[kind]}")
    if kind not in SKYRL_LOSSES:
        raise unknown(where, "policy_loss_type", kind, SKYRL_LOSSES)
    if kind == "importance_sampling":
        aggregation = "token-sum"
    elif reduction in _AGGREGATIONS:
        aggregation = _AGGREGATIONS[reduction]
    elif reduction in ("token_mean_legacy", "prompt_mean"):
        raise ValueError(f"{where}: loss_reduction {reduction!r} is expressed with the argument weights of policy_loss")
    else:
        raise unknown(where, "loss_reduction", reduction, _AGGREGATIONS)
    if aggregation.endswith("norm") and f["max_seq_len"] is None:
        raise ValueError(f"{where}: max_seq_len must be given with seq_mean_token_sum_norm, got None")
    return dict(
        aggregation=aggregation,
        max_length=f["max_seq_len"] if aggregation.endswith("norm") else None,
        count_empty_rows=True,
        kl_aggregation="seq-mean-token-mean",
        entropy_aggregation="seq-mean-token-mean",
        entropy_coef=f["entropy_loss_coef"] if f["use_entropy_loss"] else 0.0,
        **_loss(where, kind, f),
        **_correction(where, f["off_policy_correction"]),
        **_kl(where, f),
    )


def _loss(where: str, kind: str, f: dict[str, Any]) -> dict[str, Any]:
    clip = {"clip_low": f["eps_clip_low"], "clip_high": f["eps_clip_high"]}
    if kind == "sapo":
        temperatures = (f["sapo"]["tau_pos"], f["sapo"]["tau_neg"])
        return {"loss": "sapo", "sapo_temperatures": temperatures, "log_ratio_clamp": _CLAMP}
    if kind == "gspo":
        return {"ratio": "sequence_token", "log_ratio_clamp": (float("-inf"), 10.0), **clip}
    if kind == "cispo":
        bounds = {side: f["cispo"][f"cispo_eps_{side}"] for side in clip}
        return {"loss": "cispo", "log_ratio_clamp": _CLAMP, **bounds}
    if kind == "rollout_is":  # the same gradient; the value has the ratio instead of ratio times log-prob
        return {"loss": "icepop", "log_ratio_clamp": _CLAMP, **clip}
    if kind == "dppo":  # likewise, the other way around
        losses = {"binary_tv": "dppo_tv", "binary_kl": "dppo_kl"}
        dppo = f["dppo"]
        if dppo["dppo_type"] not in losses:
            raise unknown(f"{where}: dppo", "dppo_type", dppo["dppo_type"], losses)
        return {
            "loss": losses[dppo["dppo_type"]],
            "clip_low": dppo["delta_low"],
            "clip_high": dppo["delta_high"],
            "log_ratio_clamp": _CLAMP,
        }
    if kind == "clip_cov":
        cov = f["clip_cov"]
        drawn = {"cov_ratio": cov["clip_ratio"], "cov_bounds": (cov["clip_cov_lb"], cov["clip_cov_ub"])}
        return {"loss": "clip_cov", **drawn, **clip}
    if kind == "kl_cov":
        return {"loss": "kl_cov", "cov_ratio": f["kl_cov"]["kl_cov_frac"], "cov_kl_coef": f["kl_cov"]["ppo_kl_coef"]}
    if kind == "importance_sampling":
        return {"clip_low": None, "clip_high": None}
    return {"dual_clip": f["clip_ratio_c"] if kind == "dual_clip" else None, "log_ratio_clamp": _CLAMP, **clip}


def _correction(where: str, f: dict[str, Any]) -> dict[str, Any]:
    level = f["tis_ratio_type"]
    if level is None:
        return {}
    if level not in ("token", "sequence"):
        raise unknown(f"{where}: off_policy_correction", "tis_ratio_type", level, ("token", "sequence"))
    return {"correction": f"{level}_truncate", "correction_max": f[f"{level}_tis_ratio_clip_high"]}


def _kl(where: str, f: dict[str, Any]) -> dict[str, Any]:
    if not f["use_kl_loss"]:
        return {}
    kl = f["kl_estimator_type"]
    if kl not in ("k1", "k2", "k3", "abs"):
        raise unknown(where, "kl_estimator_type", kl, ("k1", "k2", "k3", "abs"))
    return {"kl": kl, "kl_coef": f["kl_loss_coef"], "kl_clamp": (20.0, 10.0) if kl == "k3" else None}
