"""Calibration of correctness: the reward from which a response counts as correct, from held-out demonstrations.

A reward on a continuous scale has no natural limit, and a fixed one may be out of reach or trivial. A quantile of the
rewards of demonstrations is a limit that the data sets: at the quantile 0.75 a correct response is at least as good as
all but the best quarter of the demonstrations.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

import torch

from grpo_trainer.algorithm import total_rewards
from grpo_trainer.recipe import Data
from grpo_trainer.rewards import LoadedReward, score
from grpo_trainer.rewards.base import WeightedReward
from grpo_trainer.rollout import Rollout
from grpo_trainer.splits import demonstrated, with_demonstration
from grpo_trainer.tasks import Item

DIGITS = 6


def check_calibration(quantile: float, items: Sequence[Item], data: Data, rewards: Sequence[LoadedReward]) -> None:
    """Raises if `calibrate` would, as far as this shows without scoring the demonstrations."""
    for setting, function in rewards:
        if isinstance(function, WeightedReward):
            _refuse_correctness(quantile, setting.name, function.weight_of())
    if not with_demonstration(data, items):
        raise ValueError(
            f"evaluation.solved_quantile: needs the column {data.demonstration!r} (data.demonstration) in the "
            f"validation split, got {len(items)} lines without it; add it, or set evaluation.solved instead"
        )


def _refuse_correctness(quantile: float, reward: str, components: Container[str]) -> None:
    if "correct" in components:
        raise ValueError(
            f"evaluation.solved_quantile: must be null with the reward {reward!r}, which reports correctness itself, "
            f"got {quantile!r}"
        )


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
    check_calibration(quantile, items, data, rewards)
    lines = demonstrated(data, "validation", with_demonstration(data, items))
    shown = [line | {"prompt": line[data.prompt]} for line in lines]
    no_tokens: Any = None  # rewards read texts
    truncated = torch.zeros(len(shown), dtype=torch.bool)
    texts = [item["demonstration"] for item in shown]
    scores = score(rewards, Rollout(shown, no_tokens, no_tokens, truncated, texts))
    for (setting, _), components in zip(rewards, scores.components, strict=True):
        _refuse_correctness(quantile, setting.name, components)
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
