"""Evaluation of a policy on held-out prompts."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_trainer import distributed
from grpo_trainer.adapters import load_adapter, settings_of_base
from grpo_trainer.algorithm import total_rewards
from grpo_trainer.diversity_measures import MAX_EMBEDDED, diversity_efficiency, measure_prompts, medoids
from grpo_trainer.embed import Embedder, embed_all, load_embedder
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Evaluation, Recipe, Similarity, Vllm
from grpo_trainer.recipe import Rollout as Sampling
from grpo_trainer.response_map import response_map
from grpo_trainer.rewards import LoadedReward, component_means, score
from grpo_trainer.rollout import Rollout, roll_out
from grpo_trainer.setup import Run, distribute_weights, set_up
from grpo_trainer.splits import no_usable_line
from grpo_trainer.tasks import Item


@dataclasses.dataclass
class Result:
    """Metrics of an evaluation and the prompts they were computed from."""

    metrics: dict[str, float]
    lines: list[dict[str, Any]]  # one per prompt: responses, rewards, correctness
    embedder: str | None = None  # name of the embedder behind the diversity measures
    solved: float | None = None  # calibrated reward from which a response counts as correct

    @property
    def group_metrics(self) -> dict[str, float]:
        """Metrics over all sampled responses, or over the greedy ones, under the names common among GRPO trainers."""
        groups = [line.get("rewards", [line["reward"]]) for line in self.lines]
        texts = [text for line in self.lines for text in line.get("samples", [line["greedy"]])]
        rewards = [reward for group in groups for reward in group if not math.isnan(reward)]
        math_score = self.metrics.get("components/vocabulary")  # of gsm8k, if that part is on
        return {
            "avg_reward": _mean(rewards),
            "avg_reward_std": statistics.pstdev(rewards) if rewards else math.nan,
            "avg_group_reward": _mean([_mean(group) for group in groups]),
            "num_groups": float(len(groups)),
            "total_responses": float(sum(map(len, groups))),
            "avg_response_length": _mean([float(len(text.split())) for text in texts]),  # in words
        } | ({} if math_score is None else {"avg_math_score": math_score})

    def to_json(self) -> dict[str, Any]:
        return {"metrics": self.metrics, "prompts": self.lines, "embedder": self.embedder, "solved": self.solved}


def evaluate(
    policy: Policy,
    items: list[Item],
    settings: Evaluation,
    rewards: Sequence[LoadedReward],
    max_completion_length: int,
    generator: torch.Generator,
    solved: float,  # total reward from which a response counts as correct, unless a reward reports correctness
) -> Result:
    """Answers all prompts greedily; with `settings.samples`, also measures pass@k and diversity of sampled answers."""
    length = {"max_completion_length": max_completion_length, "batch": settings.batch}
    sampling = Sampling().model_copy(update=length | {"num_generations": 1, "temperature": 0.0})
    greedy = roll_out(policy, items, sampling, None)
    totals, correct, skipped, components = _grade(greedy, rewards, solved)
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
        **{f"components/{name}": value for name, value in components.items()},
    }
    if not settings.samples:
        return Result(metrics, lines)
    n = settings.samples
    sampling = sampling.model_copy(update={"num_generations": n, "temperature": settings.temperature})
    sampled = roll_out(policy, items, sampling, generator)
    totals, correct, skipped, _ = _grade(sampled, rewards, solved)
    for i, line in enumerate(lines):
        rows = slice(i * n, (i + 1) * n)
        line |= {"samples": sampled.texts[rows], "rewards": totals[rows], "right": correct[rows]}
    metrics["sampled_reward"] = _mean([_mean(line["rewards"]) for line in lines])  # each prompt counts once
    metrics["sampled_exact"] = _mean([_mean(line["right"]) for line in lines])
    metrics["skipped"] += float(skipped)
    passes = {k: _mean([estimate_pass_at_k(line["right"], k) for line in lines]) for k in settings.pass_k if k <= n}
    metrics |= {f"pass@{k}": value for k, value in passes.items()}
    metrics |= {f"der@{k}": value for k, value in diversity_efficiency(passes).items()}
    embedder = _embedder(settings.embedder)
    measures = _measures([line["samples"] for line in lines], [line["rewards"] for line in lines], embedder)
    for i, line in enumerate(lines):
        line["measures"] = {name: values[i] for name, values in measures.items()}
    return Result(metrics | {name: _mean(values) for name, values in measures.items()}, lines, embedder.name)


def estimate_pass_at_k(correct: Sequence[float], k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is correct; NaN if fewer than k are graded.

    The samples are marked 1, 0, or NaN if ungraded.
    """
    graded = [value for value in correct if not math.isnan(value)]
    n, wrong = len(graded), graded.count(0)
    return 1.0 - math.comb(wrong, k) / math.comb(n, k) if n >= k else math.nan


def _measures(
    samples: Sequence[Sequence[str]], rewards: Sequence[Sequence[float]], embedder: Embedder
) -> dict[str, list[float]]:
    """Diversity of each prompt's samples, and under "usq" the reward of the one that represents them best."""
    embeddings = embed_all(embedder, [text for texts in samples for text in texts[:MAX_EMBEDDED]])
    measures = measure_prompts(samples, embeddings)
    chosen = medoids(embeddings, min(len(samples[0]), MAX_EMBEDDED)) if samples else []
    selected = [math.nan if i is None else values[i] for i, values in zip(chosen, rewards, strict=True)]
    return measures | {"usq": selected}


@functools.cache
def _embedder(name: str) -> Embedder:
    return load_embedder(Similarity(embedder=name, text="whole"))


def _grade(
    rollout: Rollout, rewards: Sequence[LoadedReward], solved: float
) -> tuple[list[float], list[float], int, dict[str, float]]:
    """Total reward and correctness of each response, the number of skipped scores, and the means of the components.

    A reward with a component "correct" decides correctness; otherwise a total of at least `solved` counts as correct.
    """
    values, skipped, components = score(rewards, rollout)
    means = component_means(rewards, components)
    totals = total_rewards(values, torch.tensor([reward.settings.weight for reward in rewards], dtype=torch.float64))
    correct = next((parts["correct"] for parts in components if "correct" in parts), None)
    if correct is None:
        correct = torch.where(totals.isnan(), torch.nan, is_solved(totals, solved).double())
    return totals.tolist(), correct.tolist(), skipped, means


def is_solved(reward: Any, solved: float) -> Any:
    """Whether a reward, or each of a tensor, is at least `solved`, up to the rounding of weighted sums."""
    return reward >= solved - 1e-9


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def evaluate_split(run: Run, split: str) -> Result | None:
    """Evaluates the policy as it is; None if the split is empty."""
    recipe, settings = run.recipe, run.recipe.evaluation
    items = run.items(split)[: settings.test_prompts if split == "test" else settings.prompts]
    if not items:
        return None
    generator = torch.Generator(run.policy.device).manual_seed(recipe.seed_of("evaluation", split))
    length, rewards = recipe.max_completion_length, run.evaluation_rewards
    result = evaluate(run.policy, items, settings, rewards, length, generator, run.solved)
    return dataclasses.replace(result, solved=None if settings.solved_quantile is None else run.solved)


def evaluate_and_log(run: Run, split: str, phase: str, step: int) -> dict[str, float]:
    """Evaluates a split, and logs the metrics and responses; returns {} if the split is empty."""
    result = evaluate_split(run, split)
    if result is None:
        return {}
    metrics = {f"eval/{split}_{name}": value for name, value in result.metrics.items()}
    if split == "validation":
        metrics |= {f"eval/{name}": value for name, value in result.group_metrics.items()}
    content = result.to_json()
    if split == "validation" and phase == "rl" and (drawn := response_map(run)) is not None:
        content["map"] = drawn
    with distributed.fail_together():
        run.log_left_out()
        run.log.evaluation(phase, step, split, metrics, content)
    return metrics


def evaluate_model(recipe: Recipe, path: str, split: str) -> Result:
    """Evaluates another model, or adapters that the recipe's model was trained with, on a split of the recipe's data.

    `path` is a folder or a hub name, and `split` "train", "validation" or "test".
    """
    is_adapter = (Path(path) / "adapter_config.json").exists()
    if is_adapter:
        model = settings_of_base(recipe.model, Path(path))
    elif recipe.model.four_bit:  # the precision that adapters are trained and evaluated in; new adapters add zero
        model = recipe.model.model_copy(update={"path": path})
    else:
        model = recipe.model.model_copy(update={"path": path, "lora": None})
    changes: dict[str, Any] = {
        "model": model.model_copy(update={"reference_model_path": None}),  # of the KL term, which is not evaluated
        "logging": recipe.logging.model_copy(update={"to": []}),
    }
    if recipe.rl is not None:  # evaluations sample with the policy, whatever the engine, and compute no advantages
        length = recipe.max_completion_length
        used = {"engine": "transformers", "vllm": Vllm(), "max_completion_length": length}
        rollout = recipe.rl.rollout.model_copy(update=used)
        unused: dict[str, Any] = {"correction": {}}
        if (similarity := recipe.rl.algorithm.similarity) is not None:
            ready = {"embedder": "hashed", "workers": 0, "gpus_per_worker": 0}  # needs no package and no cluster
            unused["similarity"] = similarity.model_copy(update=ready)
        algorithm = recipe.rl.algorithm.model_copy(update=unused)
        changes["rl"] = recipe.rl.model_copy(update={"rollout": rollout, "algorithm": algorithm})
    run = set_up(recipe.model_copy(update=changes))
    run.log.is_main = False  # keeps the evaluation out of the run's logs
    if is_adapter:
        load_adapter(run.policy, recipe.model, Path(path))
    distribute_weights(run)
    result = evaluate_split(run, split)
    if result is None:
        raise ValueError(no_usable_line(f"the split {split!r}", run.left_out[split]))
    return result
