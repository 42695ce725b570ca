"""Embeddings of the responses to each prompt, put into groups of similar ones."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks, dispatch
from grpo_kernels.config import SimilarityConfig
from grpo_kernels.functional.group_layout import check_layout
from grpo_kernels.ops import similarity_groups as op

_OP = "similarity_groups"
_BOOL = (torch.bool,)


class Verdict(enum.IntEnum):
    """What was found about a prompt."""

    CLUSTERED = 0
    ALL_SAME = 1  # no two responses further apart than distance_floor
    ALL_DIFFERENT = 2  # no good cut, and all further apart than different_at
    SMALL = 3  # fewer than three responses
    EMPTY = 4  # none
    UNCLEAR = 5  # no good cut, and neither of the above


class RowStatus(enum.IntFlag):
    """What was found about a response."""

    IN_USE = 0
    MASKED = 1  # valid is False: left out
    NOT_FINITE = 2  # or its squared norm beyond float32: left out
    ZERO_VECTOR = 4  # or its squared norm below 1e-30: in use, at distance 1 from all others


class SimilarityGroups(NamedTuple):
    """Of every response (or place, from distances) and of every prompt.

    labels      int32, the group within the prompt in order of first appearance; -1: left out
    group_ids   int64, unique over all prompts, for group_advantages(subgroups=...); -1: left out
    num_groups  int32 [P]
    silhouette  float32 [P], of the best cut, whether it was taken or not; 0 where there is none
    best_k      int32 [P], its number of groups
    verdict     uint8 [P], see Verdict
    status      uint8, see RowStatus
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
    """Clusters the responses of each prompt by the cosine of their embeddings; the silhouette chooses how many groups.

    embeddings  [N, D], float32, bfloat16 or float16; need not be normalised
    groups      whose response a row is: an int (prompts of that many neighbours) or integer ids [N] in any order
    valid       bool [N]; False: left out, as if it were not there
    num_groups, max_size
                with ids: how many prompts there are, and the most responses of one (at most 256); finding them waits
                for a GPU once. More than there are: empty prompts at the end
    config      a SimilarityConfig or the name of a linkage: single, complete, average, ward
    backend     "cuda", "triton", "cpu", "reference"; None: the first that can

    Prompts come in ascending order of their ids. A prompt's result depends on its own responses and their order only.
    Not differentiable.
    """
    settings = SimilarityConfig.of(config, _OP)
    given = check_embeddings(_OP, embeddings)
    layout = check_layout(_OP, groups, given, num_groups, max_size, op.MOST_ROWS)
    mask = check_valid(_OP, valid, given)
    chosen = dispatch.select(
        _OP, backend, given.device.type, given.dtype, op.SUPPORTS, given.device.index, op.too_large(layout.size)
    )
    results = op.FORWARD[chosen](given, *layout, mask, settings.modes, settings.coefficients)
    return SimilarityGroups(*results)


def cluster_distances(
    distances: Tensor, *, config: SimilarityConfig | str = "average", backend: str | None = None
) -> SimilarityGroups:
    """similarity_groups of distances [P, K, K] that are known already, as pairwise_cosine gives them.

    Symmetric, at least 0, with 0 on the diagonal; a place whose diagonal is infinite is left out. With
    linkage="ward" they are taken for cosine distances. labels, group_ids and status have shape [P, K].
    """
    settings = SimilarityConfig.of(config, "cluster_distances")
    given = check_distances("cluster_distances", distances)
    chosen = dispatch.select(
        "cluster_distances",
        backend,
        given.device.type,
        given.dtype,
        op.OF_DISTANCES,
        given.device.index,
        op.too_large(given.shape[1]),
    )
    labels, count, score, best_k, verdict = op.CLUSTERS[chosen](given, settings.modes, settings.coefficients)
    first = torch.arange(labels.shape[0], device=labels.device)[:, None] * labels.shape[1]
    status = (labels < 0).to(torch.uint8) * int(RowStatus.MASKED)
    ids = torch.where(labels < 0, -1, labels + first)
    return SimilarityGroups(labels, ids, count, score, best_k, verdict, status)


def check_embeddings(name: str, embeddings: Tensor) -> Tensor:
    checks.tensor(name, "embeddings", embeddings, checks.FLOATS)
    if embeddings.dim() != 2 or embeddings.shape[1] == 0:
        raise ValueError(f"{name}: embeddings must have shape [N, D] with D > 0, got {list(embeddings.shape)}")
    if embeddings.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: embeddings must not require grad, got requires_grad=True; pass embeddings.detach()")
    return embeddings.detach().contiguous()


def check_valid(name: str, valid: Tensor | None, embeddings: Tensor) -> Tensor | None:
    return None if valid is None else checks.per_row(name, "valid", valid, _BOOL, embeddings).contiguous()


def check_distances(name: str, distances: Tensor) -> Tensor:
    """What they hold is looked at on the CPU only, where that does not wait."""
    checks.tensor(name, "distances", distances, (torch.float32, torch.float64))
    if distances.dim() != 3 or distances.shape[1] != distances.shape[2]:
        raise ValueError(f"{name}: distances must have shape [P, K, K], got {list(distances.shape)}")
    if distances.shape[1] > op.MOST_ROWS:
        raise ValueError(f"{name}: distances must have at most {op.MOST_ROWS} places, got {distances.shape[1]}")
    given = distances.detach().float().contiguous()
    if given.device.type == "cpu" and not torch.compiler.is_compiling():
        check_metric(name, given)
    return given


def check_metric(name: str, distances: Tensor) -> None:
    """Whether they are what pairwise_cosine gives; waits for a GPU, so only for the CPU."""
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
