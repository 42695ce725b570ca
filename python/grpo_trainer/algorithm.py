"""Algorithms: how rewards become advantages and which loss they enter, in terms of grpo_kernels."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer.messages import unknown_key, unknown_name
from grpo_trainer.recipe import Algorithm, Rl, Similarity
from grpo_trainer.rollout import Rollout

Config = TypeVar("Config")
_CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
_ROW_MEAN = {"aggregation": "seq-mean-token-mean"}
_GEO_MEAN = {"loss": "geo_mean", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "seq-mean-token-sum"}

# Defaults of AdvantageConfig and LossConfig by name; the recipe's own fields override them.
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
    "gmpo": ({"estimator": "grpo"}, _GEO_MEAN),
    "cispo": ({"estimator": "grpo"}, {"loss": "cispo", "clip_low": None, "clip_high": 4.0}),
    "sapo": ({"estimator": "grpo"}, {"loss": "sapo"} | _ROW_MEAN),
    "similarity_group_grpo": ({"estimator": "grpo", "shrinkage": 4.0}, {"kl": "k3", "kl_coef": 0.01}),
    "polychromic": ({}, {"kl": "k3", "kl_coef": 0.01}),
    "ppo": ({}, {}),
    "group_ppo": ({}, {"ratio": "segment"}),
}
# fields of the configs that a key of the recipe sets, with their values in braces
_SET_BY = {
    "advantage": {"reward_weights": "the weight of each reward"},
    "loss": {
        "kl_coef": "algorithm.beta: {}",
        "clip_low": "algorithm.epsilon: {}",
        "clip_high": "algorithm.epsilon_high: {} (with cispo 1 more)",
    },
}
CORRECTION = {"weights": "token", "weight_max": 2.0}  # of the mismatch between an engine and the policy
CORRECTION_OF_SEGMENTS = CORRECTION | {"weights": "sequence"}  # whose terms read the weight of one token
WITH_CRITIC = ("ppo", "group_ppo")
WITH_CLUSTERS = ("similarity_group_grpo", "polychromic")


@dataclasses.dataclass
class Plan:
    """An algorithm with all settings resolved. The segment threshold is its only state."""

    settings: Algorithm
    advantage: gk.AdvantageConfig | None
    loss: gk.LossConfig
    similarity: Similarity | None
    clustering: gk.SimilarityConfig | None
    segments: gk.SegmentConfig | None
    threshold: gk.SegmentThreshold | None
    correction: gk.CorrectionConfig  # applies where an engine other than the policy samples

    @classmethod
    def of(cls, rl: Rl) -> Plan:
        """Resolves the settings, and raises on any that the algorithm does not use; errors name keys of the recipe."""
        settings = rl.algorithm
        name, has_critic = settings.name, settings.name in WITH_CRITIC
        if name not in ALGORITHMS:
            raise ValueError(unknown_name("rl.algorithm.name", name, list(ALGORITHMS)))
        _refuse_unused(settings, has_critic)
        advantage_fields, loss_fields = ALGORITHMS[name]
        segments = threshold = advantage = None
        if has_critic:
            fields = {"group_max_size": 1} if name == "ppo" else {}
            segments = gk.SegmentConfig.of(fields | settings.segments, "rl.algorithm.segments")
            threshold = gk.SegmentThreshold(segments) if name == "group_ppo" else None
            if name == "ppo":
                _refuse_cuts(segments, settings)
            loss_fields = loss_fields | ({"ratio": "token"} if settings.sparse else {})
        elif name != "polychromic":
            advantage = _config(gk.AdvantageConfig, advantage_fields, settings.advantage, "advantage")
            if settings.drop_flat and advantage.gain != "none":
                rule = (
                    "must be left out with drop_flat, which takes groups without an advantage out of the divisor, too"
                )
                _refuse("gain" in settings.advantage, "algorithm.advantage.gain", rule, advantage.gain, settings)
                advantage = dataclasses.replace(advantage, gain="none")
        loss_fields = _with_coefficients(loss_fields, settings)
        if (loss_fields | settings.loss).get("aggregation") == "seq-mean-token-sum-norm":
            loss_fields = {"max_length": rl.rollout.max_completion_length} | loss_fields
        loss = _config(gk.LossConfig, loss_fields, settings.loss, "loss")
        similarity, clustering = settings.similarity, None
        if similarity is None and name in WITH_CLUSTERS:
            similarity = Similarity()
        if similarity is not None:
            clustering = _config(gk.SimilarityConfig, {}, similarity.config, "similarity.config")
        by_default = CORRECTION_OF_SEGMENTS if loss.ratio.startswith("segment") else CORRECTION
        correction = _config(gk.CorrectionConfig, {}, settings.correction or by_default, "correction")
        plan = cls(settings, advantage, loss, similarity, clustering, segments, threshold, correction)
        plan._refuse_unmet(rl.rollout.num_generations)
        return plan

    def _refuse_unmet(self, group_size: int) -> None:
        """Raises if the advantages or the loss need what this algorithm or its groups do not give them."""
        loss, advantage = self.loss, self.advantage
        by_segment = loss.ratio.startswith("segment") and self.segments is None
        rule = "must not be of segments, which ppo and group_ppo alone have"
        _refuse(by_segment, "algorithm.loss.ratio", rule, loss.ratio, self.settings)
        rule = "must not be a mean over each micro-batch, which would weigh more the more there are; give token-mean"
        for key in ("kl_aggregation", "entropy_aggregation"):
            value = getattr(loss, key)
            _refuse(value == "local-token-mean", f"algorithm.loss.{key}", rule, value, self.settings)
        rule = "must be left out, as responses without a token in the loss are left out of its divisors"
        key, value = "algorithm.loss.count_empty_rows", loss.count_empty_rows
        _refuse(value and "count_empty_rows" in self.settings.loss, key, rule, value, self.settings)
        is_alike = self.settings.name == "polychromic" and group_size < 3
        rule = "must be at least 3, as a set of all responses credits all alike"
        _refuse(is_alike, "rollout.num_generations", rule, group_size, self.settings)
        if advantage is None:
            return
        rule = "must not need baselines, which the trainer does not have"
        chosen = "center" if "center" in self.settings.advantage else "estimator"
        value = getattr(advantage, chosen)
        _refuse(advantage.needs_baselines, f"algorithm.advantage.{chosen}", rule, value, self.settings)
        rule = "applies within clusters: give algorithm.similarity, too"
        for field, is_set in (("shrinkage", advantage.shrinkage > 0), ("singleton", advantage.singleton == "parent")):
            is_refused = is_set and self.similarity is None
            _refuse(is_refused, f"algorithm.advantage.{field}", rule, getattr(advantage, field), self.settings)
        compares = advantage.center not in ("none", "baseline") and advantage.singleton == "zero"
        rule = "must be at least 2, as the responses of a prompt are compared"
        _refuse(compares and group_size == 1, "rollout.num_generations", rule, group_size, self.settings)

    def described(self) -> str:
        """The configs of the advantages and of the loss, without the fields that have their defaults."""
        configs = {"advantages": self.advantage, "segments": self.segments, "loss": self.loss}
        return "; ".join(f"{name}: {_changed(config)}" for name, config in configs.items() if config is not None)

    @property
    def needs_reference(self) -> bool:
        return self.loss.kl != "none"


def _refuse_cuts(segments: gk.SegmentConfig, settings: Algorithm) -> None:
    """Raises on settings of where segments end, as every token of ppo is one."""
    own = gk.SegmentConfig(group_max_size=1)
    thresholds = ("group_variance_threshold", "adaptive_threshold", "threshold_lr", "min_threshold", "max_threshold")
    for key in ("group_max_size", *thresholds, "rule", "proxy"):
        value = getattr(segments, key)
        rule = "must be left out, as every token is a segment; use group_ppo"
        _refuse(value != getattr(own, key), f"algorithm.segments.{key}", rule, value, settings)


def _with_coefficients(fields: dict[str, Any], settings: Algorithm) -> dict[str, Any]:
    """The fields of the loss with the recipe's beta and epsilon, which mean what they mean in TRL."""
    beta, low, high = settings.beta, settings.epsilon, settings.epsilon_high
    kl = settings.loss.get("kl", fields.get("kl", "none"))
    if beta == 0 or (kl == "none" and beta is None):
        fields = {name: value for name, value in fields.items() if name not in ("kl", "kl_coef")}
    elif beta is not None:
        _refuse(
            kl == "none" and "kl" in settings.loss, "algorithm.beta", "must be 0 with loss.kl: none", beta, settings
        )
        fields = fields | {"kl": "k3" if kl == "none" else kl, "kl_coef": beta}
    else:
        rule = "needs algorithm.beta, 0 to be measured only"
        _refuse("kl_coef" not in fields | settings.loss, "algorithm.loss.kl", rule, kl, settings)
    if (fields | settings.loss).get("loss") == "cispo":  # caps the ratio at epsilon_high itself, and ignores epsilon
        rule = "must be left out without epsilon_high, which alone caps the ratios of cispo"
        _refuse(low is not None and high is None, "algorithm.epsilon", rule, low, settings)
        return fields if high is None else fields | {"clip_low": None, "clip_high": high - 1}
    if low is not None:
        fields = fields | {"clip_low": low, "clip_high": low}
    return fields if high is None else fields | {"clip_high": high}


@dataclasses.dataclass
class Credit:
    """Advantages of N responses of at most T tokens, and what else the loss reads with them."""

    advantages: Tensor  # [N] or [N, T]
    mask: Tensor | None = None  # [N, T] tokens that enter the loss; None: all response tokens
    segments: Tensor | None = None  # [N, T] segment ids, -1 outside
    endpoints: Tensor | None = None  # [N, T] last tokens of the segments, whose tokens share an advantage
    returns: Tensor | None = None  # [N, T] targets of the critic
    is_weights: Tensor | None = None  # [N, T] importance weights of tokens that another engine sampled
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    clusters: gk.SimilarityGroups | None = None

    def in_loss(self, mask: Tensor) -> Tensor:
        """Those of the response tokens [N, T] that enter the loss."""
        return mask if self.mask is None else self.mask & mask

    def measured(self) -> Tensor:
        """The advantages with that of a segment once, at its end. [N] or [N, T]"""
        return self.advantages if self.endpoints is None else self.advantages * self.endpoints


def assign_credit(
    plan: Plan,
    rollout: Rollout,
    rewards: Tensor,
    weights: Tensor,
    embeddings: Tensor | None,
    values: Tensor | None,
    counted: Tensor | None = None,
) -> Credit:
    """Computes the advantages of a rollout.

    Args:
        plan: the algorithm.
        rollout: N responses of at most T tokens.
        rewards: [N, R], NaN for unscored responses.
        weights: [R] weight of each reward.
        embeddings: [N, D] of the responses, rows of NaN for excluded ones; for algorithms with clusters.
        values: [N, T] of the critic; for algorithms with a critic.
        counted: [N, T] response tokens that truncation and rejection leave in the loss; None: all. A response with none
            of them has no advantage, and the others are not compared with it.
    """
    if counted is not None:
        is_left_out = ~counted.any(1, keepdim=True)
        rewards = rewards.masked_fill(is_left_out, torch.nan)
        embeddings = None if embeddings is None else embeddings.masked_fill(is_left_out, torch.nan)
    totals = total_rewards(rewards, weights)
    if plan.segments is not None:
        assert values is not None
        credit = _credit_segments(plan, rollout, totals, values)
    elif plan.settings.name == "polychromic":
        assert embeddings is not None
        credit = _credit_sets(plan, rollout, totals, embeddings)
    else:
        credit = _credit_responses(plan, rollout, rewards, weights, embeddings, counted)
    if counted is not None:
        credit.mask = credit.in_loss(counted)
    if totals.isnan().any():  # unscored responses carry no signal and must not enter the divisors either
        credit.mask = credit.in_loss(rollout.batch.mask) & ~totals.isnan()[:, None]
    if plan.settings.top_k_ratio < 1:
        _keep_largest(credit, rollout, plan.settings.top_k_ratio)
    return credit


def rows_in_loss(plan: Plan, credit: Credit, mask: Tensor, group_size: int) -> Tensor:
    """Responses [N] that enter the loss; groups without any advantage carry no learning signal.

    Args:
        plan: the algorithm.
        credit: of the responses.
        mask: [N, T] response tokens.
        group_size: responses per prompt.
    """
    has_signal = credit.in_loss(mask).any(1)
    if plan.settings.drop_flat and plan.segments is None:
        advantages = credit.advantages if credit.advantages.dim() == 1 else credit.advantages.abs().sum(1)
        is_group_flat = (advantages.view(-1, group_size) == 0).all(1)
        has_signal = has_signal & ~is_group_flat.repeat_interleave(group_size)
    return has_signal


def minibatch_counts(mask: Tensor, segments: Tensor | None = None) -> dict[str, float]:
    """Tokens, rows and segments of a minibatch [N, T], by which each of its micro-batches divides its share."""
    counts = {"tokens": float(mask.sum()), "rows": float(len(mask))}
    if segments is not None:
        counts["segments"] = float(_count_ids(torch.where(mask, segments, -1)))
    return counts


def _count_ids(ids: Tensor) -> int:
    """Number of different ids from 0 on, added up over the rows."""
    ordered = torch.nn.functional.pad(ids.sort(1).values, (1, 0), value=-1)
    return int((ordered.diff(dim=1) != 0).sum())


def total_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum [N] of the rewards [N, R] of each response, ignoring NaN; NaN where all are NaN."""
    is_scored = ~rewards.isnan()
    return torch.where(is_scored.any(1), torch.where(is_scored, rewards * weights, 0).sum(1), torch.nan)


def _credit_responses(
    plan: Plan,
    rollout: Rollout,
    rewards: Tensor,
    weights: Tensor,
    embeddings: Tensor | None,
    counted: Tensor | None,
) -> Credit:
    assert plan.advantage is not None
    size = rollout.group_size
    config = dataclasses.replace(plan.advantage, reward_weights=tuple(weights.tolist()))
    lengths = None
    if config.needs_lengths:
        lengths = rollout.lengths if counted is None else counted.sum(1)
    if plan.similarity is None:
        return Credit(gk.group_advantages(rewards, size, lengths=lengths, config=config).advantages)
    assert embeddings is not None and plan.clustering is not None
    clusters = gk.similarity_groups(embeddings, size, config=plan.clustering)
    if plan.similarity.sharing > 0:
        rewards = share_rewards(rewards, clusters.group_ids, size, plan.similarity.sharing)
    within = gk.group_advantages(rewards, size, subgroups=clusters.labels, lengths=lengths, config=config)
    advantages = plan.similarity.within * within.advantages
    if plan.similarity.between > 0:
        singleton = "zero" if config.singleton == "parent" else config.singleton
        whole = dataclasses.replace(config, shrinkage=0.0, singleton=singleton)  # nothing is above a prompt
        between = gk.group_advantages(rewards, size, lengths=lengths, config=whole).advantages
        advantages = advantages + plan.similarity.between * torch.where(clusters.labels >= 0, between, 0)
    return Credit(advantages, metrics=gk.similarity_metrics(clusters), clusters=clusters)


def _credit_sets(plan: Plan, rollout: Rollout, rewards: Tensor, embeddings: Tensor) -> Credit:
    """Polychromic: scores a set by mean reward times diversity, and credits a response with its sets' advantage."""
    assert plan.clustering is not None
    size = rollout.group_size
    clusters = gk.similarity_groups(embeddings, size, config=plan.clustering)
    advantages = gk.diversity.set_advantages(
        rewards.view(-1, size), clusters.labels.view(-1, size), set_size=plan.settings.set_size or max(2, size // 2)
    )
    return Credit(advantages.flatten().to(rewards.dtype), metrics=gk.similarity_metrics(clusters), clusters=clusters)


def _credit_segments(plan: Plan, rollout: Rollout, rewards: Tensor, values: Tensor) -> Credit:
    assert plan.segments is not None
    mask = rollout.batch.mask & ~rewards.isnan()[:, None]
    # the reward arrives at the last token
    token_rewards = torch.zeros_like(rollout.logprobs)
    last = (rollout.lengths - 1).clamp(min=0)[:, None]
    token_rewards.scatter_(1, last, rewards.nan_to_num()[:, None].to(token_rewards))
    by_segment = plan.loss.ratio.startswith("segment") and not plan.settings.sparse
    # Terms of tokens need the advantage at each token. A term of a segment reads the last token that is left, and a
    # correction may reject the segment's own.
    is_shared = by_segment or ("credit" not in plan.settings.segments and not plan.settings.sparse)
    config = dataclasses.replace(plan.segments, credit="broadcast") if is_shared else plan.segments
    result = gk.endpoint_segments(
        token_rewards,
        rollout.logprobs,
        rollout.logprobs,
        mask,
        values=values,
        groups=rollout.group_size if plan.segments.norm == "prompt" else None,
        threshold=plan.threshold,
        config=config,
    )
    credit = Credit(result.advantages, mask, returns=result.returns)
    if config.credit == "broadcast":
        credit.endpoints = result.endpoint_mask
    if by_segment:
        credit.segments = result.segment_ids
    elif plan.settings.sparse:
        credit.mask = result.endpoint_mask
    if plan.threshold is not None:
        credit.metrics = gk.segment_metrics(result._replace(advantages=credit.measured()), rollout.group_size)
        plan.threshold.update(result)
    return credit


def _keep_largest(credit: Credit, rollout: Rollout, ratio: float) -> None:
    """Masks all but the given share of each group's responses in the loss, with the largest absolute advantages."""
    mask = credit.in_loss(rollout.batch.mask)
    is_in_loss = mask.any(1).view(-1, rollout.group_size)
    magnitude = credit.advantages.abs()
    magnitude = (magnitude if magnitude.dim() == 1 else magnitude.amax(1)).view_as(is_in_loss)
    order = torch.where(is_in_loss, magnitude, -1).sort(stable=True, dim=1, descending=True).indices
    count = (ratio * is_in_loss.sum(1, keepdim=True).double()).round().clamp(min=1)
    is_kept = ((order.argsort(dim=1) < count) & is_in_loss).flatten()
    credit.mask = mask & is_kept[:, None]
    credit.metrics["train/kept_rows"] = float(is_kept.sum())


def share_rewards(rewards: Tensor, group_ids: Tensor, size: int, power: float) -> Tensor:
    """Divides rewards among similar responses, so that a rare correct solution is worth more than a common one.

    Policy gradients amplify whatever is sampled often, even among equally correct solutions, until one remains. With
    shared rewards the solutions settle at shares proportional to s ** (1 / power), where s is their success rate.

    Args:
        rewards: [N, R]; the part above the prompt's lowest reward is divided.
        group_ids: [N] cluster of each response, -1 for none.
        size: responses per prompt.
        power: the divisor is the number of rewarded responses in the cluster to this power.
    """
    ids, grouped = group_ids.view(-1, size), rewards.view(-1, size, rewards.shape[1])
    lowest = torch.where(grouped.isnan(), torch.inf, grouped).amin(1, keepdim=True)
    is_same_cluster = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :]
    sharers = is_same_cluster.to(rewards) @ (grouped > lowest).to(rewards)
    return (lowest + (grouped - lowest) * sharers.clamp(min=1) ** -power).view_as(rewards)


def _refuse_unused(settings: Algorithm, has_critic: bool) -> None:
    """Raises if a setting would have no effect on this algorithm."""
    name, similarity = settings.name, settings.similarity
    is_polychromic = name == "polychromic"
    without_critic, with_critic = "applies to algorithms without a critic", "applies to ppo and group_ppo"
    sets = "applies to algorithms other than polychromic, which credits sets of responses"
    defaults = Algorithm()
    for key, is_used, rule in (
        ("advantage", not has_critic, without_critic),
        ("advantage", not is_polychromic, sets),
        ("similarity", not has_critic, without_critic),
        ("drop_flat", not has_critic, without_critic),
        ("segments", has_critic, with_critic),
        ("critic", has_critic, with_critic),
        ("sparse", name == "group_ppo", "applies to group_ppo"),
        ("set_size", is_polychromic, "applies to polychromic"),
    ):
        value = getattr(settings, key)
        _refuse(not is_used and value != getattr(defaults, key), f"algorithm.{key}", rule, value, settings)
    for key in ("sharing", "within", "between") if is_polychromic and similarity is not None else ():
        value = getattr(similarity, key)
        _refuse(value != getattr(Similarity(), key), f"algorithm.similarity.{key}", sets, value, settings)


def _refuse(is_refused: bool, key: str, rule: str, value: Any, settings: Algorithm) -> None:
    if is_refused:
        raise ValueError(f"rl.{key}: {rule}, got {value!r} with {settings.name!r}")


def _changed(config: Any) -> str:
    default = type(config)()
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    changed = [f"{name}={value}" for name, value in fields.items() if value != getattr(default, name)]
    return ", ".join(changed) or "the defaults"


def _config(kind: Callable[..., Config], defaults: dict[str, Any], fields: dict[str, Any], key: str) -> Config:
    """Builds a config from YAML, whose lists become tuples, over the algorithm's own fields; errors name the key."""
    known = list(inspect.signature(kind).parameters)
    for name, value in fields.items():
        if name not in known:
            raise ValueError(unknown_key(f"rl.algorithm.{key}", name, known))
        if name in _SET_BY.get(key, {}):
            way_out = f"set {_SET_BY[key][name].format(value)} instead"
            raise ValueError(f"rl.algorithm.{key}.{name}: must be left out, got {value!r}; {way_out}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    try:
        return kind(**(defaults | given))
    except (TypeError, ValueError) as error:
        raise type(error)(f"rl.algorithm.{key}: {error}") from error
