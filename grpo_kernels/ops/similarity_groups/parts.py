"""The parts of similarity_groups as functions of their own: distances, trees and silhouettes.

Like similarity_groups they wait for a GPU without the CUDA kernels, whose tensors the CPU kernels take in copies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.checks import unknown
from grpo_kernels.groups import check_layout, layout_within, places
from grpo_kernels.ops.similarity_groups import check_distances, check_embeddings, check_valid
from grpo_kernels.ops.similarity_groups import registration as op
from grpo_kernels.ops.similarity_groups.config import LINKAGES, MAX_ROWS
from grpo_kernels.ops.similarity_groups.reference import Labelled, Linked, Responses


class Dendrogram(NamedTuple):
    """Merges of each prompt in order of ascending height.

    Attributes:
        merges: int32 [P, K - 1, 2], the lowest places of the two clusters, the lower first; -1 past the last merge
        heights: float32 [P, K - 1], the distance of the two clusters; infinite past the last merge
    """

    merges: Tensor
    heights: Tensor


class Silhouette(NamedTuple):
    """Silhouettes of a clustering.

    Attributes:
        score: float32 [P], mean over the places in use; NaN with fewer than two labels
        samples: float32 in the shape of labels; NaN at places not in use
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
    """Computes cosine distances [P, K, K] of the responses of each prompt: float32, symmetric, 0 for equal rows.

    Arguments are those of similarity_groups. Prompts with fewer than K responses are padded with inf, and rows that are
    not valid or not finite are inf throughout, diagonal included. There is no gradient.

    Returns:
        distances [P, K, K]; those of absent or left-out responses are infinite
    """
    name = "pairwise_cosine"
    vectors = check_embeddings(name, embeddings)
    mask = check_valid(name, valid, vectors)
    layout = check_layout(name, groups, vectors, num_groups, max_size, MAX_ROWS)
    chosen = backends.select(name, backend, vectors.device.type, vectors.dtype, op.SUPPORTS, vectors.device.index)
    distances: Tensor = op.COSINE(chosen, Responses(vectors, *layout, mask))[0]
    return distances


def agglomerate(distances: Tensor, *, linkage: str = "average", backend: str | None = None) -> Dendrogram:
    """Builds the tree over each prompt's responses from distances [P, K, K], as returned by pairwise_cosine.

    The pair with the smallest (distance, lower place, higher place) is always merged next, so ties have one answer.

    Args:
        distances: [P, K, K]
        linkage: "single", "complete", "average" or "ward" (of cosine distances d on unit vectors, with the heights of
            sqrt(2 d))
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        a Dendrogram: the merges of each prompt and their heights
    """
    name = "agglomerate"
    if linkage not in LINKAGES:
        raise unknown(name, "linkage", linkage, LINKAGES)
    distances = check_distances(name, distances)
    chosen = backends.select(
        name,
        backend,
        distances.device.type,
        distances.dtype,
        op.OF_DISTANCES,
        distances.device.index,
    )
    return Dendrogram(*op.TREE(chosen, Linked(distances, LINKAGES.index(linkage))))


def silhouette(
    distances: Tensor, labels: Tensor, groups: int | Tensor | None = None, *, backend: str | None = None
) -> Silhouette:
    """Scores labels by distances [P, K, K], as scikit-learn's silhouette_score and silhouette_samples do.

    Args:
        distances: [P, K, K], as returned by pairwise_cosine
        labels: integers [P, K], or [N] with the groups that the distances were made from; negative means left out
        groups: an int or ids [N], see similarity_groups
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        a Silhouette: the score of each prompt and of each response
    """
    name = "silhouette"
    distances = check_distances(name, distances)
    checks.tensor(name, "labels", labels, checks.INTEGERS)
    checks.same_device(name, "labels", labels, distances.device)
    chosen = backends.select(
        name,
        backend,
        distances.device.type,
        distances.dtype,
        op.OF_DISTANCES,
        distances.device.index,
    )
    prompts, size = distances.shape[:2]
    if groups is None:
        if labels.shape != distances.shape[:2]:
            raise ValueError(
                f"{name}: labels must have shape {list(distances.shape[:2])}, or [N] with groups, "
                f"got {list(labels.shape)}"
            )
        return Silhouette(*op.SILHOUETTE(chosen, Labelled(distances, labels.long().contiguous())))
    if labels.dim() != 1:
        raise ValueError(f"{name}: labels must have shape [N] with groups, got {list(labels.shape)}")
    rule = f"those of the distances, {prompts} of at most {size} rows"
    layout = layout_within(name, groups, labels, prompts, size, rule)
    order, place = places(layout, len(labels), labels.device)
    padded = labels.new_full((prompts * size,), -1, dtype=torch.int64)
    padded[place] = labels[order].long()
    score, samples = op.SILHOUETTE(chosen, Labelled(distances, padded.view(prompts, size)))
    return Silhouette(score, torch.empty_like(samples.view(-1)[place]).index_put((order,), samples.view(-1)[place]))
