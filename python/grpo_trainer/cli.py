"""The command grpo: train, eval and report. Heavy imports are deferred until they are needed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

if TYPE_CHECKING:
    from grpo_trainer.recipe import Recipe

# Waiting threads must sleep: spinning keeps a core from processes that need it. OpenMP reads this when torch loads it,
# so it precedes everything that imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_OVERRIDE = "sets a key of the recipe; dots separate nested keys; grpo train --keys lists all keys"
_TRAIN_EXAMPLES = """
examples:
  grpo train arithmetic                            train the default recipe; minutes on a CPU
  grpo train arithmetic seed=1 rl.steps=40         change keys of the recipe
  grpo train arithmetic rl.algorithm.name=dr_grpo  with another algorithm
  grpo train my.yaml --dry-run                     see what a recipe of your own needs
  grpo train my.yaml --resume                      continue a run that was stopped or killed
Ctrl-C ends a run after the present step, or before it while it samples, with a checkpoint.
"""
_EVAL_EXAMPLES = """
examples:
  grpo eval arithmetic runs/arithmetic-0/checkpoints/rl-80/model
  grpo eval my.yaml BEFORE AFTER --split validation --json comparison.json
  grpo eval my.yaml MODEL evaluation.samples=8 evaluation.temperature=0.7
"""
_REPORT_EXAMPLES = """
examples:
  grpo report runs/arithmetic-0                                 a page for a run, also while it trains
  grpo report --compare runs/a-0 runs/a-1 runs/b-0 runs/b-1     recipes side by side, over their seeds
  grpo report --adapters runs/a/checkpoints/rl-80/model         what LoRA adapters have learned
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status; errors that a user can fix are reported in one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"train": train, "eval": evaluate, "report": report}
    if not given or given[0] not in commands:
        examples = f"{_TRAIN_EXAMPLES}{_EVAL_EXAMPLES}{_REPORT_EXAMPLES}"
        parser = _parser("grpo", "Train language models with GRPO.", examples)
        parser.add_argument("command", choices=commands, help="train a recipe, evaluate a model, or report on a run")
        parser.parse_args(given[:1] or ["--help"])
    try:
        return commands[given[0]](given[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        line = _line_of(error)
        if line is None or os.environ.get("GRPO_TRACEBACK"):
            raise
        sys.stderr.write(f"error: {line}\n")  # at once, as several processes may print theirs
        return 2


def _line_of(error: Exception) -> str | None:
    """The line that reports an error; None for one that is a fault of the trainer."""
    if isinstance(error, ModuleNotFoundError):
        if error.name is None:  # transformers' own, of a module whose import fails for another reason
            return f"{' '.join(str(error).split())} Cause: {error.__cause__ or error.__context__}"
        return f'{error}; the trainer\'s requirements come with pip install "grpo-kernels[trainer]"'
    if isinstance(error, FileNotFoundError):
        from grpo_trainer.messages import nearest_file

        return f"{error}{nearest_file(error.filename)}"
    is_ours = type(error).__module__.startswith("grpo_trainer.")
    return str(error) if is_ours or isinstance(error, ValueError | TypeError | OSError | FloatingPointError) else None


class _Parser(argparse.ArgumentParser):
    """A parser whose error about an unknown option names the nearest one, or says how to set a recipe's key."""

    def error(self, message: str) -> NoReturn:
        from grpo_trainer.messages import nearest
        from grpo_trainer.recipe import Recipe

        _, mark, unknown = message.partition("unrecognized arguments: ")
        if mark:
            key = unknown.split()[0].lstrip("-").partition("=")[0]
            is_key = key.partition(".")[0] in Recipe.model_fields
            as_key = f"; a key of the recipe is set without dashes: {key}=VALUE" if is_key else ""
            message += as_key or nearest(unknown.split()[0], sorted(self._option_string_actions))
        super().error(message)


def _refuse_repeated(parser: argparse.ArgumentParser, overrides: Sequence[str]) -> None:
    """Refuses a key that is set twice, of which only the last value would count."""
    by_key: dict[str, str] = {}
    for assignment in overrides:
        first = by_key.setdefault(assignment.partition("=")[0], assignment)
        if first is not assignment:
            parser.error(f"a key can be set once, got {first} and {assignment}")


def _parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    epilog = examples.replace("\n\nexamples:", "").strip()
    return _Parser(name, description=description, epilog=epilog, formatter_class=kind, allow_abbrev=False)


def train(arguments: Sequence[str]) -> int:
    parser = _parser("grpo train", "Train a recipe. Without arguments: show what there is.", _TRAIN_EXAMPLES)
    parser.add_argument("recipe", nargs="?", help="a YAML file, or the name of a bundled recipe (--list)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=_OVERRIDE)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the output folder")
    parser.add_argument("--fresh", action="store_true", help="delete an earlier run in the output folder")
    parser.add_argument("--smoke", action="store_true", help="run for seconds only, to see that everything works")
    parser.add_argument("--dry-run", action="store_true", help="say what is missing, and start nothing")
    parser.add_argument("--keys", action="store_true", help="explain every key of a recipe")
    parser.add_argument("--list", action="store_true", help="list the bundled recipes and the algorithms")
    options = parser.parse_intermixed_args(arguments)
    if options.keys:
        return _print("\n".join(_all_keys()))
    if options.list or not arguments:
        return _print(_overview())
    if options.recipe is None:
        parser.error("a recipe is needed; --list names the bundled ones")
    if options.resume and options.fresh:
        parser.error("--resume continues the run that --fresh deletes")
    _refuse_repeated(parser, options.overrides)
    return _train(options)


def _print(text: str) -> int:
    """Prints a text of which the reader, such as head, may want the beginning only."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)
    return 0


def _overview() -> str:
    """What there is to train, and how to begin."""
    from grpo_trainer import recipes
    from grpo_trainer.algorithm import ALGORITHMS

    found = {name: recipes.description(path) for name, path in sorted(recipes.bundled().items())}
    width = max(map(len, found)) + 2
    lines = [
        "recipes:",
        *(f"  {name:<{width}}{text}" for name, text in found.items()),
        "",
        "algorithms, and what they set of AdvantageConfig and LossConfig (the names are the trainer's,",
        "not those of TRL's loss types, which gk.policy_loss(config=...) takes):",
        *(f"  {name:<{width}}{_fields(*defaults)}" for name, defaults in ALGORITHMS.items()),
        "",
        "grpo train arithmetic           train the default recipe; minutes on a CPU",
        "grpo train NAME --smoke         see in seconds that a recipe works",
        "grpo train NAME --dry-run       what is missing here for a recipe",
        "grpo train --keys               every key of a recipe",
    ]
    return "\n".join(lines)


def _fields(*configs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for fields in configs for name, value in fields.items()) or "nothing"


def _all_keys() -> Iterator[str]:
    """The keys of a recipe, then the options of every bundled task and reward."""
    from grpo_trainer import rewards, tasks
    from grpo_trainer.recipe import Recipe

    yield from _keys(Recipe)
    for name in tasks.SYSTEMS:
        yield f"\ndata.options of the task {name}:"
        yield from _keys(tasks.load_task(name).Options, "  ")
    for name in rewards.BUNDLED:
        lines = list(_keys(rewards.load_class(name), "  "))
        yield f"\noptions of the reward {name}:{'' if lines else ' none'}"
        yield from lines


def _keys(kind: Any, where: str = "") -> Iterator[str]:
    """A line for every key: its type or choices, its default, and what it means."""
    from grpo_trainer.recipes import section_in

    for name, field in kind.model_fields.items():
        if name in getattr(kind, "unused", ()):
            continue
        path, nested = f"{where}{name}", section_in(field.annotation)
        text = " ".join((field.description or "").split())
        if nested is None:
            shown = _type(field.annotation, field.metadata)
            state = "required"
            if not field.is_required():
                state = f"default {json.dumps(field.get_default(call_default_factory=True))}"
            yield f"{path} ({shown}, {state}): {text}".removesuffix(": ")
        else:
            yield f"{path}: {text}"
            yield from _keys(nested, f"{path}[]." if isinstance(field.default, list) else f"{path}.")


def _type(annotation: Any, limits: Sequence[Any] = (), plural: str = "") -> str:
    """A key's type in words, such as "list of numbers in [0, 1)"."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return _type(parts[0], [limit for of in parts[1:] for limit in getattr(of, "metadata", [of])], plural)
    if kind is Literal:
        return " | ".join(parts)
    if kind in (list, tuple):
        return f"{'list' if kind is list else 'pair'} of {_type(parts[0], plural='s')}"
    if kind in (Union, types.UnionType):
        return " or ".join(_type(part, plural=plural) for part in parts)
    names = {str: "text", int: "integer", float: "number", bool: "boolean", type(None): "null"}
    name = f"{names[annotation]}{plural}" if annotation in names else "mapping"
    ends = {end: getattr(limit, end) for limit in limits for end in ("gt", "ge", "lt", "le") if hasattr(limit, end)}
    low, high = ends.get("gt", ends.get("ge")), ends.get("lt", ends.get("le"))
    if high is not None:
        return f"{name} in {'(' if 'gt' in ends else '['}{low}, {high}{')' if 'lt' in ends else ']'}"
    return name if low is None else f"{name} above {low}" if "gt" in ends else f"{name} from {low} on"


def _train(options: argparse.Namespace) -> int:
    from grpo_trainer.recipes import load

    recipe = load(options.recipe, options.overrides, options.smoke)
    _import_from_current_folder()
    if options.dry_run:
        return _dry_run(recipe, options.resume or options.fresh)
    _set_threads(recipe.threads)
    from grpo_trainer import checkpoint, distributed, interruption
    from grpo_trainer.report.run_page import summary, write_report
    from grpo_trainer.train import train as train_recipe

    if not options.resume and not options.fresh:
        checkpoint.refuse_used_folder(recipe)  # before the model is loaded
    is_main = os.environ.get("RANK", "0") == "0"
    if options.resume and is_main and not checkpoint.is_used(recipe):
        print(f"{recipe.folder} contains no run to resume: starting from the beginning", file=sys.stderr)
    last = checkpoint.final_folder(recipe)
    is_trained = options.resume and last is not None and last.exists()
    with interruption.handled():
        try:
            train_recipe(recipe, options.resume, options.fresh)
        except BaseException as error:
            if not (isinstance(error, interruption.Stopped) or interruption.is_immediate()):
                raise
            if is_main:
                print(_how_to_continue(recipe, options.fresh), file=sys.stderr)
            if not interruption.is_immediate():  # otherwise other processes may be gone already
                distributed.destroy_process_group()
            return 128 + (interruption.signal_number() or 0)
    distributed.destroy_process_group()
    if is_main:
        page = write_report(recipe.folder)
        if is_trained:
            print(f"nothing was left to train after {last}", file=sys.stderr)
        print(summary(recipe.folder))
        print(f"report: {page}")
    return 0


def _dry_run(recipe: Recipe, may_hold_run: bool) -> int:
    from grpo_trainer.dry_run import dry_run

    lines, problems = dry_run(recipe, may_hold_run)
    print("\n".join(lines))
    if problems:
        raise ValueError("\n  ".join(["this run cannot start:", *problems]))
    print("nothing is missing")
    return 0


def _how_to_continue(recipe: Recipe, is_fresh: bool) -> str:
    """Last line of a run that was asked to stop."""
    from grpo_trainer.checkpoint import last_folder

    folder = last_folder(recipe)
    last = "before the first checkpoint" if folder is None else f"the last checkpoint is {folder}"
    option = "--resume in place of --fresh" if is_fresh else "--resume"
    return f"stopped: {last}; continue with the same command and {option}"


def evaluate(arguments: Sequence[str]) -> int:
    text = "Evaluate a model, or compare two on the same prompts."
    parser = _parser("grpo eval", text, _EVAL_EXAMPLES)
    parser.add_argument("recipe", help="a YAML file or bundled recipe with the data, rewards and sampling to use")
    models_help = f"folder or hub name of one model, or of two to compare; KEY=VALUE {_OVERRIDE}"
    parser.add_argument("models", nargs="*", metavar="MODEL | KEY=VALUE", help=models_help)
    splits = ("train", "validation", "test")
    parser.add_argument("--split", choices=splits, default="test", help="part of the data; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results, including every response")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="folder for a page with intervals and plots")
    if not arguments:
        found = sorted(Path("runs").glob("*/checkpoints/*/model"))
        return _print("\n".join([parser.format_help(), "models in runs/:", *(f"  {path}" for path in found)]))
    options = parser.parse_intermixed_args(arguments)
    models = [argument for argument in options.models if "=" not in argument or os.path.exists(argument)]
    overrides = [argument for argument in options.models if argument not in models]
    if not 1 <= len(models) <= 2:
        got = f"the recipe {options.recipe} and {len(models)} models"
        parser.error(f"a recipe and one or two models are needed, got {got}")
    if len(set(models)) < len(models):
        parser.error(f"two different models, got {models[0]} twice")
    _refuse_repeated(parser, overrides)
    return _evaluate(options, overrides, models)


def _evaluate(options: argparse.Namespace, overrides: list[str], models: list[str]) -> int:
    from grpo_trainer.recipes import load

    recipe = load(options.recipe, overrides)
    _set_threads(recipe.threads)
    _import_from_current_folder()
    from grpo_trainer import distributed, pretrained
    from grpo_trainer.evaluate import evaluate_model
    from grpo_trainer.log import to_json
    from grpo_trainer.report.compare import compare
    from grpo_trainer.report.comparison import write_evaluation

    for model in models:
        pretrained.refuse_missing(model)
        if model == "tiny" and Path(model).is_dir():
            raise ValueError("MODEL: must be './tiny' for the folder, got 'tiny', the model that a recipe makes anew")
    if options.json is not None:  # fails before the evaluation, whose results would be lost
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.open("a").close()
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
    results = {model: evaluate_model(recipe, model, options.split).to_json() for model in models}
    if not distributed.is_main_process():
        return 0
    for model, result in results.items():
        print(model)
        for key, value in result["metrics"].items():
            print(f"  {key:<28} {value:.4f}")
    if options.json is not None:  # before the comparison, which may raise
        options.json.write_text(to_json(results, indent=1) + "\n")
    if options.report is not None:
        print(f"page: {write_evaluation(results, recipe, options.split, options.report)}")
    if len(results) == 2:
        before, after = results.values()
        comparison = compare(before, after, recipe.evaluation.solved)
        print(f"\nbefore: the first model; after: the second\n{comparison.table()}")
        if options.json is not None:
            options.json.write_text(to_json({**results, "comparison": comparison.to_json()}, indent=1) + "\n")
    return 0


def report(arguments: Sequence[str]) -> int:
    text = "Write a page with plots for a run, finished or not, or for several runs."
    parser = _parser("grpo report", text, _REPORT_EXAMPLES)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run, into which the page is written")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], metavar="RUN", help="folders of runs to compare")
    adapters = "folders of one or two LoRA adapters"
    parser.add_argument("--adapters", type=Path, nargs="+", default=[], metavar="MODEL", help=adapters)
    output = "folder of the page of --compare or --adapters; default: ./report"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=output)
    if not arguments:
        found = sorted(path.parent for path in Path("runs").glob("*/recipe.yaml"))
        return _print("\n".join([parser.format_help(), "runs in runs/:", *(f"  {path}" for path in found)]))
    options = parser.parse_args(arguments)
    if sum(map(bool, (options.run, options.compare, options.adapters))) != 1:
        parser.error("one of a run's folder, --compare and --adapters is needed")
    if options.run and options.output:
        parser.error("--output is that of --compare and --adapters; the page of a run is in its folder")
    from grpo_trainer.report.adapters import write_adapters
    from grpo_trainer.report.comparison import write_comparison
    from grpo_trainer.report.run_page import summary, write_report

    folder = options.output or Path("report")
    if options.compare:
        print(write_comparison(options.compare, folder))
    elif options.adapters:
        print(write_adapters(options.adapters, folder))
    else:
        page = write_report(options.run)
        print(summary(options.run))
        print(f"report: {page}")
    return 0


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
