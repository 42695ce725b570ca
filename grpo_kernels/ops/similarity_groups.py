"""torch registration of similarity_groups and of its parts. Not differentiable: labels are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.ops import registry

_EMBEDDINGS = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT = (torch.float32,)
SUPPORTS = {
    "cuda": _EMBEDDINGS,
    "triton": _EMBEDDINGS,
    "cpu": _EMBEDDINGS,
    "reference": (*_EMBEDDINGS, torch.float64),
}
OF_DISTANCES = dict.fromkeys(SUPPORTS, _FLOAT)
MOST_ROWS = 256
_MOST_ROWS_OF = {"triton": 64}  # a tile of their distances stays in registers

_LAYOUT = "Tensor embeddings, Tensor? order, Tensor? offsets, int num_groups, int size, Tensor? valid"


def too_large(size: int) -> dict[str, str]:
    """Of the backends that cannot take prompts of so many rows the reason."""
    return {
        backend: f"it takes prompts of at most {most} rows, got {size}"
        for backend, most in _MOST_ROWS_OF.items()
        if size > most
    }


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


registry.define_compiled(f"_pairwise_cosine_cuda({_LAYOUT}) -> (Tensor, Tensor)")
registry.define_compiled(
    "_cluster_distances_cuda(Tensor distances, Tensor? order, Tensor? offsets, int rows, int[] modes, "
    "float[] coefficients) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
registry.define_compiled("_agglomerate_cuda(Tensor distances, int linkage) -> (Tensor, Tensor)")
registry.define_compiled("_silhouette_cuda(Tensor distances, Tensor labels) -> (Tensor, Tensor)")

FORWARD = registry.define(
    "similarity_groups",
    f"({_LAYOUT}, int[] modes, float[] coefficients) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    SUPPORTS,
    _fake_groups,
)
COSINE = registry.define(
    "pairwise_cosine",
    f"({_LAYOUT}) -> (Tensor, Tensor)",
    SUPPORTS,
    _fake_cosine,
    implementation="similarity_groups.pairwise_cosine",
)
CLUSTERS = registry.define(
    "cluster_distances",
    "(Tensor distances, int[] modes, float[] coefficients) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    OF_DISTANCES,
    _fake_clusters,
    implementation="similarity_groups.cluster_distances",
)
TREE = registry.define(
    "agglomerate",
    "(Tensor distances, int linkage) -> (Tensor, Tensor)",
    OF_DISTANCES,
    _fake_tree,
    implementation="similarity_groups.agglomerate",
)
SILHOUETTE = registry.define(
    "silhouette",
    "(Tensor distances, Tensor labels) -> (Tensor, Tensor)",
    OF_DISTANCES,
    _fake_silhouette,
    implementation="similarity_groups.silhouette",
)
