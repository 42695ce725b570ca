"""From rewards to what the loss is given: every named algorithm, in terms of grpo_kernels."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer.recipe import Algorithm, Similarity
from grpo_trainer.rollout import Rollout
from grpo_trainer.settings import unknown

Config = TypeVar("Config")
_CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
_ROW_MEAN = {"aggregation": "seq-mean-token-mean"}

# Fields of AdvantageConfig and of LossConfig; what a recipe says itself goes over them.
ALGORITHMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"estimator": "grpo"}, {"kl": "k3", "kl_coef": 0.01}),
    "dr_grpo": ({"estimator": "dr_grpo"}, {"aggregation": "seq-mean-token-sum-norm"}),
    "dapo": ({"estimator": "grpo"}, _CLIP_HIGHER),
    "rloo": ({"estimator": "rloo"}, {}),
    "reinforce": ({"estimator": "rloo"}, {"loss": "reinforce"}),
    "reinforce_plus_plus": ({"estimator": "reinforce_plus_plus_baseline"}, {"kl": "k2", "kl_coef": 0.01}),
    "opo": ({"estimator": "opo"}, {}),
    "maxrl": ({"estimator": "maxrl"}, {}),
    "gpg": ({"estimator": "gpg"}, {"loss": "reinforce"}),
    "pass_k": ({"estimator": "grpo_passk"}, {}),
    "gdpo": ({"estimator": "gdpo"}, {}),
    "gspo": ({"estimator": "grpo"}, {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4} | _ROW_MEAN),
    "gmpo": ({"estimator": "grpo"}, {"loss": "geo_mean", "clip_low": 0.4, "clip_high": 0.4,
                                     "aggregation": "seq-mean-token-sum"}),
    "cispo": ({"estimator": "grpo"}, {"loss": "cispo", "clip_low": None, "clip_high": 4.0}),
    "sapo": ({"estimator": "grpo"}, {"loss": "sapo"} | _ROW_MEAN),
    "similarity_group_grpo": ({"estimator": "grpo", "shrinkage": 4.0}, {"kl": "k3", "kl_coef": 0.01}),
    "polychromic": ({}, {"kl": "k3", "kl_coef": 0.01}),
    "ppo": ({}, {}),
    "group_ppo": ({}, {"ratio": "segment"}),
}  # fmt: skip
WITH_CRITIC = ("ppo", "group_ppo")
WITH_CLUSTERS = ("similarity_group_grpo", "polychromic")


@dataclasses.dataclass
class Plan:
    """An algorithm with its settings filled in, and the one thing about it that changes: the threshold of segments."""

    settings: Algorithm
    advantage: gk.AdvantageConfig | None
    loss: gk.LossConfig
    similarity: Similarity | None
    segments: gk.SegmentConfig | None
    threshold: gk.SegmentThreshold | None

    @classmethod
    def of(cls, settings: Algorithm, max_new_tokens: int) -> Plan:
        if settings.name not in ALGORITHMS:
            raise ValueError(unknown("algorithm.name", settings.name, list(ALGORITHMS)))
        advantage, loss = ALGORITHMS[settings.name]
        loss = loss | settings.loss
        if loss.get("aggregation") == "seq-mean-token-sum-norm":
            loss = {"max_length": max_new_tokens} | loss
        has_critic = settings.name in WITH_CRITIC
        _refuse(settings, has_critic)
        segments = None
        if has_critic:
            fields = {"group_max_size": 1} if settings.name == "ppo" else {}
            segments = gk.SegmentConfig.of(fields | settings.segments, "algorithm.segments")
            if settings.sparse:
                loss = loss | {"ratio": "token"}
        clusters = settings.similarity
        if clusters is None and settings.name in WITH_CLUSTERS:
            clusters = Similarity()
        threshold = gk.SegmentThreshold(segments) if segments is not None and settings.name == "group_ppo" else None
        is_by_rows = not has_critic and settings.name != "polychromic"
        config = None if not is_by_rows else _config(gk.AdvantageConfig, advantage | settings.advantage, "advantage")
        plan = cls(settings, config, _config(gk.LossConfig, loss, "loss"), clusters, segments, threshold)
        if clusters is not None:
            _ = plan.clustering  # so that what is wrong with it is said now
        return plan

    @property
    def clustering(self) -> gk.SimilarityConfig:
        assert self.similarity is not None
        return _config(gk.SimilarityConfig, self.similarity.config, "similarity.config")

    @property
    def needs_reference(self) -> bool:
        return self.loss.kl != "none"


@dataclasses.dataclass
class Credit:
    """What each response, or each of its tokens, is worth to the loss."""

    advantages: Tensor  # [N] or [N, T]
    mask: Tensor | None = None  # [N, T]: tokens that enter the loss
    segments: Tensor | None = None  # [N, T]
    returns: Tensor | None = None  # [N, T], what a critic learns
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    clusters: gk.SimilarityGroups | None = None


def credit(
    plan: Plan, rollout: Rollout, rewards: Tensor, weights: Tensor, embeddings: Tensor | None, values: Tensor | None
) -> Credit:
    """rewards [N, R], NaN where one was not given; weights [R]; embeddings of the responses, NaN for those left out."""
    totals = total(rewards, weights)
    if plan.segments is not None:
        assert values is not None
        found = _by_segments(plan, rollout, totals, values)
    elif plan.settings.name == "polychromic":
        assert embeddings is not None
        found = _by_sets(plan, rollout, totals, embeddings)
    else:
        found = _by_rows(plan, rollout, rewards, weights, embeddings)
    if totals.isnan().any():  # without a reward a response is no evidence, and not one of those that are divided by
        mask = rollout.batch.mask if found.mask is None else found.mask
        found.mask = mask & ~totals.isnan()[:, None]
    if plan.settings.top_k_ratio < 1:
        _keep_largest(found, rollout, plan.settings.top_k_ratio)
    return found


def total(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of the rewards that were given; NaN where none was."""
    given = ~rewards.isnan()
    return torch.where(given.any(1), torch.where(given, rewards * weights, 0).sum(1), torch.nan)


def _by_rows(plan: Plan, rollout: Rollout, rewards: Tensor, weights: Tensor, embeddings: Tensor | None) -> Credit:
    assert plan.advantage is not None
    size = rollout.group_size
    config = dataclasses.replace(plan.advantage, reward_weights=tuple(weights.tolist()))
    lengths = rollout.lengths if config.needs_lengths else None
    if plan.similarity is None:
        found = gk.group_advantages(rewards, size, lengths=lengths, config=config)
        return Credit(found.advantages)
    assert embeddings is not None
    clusters = gk.similarity_groups(embeddings, size, config=plan.clustering)
    if plan.similarity.sharing > 0:
        rewards = shared(rewards, clusters.group_ids, size, plan.similarity.sharing)
    within = gk.group_advantages(rewards, size, subgroups=clusters.labels, lengths=lengths, config=config)
    advantages = plan.similarity.within * within.advantages
    if plan.similarity.between > 0:
        alone = dataclasses.replace(config, shrinkage=0.0)
        among_all = gk.group_advantages(rewards, size, lengths=lengths, config=alone).advantages
        advantages = advantages + plan.similarity.between * torch.where(clusters.labels >= 0, among_all, 0)
    return Credit(advantages, metrics=gk.similarity_metrics(clusters), clusters=clusters)


def _by_sets(plan: Plan, rollout: Rollout, rewards: Tensor, embeddings: Tensor) -> Credit:
    """Polychromic: a set is worth its mean reward times its diversity, a response what sets with it are worth more."""
    assert plan.similarity is not None
    size = rollout.group_size
    clusters = gk.similarity_groups(embeddings, size, config=plan.clustering)
    found = gk.diversity.set_advantages(
        rewards.view(-1, size), clusters.labels.view(-1, size), set_size=plan.settings.set_size or max(2, size // 2)
    )
    return Credit(found.flatten().to(rewards.dtype), metrics=gk.similarity_metrics(clusters), clusters=clusters)


def _by_segments(plan: Plan, rollout: Rollout, rewards: Tensor, values: Tensor) -> Credit:
    assert plan.segments is not None
    mask = rollout.batch.mask & ~rewards.isnan()[:, None]  # nor of a segment
    at_end = torch.zeros_like(rollout.logprobs)
    last = (rollout.lengths - 1).clamp(min=0)[:, None]
    at_end.scatter_(1, last, rewards.nan_to_num()[:, None].to(at_end))
    groups = rollout.group_size if plan.segments.norm == "prompt" else None
    found = gk.endpoint_segments(
        at_end, rollout.logprobs, rollout.logprobs, mask, values=values, groups=groups, threshold=plan.threshold,
        config=plan.segments,
    )  # fmt: skip
    result = Credit(found.advantages, mask, returns=found.returns)
    if plan.threshold is not None:
        result.metrics = gk.segment_metrics(found, rollout.group_size)
        plan.threshold.update(found)
    if plan.settings.sparse:
        result.mask = found.endpoint_mask
    elif plan.loss.ratio.startswith("segment"):
        result.segments = found.segment_ids
    return result


def _keep_largest(found: Credit, rollout: Rollout, ratio: float) -> None:
    """Of each group the share with the largest advantages in magnitude; the others do not enter the loss at all."""
    size = rollout.group_size
    magnitude = found.advantages.abs()
    of_row = (magnitude if magnitude.dim() == 1 else magnitude.amax(1)).view(-1, size)
    kept = max(1, round(ratio * size))
    order = of_row.sort(stable=True, dim=1, descending=True).indices
    keeps = torch.zeros_like(of_row, dtype=torch.bool).scatter_(1, order[:, :kept], True).flatten()
    mask = rollout.batch.mask if found.mask is None else found.mask
    found.mask = mask & keeps[:, None]
    found.metrics["train/kept_rows"] = float(keeps.sum())


def shared(rewards: Tensor, group_ids: Tensor, size: int, power: float) -> Tensor:
    """Rewards [N, R] above the prompt's lowest, divided by how many of the cluster have one, to the power of `power`.

    A policy gradient gives what is sampled often more of it, among equally right ways too, until one is left. Where
    alike responses share what they get, a rare way is worth more, so the ways come to rest at shares of their own:
    with success rates s, at shares that go as s ** (1 / power).
    """
    ids, of_group = group_ids.view(-1, size), rewards.view(-1, size, rewards.shape[1])
    lowest = torch.where(of_group.isnan(), torch.inf, of_group).amin(1, keepdim=True)
    alike = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :]
    sharers = alike.to(rewards) @ (of_group > lowest).to(rewards)
    return (lowest + (of_group - lowest) * sharers.clamp(min=1) ** -power).view_as(rewards)


def _refuse(settings: Algorithm, has_critic: bool) -> None:
    name = settings.name
    rules: list[tuple[str, Any, bool, str]] = [
        ("advantage", settings.advantage, bool(settings.advantage) and has_critic, "is of algorithms without a critic"),
        ("segments", settings.segments, bool(settings.segments) and not has_critic, "is of ppo and group_ppo"),
        ("sparse", settings.sparse, settings.sparse and name != "group_ppo", "is of group_ppo"),
        ("critic", settings.critic, settings.critic is not None and not has_critic, "is of ppo and group_ppo"),
        ("advantage", settings.advantage, bool(settings.advantage) and name == "polychromic",
         "is of algorithms other than polychromic, whose sets say what a response is worth"),
        ("advantage.reward_weights", settings.advantage.get("reward_weights"),
         "reward_weights" in settings.advantage, "is said by the weight of each of the rewards"),
        ("set_size", settings.set_size, settings.set_size > 0 and name != "polychromic", "is of polychromic"),
        ("similarity", settings.similarity, settings.similarity is not None and has_critic,
         "is of algorithms without a critic"),
        ("drop_flat", settings.drop_flat, not settings.drop_flat and has_critic, "is of algorithms without a critic"),
    ]  # fmt: skip
    if name == "polychromic" and settings.similarity is not None:
        rules += [
            (f"similarity.{key}", getattr(settings.similarity, key), getattr(settings.similarity, key) != default,
             "is of algorithms other than polychromic")
            for key, default in (("sharing", 0.0), ("within", 1.0), ("between", 0.0))
        ]  # fmt: skip
    for key, value, refused, rule in rules:
        if refused:
            raise ValueError(f"algorithm.{key}: {rule}, got {value!r} with {name!r}")


def _config(kind: Callable[..., Config], fields: dict[str, Any], key: str) -> Config:
    """YAML has lists where the configs have tuples."""
    known = list(inspect.signature(kind).parameters)
    for name in fields:
        if name not in known:
            raise ValueError(unknown(f"algorithm.{key}", name, known))
    tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    try:
        return kind(**tuples)
    except (TypeError, ValueError) as error:
        raise type(error)(f"algorithm.{key}: {error}") from error
