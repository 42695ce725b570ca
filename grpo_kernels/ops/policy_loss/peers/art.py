"""The loss settings of OpenPipe ART 0.5.18's dev.TrainConfig."""

from __future__ import annotations

from typing import Any

from grpo_kernels.checks import unknown, with_defaults

ART_DEFAULTS: dict[str, Any] = {
    "importance_sampling_level": "token",
    "ppo": False,
    "epsilon": None,
    "epsilon_high": None,
    "truncated_importance_sampling": None,
}
ART_LEVELS = ("token", "sequence", "average", "geometric_average")


def art_fields(**fields: Any) -> dict[str, Any]:
    where = "LossConfig.art"
    f = with_defaults(where, fields, ART_DEFAULTS)
    level = f["importance_sampling_level"]
    if level not in ART_LEVELS:
        raise unknown(where, "importance_sampling_level", level, ART_LEVELS)
    low, high = (0.2, None) if f["ppo"] else (1.0, 4.0)
    low = low if f["epsilon"] is None else f["epsilon"]
    high = high if f["epsilon_high"] is None else f["epsilon_high"]
    own: dict[str, Any] = {"clip_low": low, "clip_high": low if high is None else high}
    if f["truncated_importance_sampling"] is not None:
        own |= {"correction": "token_truncate", "correction_max": f["truncated_importance_sampling"]}
    return {"loss": "clip" if f["ppo"] else "cispo", "ratio": level, **own}
