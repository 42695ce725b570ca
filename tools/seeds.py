"""Runs recipes on several seeds, and prints the gain of RL on the test split with its confidence interval.

    python tools/seeds.py arithmetic --seeds 0 1 2
    python tools/seeds.py reply-sft reply reply-polychromic --seeds 0 1 2     # and compares the recipes

"before" is the checkpoint that RL started from, "after" the last one. Answers are greedy, except for the measure
"sampled". The interval is a paired bootstrap over the prompts. Existing runs are resumed.

Several recipes are also compared with each other: tables are printed, and the page of `grpo report --compare` is
written. Phases that recipes share are trained once per seed: name the recipe that ends with them first.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported, as in grpo_trainer.cli

import torch
from grpo_trainer import checkpoint
from grpo_trainer import recipe as recipes
from grpo_trainer.recipe import Recipe
from grpo_trainer.report.compare import Difference, compare, difference, paired
from grpo_trainer.report.comparison import write_comparison
from grpo_trainer.report.paradigms import Row, select, value_of
from grpo_trainer.report.run_folder import Evaluated, RunFolder, series
from grpo_trainer.train import Trainer

TITLES = ("recipe", "seed", "measure", "before", "after", "gain", "95 % interval", "p", "training", "with evaluation")
QUALITY = ("reward", "sampled_reward", "exact", "pass@1", "pass@5", "pass@10", "usq")
DIVERSITY = (
    *("self_bleu", "distinct_1", "distinct_2", "rouge_diversity", "semantic_diversity"),
    *("vendi", "cluster_entropy", "der@5", "der@10"),
)
COMPARED = ("sampled_reward", "pass@10", "semantic_diversity")


def run(recipe: Recipe, finished: Sequence[Recipe] = ()) -> RunFolder:
    """Trains a recipe unless its folder has a finished run, from the phases that it shares with a finished one."""
    folder = recipe.folder
    if not any(evaluation.phase == len(recipe.phases) for evaluation in evaluations(folder)):
        start = longest_start(recipe, finished)
        if start is not None and not (folder / "recipe.json").exists():
            checkpoint.branch(start.folder, recipe)
        Trainer(recipe).run(resume=(folder / "recipe.json").exists())
    return RunFolder.read(folder)


def longest_start(recipe: Recipe, finished: Sequence[Recipe]) -> Recipe | None:
    """The recipe whose phases are the first ones of this recipe, and as many as possible."""
    starts = [
        other
        for other in finished
        if 0 < len(other.phases) < len(recipe.phases)
        and dataclasses.replace(recipe, name=other.name, output=other.output, phases=recipe.phases[: len(other.phases)])
        == other
    ]
    return max(starts, key=lambda other: len(other.phases), default=None)


def evaluations(folder: Path) -> list[Evaluated]:
    return RunFolder.read(folder).evaluations if (folder / "recipe.json").exists() else []


def rows(recipe: Recipe, run: RunFolder) -> list[tuple[str, ...]]:
    """Gain of RL in each measure."""
    pair = run.before_and_after()
    if pair is None:
        raise ValueError(f"{run.path}: must have two evaluations of one split")
    before, after = pair
    compared = compare(before.content, after.content, solved=recipe.evaluation.solved)
    training = sum(sum(series(run.lines(kind), "time/step")) for kind in ("sft", "rl"))
    times = (f"{training:.0f} s", f"{run.seconds:.0f} s")
    measures = {"exact": compared.exact} | ({} if compared.reward == compared.exact else {"reward": compared.reward})
    if recipe.evaluation.samples:
        lines = paired(before.prompts, after.prompts)
        measures["sampled"] = difference(
            [(value_of(a, "sampled_reward"), value_of(b, "sampled_reward")) for a, b in lines]
        )
    name = (recipe.name, str(recipe.seed))
    return [(*name, measure, *cells(gain), *times) for measure, gain in measures.items()]


def cells(difference: Difference) -> tuple[str, ...]:
    low, high = difference.interval
    numbers = (f"{difference.before:.3f}", f"{difference.after:.3f}", f"{difference.improvement:+.3f}")
    return (*numbers, f"{low:+.3f} to {high:+.3f}", f"{difference.p_value:.4f}")


def side_by_side(paradigms: Sequence[Row], names: Sequence[str]) -> str:
    """Table of measures after training, with a line per recipe and seed, and one for the mean over several seeds."""
    lines = []
    for row in paradigms:
        for one in by_seed(row):
            lines.append([row.name, str(one.seeds[0]), *(f"{one.estimate(name).mean:.3f}" for name in names)])
        if len(row.seeds) > 1:
            lines.append([row.name, "mean", *(f"{row.estimate(name).mean:.3f}" for name in names)])
    return markdown([["", "seed", *names], *lines])


def differences(paradigms: Sequence[Row], names: Sequence[str]) -> str:
    """Table of the differences of all pairs of recipes on each seed.

    Bold ones have the same sign on all seeds, with a bootstrap interval over the prompts that excludes 0.
    """
    lines = []
    for row, other in itertools.combinations(paradigms, 2):
        others = {one.seeds[0]: one for one in by_seed(other)}
        pairs = [(one, others[one.seeds[0]]) for one in by_seed(row) if one.seeds[0] in others]
        cells = []
        for name in names:
            gaps = [theirs.minus(ours, name) for ours, theirs in pairs]
            text = ", ".join(f"{gap.mean:+.3f}" for gap in gaps)
            is_clear = all(gap.low > 0 for gap in gaps) or all(gap.high < 0 for gap in gaps)
            cells.append(f"**{text}**" if gaps and is_clear else text)
        seeds = ", ".join(str(ours.seeds[0]) for ours, _ in pairs)
        lines.append([f"{other.name} - {row.name}", seeds, *cells])
    return markdown([["", "seeds", *names], *lines])


def by_seed(row: Row) -> list[Row]:
    return [Row(row.number, [run], [e]) for run, e in zip(row.runs, row.evaluated, strict=True)]


def markdown(table: Sequence[Sequence[str]]) -> str:
    titles, *lines = table
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, ["---"] * len(titles), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recipes", nargs="+", metavar="RECIPE | KEY=VALUE", help="recipes, and keys that are set in all of them"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds; default: 0 1 2")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/seeds"), help="folder of the runs; default: %(default)s"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; default: %(default)s")
    options = parser.parse_intermixed_args()
    names = [argument for argument in options.recipes if "=" not in argument]
    overrides = [argument for argument in options.recipes if "=" in argument]
    if not names:
        parser.error("a recipe is needed")
    torch.set_num_threads(options.threads)
    sys.path.insert(0, os.getcwd())  # own rewards, as with grpo train
    gains: dict[str, list[tuple[str, ...]]] = {name: [] for name in names}
    for seed in options.seeds:
        finished: list[Recipe] = []
        for name in names:
            output = f"output={options.folder}/{name}-{seed}"
            recipe = recipes.load(name, [f"seed={seed}", output, *overrides])
            folder = run(recipe, finished)
            finished.append(recipe)
            if len(names) == 1 or "rl" in folder.phases:
                gains[name] += rows(recipe, folder)
    print(markdown([TITLES, *itertools.chain(*gains.values())]))
    if len(names) > 1:
        folders = [options.folder / f"{name}-{seed}" for name in names for seed in options.seeds]
        paradigms, _ = select(folders)
        for table in (side_by_side(paradigms, QUALITY), side_by_side(paradigms, DIVERSITY)):
            print(f"\n{table}")
        print(f"\n{differences(paradigms, COMPARED)}\n")
        print(f"page: {write_comparison(folders, options.folder / 'comparison')}")


if __name__ == "__main__":
    main()
