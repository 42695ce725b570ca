"""How good a policy is on prompts that it was not trained on."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from grpo_trainer.algorithm import total
from grpo_trainer.diversity_measures import MOST_EMBEDDED, of_prompts
from grpo_trainer.embed import Embedder, load_embedder
from grpo_trainer.model import Policy
from grpo_trainer.recipe import Evaluation, Reward, Similarity
from grpo_trainer.rewards import RewardFunction, score
from grpo_trainer.rollout import Rollout, roll_out
from grpo_trainer.tasks.base import Item


@dataclasses.dataclass
class Result:
    """Figures, and what they were computed from: a line for each prompt."""

    metrics: dict[str, float]
    lines: list[dict[str, Any]]
    embedder: str | None = None  # that the measures of diversity were made with

    def to_json(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "prompts": self.lines, "embedder": self.embedder}


def evaluate(
    policy: Policy, items: list[Item], settings: Evaluation, rewards: Sequence[Reward],
    functions: Sequence[RewardFunction], max_new_tokens: int, generator: torch.Generator,
    embedder: Embedder | None = None,
) -> Result:  # fmt: skip
    """Greedy answers to all prompts; with `samples`, also pass@k and how they differ.

    embedder  of the samples, for semantic measures; None: the default of recipes
    """
    greedy = roll_out(
        policy, items, 1, max_new_tokens=max_new_tokens, generator=None, temperature=0.0, batch=settings.batch
    )
    worth = _worth(greedy, rewards, functions)
    lines: list[dict[str, Any]] = [
        {"prompt": item["prompt"], "greedy": text, "reward": value}
        for item, text, value in zip(items, greedy.texts, worth, strict=True)
    ]
    metrics = {
        "reward": _mean(worth),
        "exact": _mean([float(value == 1) for value in worth]),
        "truncated": float(greedy.truncated.double().mean()),
        "length": float(greedy.lengths.double().mean()),
        "prompts": float(len(items)),
    }
    if settings.samples:
        sampled = roll_out(
            policy, items, settings.samples, max_new_tokens=max_new_tokens, generator=generator,
            temperature=settings.temperature, batch=settings.batch,
        )  # fmt: skip
        values = _worth(sampled, rewards, functions)
        n = settings.samples
        for i, line in enumerate(lines):
            line |= {"samples": sampled.texts[i * n : (i + 1) * n], "rewards": values[i * n : (i + 1) * n]}
        metrics["sampled_reward"] = _mean(values)
        for k in settings.pass_k:
            if k <= n:
                metrics[f"pass@{k}"] = _mean([pass_at_k(n, sum(r == 1 for r in line["rewards"]), k) for line in lines])
        embedder = _default_embedder() if embedder is None else embedder
        metrics |= _diversity([line["samples"] for line in lines], embedder)
    return Result(metrics, lines, embedder.name if settings.samples and embedder is not None else None)


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that k of n samples, of which so many are right, have a right one; unbiased in them."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def _diversity(samples: Sequence[Sequence[str]], embedder: Embedder) -> dict[str, float]:
    embeddings = embedder([text for texts in samples for text in texts[:MOST_EMBEDDED]])
    return {name: _mean(values) for name, values in of_prompts(samples, embeddings).items()}


@functools.cache
def _default_embedder() -> Embedder:
    return load_embedder(Similarity())


def _worth(rollout: Rollout, rewards: Sequence[Reward], functions: Sequence[RewardFunction]) -> list[float]:
    values, _ = score(rewards, functions, rollout)
    weights = torch.tensor([each.weight for each in rewards], dtype=torch.float64)
    found: list[float] = total(values, weights).tolist()
    return found


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
