"""Projection of one prompt's responses onto two dimensions: a line of maps.jsonl, drawn by the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def map_line(
    step: int, prompt: str, texts: Sequence[str], embeddings: Tensor, labels: Tensor, rewards: Tensor
) -> dict[str, Any]:
    """Builds a line of maps.jsonl.

    Args:
        step: step of the phase.
        prompt: the prompt.
        texts: K responses.
        embeddings: [K, D], rows of NaN for excluded responses.
        labels: [K] clusters, -1 for excluded responses.
        rewards: [K], NaN for unscored responses.

    Returns:
        The line; xy is None without an embedding, `explained` is the share of variance of each axis.
    """
    points, explained = principal_plane(embeddings)
    responses = [
        {"text": text, "cluster": int(label), "reward": None if math.isnan(reward) else reward, "xy": xy}
        for text, label, reward, xy in zip(texts, labels.tolist(), rewards.tolist(), points, strict=True)
    ]
    return {"step": step, "prompt": prompt, "explained": explained, "responses": responses}


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
    centred = unit - unit.mean(0)
    _, strength, axes = torch.linalg.svd(centred, full_matrices=False)
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    is_significant = strength > 1e-6  # smaller values are rounding
    plane = torch.zeros(len(unit), 2, dtype=torch.float64)
    projected = (centred @ (axes * largest.sign()).T * is_significant)[:, :2]
    plane[:, : projected.shape[1]] = projected
    for row, xy in zip(is_known.nonzero().flatten().tolist(), plane.tolist(), strict=True):
        points[row] = xy
    explained = torch.zeros(2, dtype=torch.float64)
    variances = (strength * is_significant).square()
    explained[: min(2, len(variances))] = variances[:2] / variances.sum() if bool(is_significant.any()) else 0
    return points, explained.tolist()
