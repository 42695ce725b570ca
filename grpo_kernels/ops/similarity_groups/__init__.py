"""Clusters the responses to each prompt by the similarity of their embeddings."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.groups import check_layout
from grpo_kernels.ops.similarity_groups import registration as op
from grpo_kernels.ops.similarity_groups.config import MAX_ROWS, RowStatus, SimilarityConfig, Verdict
from grpo_kernels.ops.similarity_groups.reference import Distances, Grouping, Responses

_OP = "similarity_groups"
_BOOL = (torch.bool,)

__all__ = ["RowStatus", "SimilarityGroups", "Verdict", "cluster_distances", "similarity_groups"]


class SimilarityGroups(NamedTuple):
    """Result of similarity_groups, per response (or per place of padded distances) and per prompt.

    Attributes:
        labels: int32, group within the prompt in order of first appearance; -1 if left out
        group_ids: int64, unique over all prompts, for group_advantages(subgroups=...); -1 if left out
        num_groups: int32 [P]
        silhouette: float32 [P], of the best cut, whether or not it was taken; 0 if there is none
        best_k: int32 [P], number of groups of that cut
        verdict: uint8 [P], see Verdict
        status: uint8, see RowStatus
    """

    labels: Tensor
    group_ids: Tensor
    num_groups: Tensor
    silhouette: Tensor
    best_k: Tensor
    verdict: Tensor
    status: Tensor


def similarity_groups(
    embeddings: Tensor,
    groups: int | Tensor,
    *,
    valid: Tensor | None = None,
    num_groups: int | None = None,
    max_size: int | None = None,
    config: SimilarityConfig | str = "average",
    backend: str | None = None,
) -> SimilarityGroups:
    """Clusters the responses of each prompt by cosine similarity; the silhouette chooses the number of groups.

    Prompts come in ascending order of their ids. The result of a prompt depends only on its own responses and their
    order. There is no gradient. On a GPU without the CUDA kernels the CPU kernel takes copies, for which it waits.

    Args:
        embeddings: [N, D]; float32, bfloat16 or float16; need not be normalised
        groups: prompt of each row, as an int (that many consecutive rows) or integer ids [N] in any order
        valid: bool [N]; rows with False are left out, as if they were absent
        num_groups, max_size: with ids, the number of prompts and the largest number of responses of one (at most 256).
            Finding them waits for a GPU once. Larger values add empty prompts at the end
        config: a SimilarityConfig or the name of a linkage: "single", "complete", "average", "ward"
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        SimilarityGroups: labels and ids of the clusters, their number and silhouette, and a verdict on each prompt
    """
    settings = SimilarityConfig.of(config, _OP)
    vectors = check_embeddings(_OP, embeddings)
    mask = check_valid(_OP, valid, vectors)
    layout = check_layout(_OP, groups, vectors, num_groups, max_size, MAX_ROWS)
    chosen = backends.select(_OP, backend, vectors.device.type, vectors.dtype, op.SUPPORTS, vectors.device.index)
    inputs = Grouping(Responses(vectors, *layout, mask), settings.settings)
    return SimilarityGroups(*op.GROUPS(chosen, inputs))


def cluster_distances(
    distances: Tensor, *, config: SimilarityConfig | str = "average", backend: str | None = None
) -> SimilarityGroups:
    """Computes similarity_groups from distances [P, K, K], as returned by pairwise_cosine.

    Distances are symmetric, at least 0, and 0 on the diagonal; a place whose diagonal is infinite is left out. With
    linkage="ward" they are taken as cosine distances. labels, group_ids and status have shape [P, K]. Waits for a GPU
    without the CUDA kernels, as similarity_groups does.

    Returns:
        SimilarityGroups: labels and ids of the clusters, their number and silhouette, and a verdict on each prompt
    """
    settings = SimilarityConfig.of(config, "cluster_distances")
    distances = check_distances("cluster_distances", distances)
    chosen = backends.select(
        "cluster_distances",
        backend,
        distances.device.type,
        distances.dtype,
        op.OF_DISTANCES,
        distances.device.index,
    )
    inputs = Distances(distances, settings.settings)
    labels, count, score, best_k, verdict = op.CLUSTERS(chosen, inputs)
    first = torch.arange(labels.shape[0], device=labels.device)[:, None] * labels.shape[1]
    status = (labels < 0).to(torch.uint8) * int(RowStatus.MASKED)
    ids = torch.where(labels < 0, -1, labels + first)
    return SimilarityGroups(labels, ids, count, score, best_k, verdict, status)


def check_embeddings(name: str, embeddings: Tensor) -> Tensor:
    checks.tensor(name, "embeddings", embeddings, checks.FLOATS)
    if embeddings.dim() != 2 or embeddings.shape[1] == 0:
        raise ValueError(f"{name}: embeddings must have shape [N, D] with D > 0, got {list(embeddings.shape)}")
    checks.constant(name, "embeddings", embeddings)
    return embeddings.detach().contiguous()


def check_valid(name: str, valid: Tensor | None, embeddings: Tensor) -> Tensor | None:
    return None if valid is None else checks.per_row(name, "valid", valid, _BOOL, embeddings).contiguous()


def check_distances(name: str, distances: Tensor) -> Tensor:
    """Checks shape and dtype, and values on the CPU, where looking at them does not wait."""
    checks.tensor(name, "distances", distances, (torch.float32, torch.float64))
    if distances.dim() != 3 or distances.shape[1] != distances.shape[2]:
        raise ValueError(f"{name}: distances must have shape [P, K, K], got {list(distances.shape)}")
    if distances.shape[1] > MAX_ROWS:
        raise ValueError(f"{name}: distances must have at most {MAX_ROWS} places, got {distances.shape[1]}")
    checked = distances.detach().float().contiguous()
    if checked.device.type == "cpu" and not torch.compiler.is_compiling():
        check_metric(name, checked)
    return checked


def check_metric(name: str, distances: Tensor) -> None:
    """Requires distances as pairwise_cosine returns them. Waits for a GPU, so it is called on the CPU only."""
    own = distances.diagonal(dim1=1, dim2=2)
    pairs = (own == 0)[:, :, None] & (own == 0)[:, None]
    for rule, is_broken in (
        ("be 0 on the diagonal, or infinite", (own != 0) & (own != torch.inf)),
        ("be finite and at least 0 where both places are in use", pairs & ~(distances.isfinite() & (distances >= 0))),
        ("be symmetric", pairs & (distances != distances.mT)),
    ):
        if bool(is_broken.any()):
            where = is_broken.nonzero()[0].tolist()
            value = distances[where[0], where[1], where[-1]].item()
            raise ValueError(f"{name}: distances must {rule}, got {value} at {where}")
