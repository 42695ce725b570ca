"""Compares algorithms on several seeds: trains, evaluates and prints a table.

    python tools/learning.py strategies --seeds 0 1 2     # similarity groups against plain GRPO
    python tools/learning.py segments --seeds 0 1 2       # GROUP-PPO against PPO
    python tools/learning.py dialogue --seeds 0 1 2       # REINFORCE against GRPO
    python tools/learning.py dialogue-experiments --seeds 0 1 2   # published settings of GRPO

For each seed SFT is trained once, and every variant continues from its checkpoint with the same data and numbers of
steps and responses. Figures are for the test split, after the last step. The intervals of gains are paired bootstraps
over the prompts. Existing runs are read, not repeated.
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
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported, as in grpo_trainer.cli

import torch
from grpo_trainer import recipe as recipes
from grpo_trainer.recipe import Algorithm, Recipe
from grpo_trainer.report.compare import compare_files
from grpo_trainer.recipes import validated
from grpo_trainer.tasks import load_task
from grpo_trainer.train import Trainer
from seeds import cells  # beside this script

SFT = "SFT"
Figures = dict[str, float]
Measure = Callable[[Path, dict[str, Any]], Figures]  # from a run's folder and its evaluation
Variant = Mapping[str, Any] | str | None  # keys of Algorithm, a recipe with the phase, or None for the recipe's own


@dataclasses.dataclass(frozen=True)
class Experiment:
    recipe: str
    baseline: str  # the variant that the others are compared with
    variants: Mapping[str, Variant]
    measure: Measure
    shares: tuple[tuple[str, str], ...] = ()  # a figure, and the variant to divide it by
    prompts: int | None = None  # of the test split; None for all
    samples: int = 16  # per prompt
    quality: Literal["exact", "reward"] = "exact"  # what `greedy`, `sampled` and their gains are in terms of


def strategies_of(folder: Path, evaluation: dict[str, Any]) -> Figures:
    """Diversity of strategies among the correct responses to a prompt, averaged over prompts with enough of them."""
    entropies, differences = [], []
    for line in evaluation["prompts"]:
        correct = [text for text, is_right in zip(line["samples"], line["right"], strict=True) if is_right == 1]
        counts = list(Counter(map(load_task("strategies").strategy, correct)).values())
        n = len(correct)
        if n >= 1:
            entropies.append(-sum(count / n * math.log(count / n) for count in counts))
        if n >= 2:
            differences.append(1 - sum(count * (count - 1) for count in counts) / (n * (n - 1)))
    return {"entropy": mean(entropies), "two differ": mean(differences)}


def segments_of(folder: Path, evaluation: dict[str, Any]) -> Figures:
    """Share of tokens that are endpoints, over all steps."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    shares = [1 - step["group/compression_ratio"] for step in steps if "group/compression_ratio" in step]
    return {"endpoints": mean(shares) if shares else 1.0}


def similarities_of(folder: Path, evaluation: dict[str, Any]) -> Figures:
    """Components of the reward of greedy replies, and the shares that equal the reference and that evade."""
    metrics = evaluation["metrics"]
    components = {name.replace("_", "-"): metrics[f"components/{name}"] for name in ("f1", "rouge_l", "bleu")}
    is_evasive = [float(line["greedy"].strip() in load_task("dialogue").EVASIONS) for line in evaluation["prompts"]]
    return components | {"exact": metrics["exact"], "evasive": mean(is_evasive)}


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
    "dialogue": Experiment(
        "dialogue",
        "GRPO",
        {"GRPO": None, "REINFORCE": "dialogue-reinforce", "one response": "dialogue-reinforce-single"},
        similarities_of,
        samples=4,
        quality="reward",
    ),
    # shares its runs of SFT and GRPO with the experiment above
    "dialogue-experiments": Experiment(
        "dialogue",
        "GRPO",
        {
            "GRPO": None,
            "conservative": "dialogue-conservative",
            "exploratory": "dialogue-exploratory",
            "reference": "dialogue-reference",
        },
        similarities_of,
        samples=4,
        quality="reward",
    ),
    "dialogue-seq2seq": Experiment(
        "dialogue-seq2seq", "GRPO", {"GRPO": None}, similarities_of, prompts=256, samples=4, quality="reward"
    ),
}


def run_all(
    experiment: Experiment, seeds: Sequence[int], folder: Path, overrides: list[str]
) -> dict[str, list[Figures]]:
    """Figures of SFT and of each variant, one per seed."""
    by_variant: dict[str, list[Figures]] = {name: [] for name in (SFT, *experiment.variants)}
    for seed in seeds:
        whole = recipes.load(experiment.recipe, [f"seed={seed}", "evaluation.every=0", *overrides])
        evaluation = dataclasses.replace(whole.evaluation, samples=experiment.samples, test_prompts=experiment.prompts)
        whole = dataclasses.replace(whole, evaluation=evaluation)
        torch.set_num_threads(whole.threads or 1)
        start = folder_of(experiment, folder, SFT, seed)
        run_unless_done(dataclasses.replace(whole, output=str(start), phases=whole.phases[:1]))
        by_variant[SFT].append(figures(experiment, start))
        model = dataclasses.replace(whole.model, path=str(next(start.glob("checkpoints/*/model"))))
        for name, variant in experiment.variants.items():
            place = folder_of(experiment, folder, name, seed)
            phase = phase_of(variant, whole.phases[1], overrides)
            run_unless_done(dataclasses.replace(whole, output=str(place), model=model, phases=[phase]))
            by_variant[name].append(figures(experiment, place))
    return by_variant


def folder_of(experiment: Experiment, folder: Path, variant: str, seed: int) -> Path:
    name = "sft" if variant == SFT else variant.replace(" ", "_")
    return folder / experiment.recipe / f"{name}-{seed}"


def phase_of(variant: Variant, phase: recipes.Phase, overrides: list[str]) -> recipes.Phase:
    if isinstance(variant, str):
        return recipes.load(variant, overrides).phases[1]
    if variant is None or phase.rl is None:
        return phase
    return recipes.Phase(rl=dataclasses.replace(phase.rl, algorithm=build(Algorithm, variant)))


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
    evaluation = json.loads(last_evaluation(folder).read_text())
    metrics, quality = evaluation["metrics"], experiment.quality
    overall = {"greedy": metrics[quality], "sampled": metrics[f"sampled_{quality}"]}
    return overall | experiment.measure(folder, evaluation)


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
    return as_markdown(rows)


def gains(experiment: Experiment, seeds: Sequence[int], folder: Path) -> str:
    """Markdown table of each variant's gain over SFT and over the baseline, for greedy responses."""
    rows = [["", "over", "seed", "before", "after", "gain", "95 % interval", "p"], ["---"] * 8]
    for variant in experiment.variants:
        for start in (SFT,) if variant == experiment.baseline else (SFT, experiment.baseline):
            for seed in seeds:
                pair = [last_evaluation(folder_of(experiment, folder, name, seed)) for name in (start, variant)]
                change = getattr(compare_files(*pair), experiment.quality)
                rows.append([variant, start, str(seed), *cells(change)])
    return as_markdown(rows)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def differences(experiment: Experiment, by_variant: dict[str, list[Figures]]) -> str:
    """Difference of `sampled` to the baseline, paired by seed, as a seed has one start."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS, help="the experiment")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds; default: 0 1 2")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/learning"), help="folder of the runs; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, help="file for the figures; default: EXPERIMENT.json in the folder")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of the recipe")
    options = parser.parse_intermixed_args()
    experiment = EXPERIMENTS[options.experiment]
    by_variant = run_all(experiment, options.seeds, options.folder, options.overrides)
    path = options.json or options.folder / f"{options.experiment}.json"
    path.write_text(json.dumps({"seeds": options.seeds, "figures": by_variant}, indent=1) + "\n")
    print(table(experiment, by_variant, options.seeds))
    print(differences(experiment, by_variant))
    print(gains(experiment, options.seeds, options.folder))


if __name__ == "__main__":
    main()
