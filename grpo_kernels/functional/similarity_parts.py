"""The parts of similarity_groups, each by itself: distances, trees and silhouettes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks, dispatch
from grpo_kernels.config.rules import unknown
from grpo_kernels.config.similarity import LINKAGES
from grpo_kernels.functional.group_layout import check_layout, layout_within, places
from grpo_kernels.functional.similarity_groups import check_distances, check_embeddings, check_valid
from grpo_kernels.ops import similarity_groups as op


class Dendrogram(NamedTuple):
    """Of each prompt the merges in their order, ascending in height.

    merges   int32 [P, K - 1, 2], the lowest places of the two clusters, the lower first; -1: no merge any more
    heights  float32 [P, K - 1], the distance of the two; infinite: no merge any more
    """

    merges: Tensor
    heights: Tensor


class Silhouette(NamedTuple):
    """score  float32 [P], the mean over the places in use; NaN with fewer than two labels
    samples  float32, like labels; NaN where a place is not in use
    """

    score: Tensor
    samples: Tensor


def pairwise_cosine(
    embeddings: Tensor,
    groups: int | Tensor,
    *,
    valid: Tensor | None = None,
    num_groups: int | None = None,
    max_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Cosine distances [P, K, K] of the responses of each prompt: float32, exactly 0 between equal rows, symmetric.

    Arguments as in similarity_groups. A prompt with fewer than K responses is filled up with inf, and so are rows that
    are not valid or not finite, diagonal included. Not differentiable.
    """
    name = "pairwise_cosine"
    given = check_embeddings(name, embeddings)
    layout = check_layout(name, groups, given, num_groups, max_size, op.MOST_ROWS)
    mask = check_valid(name, valid, given)
    chosen = dispatch.select(
        name, backend, given.device.type, given.dtype, op.SUPPORTS, given.device.index, op.too_large(layout.size)
    )
    distances: Tensor = op.COSINE[chosen](given, *layout, mask)[0]
    return distances


def agglomerate(distances: Tensor, *, linkage: str = "average", backend: str | None = None) -> Dendrogram:
    """The whole tree over each prompt's responses, from distances [P, K, K] as pairwise_cosine gives them.

    linkage  single, complete, average, ward (of cosine distances d, on unit vectors: heights are those of sqrt(2 d))

    Always the pair with the smallest (distance, lower place, higher place) is merged, so that ties have one answer.
    """
    name = "agglomerate"
    if linkage not in LINKAGES:
        raise unknown(name, "linkage", linkage, LINKAGES)
    given = check_distances(name, distances)
    chosen = dispatch.select(
        name, backend, given.device.type, given.dtype, op.OF_DISTANCES, given.device.index, op.too_large(given.shape[1])
    )
    return Dendrogram(*op.TREE[chosen](given, LINKAGES.index(linkage)))


def silhouette(
    distances: Tensor, labels: Tensor, groups: int | Tensor | None = None, *, backend: str | None = None
) -> Silhouette:
    """How well labels fit distances [P, K, K], as scikit-learn's silhouette_score and silhouette_samples have it.

    labels  integers [P, K]; or [N] with the groups that the distances were made from. Negative: left out
    """
    name = "silhouette"
    given = check_distances(name, distances)
    checks.tensor(name, "labels", labels, checks.INTEGERS)
    checks.same_device(name, "labels", labels, given.device)
    chosen = dispatch.select(
        name, backend, given.device.type, given.dtype, op.OF_DISTANCES, given.device.index, op.too_large(given.shape[1])
    )
    prompts, size = given.shape[:2]
    if groups is None:
        if labels.shape != given.shape[:2]:
            raise ValueError(
                f"{name}: labels must have shape {list(given.shape[:2])}, or [N] with groups, got {list(labels.shape)}"
            )
        return Silhouette(*op.SILHOUETTE[chosen](given, labels.long().contiguous()))
    if labels.dim() != 1:
        raise ValueError(f"{name}: labels must have shape [N] with groups, got {list(labels.shape)}")
    rule = f"those of the distances, {prompts} of at most {size} rows"
    layout = layout_within(name, groups, labels, prompts, size, rule)
    order, place = places(layout, len(labels), labels.device)
    padded = labels.new_full((prompts * size,), -1, dtype=torch.int64)
    padded[place] = labels[order].long()
    score, samples = op.SILHOUETTE[chosen](given, padded.view(prompts, size))
    return Silhouette(score, torch.empty_like(samples.view(-1)[place]).index_put((order,), samples.view(-1)[place]))
