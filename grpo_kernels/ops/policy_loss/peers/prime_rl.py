"""The loss settings of prime-rl as of September 2026 (pull requests 3526 and 3586)."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown, with_defaults

PRIME_RL_DEFAULTS: dict[str, dict[str, Any]] = {
    "ipo": {"eps": 0.3, "adv_tau": 1.0, "kl_tau": 0.0},
    "icepop": {"ratio_low": 0.2, "ratio_high": 5.0, "adv_tau": 1.0},
}


def prime_rl_fields(**fields: Any) -> dict[str, Any]:
    where, kind = "LossConfig.prime_rl", fields.pop("type", "ipo")
    if kind not in PRIME_RL_DEFAULTS:
        raise unknown(where, "type", kind, PRIME_RL_DEFAULTS)
    f = with_defaults(where, fields, PRIME_RL_DEFAULTS[kind])
    if f["adv_tau"] != 1.0:
        raise ValueError(f"{where}: adv_tau must be 1, got {f['adv_tau']!r}; multiply the advantages by it")
    if kind == "icepop":
        return {"loss": "icepop", "clip_low": 1 - f["ratio_low"], "clip_high": f["ratio_high"] - 1}
    own = {"loss": "ipo", "clip_low": f["eps"], "clip_high": f["eps"]}
    # its KL is the squared log ratio, of which k2 is half, to the log-probs that the ratio refers to
    return own | ({"kl": "k2", "kl_coef": 2 * f["kl_tau"]} if f["kl_tau"] else {})
