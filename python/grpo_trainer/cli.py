"""The commands grpo-train, grpo-eval, grpo-data and grpo-report. Heavy imports are deferred until they are needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Waiting threads must sleep: spinning keeps a core from processes that need it. OpenMP reads this when torch loads it,
# so it precedes everything that imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_OVERRIDES = "KEY=VALUE sets a key; dots separate nested keys (phases.1.rl.steps=10). grpo-train --keys lists all keys."


def train(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("grpo-train", description="Train a recipe.", epilog=_OVERRIDES)
    parser.add_argument("recipe", nargs="?", help="a YAML file, or the name of a bundled recipe (--list)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the output folder")
    parser.add_argument("--fresh", action="store_true", help="delete an earlier run in the output folder")
    parser.add_argument("--smoke", action="store_true", help="run for seconds only, to see that everything works")
    parser.add_argument("--keys", action="store_true", help="explain every key of a recipe")
    parser.add_argument("--list", action="store_true", help="list the bundled recipes and the algorithms")
    options = parser.parse_intermixed_args(arguments)
    from grpo_trainer import recipe as recipes
    from grpo_trainer.settings import explain

    if options.keys:
        print("\n".join(explain(recipes.Recipe)))
        return 0
    if options.list:
        from grpo_trainer.algorithm import ALGORITHMS

        print("recipes:   ", ", ".join(recipes.bundled()))
        print("algorithms:", ", ".join(ALGORITHMS))
        return 0
    if options.recipe is None:
        parser.error("a recipe is needed; --list names the bundled ones")
    if options.resume and options.fresh:
        parser.error("--resume continues the run that --fresh deletes")
    return _run(lambda: _train(options))


def _train(options: argparse.Namespace) -> None:
    from grpo_trainer import recipe as recipes

    recipe = recipes.load(options.recipe, options.overrides, options.smoke)
    _set_threads(recipe.threads)
    _import_from_current_folder()
    import shutil

    from transformers.utils.logging import disable_progress_bar

    from grpo_trainer import distributed
    from grpo_trainer.report import write_report
    from grpo_trainer.report.compare import compare
    from grpo_trainer.report.run_folder import RunFolder
    from grpo_trainer.train import Trainer

    disable_progress_bar()  # one per checkpoint otherwise
    trainer = Trainer(recipe)
    with distributed.fail_together():
        if options.fresh and trainer.accelerator.is_main_process and (recipe.folder / "recipe.json").exists():
            shutil.rmtree(recipe.folder)
    metrics = trainer.run(options.resume)
    distributed.destroy_process_group()
    if trainer.accelerator.is_main_process:
        page = write_report(recipe.folder)
        for key, value in metrics.items():
            print(f"{key:<32} {value:.4f}")
        if (pair := RunFolder.read(recipe.folder).before_and_after()) is not None:
            before, after = pair
            trained = "RL" if any(phase.rl for phase in recipe.phases) else "training"
            print(f"\nThe {before.split} split, before and after {trained}:")
            print(compare(before.content, after.content, solved=recipe.evaluation.solved).table())
        print(f"report: {page}")


def evaluate(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "grpo-eval", description="Evaluate a checkpoint, or compare two on the same prompts.", epilog=_OVERRIDES
    )
    parser.add_argument("recipe", help="recipe with the data, rewards and sampling to use")
    parser.add_argument("models", nargs="+", help="folder or hub name of one model, or of two to compare")
    parser.add_argument("--split", choices=("train", "validation", "test"), default="test")
    parser.add_argument("--json", type=Path, help="file for the results, including every response")
    options = parser.parse_intermixed_args(arguments)
    models = [argument for argument in options.models if "=" not in argument]
    overrides = [argument for argument in options.models if "=" in argument]
    if not 1 <= len(models) <= 2:
        parser.error(f"one or two models, got {len(models)}")
    return _run(lambda: _evaluate(options.recipe, overrides, models, options.split, options.json))


def _evaluate(name: str, overrides: list[str], models: list[str], split: str, output: Path | None) -> None:
    from grpo_trainer import recipe as recipes

    recipe = recipes.load(name, overrides)
    _set_threads(recipe.threads)
    _import_from_current_folder()
    from grpo_trainer import distributed
    from grpo_trainer.report.compare import compare
    from grpo_trainer.train import evaluate_model

    results = [evaluate_model(recipe, model, split) for model in models]
    if not distributed.is_main_process():
        return
    content = {model: result.to_json() for model, result in zip(models, results, strict=True)}
    for model, result in zip(models, results, strict=True):
        print(model)
        for key, value in result.metrics.items():
            print(f"  {key:<28} {value:.4f}")
    if len(results) == 2:
        comparison = compare(results[0], results[1], solved=recipe.evaluation.solved)
        print("\nbefore: the first model; after: the second")
        print(comparison.table())
        content["comparison"] = comparison.to_json()
    if output is not None:
        output.write_text(json.dumps(content, indent=1))


def data(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("grpo-data", description="Prepare JSONL files.")
    commands = parser.add_subparsers(dest="command", required=True)
    split = commands.add_parser("split", help="split a file into parts for SFT and RL, stratified by a column")
    split.add_argument("file", type=Path)
    split.add_argument("--by", help="column to stratify by, or a quotient A/B of two (B at least 1); default: none")
    split.add_argument("--ratio", type=float, default=0.5, help="share of the first part")
    split.add_argument("--parts", type=int, default=4, help="number of strata; 4: quartiles")
    split.add_argument("--seed", type=int, default=42)
    split.add_argument("--names", nargs=2, default=("phase1", "phase2"), help="names of the parts: FILE.NAME.jsonl")
    options = parser.parse_args(arguments)
    return _run(lambda: _split(options))


def _split(options: argparse.Namespace) -> None:
    from grpo_trainer.data import column_values, read_jsonl, split_stratified, write_jsonl

    if not 0 < options.ratio < 1:
        raise ValueError(f"--ratio: must be between 0 and 1, got {options.ratio}")
    lines = read_jsonl(options.file)
    by = [0.0] * len(lines) if options.by is None else column_values(lines, options.by)
    parts = split_stratified(lines, by, options.ratio, 1 if options.by is None else options.parts, options.seed)
    for name, part in zip(options.names, parts, strict=True):
        path = options.file.with_suffix(f".{name}.jsonl")
        write_jsonl(path, part)
        print(f"{path}: {len(part)} lines")


def report(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "grpo-report", description="Write plots and a report page for a run, finished or not."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beside", type=Path, nargs="+", default=[], help="other runs whose step times are compared")
    options = parser.parse_args(arguments)

    def draw() -> None:
        from grpo_trainer.report import write_report

        print(write_report(options.folder, options.beside))

    return _run(draw)


def _set_threads(threads: int | None) -> None:
    """Sets the CPU threads; by default the idle cores are divided among the launched processes."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(threads or max(1, (cores - busy) // processes))


def _import_from_current_folder() -> None:
    """Lets a reward module:function be in the current folder, as with `python -m`."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _run(command: Callable[[], None]) -> int:
    """Runs a command and returns its exit status; errors that a user can fix are reported in one line."""
    from grpo_trainer.checkpoint import CheckpointError
    from grpo_trainer.distributed import ProcessError
    from grpo_trainer.engine import EngineError
    from grpo_trainer.rewards import RewardError

    try:
        command()
    except (ValueError, TypeError, OSError, CheckpointError, RewardError, EngineError, ProcessError) as error:
        return _fail(error, str(error))
    except ModuleNotFoundError as error:
        return _fail(error, f'{error}; the trainer\'s requirements come with pip install "grpo-kernels[trainer]"')
    return 0


def _fail(error: Exception, line: str) -> int:
    if os.environ.get("GRPO_TRACEBACK"):
        raise error
    print(f"error: {line}", file=sys.stderr)
    return 2
