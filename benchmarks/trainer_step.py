"""Times a step of the trainer with the kernels, with the reference backend, and with the loops of the original systems.

    python -m benchmarks.trainer_step similarity_group --steps 5 --out runs/step

After a short supervised phase the three start from one checkpoint and alternate step by step. Each writes a run folder.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
from pathlib import Path

import torch
from grpo_trainer import recipes
from grpo_trainer.recipe import Recipe
from grpo_trainer.setup import Run
from grpo_trainer.train import train

from benchmarks.loops import instead_of_kernels
from benchmarks.run import usable
from benchmarks.trainer_run import begin, take_step

NAMES = ("kernels", "reference", "loops")


def variant(name: str, base: Recipe, folder: Path, start: Path) -> Run:
    rl = base.rl
    assert rl is not None
    if name == "loops" and rl.algorithm.name == "group_ppo":
        rl = rl.model_copy(update={"algorithm": rl.algorithm.model_copy(update={"sparse": True})})
    changes = {
        "name": name,
        "output": str(folder / name),
        "backend": "reference" if name == "reference" else "auto",
        "model": base.model.model_copy(update={"path": str(start)}),
        "sft": None,
        "rl": rl,
    }
    return begin(base.model_copy(update=changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="arithmetic", help="recipe to measure; default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of each, of which the first is not counted; default: %(default)s"
    )
    parser.add_argument("--sft", type=int, default=200, help="supervised steps before them; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/step"), help="folder of the runs; default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; default: %(default)s")
    options = parser.parse_args()
    usable("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(options.threads)
    shutil.rmtree(options.out, ignore_errors=True)

    sft = [
        f"sft.steps={options.sft}",
        "evaluation.test_prompts=8",
        "evaluation.samples=0",
        "logging.progress=false",
    ]
    base = recipes.load(options.recipe, sft)
    train(base.model_copy(update={"output": str(options.out / "before"), "rl": None}))
    start = next((options.out / "before" / "checkpoints").iterdir()) / "model"

    runs = {name: variant(name, base, options.out, start) for name in NAMES}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for step in range(1, options.steps + 1):
        for name, run in runs.items():
            with instead_of_kernels() if name == "loops" else contextlib.nullcontext():
                metrics = take_step(run, step)
            if step > 1:
                run.log.metrics("rl", step, metrics)
                taken[name].append(metrics)
                print(
                    f"{step:3} {name:<10} {metrics['time/step']:7.3f} s, outside the model {outside(metrics):6.2%}",
                    flush=True,
                )
    print_table(taken)


def outside(metrics: dict[str, float], *more: str) -> float:
    """Share of a step's time outside generation and the model's passes, and outside of more parts."""
    inside = sum(metrics.get(f"time/{part}", 0.0) for part in ("generate", "model", *more))
    return 1 - inside / metrics["time/step"]


def print_table(taken: dict[str, list[dict[str, float]]]) -> None:
    print("\n| ms a step, median | " + " | ".join(taken) + " |\n|---|" + "---|" * len(taken))
    for part in ("generate", "reward", "embed", "model", "advantage", "step"):
        medians = [statistics.median(metrics.get(f"time/{part}", 0.0) for metrics in steps) for steps in taken.values()]
        print(f"| {part} | " + " | ".join(f"{median * 1e3:.1f}" for median in medians) + " |")
    for title, parts in (
        ("outside generation and the model", ()),
        ("the same without the embedding model", ("embed",)),
    ):
        shares = [statistics.mean(outside(metrics, *parts) for metrics in steps) for steps in taken.values()]
        print(f"| {title} | " + " | ".join(f"{share:.2%}" for share in shares) + " |")


if __name__ == "__main__":
    main()
