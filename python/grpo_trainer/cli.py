"""The commands grpo-train, grpo-eval, grpo-data and grpo-report. What is heavy is imported once it is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Threads that wait must sleep: spinning keeps a core from a process that wants it. torch's OpenMP reads this when it is
# loaded, so it stands before anything that imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_OVERRIDES = "KEY=VALUE sets a key, nested by dots (phases.1.rl.steps=10); grpo-train --keys explains them all."


def train(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("grpo-train", description="Train as a recipe says.", epilog=_OVERRIDES)
    parser.add_argument("recipe", nargs="?", help="a YAML file, or the name of a bundled recipe (--list)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the output folder")
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier run left in the output folder")
    parser.add_argument("--smoke", action="store_true", help="a size of seconds, to see that everything works")
    parser.add_argument("--keys", action="store_true", help="explain every key of a recipe")
    parser.add_argument("--list", action="store_true", help="the bundled recipes and the algorithms")
    given = parser.parse_intermixed_args(arguments)
    from grpo_trainer import recipe as recipes
    from grpo_trainer.settings import explain

    if given.keys:
        print("\n".join(explain(recipes.Recipe)))
        return 0
    if given.list:
        from grpo_trainer.algorithm import ALGORITHMS

        print("recipes:   ", ", ".join(recipes.bundled()))
        print("algorithms:", ", ".join(ALGORITHMS))
        return 0
    if given.recipe is None:
        parser.error("a recipe is needed; --list names the bundled ones")
    if given.resume and given.fresh:
        parser.error("--resume goes on with what --fresh removes")
    return _reported(lambda: _train(given))


def _train(given: argparse.Namespace) -> None:
    from grpo_trainer import recipe as recipes

    recipe = recipes.load(given.recipe, given.overrides, given.smoke)
    _set_threads(recipe.threads)
    _find_modules_here()
    import shutil

    from transformers.utils.logging import disable_progress_bar

    from grpo_trainer import processes
    from grpo_trainer.compare import compare
    from grpo_trainer.report import write_report
    from grpo_trainer.run_folder import RunFolder
    from grpo_trainer.train import Trainer

    disable_progress_bar()  # of every checkpoint
    trainer = Trainer(recipe)
    with processes.together():
        if given.fresh and trainer.accelerator.is_main_process and (recipe.folder / "recipe.json").exists():
            shutil.rmtree(recipe.folder)
    metrics = trainer.run(given.resume)
    processes.end()
    if trainer.accelerator.is_main_process:
        page = write_report(recipe.folder)
        for key, value in metrics.items():
            print(f"{key:<32} {value:.4f}")
        if (pair := RunFolder.read(recipe.folder).before_and_after()) is not None:
            before, after = pair
            began = "RL" if any(phase.rl for phase in recipe.phases) else "training"
            print(f"\nThe {before.split} split, before {began} and after it:")
            print(compare(before.content, after.content, solved=recipe.evaluation.solved).table())
        print(f"report: {page}")


def evaluate(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "grpo-eval", description="Evaluate a checkpoint, or compare two on the same prompts.", epilog=_OVERRIDES
    )
    parser.add_argument("recipe", help="whose data, rewards and sampling are used")
    parser.add_argument("models", nargs="+", help="one folder or name of a model, or two to compare; then KEY=VALUE")
    parser.add_argument("--split", choices=("train", "validation", "test"), default="test")
    parser.add_argument("--json", type=Path, help="where the result goes, with every response")
    given = parser.parse_intermixed_args(arguments)
    models = [each for each in given.models if "=" not in each]
    overrides = [each for each in given.models if "=" in each]
    if not 1 <= len(models) <= 2:
        parser.error(f"one or two models, got {len(models)}")
    return _reported(lambda: _evaluate(given.recipe, overrides, models, given.split, given.json))


def _evaluate(name: str, overrides: list[str], models: list[str], split: str, out: Path | None) -> None:
    from grpo_trainer import recipe as recipes

    recipe = recipes.load(name, overrides)
    _set_threads(recipe.threads)
    _find_modules_here()
    from grpo_trainer import processes
    from grpo_trainer.compare import compare
    from grpo_trainer.train import evaluate_model

    results = [evaluate_model(recipe, model, split) for model in models]
    if not processes.is_first():
        return
    found = {model: result.to_json() for model, result in zip(models, results, strict=True)}
    for model, result in zip(models, results, strict=True):
        print(model)
        for key, value in result.metrics.items():
            print(f"  {key:<28} {value:.4f}")
    if len(results) == 2:
        comparison = compare(results[0], results[1], solved=recipe.evaluation.solved)
        print("\nbefore: the first of them; after: the second")
        print(comparison.table())
        found["comparison"] = comparison.to_json()
    if out is not None:
        out.write_text(json.dumps(found, indent=1))


def data(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("grpo-data", description="Work on JSONL files.")
    commands = parser.add_subparsers(dest="command", required=True)
    split = commands.add_parser(
        "split", help="two parts, for SFT and for RL, with equal shares of each rank of a column"
    )
    split.add_argument("file", type=Path)
    split.add_argument("--by", help="column to rank by; A/B: their quotient, B at least 1; nothing: at random")
    split.add_argument("--ratio", type=float, default=0.5, help="share of the first part")
    split.add_argument("--parts", type=int, default=4, help="ranks: 4 are quartiles")
    split.add_argument("--seed", type=int, default=42)
    split.add_argument("--names", nargs=2, default=("phase1", "phase2"), help="of the parts, in FILE.NAME.jsonl")
    given = parser.parse_args(arguments)
    return _reported(lambda: _split(given))


def _split(given: argparse.Namespace) -> None:
    from grpo_trainer.data import ranks_of, read_jsonl, stratified, write_jsonl

    if not 0 < given.ratio < 1:
        raise ValueError(f"--ratio: must be between 0 and 1, got {given.ratio}")
    lines = read_jsonl(given.file)
    by = [0.0] * len(lines) if given.by is None else ranks_of(lines, given.by)
    parts = stratified(lines, by, given.ratio, 1 if given.by is None else given.parts, given.seed)
    for name, part in zip(given.names, parts, strict=True):
        path = given.file.with_suffix(f".{name}.jsonl")
        write_jsonl(path, part)
        print(f"{path}: {len(part)} lines")


def report(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("grpo-report", description="Draw a run: plots and one page, finished or not.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beside", type=Path, nargs="+", default=[], help="runs whose time a step is shown, too")
    given = parser.parse_args(arguments)

    def draw() -> None:
        from grpo_trainer.report import write_report

        print(write_report(given.folder, given.beside))

    return _reported(draw)


def _set_threads(wanted: int | None) -> None:
    """Of the CPU: as many as cores that nobody else is busy with, divided among the processes that were launched."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(wanted or max(1, (cores - busy) // here))


def _find_modules_here() -> None:
    """A reward named module:function may be in the current folder, as with `python -m`."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _reported(work: Callable[[], None]) -> int:
    """What a user can mend is said in a line; anything else keeps its traceback."""
    from grpo_trainer.checkpoint import CheckpointError
    from grpo_trainer.processes import ProcessError
    from grpo_trainer.rewards import RewardError

    try:
        work()
    except (ValueError, TypeError, OSError, CheckpointError, RewardError, ProcessError) as error:
        return _said(error, str(error))
    except ModuleNotFoundError as error:
        needed = 'what the trainer itself needs comes with pip install "grpo-kernels[trainer]"'
        return _said(error, f"{error}; {needed}")
    return 0


def _said(error: Exception, line: str) -> int:
    if os.environ.get("GRPO_TRACEBACK"):
        raise error
    print(f"error: {line}", file=sys.stderr)
    return 2
