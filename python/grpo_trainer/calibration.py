"""Calibration of correctness: the reward from which a response counts as correct, from held-out demonstrations.

A reward on a continuous scale has no natural limit, and a fixed one may be out of reach or trivial. A quantile of the
rewards of demonstrations is a limit that the data sets: at the quantile 0.75 a correct response is at least as good as
all but the best quarter of the demonstrations.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_trainer import checkpoint, distributed
from grpo_trainer.algorithm import total_rewards
from grpo_trainer.data import Batch
from grpo_trainer.recipe import Data, Reward
from grpo_trainer.rewards import RewardFunction, score
from grpo_trainer.rollout import Rollout
from grpo_trainer.splits import demonstrated, with_demonstration
from grpo_trainer.tasks.base import Item

FILE = "solved.json"  # in a run's folder
DIGITS = 6


@dataclasses.dataclass(frozen=True)
class Calibration:
    threshold: float
    quantile: float
    demonstrations: int  # with a reward


def calibrate(
    quantile: float, items: Sequence[Item], data: Data, rewards: Sequence[Reward], functions: Sequence[RewardFunction]
) -> Calibration:
    """Computes the quantile of the demonstrations' rewards, interpolated linearly and rounded down to 6 digits.

    Rounding down lets a response count that equals the demonstration at the quantile, although its embedding may come
    from another batch.

    Args:
        quantile: share of the demonstrations below the threshold.
        items: lines of the validation split; those without a demonstration are left out.
        data: names of the columns.
        rewards: settings of the rewards.
        functions: the reward functions that belong to them.
    """
    lines = demonstrated(data, "validation", with_demonstration(data, items))
    shown = [line | {"prompt": line[data.prompt]} for line in lines]
    if not shown:
        raise ValueError(
            f"evaluation.solved_quantile: needs the column {data.demonstration!r} (data.demonstration) in the "
            f"validation split, got {len(items)} lines without it; add it, or set evaluation.solved instead"
        )
    scores = score(rewards, functions, _as_rollout(shown, [item["demonstration"] for item in shown]))
    for setting, components in zip(rewards, scores.components, strict=True):
        if "correct" in components:
            raise ValueError(
                f"evaluation.solved_quantile: must be null with the reward {setting.name!r}, which reports correctness "
                f"itself, got {quantile!r}"
            )
    totals = total_rewards(scores.values, torch.tensor([reward.weight for reward in rewards], dtype=torch.float64))
    known = totals[~totals.isnan()]
    if not len(known):
        raise ValueError(
            f"evaluation.solved_quantile: needs demonstrations with a reward, got none among {len(shown)}; set "
            "evaluation.solved instead"
        )
    scale = 10**DIGITS
    return Calibration(math.floor(float(known.quantile(quantile)) * scale) / scale, quantile, len(known))


def stored_or(folder: Path, quantile: float, compute: Any) -> Calibration:
    """The calibration in a run's folder, or else a new one, which is written there; all processes must call it."""
    path = folder / FILE
    content = distributed.broadcast(_read(path) if distributed.is_main_process() and path.exists() else None)
    if content is None:
        calibration: Calibration = compute()
        with distributed.fail_together():
            if distributed.is_main_process():
                checkpoint.write_text(path, checkpoint.to_json(dataclasses.asdict(calibration)))
        return calibration
    if content.quantile != quantile:
        raise checkpoint.CheckpointError(
            f"{folder}: evaluation.solved_quantile: must be {content.quantile} as in the original run, whose "
            f"evaluations would not compare otherwise, got {quantile}"
        )
    return content


def _read(path: Path) -> Calibration:
    try:
        return Calibration(**json.loads(path.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise checkpoint.CheckpointError(f"{path}: cannot be read ({error}); delete it to compute it again") from error


def _as_rollout(items: list[dict[str, Any]], texts: list[str]) -> Rollout:
    """Texts in the form that rewards read; there are no tokens."""
    count = len(items)
    empty, rows = torch.zeros(count, 0, dtype=torch.long), torch.arange(count)
    batch = Batch(empty, empty.bool(), empty, empty.bool(), rows)
    return Rollout(items, batch, empty.double(), torch.zeros(count, dtype=torch.bool), texts)
