"""The commands grpo-train, grpo-eval, grpo-data and grpo-report. Heavy imports are deferred until they are needed."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainer.parsers import make_parser

if TYPE_CHECKING:
    from grpo_trainer.recipe import Recipe

# Waiting threads must sleep: spinning keeps a core from processes that need it. OpenMP reads this when torch loads it,
# so it precedes everything that imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_OVERRIDE = "sets a key of the recipe; dots separate nested keys; grpo-train --keys lists all keys"
_TRAIN_EXAMPLES = """
examples:
  grpo-train arithmetic                               train the default recipe; minutes on a CPU
  grpo-train arithmetic seed=1 phases.1.rl.steps=40   change keys of the recipe
  grpo-train my.yaml --dry-run                        see what a recipe of your own needs
  grpo-train my.yaml --resume                         continue a run that was stopped or killed
Ctrl-C ends a run after the present step, with a checkpoint.
"""
_EVAL_EXAMPLES = """
examples:
  grpo-eval arithmetic runs/arithmetic-0/checkpoints/1-000080/model
  grpo-eval my.yaml BEFORE AFTER --split validation --json comparison.json
  grpo-eval my.yaml MODEL evaluation.samples=8 evaluation.temperature=0.7
"""
_SPLIT_EXAMPLES = """
examples:
  grpo-data split replies.jsonl --by likes --ratio 0.3 --names sft rl
  grpo-data split all.jsonl --into train=0.8 validation=0.1 test=0.1 --together prompt
"""
_CONVERT_EXAMPLES = """
examples:
  grpo-data convert gsm8k train.jsonl --output data/gsm8k
  grpo-data convert tweets posts.csv --columns post=body likes=favorites
"""
_REPORT_EXAMPLES = """
examples:
  grpo-report runs/arithmetic-0                                 a page for a run, also while it trains
  grpo-report --compare runs/a-0 runs/a-1 runs/b-0 runs/b-1     recipes side by side, over their seeds
  grpo-report --adapters runs/a/checkpoints/1-000080/model      what LoRA adapters have learned
"""


def train(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("grpo-train", "Train a recipe. Without arguments: show what there is.", _TRAIN_EXAMPLES)
    parser.add_argument("recipe", nargs="?", help="a YAML file, or the name of a bundled recipe (--list)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDE)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the output folder")
    parser.add_argument("--fresh", action="store_true", help="delete an earlier run in the output folder")
    parser.add_argument("--smoke", action="store_true", help="run for seconds only, to see that everything works")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what the run needs and what is missing, and start nothing"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="COUNT",
        help="devices that --dry-run divides the memory among; default: 1",
    )
    parser.add_argument("--keys", action="store_true", help="explain every key of a recipe")
    parser.add_argument("--list", action="store_true", help="list the bundled recipes and the algorithms")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_intermixed_args(given)
    from grpo_trainer import recipe as recipes

    if options.keys:
        from grpo_trainer.keys import explain

        _list("\n".join(explain(recipes.Recipe)))
        return 0
    if options.list or not given:
        if not given:
            parser.print_usage()
        _list(_overview())
        return 0
    if options.recipe is None:
        parser.error("a recipe is needed; --list names the bundled ones")
    if options.resume and options.fresh:
        parser.error("--resume continues the run that --fresh deletes")
    if options.processes is not None and not options.dry_run:
        launch = f"torchrun --nproc_per_node {options.processes} -m grpo_trainer {options.recipe}"
        parser.error(f"--processes is that of --dry-run; several processes are started by {launch}")
    _refuse_repeated(parser, options.overrides)
    return _run(lambda: _examine(options) if options.dry_run else _train(options))


def _refuse_repeated(parser: argparse.ArgumentParser, overrides: Sequence[str]) -> None:
    """Refuses a key that is set twice, of which only the last value would count."""
    by_key: dict[str, str] = {}
    for assignment in overrides:
        first = by_key.setdefault(assignment.partition("=")[0], assignment)
        if first is not assignment:
            parser.error(f"a key can be set once, got {first} and {assignment}")


def _list(text: str) -> None:
    """Prints a text of which the reader, such as head, may want the beginning only."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends


def _overview() -> str:
    """What there is to train, and how to begin."""
    from grpo_trainer import recipe as recipes
    from grpo_trainer.algorithm import ALGORITHMS

    found = {name: recipes.description(path) for name, path in sorted(recipes.bundled().items())}
    width = max(map(len, found)) + 2
    lines = [
        "recipes:",
        *(f"  {name:<{width}}{text}" for name, text in found.items()),
        "",
        "algorithms, and what they set of AdvantageConfig and LossConfig:",
        *(f"  {name:<{width}}{_fields(*defaults)}" for name, defaults in ALGORITHMS.items()),
        "",
        "grpo-train arithmetic           train the default recipe; minutes on a CPU",
        "grpo-train NAME --smoke         see in seconds that a recipe works",
        "grpo-train NAME --dry-run       what a recipe needs, and what is missing here",
        "grpo-train --keys               every key of a recipe",
    ]
    return "\n".join(lines)


def _fields(*configs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for fields in configs for name, value in fields.items()) or "nothing"


def _examine(options: argparse.Namespace) -> None:
    from grpo_trainer import recipe as recipes
    from grpo_trainer.dry_run import dry_run

    processes = 1 if options.processes is None else options.processes
    if processes < 1:
        raise ValueError(f"--processes: must be positive, got {processes}")
    _import_from_current_folder()
    recipe = recipes.load(options.recipe, options.overrides, options.smoke)
    lines, problems = dry_run(recipe, processes, options.resume, options.fresh)
    print("\n".join(lines))
    if problems:
        raise ValueError("\n  ".join(["this run cannot start:", *problems]))
    print("nothing is missing")


def _train(options: argparse.Namespace) -> int:
    from grpo_trainer import recipe as recipes

    recipe = recipes.load(options.recipe, options.overrides, options.smoke)
    _set_threads(recipe.threads)
    _import_from_current_folder()
    import shutil

    from grpo_trainer import checkpoint, distributed, interruption
    from grpo_trainer.report import write_report
    from grpo_trainer.report.compare import compare
    from grpo_trainer.report.run_folder import RunFolder
    from grpo_trainer.train import Trainer

    if not options.resume and not options.fresh:
        checkpoint.refuse_used_folder(recipe.folder)  # before the model is loaded
    trainer = Trainer(recipe)
    if options.resume and trainer.accelerator.is_main_process and not (recipe.folder / "recipe.json").exists():
        print(f"{recipe.folder} contains no run to resume: starting from the beginning", file=sys.stderr)
    with distributed.fail_together():
        if options.fresh and trainer.accelerator.is_main_process and (recipe.folder / "recipe.json").exists():
            shutil.rmtree(recipe.folder)
    with interruption.handled():
        try:
            metrics = trainer.run(options.resume)
        except BaseException as error:
            if not (isinstance(error, interruption.Stopped) or interruption.is_immediate()):
                raise
            if trainer.accelerator.is_main_process:
                print(_how_to_continue(recipe, options.fresh), file=sys.stderr)
            if not interruption.is_immediate():  # otherwise other processes may be gone already
                distributed.destroy_process_group()
            return 128 + (interruption.signal_number() or 0)
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
    return 0


def _how_to_continue(recipe: Recipe, is_fresh: bool) -> str:
    """Last line of a run that was asked to stop."""
    from grpo_trainer.checkpoint import last_folder

    folder = last_folder(recipe)
    last = "before the first checkpoint" if folder is None else f"the last checkpoint is {folder}"
    option = "--resume in place of --fresh" if is_fresh else "--resume"
    return f"stopped: {last}; continue with the same command and {option}"


def evaluate(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("grpo-eval", "Evaluate a checkpoint, or compare two on the same prompts.", _EVAL_EXAMPLES)
    parser.add_argument("recipe", help="a YAML file or bundled recipe with the data, rewards and sampling to use")
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL | KEY=VALUE",
        help=f"folder or hub name of one model, or of two to compare; KEY=VALUE {_OVERRIDE}",
    )
    parser.add_argument(
        "--split",
        choices=("train", "validation", "test"),
        default="test",
        help="part of the data; default: %(default)s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results, including every response")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="folder for a page with intervals and plots")
    options = parser.parse_intermixed_args(arguments)
    models = [argument for argument in options.models if "=" not in argument]
    overrides = [argument for argument in options.models if "=" in argument]
    if not 1 <= len(models) <= 2:
        parser.error(f"one or two models, got {len(models)}")
    if len(set(models)) < len(models):
        parser.error(f"two different models, got {models[0]} twice")
    _refuse_repeated(parser, overrides)
    return _run(lambda: _evaluate(options.recipe, overrides, models, options.split, options.json, options.report))


def _evaluate(
    name: str, overrides: list[str], models: list[str], split: str, output: Path | None, report: Path | None
) -> None:
    from grpo_trainer import recipe as recipes

    recipe = recipes.load(name, overrides)
    _set_threads(recipe.threads)
    _import_from_current_folder()
    from grpo_trainer import distributed, pretrained, strict_json
    from grpo_trainer.report.compare import compare
    from grpo_trainer.train import evaluate_model

    for model in models:
        pretrained.refuse_missing(model)
        if model == "tiny" and Path(model).is_dir():
            raise ValueError(
                "MODEL: must be './tiny' for the folder, got 'tiny', the model with new weights of a recipe"
            )
    if output is not None:  # before the evaluation, whose results would be lost
        if output.is_dir():
            raise ValueError(f"--json: must be a file, got the folder {str(output)!r}")
        output.parent.mkdir(parents=True, exist_ok=True)
    if report is not None and report.exists() and not report.is_dir():
        raise ValueError(f"--report: must be a folder, got the file {str(report)!r}")
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
        output.write_text(strict_json.to_text(content, indent=1) + "\n")
    if report is not None:
        from grpo_trainer.report.comparison import write_evaluation

        print(f"page: {write_evaluation(dict(zip(models, results, strict=True)), recipe, split, report)}")


def data(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "grpo-data", "Prepare JSONL files.", f"{_SPLIT_EXAMPLES}{_CONVERT_EXAMPLES}".replace("\n\nexamples:", "")
    )
    commands = parser.add_subparsers(dest="command", required=True)
    text = "split a file into parts, such as for SFT and RL, stratified by a column"
    split = make_parser("split", text, _SPLIT_EXAMPLES, commands)
    split.add_argument("file", type=Path, metavar="FILE", help="JSONL file; its parts are written beside it")
    split.add_argument(
        "--by", metavar="COLUMN", help="column to stratify by, or a quotient A/B of two (B at least 1); default: none"
    )
    split.add_argument("--ratio", type=float, help="share of the first of two parts; default: 0.5")
    split.add_argument("--parts", type=int, default=4, help="number of strata; default: %(default)s, quartiles")
    split.add_argument("--seed", type=int, default=42, help="seed of the random split; default: %(default)s")
    split.add_argument(
        "--names", nargs=2, metavar="NAME", help="names of two parts: FILE.NAME.jsonl; default: phase1 phase2"
    )
    split.add_argument("--into", nargs="+", metavar="NAME=SHARE", help="any number of parts, in place of two")
    split.add_argument("--together", metavar="COLUMN", help="keep lines with the same value of this column in one part")
    convert = make_parser(
        "convert", "convert a published data set into files that recipes read", _CONVERT_EXAMPLES, commands
    )
    convert.add_argument("format", choices=("gsm8k", "convai2", "tweets"), help="the data set")
    convert.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSONL files; tweets: also CSV files")
    convert.add_argument("--output", type=Path, help="files are OUTPUT-PART.jsonl; default: the name of the data set")
    parts = ["train=0.8", "validation=0.1", "test=0.1"]
    convert.add_argument(
        "--into", nargs="+", metavar="PART=SHARE", default=parts, help=f"the parts; default: {' '.join(parts)}"
    )
    convert.add_argument("--seed", type=int, default=42, help="seed of the random split; default: %(default)s")
    convert.add_argument(
        "--annotations", choices=("strip", "keep"), help="gsm8k: calculator annotations <<48/2=24>>; default: strip"
    )
    convert.add_argument(
        "--columns", nargs="+", metavar="NAME=COLUMN", help="tweets: names of the columns in the files"
    )
    convert.add_argument("--leave-out", action="store_true", help="report and leave out lines with bad columns")
    for command in (split, convert):
        command.add_argument("--overwrite", action="store_true", help="replace files that have other lines")
    options = parser.parse_args(arguments)
    if options.command == "convert":
        return _run(lambda: _convert(options))
    if options.into is not None and (options.ratio is not None or options.names is not None):
        parser.error("--into names the parts and their shares, so --ratio and --names cannot be given")
    return _run(lambda: _split(options))


def _split(options: argparse.Namespace) -> None:
    from grpo_trainer.convert import named_shares, split_together
    from grpo_trainer.data import column_values, read_jsonl

    ratio = 0.5 if options.ratio is None else options.ratio
    if not 0 < ratio < 1:
        raise ValueError(f"--ratio: must be between 0 and 1, got {ratio}")
    for name in options.names or ():
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError(f"--names: must be of letters, digits, ., - and _, got {name!r}")
    if options.names and len(set(options.names)) < 2:
        raise ValueError(f"--names: must be two different names, got {options.names[0]!r} twice")
    shares = dict(zip(options.names or ("phase1", "phase2"), (ratio, round(1 - ratio, 12)), strict=True))
    if options.into is not None:
        shares = named_shares(options.into)
    lines = read_jsonl(options.file)
    if not lines:
        raise ValueError(f"{options.file}: must have at least one line, got none")
    by = [0.0] * len(lines) if options.by is None else column_values(lines, options.by)
    strata = 1 if options.by is None else options.parts
    option = "--ratio" if options.into is None else "--into"
    parts = split_together(lines, by, shares, strata, options.seed, options.together, option)
    _write_parts({options.file.with_suffix(f".{name}.jsonl"): part for name, part in parts.items()}, options.overwrite)


def _convert(options: argparse.Namespace) -> None:
    from grpo_trainer import convert

    shares = convert.named_shares(options.into)
    lines, left_out = convert.read(
        options.format, options.files, options.annotations, options.columns, options.leave_out
    )
    for message in left_out:
        print(f"left out: {message}", file=sys.stderr)
    if not lines:
        raise ValueError(f"{', '.join(map(str, options.files))}: must have at least one usable line, got none")
    parts = convert.split(options.format, lines, shares, options.seed)
    output = options.output or Path(options.format)
    paths = {name: output.with_name(f"{output.name}-{name}.jsonl") for name in parts}
    if read_too := {path.resolve() for path in paths.values()} & {path.resolve() for path in options.files}:
        raise ValueError(f"--output: must not replace a file that is read, got {sorted(map(str, read_too))}")
    _write_parts({paths[name]: part for name, part in parts.items()}, options.overwrite)


def _write_parts(parts: dict[Path, list[Any]], overwrite: bool) -> None:
    from grpo_trainer.data import write_parts

    write_parts(parts, overwrite)
    for path, lines in parts.items():
        print(f"{path}: {len(lines)} lines")


def report(arguments: Sequence[str] | None = None) -> int:
    text = "Write plots and a report page for a run, finished or not, or for several runs."
    parser = make_parser("grpo-report", text, _REPORT_EXAMPLES)
    parser.add_argument(
        "folder", type=Path, nargs="*", help="folder of a run, one without --compare; the page is written into it"
    )
    parser.add_argument(
        "--beside", type=Path, nargs="+", default=[], metavar="RUN", help="other runs whose step times are compared"
    )
    parser.add_argument("--compare", type=Path, nargs="+", default=[], metavar="RUN", help="folders of runs to compare")
    parser.add_argument(
        "--adapters", type=Path, nargs="+", default=[], metavar="MODEL", help="folders of one or two LoRA adapters"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="folder of the page of --compare or --adapters; default: ./report"
    )
    options = parser.parse_args(arguments)
    if sum(map(bool, (options.folder, options.compare, options.adapters))) != 1:
        parser.error("one of a run's folder, --compare and --adapters is needed")
    if len(options.folder) > 1:
        parser.error(f"a page is of one run; for several: grpo-report --compare {' '.join(map(str, options.folder))}")
    if options.folder and options.output:
        parser.error("--output is that of --compare and --adapters; the page of a run is in its folder")
    if options.beside and not options.folder:
        parser.error("--beside needs a run's folder")

    def draw() -> None:
        output = options.output or Path("report")
        if output.exists() and not output.is_dir():
            raise ValueError(f"--output: must be a folder, got the file {str(output)!r}")
        if options.compare:
            from grpo_trainer.report.comparison import write_comparison

            print(write_comparison(options.compare, output))
        elif options.adapters:
            from grpo_trainer.report.adapters import write_adapters

            print(write_adapters(options.adapters, output))
        else:
            from grpo_trainer.report import write_report

            print(write_report(options.folder[0], options.beside))

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


def _run(command: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit status; errors that a user can fix are reported in one line."""
    from grpo_trainer.checkpoint import CheckpointError
    from grpo_trainer.distributed import ProcessError
    from grpo_trainer.engine import EngineError
    from grpo_trainer.ray_pool import EmbedderError
    from grpo_trainer.rewards import RewardError
    from grpo_trainer.settings import nearest_file

    try:
        return command() or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except FileNotFoundError as error:
        return _fail(error, f"{error}{nearest_file(error.filename)}")
    except (
        ValueError,
        TypeError,
        OSError,
        FloatingPointError,
        CheckpointError,
        RewardError,
        EmbedderError,
        EngineError,
        ProcessError,
    ) as error:
        return _fail(error, str(error))
    except ModuleNotFoundError as error:
        if error.name is None:  # transformers' own, of a module whose import fails for another reason
            return _fail(error, f"{' '.join(str(error).split())} Cause: {error.__cause__ or error.__context__}")
        return _fail(error, f'{error}; the trainer\'s requirements come with pip install "grpo-kernels[trainer]"')


def _fail(error: Exception, line: str) -> int:
    if os.environ.get("GRPO_TRACEBACK"):
        raise error
    sys.stderr.write(f"error: {line}\n")  # at once, as several processes may print theirs
    return 2
