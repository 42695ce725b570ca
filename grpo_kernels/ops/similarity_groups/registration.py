"""Registers similarity_groups and its parts with torch. They have no gradient: labels are discrete."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels import registry

_EMBEDDINGS = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT = (torch.float32,)
SUPPORTS = {
    "cuda": _EMBEDDINGS,
    "cpu": _EMBEDDINGS,
    "reference": (*_EMBEDDINGS, torch.float64),
}
OF_DISTANCES = dict.fromkeys(SUPPORTS, _FLOAT)
_ON_HOST = ("cpu", "reference")  # its reference reads distances to merge the nearest

_LAYOUT = "Tensor embeddings, Tensor? order, Tensor? offsets, int num_groups, int size, Tensor? valid"


def _per_prompt(like: Tensor, prompts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        like.new_empty(prompts, dtype=torch.int32),
        like.new_empty(prompts, dtype=torch.float32),
        like.new_empty(prompts, dtype=torch.int32),
        like.new_empty(prompts, dtype=torch.uint8),
    )


def _fake_groups(embeddings: Tensor, order: Any, offsets: Any, num_groups: int, *_: Any) -> tuple[Tensor, ...]:
    rows = embeddings.shape[0]
    labels = embeddings.new_empty(rows, dtype=torch.int32)
    ids = embeddings.new_empty(rows, dtype=torch.int64)
    return labels, ids, *_per_prompt(embeddings, num_groups), embeddings.new_empty(rows, dtype=torch.uint8)


def _fake_cosine(
    embeddings: Tensor, order: Any, offsets: Any, num_groups: int, size: int, _: Any
) -> tuple[Tensor, ...]:
    distances = embeddings.new_empty((num_groups, size, size), dtype=torch.float32)
    return distances, embeddings.new_empty(embeddings.shape[0], dtype=torch.uint8)


def _fake_clusters(distances: Tensor, *_: Any) -> tuple[Tensor, ...]:
    prompts, size = distances.shape[:2]
    return distances.new_empty((prompts, size), dtype=torch.int32), *_per_prompt(distances, prompts)


def _fake_tree(distances: Tensor, _: int) -> tuple[Tensor, Tensor]:
    prompts, size = distances.shape[:2]
    merges = distances.new_empty((prompts, max(size - 1, 0), 2), dtype=torch.int32)
    return merges, distances.new_empty((prompts, max(size - 1, 0)))


def _fake_silhouette(distances: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return distances.new_empty(distances.shape[:1]), distances.new_empty(distances.shape[:2])


registry.define_compiled(
    "_cluster_distances_cuda(Tensor distances, Tensor? order, Tensor? offsets, int rows, int[] modes, "
    "float[] coefficients) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _cuda_groups(
    embeddings: Tensor,
    order: Tensor | None,
    offsets: Tensor | None,
    num_groups: int,
    size: int,
    valid: Tensor | None,
    modes: list[int],
    coefficients: list[float],
) -> tuple[Tensor, ...]:
    """Launches twice: for the distances, and for the groups."""
    distances, status = COSINE["cuda"](embeddings, order, offsets, num_groups, size, valid)
    results = registry.ops._cluster_distances_cuda(distances, order, offsets, embeddings.shape[0], modes, coefficients)
    return (*results, status)


def _cuda_clusters(distances: Tensor, modes: list[int], coefficients: list[float]) -> tuple[Tensor, ...]:
    prompts, size = distances.shape[:2]
    labels, _, *results = registry.ops._cluster_distances_cuda(
        distances, None, None, prompts * size, modes, coefficients
    )
    return (labels.view(prompts, size), *results)


FORWARD = registry.define(
    "similarity_groups",
    f"({_LAYOUT}, int[] modes, float[] coefficients) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    SUPPORTS,
    _fake_groups,
    folder=__package__,
    cuda=_cuda_groups,
    on_host=_ON_HOST,
)
COSINE = registry.define(
    "pairwise_cosine",
    f"({_LAYOUT}) -> (Tensor, Tensor)",
    SUPPORTS,
    _fake_cosine,
    folder=__package__,
    function="pairwise_cosine",
    on_host=_ON_HOST,
)
CLUSTERS = registry.define(
    "cluster_distances",
    "(Tensor distances, int[] modes, float[] coefficients) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    OF_DISTANCES,
    _fake_clusters,
    folder=__package__,
    function="cluster_distances",
    cuda=_cuda_clusters,
    on_host=_ON_HOST,
)
TREE = registry.define(
    "agglomerate",
    "(Tensor distances, int linkage) -> (Tensor, Tensor)",
    OF_DISTANCES,
    _fake_tree,
    folder=__package__,
    function="agglomerate",
    on_host=_ON_HOST,
)
SILHOUETTE = registry.define(
    "silhouette",
    "(Tensor distances, Tensor labels) -> (Tensor, Tensor)",
    OF_DISTANCES,
    _fake_silhouette,
    folder=__package__,
    function="silhouette",
    on_host=_ON_HOST,
)
