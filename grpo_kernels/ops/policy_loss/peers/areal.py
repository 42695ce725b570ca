"""The loss settings of AReaL 1.0.4's PPOActorConfig."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown, with_defaults

AREAL_DEFAULTS: dict[str, Any] = {
    "eps_clip": 0.2,
    "eps_clip_higher": None,
    "c_clip": None,
    "m2_threshold": None,
    "use_sapo_loss": False,
    "sapo_tau_pos": 1.0,
    "sapo_tau_neg": 1.05,
    "use_decoupled_loss": False,
    "rejection_sampling": None,
    "importance_sampling_level": "token",
}
_REJECTION: dict[str, Any] = {
    "level": "token",
    "action": "mask",
    "metric": "ratio",
    "agg": "mean",
    "upper": 5.0,
    "lower": None,
}


def areal_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.areal"
    f = with_defaults(where, fields, AREAL_DEFAULTS, unchecked=("rejection_sampling",))
    level = f["importance_sampling_level"]
    if level not in ("token", "sequence"):
        raise unknown(where, "importance_sampling_level", level, ("token", "sequence"))
    if f["m2_threshold"] is not None:
        raise ValueError(
            f"{where}: m2_threshold must be None, got {f['m2_threshold']!r}; its choice of tokens is of the whole "
            "batch: pass the mask that sampling_correction returns"
        )
    if f["use_sapo_loss"] and f["use_decoupled_loss"]:
        raise ValueError(f"{where}: use_decoupled_loss must be False with use_sapo_loss, got True")
    if f["use_sapo_loss"]:
        own: dict[str, Any] = {"loss": "sapo", "sapo_temperatures": (f["sapo_tau_pos"], f["sapo_tau_neg"])}
    else:
        high = f["eps_clip"] if f["eps_clip_higher"] is None else f["eps_clip_higher"]
        own = {"clip_low": f["eps_clip"], "clip_high": high, "dual_clip": f["c_clip"]}
    if f["rejection_sampling"] is not None and not f["use_sapo_loss"]:
        own |= _correction(f"{where}: rejection_sampling", f["rejection_sampling"])
        if level == "sequence" and own["correction"] == "token_mask":
            raise ValueError(
                f"{where}: importance_sampling_level must be token if rejection_sampling masks tokens, got {level!r}; "
                "a row's ratio leaves them out: pass the mask that sampling_correction returns"
            )
    return {"ratio": level, **own}


def _correction(where: str, fields: Any) -> dict[str, Any]:
    """A rejected token counts in the mean, as one whose weight is 0."""
    f = with_defaults(where, fields, _REJECTION)
    levels, actions = {"token": "token", "sequence": "geometric"}, {"mask": "mask", "clamp": "truncate"}
    for name, choices in (("level", levels), ("action", actions)):
        if f[name] not in choices:
            raise unknown(where, name, f[name], choices)
    if f["metric"] != "ratio" or (f["level"] == "sequence" and f["agg"] != "mean"):
        raise ValueError(
            f"{where}: metric must be 'ratio', and agg 'mean' for sequences, got {f['metric']!r} and {f['agg']!r}; for "
            "the others pass the mask that sampling_correction returns"
        )
    return {
        "correction": f"{levels[f['level']]}_{actions[f['action']]}",
        "correction_min": f["lower"],
        "correction_max": f["upper"],
    }
