"""How good a policy is on prompts that it was not trained on."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from grpo_trainer.algorithm import total
from grpo_trainer.diversity_measures import MOST_EMBEDDED, of_prompts
from grpo_trainer.embed import Embedder, embedded, load_embedder
from grpo_trainer.model import Policy
from grpo_trainer.recipe import Evaluation, Reward, Similarity
from grpo_trainer.rewards import RewardFunction, components, score
from grpo_trainer.rollout import Rollout, roll_out
from grpo_trainer.tasks.base import Item


@dataclasses.dataclass
class Result:
    """Figures, and what they were computed from: a line for each prompt."""

    metrics: dict[str, float]
    lines: list[dict[str, Any]]
    embedder: str | None = None  # that the measures of diversity were made with

    @property
    def of_groups(self) -> dict[str, float]:
        """Of all responses, the sampled ones if there are any, under the names that such trainers have logged."""
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
    policy: Policy, items: list[Item], settings: Evaluation, rewards: Sequence[Reward],
    functions: Sequence[RewardFunction], max_new_tokens: int, generator: torch.Generator,
) -> Result:  # fmt: skip
    """Greedy answers to all prompts; with `samples`, also pass@k and how they differ."""
    greedy = roll_out(
        policy, items, 1, max_new_tokens=max_new_tokens, generator=None, temperature=0.0, batch=settings.batch
    )
    worth, right, skipped = _worth(greedy, rewards, functions, settings.solved)
    lines: list[dict[str, Any]] = [
        {"prompt": item["prompt"], "greedy": text, "reward": value, "correct": is_right}
        for item, text, value, is_right in zip(items, greedy.texts, worth, right, strict=True)
    ]
    metrics = {
        "reward": _mean(worth),
        "exact": _mean(right),
        "truncated": float(greedy.truncated.double().mean()),
        "length": float(greedy.lengths.double().mean()),
        "prompts": float(len(items)),
        "skipped": float(skipped),
    }
    if not settings.samples:
        return Result(metrics, lines)
    n = settings.samples
    sampled = roll_out(
        policy, items, n, max_new_tokens=max_new_tokens, generator=generator, temperature=settings.temperature,
        batch=settings.batch,
    )  # fmt: skip
    worth, right, skipped = _worth(sampled, rewards, functions, settings.solved)
    for i, line in enumerate(lines):
        some = slice(i * n, (i + 1) * n)
        line |= {"samples": sampled.texts[some], "rewards": worth[some], "right": right[some]}
    metrics |= {"sampled_reward": _mean(worth), "sampled_exact": _mean(right)}
    metrics["skipped"] += float(skipped)
    for k in settings.pass_k:
        if k <= n:
            metrics[f"pass@{k}"] = _mean([pass_at_k_of(line["right"], k) for line in lines])
    embedder = _embedder(settings.embedder)
    metrics |= _diversity([line["samples"] for line in lines], embedder)
    return Result(metrics, lines, embedder.name)


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that k of n samples, of which so many are right, have a right one; unbiased in them."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def pass_at_k_of(right: Sequence[float], k: int) -> float:
    """Of samples that are 1, 0, or NaN where nothing is known of them; NaN if fewer than k are known."""
    known = [value for value in right if not math.isnan(value)]
    return pass_at_k(len(known), round(sum(known)), k) if len(known) >= k else math.nan


def _diversity(samples: Sequence[Sequence[str]], embedder: Embedder) -> dict[str, float]:
    embeddings = embedded(embedder, [text for texts in samples for text in texts[:MOST_EMBEDDED]])
    return {name: _mean(values) for name, values in of_prompts(samples, embeddings).items()}


@functools.cache
def _embedder(name: str) -> Embedder:
    return load_embedder(Similarity(embedder=name, text="whole"))


def _worth(
    rollout: Rollout, rewards: Sequence[Reward], functions: Sequence[RewardFunction], solved: float
) -> tuple[list[float], list[float], int]:
    """Of each response its reward, and whether it is right: as a reward's component "correct" says, if one has it; and
    how many a reward failed on."""
    values, skipped = score(rewards, functions, rollout)
    worth = total(values, torch.tensor([each.weight for each in rewards], dtype=torch.float64))
    for function in functions:
        correct = components(function, rollout).get("correct")
        if correct is not None:
            return worth.tolist(), correct, skipped
    right = torch.where(worth.isnan(), torch.nan, (worth >= solved).double())
    return worth.tolist(), right.tolist(), skipped


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
