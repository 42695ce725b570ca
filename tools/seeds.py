"""A recipe on several seeds: what reinforcement added to the test split, and how sure that is.

    python tools/seeds.py arithmetic --seeds 0 1 2

Before is the checkpoint that RL began from, after the last one; greedy answers. The interval is a paired bootstrap over
the prompts. Runs that the folder has already, finished or not, are gone on with.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is there, as in grpo_trainer.cli

import torch
from grpo_trainer import recipe as recipes
from grpo_trainer.compare import Difference, compare
from grpo_trainer.recipe import Recipe
from grpo_trainer.run_folder import Evaluated, RunFolder, series
from grpo_trainer.train import Trainer

TITLES = ("seed", "measure", "before", "after", "gain", "95 % interval", "p", "training", "with evaluation")


def run(recipe: Recipe) -> RunFolder:
    folder = recipe.folder
    if not any(each.phase == len(recipe.phases) for each in evaluations(folder)):
        Trainer(recipe).run(resume=(folder / "recipe.json").exists())
    return RunFolder.read(folder)


def evaluations(folder: Path) -> list[Evaluated]:
    return RunFolder.read(folder).evaluations if (folder / "recipe.json").exists() else []


def rows(seed: int, run: RunFolder, solved: float) -> list[tuple[str, ...]]:
    pair = run.before_and_after()
    if pair is None:
        raise ValueError(f"{run.path}: has no two evaluations of one split")
    compared = compare(pair[0].content, pair[1].content, solved=solved)
    training = sum(sum(series(run.lines(kind), "time/step")) for kind in ("sft", "rl"))
    times = (f"{training:.0f} s", f"{run.seconds:.0f} s")
    measures = {"exact": compared.exact} | ({} if compared.reward == compared.exact else {"reward": compared.reward})
    return [(str(seed), name, *told(found), *times) for name, found in measures.items()]


def told(found: Difference) -> tuple[str, ...]:
    low, high = found.interval
    numbers = (f"{found.before:.3f}", f"{found.after:.3f}", f"{found.improvement:+.3f}")
    return (*numbers, f"{low:+.3f} to {high:+.3f}", f"{found.p_value:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/seeds"))
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_intermixed_args()
    torch.set_num_threads(given.threads)
    table = [TITLES, ("---",) * len(TITLES)]
    for seed in given.seeds:
        place = f"output={given.folder}/{given.recipe}-{seed}"
        recipe = recipes.load(given.recipe, [f"seed={seed}", place, *given.overrides])
        table += rows(seed, run(recipe), recipe.evaluation.solved)
    print("\n".join(f"| {' | '.join(row)} |" for row in table))


if __name__ == "__main__":
    main()
