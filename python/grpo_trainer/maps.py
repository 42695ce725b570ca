"""Where one prompt's responses lie among each other, in two dimensions: a line of maps.jsonl, for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def map_line(
    step: int, prompt: str, texts: Sequence[str], embeddings: Tensor, labels: Tensor, rewards: Tensor
) -> dict[str, Any]:
    """embeddings [K, D], NaN for a response that was left out; labels [K], -1 likewise; rewards [K], NaN if not scored.

    xy is None for responses without an embedding; `explained` is the share of the spread that each axis shows.
    """
    places, explained = principal_plane(embeddings)
    responses = [
        {"text": text, "cluster": int(label), "reward": None if math.isnan(reward) else reward, "xy": place}
        for text, label, reward, place in zip(texts, labels.tolist(), rewards.tolist(), places, strict=True)
    ]
    return {"step": step, "prompt": prompt, "explained": explained, "responses": responses}


def principal_plane(embeddings: Tensor) -> tuple[list[list[float] | None], list[float]]:
    """Unit vectors on the two axes along which they differ most, and how much of their spread each axis shows.

    Of an axis and its opposite the one whose largest part is positive is taken: the same responses give the same map.
    """
    rows = embeddings.detach().double().cpu()
    known = rows.isfinite().all(1)
    unit = torch.nn.functional.normalize(rows[known], dim=1)
    places: list[list[float] | None] = [None] * len(rows)
    if len(unit) == 0:
        return places, [0.0, 0.0]
    centred = unit - unit.mean(0)
    _, strength, axes = torch.linalg.svd(centred, full_matrices=False)
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    # below this, an axis is of rounding
    shown = strength > 1e-6
    plane = torch.zeros(len(unit), 2, dtype=torch.float64)
    found = (centred @ (axes * largest.sign()).T * shown)[:, :2]
    plane[:, : found.shape[1]] = found
    for place, xy in zip(known.nonzero().flatten().tolist(), plane.tolist(), strict=True):
        places[place] = xy
    spread = torch.zeros(2, dtype=torch.float64)
    squares = (strength * shown).square()
    spread[: min(2, len(squares))] = squares[:2] / squares.sum() if bool(shown.any()) else 0
    return places, spread.tolist()
