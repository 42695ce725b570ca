"""Metrics of similarity groups, and advantages within them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.checks import unknown
from grpo_kernels.ops.group_advantages import group_advantages
from grpo_kernels.ops.group_advantages.config import AdvantageConfig
from grpo_kernels.ops.similarity_groups import SimilarityGroups, Verdict, similarity_groups
from grpo_kernels.ops.similarity_groups.config import MAX_ROWS, SimilarityConfig

_PREFIX = "similarity_groups/"
_MIN_BINS = 8  # of the histogram of group counts


class SimilarityAdvantages(NamedTuple):
    """The fields of GroupAdvantages for similarity groups, and the groups themselves.

    Attributes:
        advantages, mean, std, size, degenerate: per reward row; 0, and degenerate, for rows left out of the clustering
            (label -1)
        groups: see SimilarityGroups
    """

    advantages: Tensor
    mean: Tensor
    std: Tensor
    size: Tensor
    degenerate: Tensor
    groups: SimilarityGroups


def similarity_metrics(result: SimilarityGroups) -> dict[str, float]:
    """Computes metrics to log, each named "similarity_groups/...". Waits for the device once.

    ```
    avg_groups_per_prompt            mean of num_groups
    n_prompts_split_into_{k}_groups  number of prompts with k groups, for k from 1 to 8, or more if there are
    n_single_member_groups           number of groups of one response, over all prompts
    avg_silhouette_score             mean silhouette, including cuts not taken and the 0 of small prompts
    share_{verdict}                  share of the prompts with each verdict (see Verdict) except EMPTY
    share_empty                      share of the places for prompts without a response in use
    ```

    A prompt without a response in use counts in share_empty only, so that sizes given too large do not change the other
    metrics. Without any prompt all metrics are 0.

    Returns:
        numbers by name
    """
    if not isinstance(result, SimilarityGroups):
        raise TypeError(f"similarity_metrics: result must be SimilarityGroups, got {type(result).__name__}")
    counts = torch.arange(MAX_ROWS + 1, device=result.num_groups.device)
    verdicts = torch.arange(len(Verdict), device=result.num_groups.device)
    in_use = result.verdict != Verdict.EMPTY
    parts = torch.cat(
        (
            torch.where(in_use, result.silhouette.double(), 0).sum()[None],
            _singles(result.group_ids)[None].double(),
            (result.verdict[:, None] == verdicts).sum(0).double(),
            ((result.num_groups[:, None] == counts) & in_use[:, None]).sum(0).double(),
        )
    )
    silhouettes, singles, *rest = parts.tolist()
    by_verdict, by_count = rest[: len(Verdict)], rest[len(Verdict) :]
    prompts = sum(by_count)
    largest = max((k for k, count in enumerate(by_count) if count), default=0)
    groups = sum(k * count for k, count in enumerate(by_count))
    metrics = {"avg_groups_per_prompt": groups / max(prompts, 1)}
    metrics |= {f"n_prompts_split_into_{k}_groups": by_count[k] for k in range(1, max(largest, _MIN_BINS) + 1)}
    metrics |= {"n_single_member_groups": singles, "avg_silhouette_score": silhouettes / max(prompts, 1)}
    for verdict, count in zip(Verdict, by_verdict, strict=True):
        among = sum(by_verdict) if verdict == Verdict.EMPTY else prompts
        metrics[f"share_{verdict.name.lower()}"] = count / max(among, 1)
    return {_PREFIX + name: value for name, value in metrics.items()}


def _singles(group_ids: Tensor) -> Tensor:
    """Number of ids that occur once. By sorting, because counting would need to know the largest id."""
    ids = group_ids.flatten().sort().values
    differs = ids[1:] != ids[:-1]
    edge = differs.new_ones(1)
    return (torch.cat((edge, differs)) & torch.cat((differs, edge)) & (ids >= 0)).sum() if len(ids) else ids.sum()


def similarity_advantages(
    rewards: Tensor,
    embeddings: Tensor,
    groups: int | Tensor,
    *,
    valid: Tensor | None = None,
    num_groups: int | None = None,
    max_size: int | None = None,
    similarity: SimilarityConfig | str = "average",
    config: AdvantageConfig | str = "grpo",
    lengths: Tensor | None = None,
    baselines: Tensor | None = None,
    backend: str | None = None,
) -> SimilarityAdvantages:
    """Computes advantages of responses among similar ones: similarity_groups, then group_advantages within its groups.

    Arguments not listed here are those of the two functions. There is no gradient.

    Args:
        rewards: [N] or [N, R]; NaN means not scored, but the row takes part in the clustering
        embeddings: [N, D]
        valid: bool [N]; rows with False are left out of both steps
        similarity: a SimilarityConfig or the name of a linkage
        config: an AdvantageConfig or the name of an estimator. Its `singleton` decides about responses unlike all
            others, and its `shrinkage` how much small groups borrow from their prompt
        backend: "kernel" or "reference"; None means the kernel where there is one, in both steps

    Returns:
        SimilarityAdvantages: the advantages, and the clusters that they were computed in
    """
    name = "similarity_advantages"
    checks.tensor(name, "rewards", rewards, checks.FLOATS)
    checks.tensor(name, "embeddings", embeddings, checks.FLOATS)
    checks.config_or_name(name, "similarity", similarity, SimilarityConfig)
    if isinstance(similarity, str) and similarity not in SimilarityConfig.names():
        raise unknown(name, "similarity", similarity, SimilarityConfig.names())
    if embeddings.shape[:1] != rewards.shape[:1]:
        raise ValueError(
            f"{name}: embeddings must have one row per reward, {rewards.shape[:1].numel()}, "
            f"got {list(embeddings.shape)}"
        )
    checks.same_device(name, "embeddings", embeddings, rewards.device)
    settings = AdvantageConfig.of(config, name)
    clusters = similarity_groups(
        embeddings, groups, valid=valid, num_groups=num_groups, max_size=max_size, config=similarity, backend=backend
    )
    within = group_advantages(
        rewards,
        groups,
        subgroups=clusters.labels,
        valid=valid,
        lengths=lengths,
        baselines=baselines,
        config=settings,
        backend=backend,
    )
    return SimilarityAdvantages(*within, groups=clusters)
