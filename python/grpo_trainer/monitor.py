"""Samples, histograms and warnings of a run, and a map of one prompt's responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_trainer import distributed
from grpo_trainer.algorithm import Credit, total_rewards
from grpo_trainer.data import prompt_text
from grpo_trainer.embed import embed_all
from grpo_trainer.log import Log
from grpo_trainer.metrics import segments_line, similarity_warnings
from grpo_trainer.recipe import Recipe
from grpo_trainer.rewards import score
from grpo_trainer.rollout import Rollout


class Monitor:
    """Looks at the steps of RL and writes what a person should see; each kind of warning once."""

    def __init__(self, recipe: Recipe, log: Log) -> None:
        assert recipe.rl is not None
        self.logging, self.steps, self.log = recipe.logging, recipe.rl.steps, log
        self.warned: set[str] = set()
        self.unsummarised: list[Mapping[str, float]] = []

    def see(
        self,
        step: int,
        rollout: Rollout,
        rewards: Tensor,
        totals: Tensor,
        credit: Credit,
        metrics: Mapping[str, float],
    ) -> None:
        """Writes samples, histograms and warnings of a step.

        Args:
            step: the step.
            rollout: N responses.
            rewards: [N, R] individual rewards.
            totals: [N] their weighted sums.
            credit: the advantages.
            metrics: all metrics of the step.
        """
        with distributed.fail_together():
            self._warn(step, metrics)
            self.log.samples("rl", step, self._samples(rollout, rewards, credit))
            if step % self.logging.every == 0:
                advantages = credit.advantages
                if advantages.dim() == 2:  # of tokens
                    advantages = advantages[credit.in_loss(rollout.batch.mask)]
                values = {"rewards": totals, "response_lengths": rollout.lengths, "advantages": advantages}
                self.log.histograms("rl", step, {f"histograms/{name}": of for name, of in values.items()})
            self._summarise(step, metrics)

    def _samples(self, rollout: Rollout, rewards: Tensor, credit: Credit) -> list[dict[str, Any]]:
        return [
            {
                "prompt": rollout.items[i // rollout.group_size]["prompt"],
                "response": rollout.texts[i],
                "rewards": rewards[i].tolist(),
                "advantage": float(credit.advantages[i].sum()),
            }
            for i in range(min(len(rollout.texts), self.logging.samples))
        ]

    def _warn(self, step: int, metrics: Mapping[str, float]) -> None:
        mean = metrics["rewards/mean"]
        if math.isnan(mean) and "unscored" not in self.warned:
            self.warned.add("unscored")
            self.log.event("no response of a step has a reward", phase="rl", step=step)
            self.log.line(f"step {step}: no response has a reward, so nothing is learned")
        elif metrics["train/skipped"] and not math.isnan(mean) and "skipped" not in self.warned:
            self.warned.add("skipped")
            self.log.line(f"step {step}: no response has an advantage, so the weights stay; mean reward {mean:g}")
        for kind, text in similarity_warnings(metrics).items():
            if kind not in self.warned:
                self.warned.add(kind)
                event = "similarity groups outside the healthy range"
                self.log.event(event, phase="rl", step=step, of=kind, text=text)

    def _summarise(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints a line about the token groups of the steps since the last one; only group_ppo groups tokens."""
        every = self.logging.summary
        if not every or "group/total_tokens" not in metrics:
            return
        self.unsummarised.append(metrics)
        if step % every == 0 or step == self.steps:
            first = step - len(self.unsummarised) + 1
            self.log.line(f"steps {first} to {step}: {segments_line(self.unsummarised)}")
            self.unsummarised.clear()


def response_map(run: Any) -> dict[str, Any] | None:
    """A map of responses to the first training prompt, sampled with the same random numbers each time.

    Args:
        run: a `setup.Run` in RL; without an embedder there is no map.
    """
    if run.embedder is None or run.plan.clustering is None:
        return None
    generator = torch.Generator(run.policy.device).manual_seed(run.recipe.seed_of("map"))
    items = run.items("train")[:1]
    rollout: Rollout = run.roll_out(items, generator)
    rewards = score(run.rewards, rollout).values
    embeddings = embed_all(run.embedder, rollout.texts, rollout.group_size)
    clusters = gk.similarity_groups(embeddings, rollout.group_size, config=run.plan.clustering)
    totals = total_rewards(rewards, run.reward_weights)
    return map_of(prompt_text(items[0]["prompt"]), rollout.texts, embeddings, clusters.labels, totals)


def map_of(prompt: str, texts: Sequence[str], embeddings: Tensor, labels: Tensor, rewards: Tensor) -> dict[str, Any]:
    """A map of the responses to a prompt.

    Args:
        prompt: the prompt.
        texts: K responses.
        embeddings: [K, D], rows of NaN for excluded responses.
        labels: [K] clusters, -1 for excluded responses.
        rewards: [K], NaN for unscored responses.

    Returns:
        The responses, each with its point xy, which is None without an embedding; `explained` is the share of variance
        of each axis.
    """
    points, explained = principal_plane(embeddings)
    responses = [
        {"text": text, "cluster": int(label), "reward": None if math.isnan(reward) else reward, "xy": xy}
        for text, label, reward, xy in zip(texts, labels.tolist(), rewards.tolist(), points, strict=True)
    ]
    return {"prompt": prompt, "explained": explained, "responses": responses}


def principal_plane(embeddings: Tensor) -> tuple[list[list[float] | None], list[float]]:
    """First two principal components of the normalised embeddings, and the share of variance of each.

    The sign of an axis makes its largest component positive, so that the same responses give the same map.

    Args:
        embeddings: [K, D]; rows that are not finite have no point.
    """
    rows = embeddings.detach().double().cpu()
    is_known = rows.isfinite().all(1)
    unit = torch.nn.functional.normalize(rows[is_known], dim=1)
    points: list[list[float] | None] = [None] * len(rows)
    if len(unit) == 0:
        return points, [0.0, 0.0]
    _, strength, axes = torch.linalg.svd(unit - unit.mean(0), full_matrices=False)
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    is_significant = strength > 1e-6  # smaller values are rounding
    plane = torch.zeros(len(unit), 2, dtype=torch.float64)
    projected = ((unit - unit.mean(0)) @ (axes * largest.sign()).T * is_significant)[:, :2]
    plane[:, : projected.shape[1]] = projected
    for row, xy in zip(is_known.nonzero().flatten().tolist(), plane.tolist(), strict=True):
        points[row] = xy
    explained = torch.zeros(2, dtype=torch.float64)
    variances = (strength * is_significant).square()
    explained[: min(2, len(variances))] = variances[:2] / variances.sum() if bool(is_significant.any()) else 0
    return points, explained.tolist()


def weights_and_gradients(policy: Any) -> dict[str, Tensor]:
    """Trained weights, as they are before an optimizer step, and the gradients that it takes."""
    trained: Sequence[tuple[str, Tensor]] = [(n, w) for n, w in policy.named_parameters() if w.grad is not None]
    weights = {f"weights/{name}": weight.detach().clone() for name, weight in trained}
    return weights | {f"gradients/{name}": weight.grad.clone() for name, weight in trained if weight.grad is not None}
