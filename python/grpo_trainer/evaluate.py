"""Evaluation of a policy on held-out prompts."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from grpo_trainer.algorithm import total_rewards
from grpo_trainer.diversity_measures import MAX_EMBEDDED, measure_prompts
from grpo_trainer.embed import Embedder, embed_all, load_embedder
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Evaluation, Reward, Similarity
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.rewards import RewardFunction, components, score
from grpo_trainer.rollout import Rollout, roll_out
from grpo_trainer.tasks.base import Item


@dataclasses.dataclass
class Result:
    """Metrics of an evaluation and the prompts they were computed from."""

    metrics: dict[str, float]
    lines: list[dict[str, Any]]  # one per prompt: responses, rewards, correctness
    embedder: str | None = None  # name of the embedder behind the diversity measures

    @property
    def group_metrics(self) -> dict[str, float]:
        """Metrics over all sampled responses, or over the greedy ones, under the names common among GRPO trainers."""
        groups = [line.get("rewards", [line["reward"]]) for line in self.lines]
        rewards = [reward for group in groups for reward in group if not math.isnan(reward)]
        return {
            "avg_reward": _mean(rewards),
            "avg_reward_std": statistics.pstdev(rewards) if rewards else math.nan,
            "avg_group_reward": _mean([_mean(group) for group in groups]),
            "num_groups": float(len(groups)),
            "total_responses": float(sum(map(len, groups))),
        }

    def to_json(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "prompts": self.lines, "embedder": self.embedder}


def evaluate(
    policy: Policy,
    items: list[Item],
    settings: Evaluation,
    rewards: Sequence[Reward],
    functions: Sequence[RewardFunction],
    max_new_tokens: int,
    generator: torch.Generator,
) -> Result:
    """Answers all prompts greedily; with `settings.samples`, also measures pass@k and diversity of sampled answers.

    Args:
        policy: the policy to evaluate.
        items: prompts with the columns that the rewards read.
        settings: batch size, number of samples, sampling temperature.
        rewards: settings of the rewards.
        functions: the reward functions that belong to them.
        max_new_tokens: longest response.
        generator: random numbers for sampling.
    """
    sampling = Sampling(group_size=1, temperature=0.0, max_new_tokens=max_new_tokens, batch=settings.batch)
    greedy = roll_out(policy, items, sampling, None)
    totals, correct, skipped = _grade(greedy, rewards, functions, settings.solved)
    lines: list[dict[str, Any]] = [
        {"prompt": item["prompt"], "greedy": text, "reward": reward, "correct": is_correct}
        for item, text, reward, is_correct in zip(items, greedy.texts, totals, correct, strict=True)
    ]
    metrics = {
        "reward": _mean(totals),
        "exact": _mean(correct),
        "truncated": float(greedy.truncated.double().mean()),
        "length": float(greedy.lengths.double().mean()),
        "prompts": float(len(items)),
        "skipped": float(skipped),
    }
    if not settings.samples:
        return Result(metrics, lines)
    n = settings.samples
    sampling = dataclasses.replace(sampling, group_size=n, temperature=settings.temperature)
    sampled = roll_out(policy, items, sampling, generator)
    totals, correct, skipped = _grade(sampled, rewards, functions, settings.solved)
    for i, line in enumerate(lines):
        rows = slice(i * n, (i + 1) * n)
        line |= {"samples": sampled.texts[rows], "rewards": totals[rows], "right": correct[rows]}
    metrics |= {"sampled_reward": _mean(totals), "sampled_exact": _mean(correct)}
    metrics["skipped"] += float(skipped)
    for k in settings.pass_k:
        if k <= n:
            metrics[f"pass@{k}"] = _mean([estimate_pass_at_k(line["right"], k) for line in lines])
    embedder = _embedder(settings.embedder)
    metrics |= _diversity([line["samples"] for line in lines], embedder)
    return Result(metrics, lines, embedder.name)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is correct, given `correct` of n."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def estimate_pass_at_k(correct: Sequence[float], k: int) -> float:
    """pass@k from samples marked 1, 0, or NaN if ungraded; NaN if fewer than k are graded."""
    graded = [value for value in correct if not math.isnan(value)]
    return pass_at_k(len(graded), round(sum(graded)), k) if len(graded) >= k else math.nan


def _diversity(samples: Sequence[Sequence[str]], embedder: Embedder) -> dict[str, float]:
    embeddings = embed_all(embedder, [text for texts in samples for text in texts[:MAX_EMBEDDED]])
    return {name: _mean(values) for name, values in measure_prompts(samples, embeddings).items()}


@functools.cache
def _embedder(name: str) -> Embedder:
    return load_embedder(Similarity(embedder=name, text="whole"))


def _grade(
    rollout: Rollout, rewards: Sequence[Reward], functions: Sequence[RewardFunction], solved: float
) -> tuple[list[float], list[float], int]:
    """Total reward and correctness of each response, and the number of skipped scores.

    A reward with a component "correct" decides correctness; otherwise a total of at least `solved` counts as correct.
    """
    values, skipped = score(rewards, functions, rollout)
    totals = total_rewards(values, torch.tensor([reward.weight for reward in rewards], dtype=torch.float64))
    for function in functions:
        correct = components(function, rollout).get("correct")
        if correct is not None:
            return totals.tolist(), correct, skipped
    by_total = torch.where(totals.isnan(), torch.nan, (totals >= solved).double())
    return totals.tolist(), by_total.tolist(), skipped


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
