"""The map of one prompt's responses, which an evaluation holds and the report draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def map_line(
    step: int, prompt: str, texts: Sequence[str], embeddings: Tensor, labels: Tensor, rewards: Tensor
) -> dict[str, Any]:
    """Projects responses onto the first two principal components of their normalised embeddings.

    The sign of an axis makes its largest component positive, so that the same responses give the same map.

    Args:
        step: step of the phase.
        prompt: the prompt.
        texts: K responses.
        embeddings: [K, D], rows of NaN for excluded responses.
        labels: [K] clusters, -1 for excluded responses.
        rewards: [K], NaN for unscored responses.

    Returns:
        The map; xy is None without an embedding, `explained` is the fraction of the variance along each axis.
    """
    rows = embeddings.detach().double().cpu()
    is_known = rows.isfinite().all(1)
    unit = torch.nn.functional.normalize(rows[is_known], dim=1)
    padded = torch.nn.functional.pad(unit - unit.mean(0), (0, 2, 0, 2))  # there are always two axes
    _, strength, axes = torch.linalg.svd(padded, full_matrices=False)
    strength = torch.where(strength > 1e-6, strength, 0)  # smaller values are rounding
    signs = axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    plane = padded @ (axes * signs).T * (strength > 0)
    points = iter(plane[: len(unit), :2].tolist())
    variances = strength.square()
    responses = [
        {
            "text": text,
            "cluster": int(label),
            "reward": None if math.isnan(reward) else reward,
            "xy": next(points) if has_point else None,
        }
        for text, label, reward, has_point in zip(
            texts, labels.tolist(), rewards.tolist(), is_known.tolist(), strict=True
        )
    ]
    explained = (variances / variances.sum().clamp(min=1e-12))[:2].tolist()
    return {"step": step, "prompt": prompt, "explained": explained, "responses": responses}
