"""Metrics of a training step, under the names they are logged by; NaN marks an undefined value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer.algorithm import Credit, Plan
from grpo_trainer.rewards import LoadedReward, sum_counters
from grpo_trainer.rollout import Rollout


def loss_metrics(
    metric_tensors: list[Tensor], losses: list[float], grad_norms: list[float], plan: Plan
) -> dict[str, float]:
    """Metrics of the optimizer steps of one rollout, given the loss metrics, loss and gradient norm of each."""
    merged = gk.PolicyLossMetrics.merge(torch.stack(metric_tensors)).tolist()
    m = dict(zip(gk.PolicyLossMetrics.names, merged, strict=True))
    tokens, terms, steps = max(m["tokens"], 1), max(m["terms"], 1), len(metric_tensors)
    clippable = tokens if plan.loss.loss == "geo_mean" else terms  # GMPO clips tokens, its terms are rows
    mean_ratio = m["ratio_sum"] / terms
    metrics = {
        "train/total_loss": sum(losses) / steps,
        "train/policy_loss": m["policy_loss"] / steps,
        "train/entropy": m["entropy_sum"] / tokens,
        "train/ratio_mean": mean_ratio,
        "train/ratio_std": math.sqrt(max(0.0, m["ratio_spread_sum"] / terms - (mean_ratio - 1) ** 2)),
        "train/ratio_min": m["ratio_min"],
        "train/ratio_max": m["ratio_max"],
        "train/clip_low": m["low_clipped"] / clippable,
        "train/clip_high": m["high_clipped"] / clippable,
        "train/grad_norm": sum(grad_norms) / steps,
        "train/optimizer_steps": float(steps),
        "train/tokens": m["tokens"] / steps,
    }
    if plan.loss.kl != "none":
        metrics["train/kl_mean"] = m["kl_sum"] / tokens
        metrics["train/kl_penalty"] = plan.loss.kl_coef * m["kl_loss"] / steps
    return metrics


def sampling_metrics(metrics: gk.CorrectionMetrics) -> dict[str, float]:
    """Metrics of the mismatch between the engine that sampled and the policy, by token; gaps are those of log-probs."""
    m = metrics.to_dict()
    tokens, scored, nan = m["tokens"], m["scored_tokens"], math.nan
    if not scored:
        return {}
    squares = m["weight_square_sum"]
    return {
        "sampling/gap_mean": m["gap_sum"] / scored,
        "sampling/gap_max": max(abs(m["log_ratio_min"]), abs(m["log_ratio_max"])),
        "sampling/kl": m["k3_sum"] / scored,
        # as a fraction of the tokens
        "sampling/effective_sample_size": m["weight_sum"] ** 2 / (squares * tokens) if squares else nan,
        "sampling/truncated": m["outside_tokens"] / tokens,
        "sampling/rejected": 1 - m["kept_tokens"] / tokens,
    }


def reward_names(loaded: Sequence[LoadedReward]) -> list[str]:
    """Name of each reward in the metrics; rewards of one name are numbered."""
    names = [reward.settings.name for reward in loaded]
    return [f"{name}.{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def similarity_warnings(metrics: Mapping[str, float]) -> dict[str, str]:
    """Warnings about `similarity_groups/*` metrics outside their healthy ranges, by kind.

    The ranges are those published with similarity-group GRPO, for 8 responses per prompt. Prompts without a response in
    use count nowhere.
    """
    prefix = "similarity_groups/"
    groups = {
        int(name.split("_into_")[1].split("_")[0]): count
        for name, count in metrics.items()
        if name.startswith(f"{prefix}n_prompts_split_into_")
    }
    prompts = sum(groups.values())
    if not prompts:
        return {}
    single, mean = groups.get(1, 0.0) / prompts, metrics[f"{prefix}avg_groups_per_prompt"]
    silhouette = metrics[f"{prefix}avg_silhouette_score"]
    rules = {
        "one group": (single >= 0.1, f"{single:.0%} of the prompts have one group, healthy: below 10%"),
        "few groups": (mean < 3, f"{mean:.2f} groups per prompt, healthy: 3 to 5"),
        "many groups": (mean > 5, f"{mean:.2f} groups per prompt, healthy: 3 to 5"),
        "low silhouette": (silhouette <= 0.2, f"mean silhouette {silhouette:.3f}, healthy: above 0.2"),
    }
    return {kind: text for kind, (is_outside, text) in rules.items() if is_outside}


def counter_metrics(loaded: Sequence[LoadedReward]) -> dict[str, float]:
    """Counters of the rewards that have them, for example rewards/judge_failed; all processes must call it."""
    return {
        f"rewards/{reward}_{name}": value
        for reward, values in zip(reward_names(loaded), sum_counters(loaded), strict=True)
        for name, value in values.items()
    }


def _scored_std(groups: Tensor) -> Tensor:
    """Standard deviation of the numbers in each row that are not NaN; NaN if there are fewer than two."""
    is_scored = ~groups.isnan()
    apart = torch.where(is_scored, groups - groups.nanmean(1, keepdim=True), 0).double()
    return (apart.square().sum(1) / (is_scored.sum(1) - 1).clamp(min=0)).sqrt()


def rollout_metrics(
    rollout: Rollout,  # N responses of at most T tokens
    totals: Tensor,  # [N] weighted sums of the rewards, NaN for unscored responses
    rewards: Tensor,  # [N, R]
    loaded: Sequence[LoadedReward],
    credit: Credit,
    reference: Tensor | None,  # [N, T] log-probs, if the loss has a KL term
) -> dict[str, float]:
    """Metrics of rewards, groups, lengths and advantages."""
    scored = totals[~totals.isnan()].double()
    nan = math.nan
    q25, median, q75 = (float(scored.quantile(q)) if len(scored) else nan for q in (0.25, 0.5, 0.75))
    groups = totals.view(-1, rollout.group_size)
    lowest = torch.where(groups.isnan(), math.inf, groups).amin(1)
    highest = torch.where(groups.isnan(), -math.inf, groups).amax(1)
    advantages = credit.measured()
    advantages = advantages if advantages.dim() == 1 else advantages.sum(1)
    metrics = {
        "rewards/mean": float(scored.mean()) if len(scored) else nan,
        "rewards/std": float(scored.std()) if len(scored) > 1 else nan,
        "rewards/min": float(scored.min()) if len(scored) else nan,
        "rewards/max": float(scored.max()) if len(scored) else nan,
        "rewards/q25": q25,
        "rewards/median": median,
        "rewards/q75": q75,
        "rewards/unscored": float(len(totals) - len(scored)),
        "rewards/group_std": float(_scored_std(groups).nanmean()),
        "group_stats/num_groups": float(len(rollout.items)),
        "group_stats/avg_group_size": float(rollout.group_size),
        "group_stats/flat_groups": float((highest <= lowest).sum()),
        "train/avg_reward": float(scored.mean()) if len(scored) else nan,
        "train/reward_std": float(_scored_std(groups.nanmean(1)[None])),
        "train/advantages_mean": float(advantages.double().mean()),
        "train/advantages_std": float(advantages.double().std()) if len(advantages) > 1 else nan,
        "train/nonzero_advantages": float((advantages != 0).double().mean()),
        "rollout/length_mean": float(rollout.lengths.double().mean()),
        "rollout/length_max": float(rollout.lengths.max()),
        "rollout/truncated": float(rollout.truncated.double().mean()),
    }
    for i, name in enumerate(reward_names(loaded) if len(loaded) > 1 else []):
        metrics[f"rewards/{name}"] = float(rewards[:, i].nanmean())
    if reference is not None:
        log_ratio = (rollout.logprobs - reference)[rollout.batch.mask].double()
        k3 = torch.expm1(-log_ratio) + log_ratio  # estimate for the policy that sampled
        metrics |= {"train/kl_rollout": float(k3.mean()), "train/kl_std": float(k3.std())}
    return metrics | credit.metrics
