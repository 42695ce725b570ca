"""Whether the bundled algorithms learn what their recipes say they do: trains, evaluates, prints a table.

    python tools/learning.py strategies --seeds 0 1 2     # similarity groups: do several right ways survive?
    python tools/learning.py segments --seeds 0 1 2       # segments: does PPO learn as much from few endpoints?

For each seed SFT is trained once. Every variant then goes on from there, with the same data and as many steps. Figures
are of the test split, after the last step. What the folder has already is read, not trained again.
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

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is there, as in grpo_trainer.cli

import torch
from grpo_trainer import recipe as recipes
from grpo_trainer.recipe import Algorithm, Recipe
from grpo_trainer.settings import build
from grpo_trainer.tasks.strategies import strategy
from grpo_trainer.train import Trainer

SFT = "SFT"
SAMPLES = 16
Figures = dict[str, float]
Measure = Callable[[Path, list[dict[str, Any]]], Figures]  # of a run's folder and the lines of its evaluation


@dataclasses.dataclass(frozen=True)
class Experiment:
    recipe: str
    baseline: str  # the variant that the others are compared with
    variants: Mapping[str, Mapping[str, Any] | None]  # keys of Algorithm; None: what the recipe has
    measure: Measure
    shares: tuple[tuple[str, str], ...]  # a figure, and the variant whose figure it is divided by
    prompts: int | None = None  # of the test split; nothing: all


def strategies_of(folder: Path, lines: list[dict[str, Any]]) -> Figures:
    """How the right responses to a prompt differ in strategy, averaged over the prompts that have enough of them."""
    entropies, chances = [], []
    for line in lines:
        right = [text for text, is_right in zip(line["samples"], line["right"], strict=True) if is_right == 1]
        counts = list(Counter(map(strategy, right)).values())
        n = len(right)
        if n >= 1:
            entropies.append(-sum(count / n * math.log(count / n) for count in counts))
        if n >= 2:
            chances.append(1 - sum(count * (count - 1) for count in counts) / (n * (n - 1)))
    return {"entropy": mean(entropies), "two differ": mean(chances)}


def segments_of(folder: Path, lines: list[dict[str, Any]]) -> Figures:
    """The share of tokens that are endpoints, over all steps."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shares = [1 - step["group/compression_ratio"] for step in steps if "group/compression_ratio" in step]
    return {"endpoints": mean(shares) if shares else 1.0}


# as recipes/group_ppo.yaml has it, but for the segments
PPO = {"name": "ppo", "critic": {"lr": 1e-3, "coef": 0.5, "warmup": 3}, "segments": {"lam": 0.95}}
EXPERIMENTS = {
    "strategies": Experiment(
        "similarity_group", "plain GRPO", {"plain GRPO": {"name": "grpo"}, "similarity groups": None}, strategies_of,
        (("entropy", SFT), ("two differ", SFT), ("sampled", "plain GRPO"), ("greedy", "plain GRPO")), prompts=256,
    ),
    "segments": Experiment(
        "group_ppo", "PPO", {"GRPO": {"name": "grpo"}, "PPO": PPO, "GROUP-PPO": None}, segments_of,
        (("sampled", "PPO"), ("greedy", "PPO")),
    ),
}  # fmt: skip


def run_all(
    experiment: Experiment, seeds: Sequence[int], folder: Path, overrides: list[str]
) -> dict[str, list[Figures]]:
    """Of each variant, and of SFT, the figures of each seed."""
    found: dict[str, list[Figures]] = {name: [] for name in (SFT, *experiment.variants)}
    for seed in seeds:
        whole = recipes.load(experiment.recipe, [f"seed={seed}", "evaluation.every=0", *overrides])
        evaluation = dataclasses.replace(whole.evaluation, samples=SAMPLES, test_prompts=experiment.prompts)
        whole = dataclasses.replace(whole, evaluation=evaluation)
        torch.set_num_threads(whole.threads or 1)
        start = folder / experiment.recipe / f"sft-{seed}"
        once(dataclasses.replace(whole, output=str(start), phases=whole.phases[:1]))
        found[SFT].append(figures(experiment, start))
        model = dataclasses.replace(whole.model, path=str(next(start.glob("checkpoints/*/model"))))
        for name, algorithm in experiment.variants.items():
            place = folder / experiment.recipe / f"{name.replace(' ', '_')}-{seed}"
            phase = with_algorithm(whole.phases[1], algorithm)
            once(dataclasses.replace(whole, output=str(place), model=model, phases=[phase]))
            found[name].append(figures(experiment, place))
    return found


def with_algorithm(phase: recipes.Phase, algorithm: Mapping[str, Any] | None) -> recipes.Phase:
    if algorithm is None or phase.rl is None:
        return phase
    return recipes.Phase(rl=dataclasses.replace(phase.rl, algorithm=build(Algorithm, algorithm)))


def once(recipe: Recipe) -> None:
    if last_evaluation(recipe.folder).exists():
        return
    trainer = Trainer(recipe)
    trainer.splits = dataclasses.replace(trainer.splits, validation=[])  # nothing is chosen by it here
    trainer.run(resume=(recipe.folder / "recipe.json").exists())


def last_evaluation(folder: Path) -> Path:
    """Each run here has one phase, number 0, so what follows it is 1."""
    return folder / "evaluations" / "test-1-000000.json"


def figures(experiment: Experiment, folder: Path) -> Figures:
    result = json.loads(last_evaluation(folder).read_text())
    of_all = {"greedy": result["metrics"]["exact"], "sampled": result["metrics"]["sampled_exact"]}
    return of_all | experiment.measure(folder, result["prompts"])


def table(experiment: Experiment, found: dict[str, list[Figures]], seeds: Sequence[int]) -> str:
    """Markdown, a line for each variant and seed, and one for the mean over the seeds."""
    names = list(found[SFT][0])
    titles = ["", "seed", *names, *(f"{figure} / {over}" for figure, over in experiment.shares)]
    rows = [titles, ["---"] * len(titles)]
    lines = {str(seed): {variant: some[i] for variant, some in found.items()} for i, seed in enumerate(seeds)}
    lines["mean"] = {variant: averaged(some) for variant, some in found.items()}
    for variant in found:
        for label, line in lines.items():
            own = line[variant]
            shares = [f"{ratio(own[figure], line[over][figure]):.0%}" for figure, over in experiment.shares]
            rows.append([variant, label, *(f"{own[name]:.3f}" for name in names), *shares])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def differences(experiment: Experiment, found: dict[str, list[Figures]]) -> str:
    """Of the sampled reward to the baseline's, seed by seed, as each seed has one start."""
    lines = []
    for variant in experiment.variants:
        if variant == experiment.baseline:
            continue
        pairs = zip(found[variant], found[experiment.baseline], strict=True)
        apart = [own["sampled"] - base["sampled"] for own, base in pairs]
        line = f"{variant} - {experiment.baseline}, sampled: {mean(apart):+.3f}"
        if len(apart) > 1:
            spread = math.sqrt(sum((value - mean(apart)) ** 2 for value in apart) / (len(apart) - 1))
            line += f", standard error over seeds {spread / math.sqrt(len(apart)):.3f}"
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
    parser.add_argument("--json", type=Path, help="where the figures go; nothing: EXPERIMENT.json in the folder")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the recipe")
    given = parser.parse_intermixed_args()
    experiment = EXPERIMENTS[given.experiment]
    found = run_all(experiment, given.seeds, given.folder, given.overrides)
    path = given.json or given.folder / f"{given.experiment}.json"
    path.write_text(json.dumps({"seeds": given.seeds, "figures": found}, indent=1) + "\n")
    print(table(experiment, found, given.seeds))
    print(differences(experiment, found))


if __name__ == "__main__":
    main()
