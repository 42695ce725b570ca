"""The CUDA implementation: one launch for the distances, one for the groups."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

_Pair = tuple[Tensor, Tensor]


def forward(
    embeddings: Tensor, order: Tensor | None, offsets: Tensor | None, num_groups: int, size: int,
    valid: Tensor | None, modes: list[int], coefficients: list[float],
) -> tuple[Tensor, ...]:  # fmt: skip
    distances, status = pairwise_cosine(embeddings, order, offsets, num_groups, size, valid)
    results = torch.ops.grpo_kernels._cluster_distances_cuda(
        distances, order, offsets, embeddings.shape[0], modes, coefficients
    )
    return (*results, status)


def pairwise_cosine(
    embeddings: Tensor, order: Tensor | None, offsets: Tensor | None, num_groups: int, size: int, valid: Tensor | None
) -> _Pair:  # fmt: skip
    found = torch.ops.grpo_kernels._pairwise_cosine_cuda(embeddings, order, offsets, num_groups, size, valid)
    return cast(_Pair, found)


def cluster_distances(distances: Tensor, modes: list[int], coefficients: list[float]) -> tuple[Tensor, ...]:
    prompts, size = distances.shape[:2]
    labels, _, *results = torch.ops.grpo_kernels._cluster_distances_cuda(
        distances, None, None, prompts * size, modes, coefficients
    )
    return (labels.view(prompts, size), *results)


def agglomerate(distances: Tensor, linkage: int) -> _Pair:
    return cast(_Pair, torch.ops.grpo_kernels._agglomerate_cuda(distances, linkage))


def silhouette(distances: Tensor, labels: Tensor) -> _Pair:
    return cast(_Pair, torch.ops.grpo_kernels._silhouette_cuda(distances, labels))
