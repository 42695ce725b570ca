"""A map of one prompt's responses, for the report: the plane of their embeddings in which they differ most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer import distributed
from grpo_trainer.algorithm import total_rewards
from grpo_trainer.data import prompt_text
from grpo_trainer.embed import embed_all
from grpo_trainer.rewards import RewardError, score
from grpo_trainer.rollout import Rollout


def response_map(run: Any) -> dict[str, Any] | None:
    """A map of responses to the first training prompt, sampled with the same random numbers each time.

    Args:
        run: a `setup.Run` in RL; without an embedder there is no map.
    """
    if run.embedder is None or run.plan.clustering is None:
        return None
    generator = torch.Generator(run.policy.device).manual_seed(run.recipe.seed_of("map"))
    items = run.items("train")[:1]
    rollout: Rollout = run.roll_out(items, generator)
    try:
        totals = total_rewards(score(run.rewards, rollout).values, run.reward_weights)
    except (RewardError, distributed.ProcessError):
        # such as a judge's, of whose few answers one is a large share: a map is no reason to stop
        totals = torch.full((len(rollout.texts),), torch.nan)
    embeddings = embed_all(run.embedder, rollout.texts, rollout.group_size)
    clusters = gk.similarity_groups(embeddings, rollout.group_size, config=run.plan.clustering)
    return map_of(prompt_text(items[0]["prompt"]), rollout.texts, embeddings, clusters.labels, totals)


def map_of(prompt: str, texts: Sequence[str], embeddings: Tensor, labels: Tensor, rewards: Tensor) -> dict[str, Any]:
    """A map of the responses to a prompt.

    Args:
        prompt: the prompt.
        texts: K responses.
        embeddings: [K, D], rows of NaN for excluded responses.
        labels: [K] clusters, -1 for excluded responses.
        rewards: [K], NaN for unscored responses.

    Returns:
        The responses, each with its point xy, which is None without an embedding; `explained` is the share of variance
        of each axis.
    """
    points, explained = principal_plane(embeddings)
    responses = [
        {"text": text, "cluster": int(label), "reward": None if math.isnan(reward) else reward, "xy": xy}
        for text, label, reward, xy in zip(texts, labels.tolist(), rewards.tolist(), points, strict=True)
    ]
    return {"prompt": prompt, "explained": explained, "responses": responses}


def principal_plane(embeddings: Tensor) -> tuple[list[list[float] | None], list[float]]:
    """First two principal components of the normalised embeddings, and the share of variance of each.

    The sign of an axis makes its largest component positive, so that the same responses give the same map.

    Args:
        embeddings: [K, D]; rows that are not finite have no point.
    """
    rows = embeddings.detach().double().cpu()
    is_known = rows.isfinite().all(1)
    unit = torch.nn.functional.normalize(rows[is_known], dim=1)
    points: list[list[float] | None] = [None] * len(rows)
    if len(unit) == 0:
        return points, [0.0, 0.0]
    _, strength, axes = torch.linalg.svd(unit - unit.mean(0), full_matrices=False)
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    is_significant = strength > 1e-6  # smaller values are rounding
    plane = torch.zeros(len(unit), 2, dtype=torch.float64)
    projected = ((unit - unit.mean(0)) @ (axes * largest.sign()).T * is_significant)[:, :2]
    plane[:, : projected.shape[1]] = projected
    for row, xy in zip(is_known.nonzero().flatten().tolist(), plane.tolist(), strict=True):
        points[row] = xy
    explained = torch.zeros(2, dtype=torch.float64)
    variances = (strength * is_significant).square()
    explained[: min(2, len(variances))] = variances[:2] / variances.sum() if bool(is_significant.any()) else 0
    return points, explained.tolist()
