"""Runs a recipe on several seeds, and prints the gain of RL on the test split with its confidence interval.

    python tools/seeds.py arithmetic --seeds 0 1 2

"before" is the checkpoint that RL started from, "after" the last one, both with greedy answers. The interval is a
paired bootstrap over the prompts. Existing runs are resumed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # must be set before torch is imported, as in grpo_trainer.cli

import torch
from grpo_trainer import recipe as recipes
from grpo_trainer.recipe import Recipe
from grpo_trainer.report.compare import Difference, compare
from grpo_trainer.report.run_folder import Evaluated, RunFolder, series
from grpo_trainer.train import Trainer

TITLES = ("seed", "measure", "before", "after", "gain", "95 % interval", "p", "training", "with evaluation")


def run(recipe: Recipe) -> RunFolder:
    folder = recipe.folder
    if not any(evaluation.phase == len(recipe.phases) for evaluation in evaluations(folder)):
        Trainer(recipe).run(resume=(folder / "recipe.json").exists())
    return RunFolder.read(folder)


def evaluations(folder: Path) -> list[Evaluated]:
    return RunFolder.read(folder).evaluations if (folder / "recipe.json").exists() else []


def rows(seed: int, run: RunFolder, solved: float) -> list[tuple[str, ...]]:
    pair = run.before_and_after()
    if pair is None:
        raise ValueError(f"{run.path}: must have two evaluations of one split")
    compared = compare(pair[0].content, pair[1].content, solved=solved)
    training = sum(sum(series(run.lines(kind), "time/step")) for kind in ("sft", "rl"))
    times = (f"{training:.0f} s", f"{run.seconds:.0f} s")
    measures = {"exact": compared.exact} | ({} if compared.reward == compared.exact else {"reward": compared.reward})
    return [(str(seed), name, *cells(difference), *times) for name, difference in measures.items()]


def cells(difference: Difference) -> tuple[str, ...]:
    low, high = difference.interval
    numbers = (f"{difference.before:.3f}", f"{difference.after:.3f}", f"{difference.improvement:+.3f}")
    return (*numbers, f"{low:+.3f} to {high:+.3f}", f"{difference.p_value:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_intermixed_args()
    torch.set_num_threads(options.threads)
    table = [TITLES, ("---",) * len(TITLES)]
    for seed in options.seeds:
        output = f"output={options.folder}/{options.recipe}-{seed}"
        recipe = recipes.load(options.recipe, [f"seed={seed}", output, *options.overrides])
        table += rows(seed, run(recipe), recipe.evaluation.solved)
    print("\n".join(f"| {' | '.join(row)} |" for row in table))


if __name__ == "__main__":
    main()
