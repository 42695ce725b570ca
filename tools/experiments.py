"""Trains recipes or variants of one on several seeds, and prints what they learned, with confidence intervals.

    python tools/experiments.py arithmetic --seeds 0 1 2
    python tools/experiments.py reply-sft reply reply-polychromic --seeds 0 1 2   # recipes side by side
    python tools/experiments.py strategies            # similarity groups against plain GRPO
    python tools/experiments.py segments              # GROUP-PPO against PPO
    python tools/experiments.py dialogue-algorithms   # REINFORCE against GRPO
    python tools/experiments.py dialogue-settings     # published settings of GRPO

Figures are for the test split, after the last step, with 95 % intervals over the seeds. A seed's gain is in bold if
its paired bootstrap interval over the prompts excludes 0. The variants of an experiment share SFT, which is trained
once a seed. Runs that exist are resumed or read; one of another recipe is an error. Several recipes are also compared
on the page of `grpo report --compare`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported, as in grpo_trainer.cli

import pandas as pd
import torch
from grpo_trainer import checkpoint, recipes
from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import flat
from grpo_trainer.report.compare import compare, t_interval
from grpo_trainer.report.comparison import write_comparison
from grpo_trainer.report.run_folder import Evaluated, RunFolder
from grpo_trainer.tasks import load_task
from grpo_trainer.train import train

CHANGES = ("reward", "sampled_reward", "exact", "pass@10", "semantic_diversity", "distinct_2", "self_bleu")
MEASURES = (*CHANGES, "distinct_1", "pass@1", "vendi", "cluster_entropy", "usq")
SFT = "SFT"


class Experiment(NamedTuple):
    """Variants of a recipe: overrides, or the name of a recipe with the RL to take."""

    recipe: str
    variants: Mapping[str, Sequence[str] | str]  # the first is the one that others are compared with
    measure: Callable[[Evaluated], Mapping[str, float]]
    overrides: Sequence[str] = ()


def strategies_of(evaluated: Evaluated) -> Mapping[str, float]:
    """Diversity of strategies among the correct responses to a prompt, averaged over prompts with enough of them."""
    strategy = load_task("strategies").strategy
    entropies, differences = [], []
    for line in evaluated.prompts:
        correct = [text for text, is_right in zip(line["samples"], line["right"], strict=True) if is_right == 1]
        counts, n = list(Counter(map(strategy, correct)).values()), len(correct)
        if n >= 1:
            entropies.append(-sum(count / n * math.log(count / n) for count in counts))
        if n >= 2:
            differences.append(1 - sum(count * (count - 1) for count in counts) / (n * (n - 1)))
    return {"entropy": mean(entropies), "two differ": mean(differences)}


def similarities_of(evaluated: Evaluated) -> Mapping[str, float]:
    """Components of the reward of greedy replies, and the share that evade."""
    evasions = load_task("dialogue").EVASIONS
    parts = {name: evaluated.metrics[f"components/{name}"] for name in ("f1", "rouge_l", "bleu")}
    return parts | {"evasive": mean([float(line["greedy"].strip() in evasions) for line in evaluated.prompts])}


# advantages within clusters alone, as published
PUBLISHED = (
    "rl.algorithm={name: similarity_group_grpo, advantage: {shrinkage: 0.0, singleton: zero}, "
    "similarity: {embedder: hashed, config: {linkage: average, k_max: 7}}}"
)
# as in group_ppo, except for the segments
PPO = "rl.algorithm={name: ppo, critic: {lr: 0.001, coef: 0.5, warmup: 3}, segments: {lam: 0.95}}"
PLAIN = "rl.algorithm={name: grpo}"
OF_ALL = tuple(f"rl.algorithm.{key}" for key in ("beta=", "epsilon=", "epsilon_high=", "loss."))  # that variants have
EXPERIMENTS = {
    "strategies": Experiment(
        "similarity_group",
        {"plain GRPO": [PLAIN], "similarity groups": [], "published rule": [PUBLISHED]},
        strategies_of,
        ("evaluation.samples=16", "evaluation.test_prompts=256"),
    ),
    "segments": Experiment(
        "group_ppo", {"PPO": [PPO], "GRPO": [PLAIN], "GROUP-PPO": []}, lambda _: {}, ("evaluation.samples=16",)
    ),
    "dialogue-algorithms": Experiment(
        "dialogue",
        {"GRPO": [], "REINFORCE": "dialogue-reinforce", "one response": "dialogue-reinforce-single"},
        similarities_of,
        ("evaluation.samples=4",),
    ),
    "dialogue-settings": Experiment(
        "dialogue",
        {"GRPO": [], **{name: f"dialogue-{name}" for name in ("conservative", "exploratory", "reference")}},
        similarities_of,
        ("evaluation.samples=4",),
    ),
    "dialogue-encoder-decoder": Experiment(
        "dialogue-seq2seq", {"GRPO": []}, similarities_of, ("evaluation.samples=4", "evaluation.test_prompts=256")
    ),
}


def finished(recipe: Recipe) -> RunFolder:
    """The run of a recipe, trained to its end."""
    exists = (recipe.folder / "recipe.yaml").exists()
    if exists:
        refuse_other_recipe(recipe)
    if not exists or RunFolder(recipe.folder).final_evaluation() is None:
        threads = torch.get_num_threads()
        train(recipe, resume=exists)
        torch.set_num_threads(threads)  # a resumed run has its own number
    return RunFolder(recipe.folder)


def refuse_other_recipe(recipe: Recipe) -> None:
    """Raises if the run in the folder differs in a key that its figures depend on, such as one of its evaluations."""
    free = tuple(f"{key}." for key in checkpoint.MAY_CHANGE if not key.startswith("evaluation"))
    own, stored = flat(recipe.model_dump()), flat(RunFolder(recipe.folder).recipe)
    for key in sorted({*own, *stored}):
        if own.get(key) != stored.get(key) and not f"{key}.".startswith(free):
            raise ValueError(
                f"experiments: --folder must have no run of another recipe, got {str(recipe.folder)!r}, where {key} is "
                f"{stored.get(key)!r} there and {own.get(key)!r} here; choose another --folder, or remove that run"
            )


def run_experiment(name: str, seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, RunFolder]:
    """Runs of SFT and of each variant, which continues from its checkpoint."""
    experiment = EXPERIMENTS[name]
    shared = [f"seed={seed}", "evaluation.every=0", *experiment.overrides, *overrides]

    def load(recipe: str, place: str, *more: str) -> Recipe:
        output = folder / Path(experiment.recipe).stem / f"{place.replace(' ', '-')}-{seed}"
        return recipes.load(recipe, [*shared, f"output={output}", f"name={place}", *more])

    length = load(experiment.recipe, SFT).max_completion_length
    runs = {SFT: finished(load(experiment.recipe, SFT, "rl=null", f"evaluation.max_completion_length={length}"))}
    steps = runs[SFT].setting("sft.steps")
    model = runs[SFT].path / f"checkpoints/sft-{steps}/model"
    again = [change for change in overrides if change.startswith(OF_ALL)]  # a variant may replace all of rl.algorithm
    for variant, change in experiment.variants.items():
        base, more = (change, ()) if isinstance(change, str) else (experiment.recipe, tuple(change))
        runs[variant] = finished(load(base, variant, "sft=null", f"model.path={model}", *more, *again))
    return runs


def figures(run: RunFolder, measure: Callable[[Evaluated], Mapping[str, float]] | None = None) -> dict[str, float]:
    evaluated = run.final_evaluation()
    assert evaluated is not None, run.path
    own = {name: evaluated.metrics[name] for name in MEASURES if name in evaluated.metrics}
    entropy = run.series("rl", "train/entropy").tail(5).mean()  # of the next token, in the last steps
    endpoints = 1 - run.series("rl", "group/compression_ratio").mean()  # share of tokens that are endpoints
    more = {} if math.isnan(endpoints) else {"endpoints": endpoints}
    return own | {"token_entropy": entropy} | more | dict(measure(evaluated) if measure is not None else {})


def gains(title: str, before: Evaluated, after: Evaluated) -> list[dict[str, Any]]:
    """Paired gains of a seed in quality and diversity; one is clear if its bootstrap interval excludes 0."""
    measures = compare(before.content, after.content, before.solved).measures
    return [
        {
            "": title,
            "measure": name,
            "before": d.before,
            "after": d.after,
            "gain": d.change,
            "clear": is_clear(d.interval),
        }
        for name in CHANGES
        if (d := measures.get(name)) is not None
    ]


def is_clear(interval: tuple[float, float]) -> bool:
    return interval[0] > 0 or interval[1] < 0


def summary(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each name, and one for its differences from the first, paired by seed: means and 95 % intervals."""
    groups = {name: rows.set_index("seed").drop(columns="") for name, rows in table.groupby("", sort=False)}
    first, *others = groups
    groups |= {f"{name} less {first}": groups[name] - groups[first] for name in others}
    return [{"": name} | {key: over_seeds(rows[key]) for key in rows} for name, rows in groups.items()]


def summary_of_gains(changes: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each pair and measure, with each seed's gain, in bold if its interval over the prompts excludes 0."""
    rows = []
    for (title, measure), seeds in changes.groupby(["", "measure"], sort=False):
        each = [
            f"**{gain:+.3f}**" if clear else f"{gain:+.3f}" for gain, clear in zip(seeds.gain, seeds.clear, strict=True)
        ]
        ends = {key: over_seeds(seeds[key]) for key in ("before", "after")}
        gain = over_seeds(seeds.gain, "+.3f")
        rows.append({"": title, "measure": measure, **ends, "gain": gain, "each seed": ", ".join(each)})
    return rows


def over_seeds(values: pd.Series, form: str = ".3f") -> str:
    """The mean, and the half width of its 95 % interval by Student's t if several seeds have a value."""
    if values.isna().all():
        return ""
    mean, (low, high) = f"{values.mean():{form}}", t_interval(values)
    return mean if math.isnan(low) else f"{mean} +- {(high - low) / 2:.3f}"


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    table = pd.DataFrame(rows).fillna("")
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"recipes, or one of {', '.join(EXPERIMENTS)}; and keys that are set in all of them"
    parser.add_argument("names", nargs="+", metavar="NAME | KEY=VALUE", help=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds; default: 0 1 2")
    folder_help = "folder of the runs; default: %(default)s"
    parser.add_argument("--folder", type=Path, default=Path("runs/experiments"), help=folder_help)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; default: %(default)s")
    options = parser.parse_intermixed_args()
    names = [name for name in options.names if "=" not in name]
    overrides = [name for name in options.names if "=" in name]
    if not names or (len(names) > 1 and {*names} & {*EXPERIMENTS}):
        parser.error("recipes, or one experiment, are needed")
    torch.set_num_threads(options.threads)
    sys.path.insert(0, os.getcwd())  # own rewards, as with grpo train
    table, changes = list[dict[str, Any]](), list[dict[str, Any]]()
    folders = []
    for seed in options.seeds:
        if names[0] in EXPERIMENTS:
            experiment = EXPERIMENTS[names[0]]
            runs, measure = run_experiment(names[0], seed, options.folder, overrides), experiment.measure
            baseline = next(iter(experiment.variants))
            pairs = [(start, name) for name in experiment.variants for start in (SFT, baseline) if start != name]
            for start, name in pairs:
                before, after = (runs[of].final_evaluation() for of in (start, name))
                changes += gains(f"{name} over {start}", before, after)
        else:
            outputs = {name: f"output={options.folder / name}-{seed}" for name in names}
            runs = {n: finished(recipes.load(n, [f"seed={seed}", outputs[n], *overrides])) for n in names}
            measure = None
            for name, run in runs.items():
                # that of SFT alone has one evaluation of the test split, and others of the validation split
                last = run.final_evaluation()
                if (pair := run.before_and_after()) is not None and last is not None and pair[1].split == last.split:
                    changes += gains(name, *pair)
        table += [{"": name, "seed": seed} | figures(run, measure) for name, run in runs.items()]
        folders += [run.path for run in runs.values()]
    print(markdown(summary(pd.DataFrame(table))))
    if changes:
        print(f"\n{markdown(summary_of_gains(pd.DataFrame(changes)))}")
    if len(names) > 1:
        print(f"\npage: {write_comparison(folders, options.folder / 'comparison')}")


if __name__ == "__main__":
    main()
