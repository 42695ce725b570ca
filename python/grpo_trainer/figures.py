"""The numbers of a step, under the names they are logged by. What has no value is NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.config.loss import METRICS
from grpo_kernels.functional.policy_loss_metrics import merged
from grpo_trainer.algorithm import Credit, Plan
from grpo_trainer.recipe import Reward
from grpo_trainer.rollout import Rollout


def loss_metrics(sums: list[Tensor], losses: list[float], norms: list[float], plan: Plan) -> dict[str, float]:
    m = dict(zip(METRICS, merged(torch.stack(sums)).tolist(), strict=True))
    tokens, terms, count = max(m["tokens"], 1), max(m["terms"], 1), len(sums)
    mean_ratio = m["ratio_sum"] / terms
    found = {
        "train/total_loss": sum(losses) / count,
        "train/policy_loss": m["policy_loss"] / count,
        "train/entropy": m["entropy_sum"] / tokens,
        "train/ratio_mean": mean_ratio,
        "train/ratio_std": math.sqrt(max(0.0, m["ratio_spread_sum"] / terms - (mean_ratio - 1) ** 2)),
        "train/ratio_min": m["ratio_min"],
        "train/ratio_max": m["ratio_max"],
        "train/clip_low": m["low_clipped"] / terms,
        "train/clip_high": m["high_clipped"] / terms,
        "train/grad_norm": sum(norms) / count,
        "train/optimizer_steps": float(count),
        "train/tokens": m["tokens"] / count,
    }
    if plan.loss.kl != "none":
        found |= {"train/kl_mean": m["kl_sum"] / tokens, "train/kl_penalty": plan.loss.kl_coef * m["kl_loss"] / count}
    return found


def rollout_metrics(
    rollout: Rollout, totals: Tensor, rewards: Tensor, settings: list[Reward], found: Credit, reference: Tensor | None
) -> dict[str, float]:
    """Of rewards, groups, lengths and advantages. What has no value is NaN."""
    given = totals[~totals.isnan()].double()
    quarters = (
        given.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=given.device))
        if len(given)
        else None
    )
    of_group = totals.view(-1, rollout.group_size)
    per_row = found.advantages if found.advantages.dim() == 1 else found.advantages.sum(1)
    nan = math.nan
    metrics = {
        "rewards/mean": float(given.mean()) if len(given) else nan,
        "rewards/std": float(given.std()) if len(given) > 1 else nan,
        "rewards/min": float(given.min()) if len(given) else nan,
        "rewards/max": float(given.max()) if len(given) else nan,
        "rewards/q25": float(quarters[0]) if quarters is not None else nan,
        "rewards/median": float(quarters[1]) if quarters is not None else nan,
        "rewards/q75": float(quarters[2]) if quarters is not None else nan,
        "rewards/group_std": float(of_group.std(1).nanmean()) if rollout.group_size > 1 else nan,
        "group_stats/num_groups": float(len(rollout.items)),
        "group_stats/avg_group_size": float(rollout.group_size),
        "group_stats/flat_groups": float((of_group.amax(1) == of_group.amin(1)).sum()),
        "train/avg_reward": float(given.mean()) if len(given) else nan,
        "train/reward_std": float(of_group.nanmean(1).std()) if len(of_group) > 1 else nan,
        "train/advantages_mean": float(per_row.double().mean()),
        "train/advantages_std": float(per_row.double().std()) if len(per_row) > 1 else nan,
        "train/nonzero_advantages": float((per_row != 0).double().mean()),
        "rollout/length_mean": float(rollout.lengths.double().mean()),
        "rollout/length_max": float(rollout.lengths.max()),
        "rollout/truncated": float(rollout.truncated.double().mean()),
    }
    names = [setting.name for setting in settings]
    for i, name in enumerate(names if len(names) > 1 else []):
        number = f".{i}" if names.count(name) > 1 else ""
        metrics[f"rewards/{name}{number}"] = float(rewards[:, i].nanmean())
    if reference is not None:
        apart = (rollout.logprobs - reference)[rollout.batch.mask].double()
        estimate = torch.expm1(-apart) + apart  # k3, of the policy that sampled
        metrics |= {"train/kl_rollout": float(estimate.mean()), "train/kl_std": float(estimate.std())}
    return metrics | found.metrics
