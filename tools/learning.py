"""Compares algorithms on several seeds: trains, evaluates and prints a table.

    python tools/learning.py strategies --seeds 0 1 2     # similarity groups against plain GRPO
    python tools/learning.py segments --seeds 0 1 2       # GROUP-PPO against PPO

For each seed SFT is trained once, and every variant continues from its checkpoint with the same data and number of
steps. Figures are for the test split, after the last step. Existing runs are read, not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported, as in grpo_trainer.cli

import torch
from grpo_trainer import recipe as recipes
from grpo_trainer.recipe import Algorithm, Recipe
from grpo_trainer.settings import build
from grpo_trainer.tasks.strategies import strategy
from grpo_trainer.train import Trainer

SFT = "SFT"
SAMPLES = 16
Figures = dict[str, float]
Measure = Callable[[Path, list[dict[str, Any]]], Figures]  # from a run's folder and the lines of its evaluation


@dataclasses.dataclass(frozen=True)
class Experiment:
    recipe: str
    baseline: str  # the variant that the others are compared with
    variants: Mapping[str, Mapping[str, Any] | None]  # keys of Algorithm; None for the recipe's own
    measure: Measure
    shares: tuple[tuple[str, str], ...]  # a figure, and the variant to divide it by
    prompts: int | None = None  # of the test split; None for all


def strategies_of(folder: Path, lines: list[dict[str, Any]]) -> Figures:
    """Diversity of strategies among the correct responses to a prompt, averaged over prompts with enough of them."""
    entropies, differences = [], []
    for line in lines:
        correct = [text for text, is_right in zip(line["samples"], line["right"], strict=True) if is_right == 1]
        counts = list(Counter(map(strategy, correct)).values())
        n = len(correct)
        if n >= 1:
            entropies.append(-sum(count / n * math.log(count / n) for count in counts))
        if n >= 2:
            differences.append(1 - sum(count * (count - 1) for count in counts) / (n * (n - 1)))
    return {"entropy": mean(entropies), "two differ": mean(differences)}


def segments_of(folder: Path, lines: list[dict[str, Any]]) -> Figures:
    """Share of tokens that are endpoints, over all steps."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shares = [1 - step["group/compression_ratio"] for step in steps if "group/compression_ratio" in step]
    return {"endpoints": mean(shares) if shares else 1.0}


# advantages within clusters alone, as published
PUBLISHED = {
    "name": "similarity_group_grpo",
    "advantage": {"shrinkage": 0.0, "singleton": "zero"},
    "similarity": {"embedder": "hashed", "config": {"linkage": "average", "k_max": 7}},
}
# as in recipes/group_ppo.yaml, except for the segments
PPO = {"name": "ppo", "critic": {"lr": 1e-3, "coef": 0.5, "warmup": 3}, "segments": {"lam": 0.95}}
EXPERIMENTS = {
    "strategies": Experiment(
        "similarity_group",
        "plain GRPO",
        {"plain GRPO": {"name": "grpo"}, "similarity groups": None, "published rule": PUBLISHED},
        strategies_of,
        (("entropy", SFT), ("two differ", SFT), ("sampled", "plain GRPO"), ("greedy", "plain GRPO")),
        prompts=256,
    ),
    "segments": Experiment(
        "group_ppo",
        "PPO",
        {"GRPO": {"name": "grpo"}, "PPO": PPO, "GROUP-PPO": None},
        segments_of,
        (("sampled", "PPO"), ("greedy", "PPO")),
    ),
}


def run_all(
    experiment: Experiment, seeds: Sequence[int], folder: Path, overrides: list[str]
) -> dict[str, list[Figures]]:
    """Figures of SFT and of each variant, one per seed."""
    by_variant: dict[str, list[Figures]] = {name: [] for name in (SFT, *experiment.variants)}
    for seed in seeds:
        whole = recipes.load(experiment.recipe, [f"seed={seed}", "evaluation.every=0", *overrides])
        evaluation = dataclasses.replace(whole.evaluation, samples=SAMPLES, test_prompts=experiment.prompts)
        whole = dataclasses.replace(whole, evaluation=evaluation)
        torch.set_num_threads(whole.threads or 1)
        start = folder / experiment.recipe / f"sft-{seed}"
        run_unless_done(dataclasses.replace(whole, output=str(start), phases=whole.phases[:1]))
        by_variant[SFT].append(figures(experiment, start))
        model = dataclasses.replace(whole.model, path=str(next(start.glob("checkpoints/*/model"))))
        for name, algorithm in experiment.variants.items():
            place = folder / experiment.recipe / f"{name.replace(' ', '_')}-{seed}"
            phase = with_algorithm(whole.phases[1], algorithm)
            run_unless_done(dataclasses.replace(whole, output=str(place), model=model, phases=[phase]))
            by_variant[name].append(figures(experiment, place))
    return by_variant


def with_algorithm(phase: recipes.Phase, algorithm: Mapping[str, Any] | None) -> recipes.Phase:
    if algorithm is None or phase.rl is None:
        return phase
    return recipes.Phase(rl=dataclasses.replace(phase.rl, algorithm=build(Algorithm, algorithm)))


def run_unless_done(recipe: Recipe) -> None:
    if last_evaluation(recipe.folder).exists():
        return
    trainer = Trainer(recipe)
    trainer.splits = dataclasses.replace(trainer.splits, validation=[])  # nothing is selected by it here
    trainer.run(resume=(recipe.folder / "recipe.json").exists())


def last_evaluation(folder: Path) -> Path:
    """File of the evaluation after the only phase, number 0."""
    return folder / "evaluations" / "test-1-000000.json"


def figures(experiment: Experiment, folder: Path) -> Figures:
    result = json.loads(last_evaluation(folder).read_text())
    overall = {"greedy": result["metrics"]["exact"], "sampled": result["metrics"]["sampled_exact"]}
    return overall | experiment.measure(folder, result["prompts"])


def table(experiment: Experiment, by_variant: dict[str, list[Figures]], seeds: Sequence[int]) -> str:
    """Markdown table with a line per variant and seed, and one for the mean over the seeds."""
    names = list(by_variant[SFT][0])
    titles = ["", "seed", *names, *(f"{figure} / {over}" for figure, over in experiment.shares)]
    rows = [titles, ["---"] * len(titles)]
    lines = {
        str(seed): {variant: of_seeds[i] for variant, of_seeds in by_variant.items()} for i, seed in enumerate(seeds)
    }
    lines["mean"] = {variant: averaged(of_seeds) for variant, of_seeds in by_variant.items()}
    for variant in by_variant:
        for label, line in lines.items():
            own = line[variant]
            shares = [f"{ratio(own[figure], line[over][figure]):.0%}" for figure, over in experiment.shares]
            rows.append([variant, label, *(f"{own[name]:.3f}" for name in names), *shares])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def differences(experiment: Experiment, by_variant: dict[str, list[Figures]]) -> str:
    """Difference of sampled reward to the baseline, paired by seed, as a seed has one start."""
    lines = []
    for variant in experiment.variants:
        if variant == experiment.baseline:
            continue
        pairs = zip(by_variant[variant], by_variant[experiment.baseline], strict=True)
        gaps = [own["sampled"] - base["sampled"] for own, base in pairs]
        line = f"{variant} - {experiment.baseline}, sampled: {mean(gaps):+.3f}"
        if len(gaps) > 1:
            spread = math.sqrt(sum((value - mean(gaps)) ** 2 for value in gaps) / (len(gaps) - 1))
            line += f", standard error over seeds {spread / math.sqrt(len(gaps)):.3f}"
        lines.append(line)
    return "\n".join(lines)


def averaged(of_seeds: list[Figures]) -> Figures:
    return {name: mean([figures[name] for figures in of_seeds]) for name in of_seeds[0]}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def ratio(value: float, over: float) -> float:
    return value / over if over else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--json", type=Path, help="file for the figures; default: EXPERIMENT.json in the folder")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the recipe")
    options = parser.parse_intermixed_args()
    experiment = EXPERIMENTS[options.experiment]
    by_variant = run_all(experiment, options.seeds, options.folder, options.overrides)
    path = options.json or options.folder / f"{options.experiment}.json"
    path.write_text(json.dumps({"seeds": options.seeds, "figures": by_variant}, indent=1) + "\n")
    print(table(experiment, by_variant, options.seeds))
    print(differences(experiment, by_variant))


if __name__ == "__main__":
    main()
