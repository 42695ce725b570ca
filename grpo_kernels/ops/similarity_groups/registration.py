"""Registers similarity_groups and its parts with torch. They have no gradient: labels are discrete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.similarity_groups import reference
from grpo_kernels.ops.similarity_groups.reference import Distances, Grouping, Labelled, Linked, Responses

_EMBEDDINGS = (torch.float32, torch.bfloat16, torch.float16)
SUPPORTS = {"cuda": _EMBEDDINGS, "cpu": _EMBEDDINGS, "reference": (*_EMBEDDINGS, torch.float64)}
OF_DISTANCES = dict.fromkeys(SUPPORTS, (torch.float32,))

_TWO, _FIVE, _SIX, _SEVEN = (f"({', '.join(['Tensor'] * count)})" for count in (2, 5, 6, 7))
# Kernels that the ops of the same names launch.
registry.define_compiled(
    "_pairwise_cosine_cuda(Tensor embeddings, Tensor? order, Tensor? offsets, int num_groups, int size, "
    f"Tensor? valid) -> {_TWO}"
)
registry.define_compiled(
    f"_cluster_distances_cuda(Tensor distances, Tensor? order, Tensor? offsets, int rows, float[] settings) -> {_SIX}"
)
registry.define_compiled(f"_agglomerate_cuda(Tensor distances, int linkage) -> {_TWO}")
registry.define_compiled(f"_silhouette_cuda(Tensor distances, Tensor labels) -> {_TWO}")


def _per_prompt(like: Tensor, prompts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        like.new_empty(prompts, dtype=torch.int32),
        like.new_empty(prompts, dtype=torch.float32),
        like.new_empty(prompts, dtype=torch.int32),
        like.new_empty(prompts, dtype=torch.uint8),
    )


def _fake_groups(inputs: Grouping) -> tuple[Tensor, ...]:
    embeddings = inputs.responses.embeddings
    rows = len(embeddings)
    labels = embeddings.new_empty(rows, dtype=torch.int32)
    ids = embeddings.new_empty(rows, dtype=torch.int64)
    status = embeddings.new_empty(rows, dtype=torch.uint8)
    return labels, ids, *_per_prompt(embeddings, inputs.responses.num_groups), status


def _fake_cosine(inputs: Responses) -> tuple[Tensor, ...]:
    embeddings, size = inputs.embeddings, inputs.size
    distances = embeddings.new_empty((inputs.num_groups, size, size), dtype=torch.float32)
    return distances, embeddings.new_empty(len(embeddings), dtype=torch.uint8)


def _fake_clusters(inputs: Distances) -> tuple[Tensor, ...]:
    prompts, size = inputs.distances.shape[:2]
    labels = inputs.distances.new_empty((prompts, size), dtype=torch.int32)
    return labels, *_per_prompt(inputs.distances, prompts)


def _fake_tree(inputs: Linked) -> tuple[Tensor, Tensor]:
    prompts, size = inputs.distances.shape[:2]
    merges = inputs.distances.new_empty((prompts, max(size - 1, 0), 2), dtype=torch.int32)
    return merges, inputs.distances.new_empty((prompts, max(size - 1, 0)))


def _fake_silhouette(inputs: Labelled) -> tuple[Tensor, Tensor]:
    distances = inputs.distances
    return distances.new_empty(distances.shape[:1]), distances.new_empty(distances.shape[:2])


def _cuda_groups(
    embeddings: Tensor,
    order: Tensor | None,
    offsets: Tensor | None,
    num_groups: int,
    size: int,
    valid: Tensor | None,
    settings: list[float],
) -> tuple[Tensor, ...]:
    """Launches twice: for the distances, and for the groups."""
    distances, status = registry.ops._pairwise_cosine_cuda(embeddings, order, offsets, num_groups, size, valid)
    results = registry.ops._cluster_distances_cuda(distances, order, offsets, len(embeddings), settings)
    return (*results, status)


def _cuda_clusters(distances: Tensor, settings: list[float]) -> tuple[Tensor, ...]:
    prompts, size = distances.shape[:2]
    labels, _, *results = registry.ops._cluster_distances_cuda(distances, None, None, prompts * size, settings)
    return (labels.view(prompts, size), *results)


def _compiled(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], getattr(registry.ops, name)(*args))

    return call


def _define(
    name: str,
    inputs: type,
    results: str,
    supports: registry.Supports,
    fake: Callable[[Any], Any],
    cuda: Callable[..., Any],
    specification: Callable[[Any], Any],
) -> registry.TorchOp:
    """An op of this file; the reference reads distances to merge the nearest."""
    return registry.TorchOp(
        name,
        inputs,
        results,
        supports,
        fake,
        cuda=cuda,
        reference=specification,
        opaque_reference=True,
        on_host=("cpu", "reference"),
    )


GROUPS = _define("similarity_groups", Grouping, _SEVEN, SUPPORTS, _fake_groups, _cuda_groups, reference.forward)
COSINE = _define(
    "pairwise_cosine",
    Responses,
    _TWO,
    SUPPORTS,
    _fake_cosine,
    _compiled("_pairwise_cosine_cuda"),
    reference.pairwise_cosine,
)
CLUSTERS = _define(
    "cluster_distances",
    Distances,
    _FIVE,
    OF_DISTANCES,
    _fake_clusters,
    _cuda_clusters,
    reference.cluster_distances,
)
TREE = _define(
    "agglomerate", Linked, _TWO, OF_DISTANCES, _fake_tree, _compiled("_agglomerate_cuda"), reference.agglomerate
)
SILHOUETTE = _define(
    "silhouette",
    Labelled,
    _TWO,
    OF_DISTANCES,
    _fake_silhouette,
    _compiled("_silhouette_cuda"),
    reference.silhouette,
)
