"""Calibration of correctness: the reward from which a response counts as correct, from held-out demonstrations.

A reward on a continuous scale has no natural limit, and a fixed one may be out of reach or trivial. A quantile of the
rewards of demonstrations is a limit that the data sets: at the quantile 0.75 a correct response is at least as good as
all but the best quarter of the demonstrations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from grpo_trainer.algorithm import total_rewards
from grpo_trainer.recipe import Data
from grpo_trainer.rewards import LoadedReward, score
from grpo_trainer.rollout import Rollout
from grpo_trainer.splits import demonstrated, with_demonstration
from grpo_trainer.tasks import Item

DIGITS = 6


def calibrate(quantile: float, items: Sequence[Item], data: Data, rewards: Sequence[LoadedReward]) -> float:
    """Computes the quantile of the demonstrations' rewards, interpolated linearly and rounded down to 6 digits.

    Rounding down lets a response count that equals the demonstration at the quantile, although its embedding may come
    from another batch.

    Args:
        quantile: share of the demonstrations below the threshold.
        items: lines of the validation split; those without a demonstration are left out.
        data: names of the columns.
        rewards: the rewards of evaluations.
    """
    lines = demonstrated(data, "validation", with_demonstration(data, items))
    shown = [line | {"prompt": line[data.prompt]} for line in lines]
    if not shown:
        raise ValueError(
            f"evaluation.solved_quantile: needs the column {data.demonstration!r} (data.demonstration) in the "
            f"validation split, got {len(items)} lines without it; add it, or set evaluation.solved instead"
        )
    no_tokens: Any = None  # rewards read texts
    truncated = torch.zeros(len(shown), dtype=torch.bool)
    texts = [item["demonstration"] for item in shown]
    scores = score(rewards, Rollout(shown, no_tokens, no_tokens, truncated, texts))
    for (setting, _), components in zip(rewards, scores.components, strict=True):
        if "correct" in components:
            raise ValueError(
                f"evaluation.solved_quantile: must be null with the reward {setting.name!r}, which reports correctness "
                f"itself, got {quantile!r}"
            )
    totals = total_rewards(
        scores.values, torch.tensor([reward.settings.weight for reward in rewards], dtype=torch.float64)
    )
    known = totals[~totals.isnan()]
    if not len(known):
        raise ValueError(
            f"evaluation.solved_quantile: needs demonstrations with a reward, got none among {len(shown)}; set "
            "evaluation.solved instead"
        )
    scale = 10**DIGITS
    return math.floor(float(known.quantile(quantile)) * scale) / scale
