"""The command grpo as a user types it: what it lists, runs, resumes, evaluates, refuses, tracks, and how it is stopped.

Faults they are there for: a signal or a full disk after which the resumed run has other bits, or that leaves half a
checkpoint; a run that is deleted before another can start; a comparison the wrong way round; a step counted twice over
SFT and RL by a tracker; a resumed run that begins a second one there; NaN drawn as 0.
"""

from __future__ import annotations

import errno
import importlib.machinery
import itertools
import json
import math
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from grpo_trainer import checkpoint, cli, evaluate, interruption, setup, sft
from grpo_trainer import train as training
from grpo_trainer.log import Log
from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import bundled
from grpo_trainer.report.run_folder import RunFolder
from grpo_trainer.tasks import SYSTEMS
from grpo_trainer.train import train

from tests.trainer import small
from tests.trainer.small import assert_equal_runs, lines, newest, steps, stop_before
from tests.trainer.test_recipe import failed
from tools import experiments

HANDLERS = [signal.getsignal(number) for number in interruption.SIGNALS]
OVERRIDES = ("sft.steps=2", "rl.steps=3", "evaluation={every: 1, batch: 4}", "checkpoints={every: 2, keep: 9}")


def command(folder: Path, *more: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(json.dumps(small.values(folder / "runs" / "mine")))
    return ["train", str(folder / "mine.yaml"), *OVERRIDES, *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a recipe and its undisturbed run, runs/mine."""
    folder = tmp_path_factory.mktemp("finished")
    assert cli.main(command(folder)) == 0
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return command(tmp_path)[1]


def test_commands_say_what_there_is(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished)

    def printed(*arguments: str) -> str:
        assert cli.main(arguments) == 0
        return capsys.readouterr().out

    with pytest.raises(SystemExit, match="0"):
        cli.main([])
    assert "grpo train arithmetic " in capsys.readouterr().out
    found = dict(line.split(maxsplit=1) for line in printed("train").split("\n\n")[0].splitlines()[1:])
    assert found.keys() == bundled().keys() and found["dialogue"] == "Replies that use the facts of the persona"
    listed = printed("train", "--list")
    assert "  gspo  " in listed and "not those of TRL's loss types" in listed
    assert "runs/mine/checkpoints/rl-2/model" in printed("eval") and "  runs/mine\n" in printed("report")
    keys = printed("train", "--keys").partition("\n\n")[0].splitlines()
    assert keys == list(cli._keys(Recipe)) and len(keys) > 130
    assert all(line.split(": ", 1)[1].strip() for line in keys)
    assert any(line.startswith("rl.rollout.temperature (") and "default 1.0): sampling" in line for line in keys)
    types = {line.partition(" (")[0]: line.partition(" (")[2].rpartition(", default ")[0] for line in keys}
    assert types["rl.rewards[].name"] == "text" and types["rl.rollout.engine"] == "transformers | vllm"
    assert types["threads"] == "integer above 0 or null" and types["rl.algorithm.beta"] == "number from 0 on or null"
    assert (
        types["sft.optimizer.betas"] == "list of numbers in [0, 1)" and types["rl.rollout.top_p"] == "number in (0, 1]"
    )
    assert types["model.banned"] == "list of integers or texts" and types["logging.to"].startswith("list of wandb | ")
    task = next(line for line in keys if line.startswith("data.task (text or null, default "))
    assert all(name in task for name in SYSTEMS)


def test_a_reader_may_want_the_beginning_only() -> None:
    shell = f"{sys.executable} -m grpo_trainer train --keys | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tran", "invalid choice: 'tran'"),
        ("train --resume", "a recipe is needed"),
        ("train RECIPE --seed=3", "a key of the recipe is set without dashes: seed=VALUE"),
        ("train RECIPE --resum", "the nearest is '--resume'"),
        ("train RECIPE seed=3 seed=4", "a key can be set once, got seed=3 and seed=4"),
        ("train RECIPE --fresh --resume", "--resume continues the run that --fresh deletes"),
        ("train arithmetc", "recipe: no file 'arithmetc'; the nearest is 'arithmetic'; the bundled"),
        ("eval RECIPE a b c", "a recipe and one or two models are needed, got the recipe RECIPE and 3 models"),
        ("eval RUN", "a recipe and one or two models are needed, got the recipe RUN and 0 models"),
        ("eval RECIPE a a", "two different models, got a twice"),
        ("eval RECIPE RUN/checkpoints/rl2/model", "no such model 'RUN/checkpoints/rl2/model'.*/rl-2'"),
        ("eval RECIPE RUN/checkpoints/rl-2/model --json RUN", "Is a directory: 'RUN'$"),
        ("report a --compare b", "one of a run's folder, --compare and --adapters is needed"),
        ("report a --output b", "--output is that of --compare and --adapters"),
        ("report RUN/none", "report: folder must exist, got RUN/none"),
    ],
)
def test_wrong_arguments_are_named(
    finished: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RECIPE": str(finished / "mine.yaml"), "RUN": str(finished / "runs" / "mine")}
    for name, place in places.items():
        arguments, message = arguments.replace(name, place), message.replace(name, place)
    assert re.search(message, failed(capsys, *arguments.split()).strip())


# Runs


def test_runs_are_resumed_or_started_afresh(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, whole = tmp_path / "run", finished / "runs" / "mine"
    here = [*command(finished), f"output={folder}"]
    shutil.copytree(whole, folder)
    for gone in ("rl-2", "rl-3"):
        shutil.rmtree(folder / "checkpoints" / gone)
    said = failed(capsys, *here)
    assert "continue the run in it with --resume" in said and "or write to another with output=..." in said
    assert cli.main([*here, "--resume"]) == 0
    assert "nothing was left" not in capsys.readouterr().err
    assert cli.main([*here, "--resume"]) == 0
    assert f"nothing was left to train after {folder}/checkpoints/rl-3\n" in capsys.readouterr().err
    assert_equal_runs(whole, folder)
    assert "resumed" in {event["event"] for event in lines(folder, "events")}
    failed(capsys, *here, "--fresh", "model.path=/no/such")
    assert len(steps(folder)) == 3, "a run that cannot start deletes nothing"
    (folder / "report.html").unlink()
    assert cli.main([*here, "--fresh", "seed=3"]) == 0
    assert "resumed" not in {event["event"] for event in lines(folder, "events")}
    assert "report: " in capsys.readouterr().out and (folder / "report.html").stat().st_size > 10_000
    assert cli.main([*command(finished), f"output={tmp_path}/new-{{seed}}", "seed=4", "--resume"]) == 0
    assert f"{tmp_path}/new-4 contains no run to resume: starting from the beginning" in capsys.readouterr().err


def test_a_dry_run_describes_a_run_and_starts_nothing(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed command has its own folder first on sys.path instead of the current one."""
    (tmp_path / "my_module.py").write_text("def my_reward(prompts, **_):\n    return [1.0] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    run = tmp_path / "runs" / "mine"
    assert cli.main(["train", recipe, "rl.rewards=[{name: 'my_module:my_reward'}]", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "small: 4 supervised steps of 16 demonstrations, 4 steps of grpo with 6 x 4 responses" in printed
    assert "grpo: advantages: the defaults; loss: kl=k3" in printed and re.search(r"rl: 24 lines; .* tokens", printed)
    assert printed.endswith("nothing is missing\n") and not run.exists()
    shortest = [int(least) for least in re.findall(r"prompts have (\d+) to", printed)]
    for length, status in ((max(shortest), 0), (min(shortest) - 1, 2)):  # one prompt that fits is enough
        assert cli.main(["train", recipe, "--dry-run", f"model.max_prompt_length={length}"]) == status
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text("name: x")
    for options in (["--resume"], ["--fresh"], []):
        capsys.readouterr()
        assert cli.main(["train", recipe, "--dry-run", *options]) == 0
        noted = f"note: output: must be a folder without a run, got '{run}'" in capsys.readouterr().out
        assert noted == (not options)


def test_one_model_is_evaluated_and_two_are_compared(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, page = finished / "runs" / "mine", tmp_path / "made" / "out.json", tmp_path / "page"
    prefix, before, after = ["eval", str(finished / "mine.yaml")], f"{run}/checkpoints/sft-2/model", str(newest(run))
    # evaluations sample with the policy, so they need no engine
    rewards = small.rewarded_by("equal", part="evaluation")
    long = f"data.template='{{prompt}}{'x' * 300}'"  # no name of a file
    unused = ["rl.rollout.engine=vllm", "rl.algorithm.similarity={embedder: no/such, workers: 2}"]
    assert cli.main([*prefix, after, "evaluation.test_prompts=5", rewards, *unused, long]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"{after}\n  reward +1\.0000\n(.*\n)+  prompts +5\.0000\n", printed) and "before" not in printed
    reported = ["--json", str(out), "--report", str(page), "evaluation.samples=3", "evaluation.embedder=hashed"]
    assert cli.main([*prefix, before, after, *reported, "--split", "validation"]) == 0
    printed = capsys.readouterr().out
    assert before in printed and after in printed and "page: " in printed and list(page.glob("*.html"))
    results = json.loads(out.read_text())
    assert set(results) == {before, after, "comparison"} and len(results[before]["prompts"]) == 8
    logged = [e for e in lines(run) if "eval/validation_reward" in e]
    assert results[after]["metrics"]["reward"] == logged[-1]["eval/validation_reward"]
    reward = results["comparison"]["measures"]["reward"]
    assert (reward["before"], reward["after"]) == tuple(
        pytest.approx(results[side]["metrics"]["reward"]) for side in (before, after)
    )


def test_threads_are_set_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("os.getloadavg", lambda: (2.0, 0, 0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)), raising=False)
    for threads, expected in ((4, 4), (None, 3)):
        cli._set_threads(threads)
        assert torch.get_num_threads() == expected


# Runs that end early

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("target", "place", "named"),
    [("grpo_trainer.checkpoint.save_policy", 1, "checkpoints/rl-2"), ("pathlib.Path.open", 0, "samples.jsonl")],
)
def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    place: int,
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The path is that argument of the function."""
    arguments, real = command(tmp_path, "rl.algorithm.beta=0.0"), pkgutil.resolve_name(target)

    def full(*args: Any, **kwargs: Any) -> Any:
        if re.search("rl-2|samples", str(args[place])):
            raise FULL
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(target, full)
        stderr = failed(capsys, *arguments)
    run = tmp_path / "runs" / "mine"
    assert f"{run}/{named}" in stderr and "No space left on device" in stderr
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["sft-2"]
    assert cli.main([*arguments, "--resume"]) == 0


def raising(real: Callable[..., Any], at_call: int, *numbers: int) -> Callable[..., Any]:
    """The function, which receives signals in one of its calls."""
    calls = [0]

    def function(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        for number in numbers if calls[0] == at_call else ():
            signal.raise_signal(number)
        return real(*args, **kwargs)

    return function


ASKED, ON = "stopping after this step; once more stops at once", "the same command and --resume\n"
# place of the signals, number of the call, the signals, the status, and what is said in the end
MOMENTS: dict[str, tuple[Any, str, int, tuple[int, ...], int, str]] = {
    "sft": (sft, "encode_demonstration", 10, (signal.SIGINT,), 130, f"checkpoints/sft-1; continue with {ON}"),
    "sampling": (setup, "roll_out", 2, (signal.SIGINT,), 130, f"checkpoints/rl-1; continue with {ON}"),
    "reward": (training, "score", 3, (signal.SIGTERM,), 143, f"checkpoints/rl-3; continue with {ON}"),
    "first evaluation": (evaluate, "roll_out", 1, (signal.SIGINT,), 130, "stopped: before the first checkpoint; "),
    "last evaluation": (evaluate, "roll_out", 8, (signal.SIGINT,), 130, "/rl-3; "),
    "checkpoint": (checkpoint, "save_policy", 3, (signal.SIGINT,), 130, "/rl-2; "),
    "forwarded": (training, "score", 3, (signal.SIGINT, signal.SIGTERM), 130, "/rl-3; "),
    # a second signal stops at once
    "reward, twice": (training, "score", 3, (signal.SIGINT,) * 2, 130, "/rl-2; "),
    "checkpoint, twice": (checkpoint, "save_policy", 3, (signal.SIGINT,) * 2, 130, "/rl-0; "),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_stops_at_a_step_and_resumes_with_the_same_bits(
    moment: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module, name, call, numbers, status, said = MOMENTS[moment]
    is_twice, run = moment.endswith("twice"), tmp_path / "runs" / "mine"
    monkeypatch.setattr("grpo_trainer.report.run_page.write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("grpo_trainer.report.run_page.summary", lambda folder: "")
    with monkeypatch.context() as patch:
        if is_twice:
            patch.setattr(interruption, "SAME_SECONDS", -1.0)
        patch.setattr(module, name, raising(getattr(module, name), call, *numbers))
        assert cli.main(command(tmp_path, *["--fresh"] * is_twice)) == status
    assert [signal.getsignal(number) for number in interruption.SIGNALS] == HANDLERS
    stderr = capfd.readouterr().err
    assert said in stderr and stderr.count(ASKED) == 1 and "Traceback" not in stderr
    assert ("--resume in place of --fresh\n" if is_twice else ON) in stderr
    assert not [*run.rglob(".new*")]
    assert cli.main(command(tmp_path, "--resume")) == 0
    assert_equal_runs(run, finished / "runs" / "mine")


def test_all_processes_stop_if_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of all processes are reduced before any process stops."""
    monkeypatch.setattr(interruption.distributed, "all_reduce_max", lambda flag: max(flag, 1))
    with interruption.handled(), pytest.raises(interruption.Stopped):
        interruption.stop_if_asked()
    monkeypatch.setattr(interruption.distributed, "all_reduce_max", lambda flag: flag)
    with interruption.handled():
        interruption.stop_if_asked()


def test_commands_end_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "evaluate", "report"):
        monkeypatch.setattr(cli, name, mock.Mock(side_effect=KeyboardInterrupt))
        assert cli.main([name.replace("evaluate", "eval")]) == 130
        assert capsys.readouterr().err == "interrupted\n"


# The tool that trains recipes on several seeds


calls = itertools.count()


def rising(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that seeds differ in, although greedy responses without training are the same for all of them."""
    return [next(calls) / 99 for _ in completions]


def test_experiments_on_seeds(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content: dict[str, Any] = {"base": str(finished / "mine.yaml"), "name": "own", "sft": {"steps": 1}}
    content["rl"] = {"steps": 1, "rewards": [{"name": f"{__name__}:rising"}]}
    (tmp_path / "own.yaml").write_text(json.dumps(content))
    (tmp_path / "other.yaml").write_text("base: own.yaml\nname: other\nrl: {optimizer: {lr: 0.1}}\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["experiments.py", "own.yaml", "other.yaml", "--seeds", "0", "1", "--folder", "made"]
    monkeypatch.setattr(sys, "argv", arguments)
    experiments.main()
    printed = capsys.readouterr().out
    means, gains, *_ = [
        line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| own.yaml |")
    ]
    ends = [RunFolder(Path("made") / f"own.yaml-{seed}").final_evaluation() for seed in (0, 1)]
    first, second = (end.metrics["reward"] for end in ends if end is not None)
    assert abs(first - second) > 0.01
    half = abs(first - second) / 2 * 12.7062  # Student's t with one degree of freedom
    assert means[1] == gains[3] == f"{(first + second) / 2:.3f} +- {half:.3f}"
    assert gains[1] == "reward" and len(gains[5].split(", ")) == 2 and "| other.yaml less own.yaml |" in printed
    assert "page: made/comparison/comparison.html" in printed
    before = {path: path.stat().st_mtime for path in Path("made").rglob("*.safetensors")}
    experiments.main()  # finished runs are read
    assert before == {path: path.stat().st_mtime for path in Path("made").rglob("*.safetensors")}
    for key, value in (("rl.optimizer.lr", 0.5), ("evaluation.test_prompts", 3)):
        monkeypatch.setattr(sys, "argv", [*arguments, f"{key}={value}", "logging.every=2"])
        with pytest.raises(ValueError, match=f"another recipe, got 'made/own.yaml-0', where {key} is .* {value} here"):
            experiments.main()
    # variants continue from one SFT
    variants = {"plain": [], "doctor": ["rl.algorithm={name: dr_grpo}"]}
    experiment = experiments.Experiment("own.yaml", variants, lambda _: {"one": 1.0})
    monkeypatch.setitem(experiments.EXPERIMENTS, "mine", experiment)
    overrides = ["rl.algorithm.beta=0.05", "checkpoints.every=1"]
    runs = experiments.run_experiment("mine", 3, tmp_path / "variants", overrides)
    model = str(runs["SFT"].path / "checkpoints" / "sft-1" / "model")
    paths = {name: run.setting("model.path") for name, run in runs.items()}
    assert paths == {"SFT": "tiny", "plain": model, "doctor": model}
    assert runs["doctor"].setting("rl.algorithm.name") == "dr_grpo" and runs["plain"].setting("seed") == 3
    assert runs["SFT"].setting("evaluation.max_completion_length") == 12
    assert runs["doctor"].setting("rl.algorithm.beta") == runs["plain"].setting("rl.algorithm.beta") == 0.05
    untrained = experiments.finished(small.recipe(tmp_path / "untrained", "sft=null", "rl=null"))
    assert experiments.figures(untrained)["exact"] == 0


# Trackers and the progress line

SHORT = ("sft.steps=2", "rl.steps=2", "rl.rollout.prompts=2", "checkpoints.every=1")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins of the packages, which note their calls and keep tables and histograms as they are."""
    modules = {
        name: mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None)) for name in ("wandb", "trackio")
    }
    for name, fake in modules.items():
        fake.Table.side_effect = lambda dataframe: dataframe
        fake.Histogram.side_effect = lambda values, num_bins: values
        monkeypatch.setitem(sys.modules, name, fake)
    return modules


def logged(fake: Any) -> list[tuple[int, dict[str, Any]]]:
    return [(call.kwargs["step"], call.args[0]) for call in fake.log.call_args_list]


def test_everything_arrives_with_its_step_and_a_resumed_run_continues(
    tmp_path: Path, fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    to = ("logging.to=[wandb, trackio]", "logging.project=mine", "logging.samples=3")
    recipe = small.recipe(tmp_path, *SHORT, *to)
    stop_before(monkeypatch, recipe, "rl", 2)
    with pytest.raises(FileExistsError):
        train(recipe)  # refused before a tracker is opened
    train(recipe, resume=True)
    header = ("kind", "phase", "step", "split", "time")
    expected = [
        (e["step"] + 2 * (e["phase"] == "rl"), {k: v for k, v in e.items() if k not in header and v is not None})
        for e in lines(tmp_path)
    ]
    samples, first = lines(tmp_path, "samples"), steps(tmp_path)[0]
    for name, fake in fakes.items():
        entries = [(step, values) for step, values in logged(fake) if not {"samples", "histograms/rewards"} & {*values}]
        assert all(entry in entries for entry in expected) and fake.finish.call_count == 2
        begun, again = (call.kwargs for call in fake.init.call_args_list)
        assert begun["project"] == "mine" and begun["name"].startswith("small") and begun["config"]["seed"] == 0
        assert begun == again and begun["resume"] == "allow"
        tables = [(step, values["samples"]) for step, values in logged(fake) if "samples" in values]
        assert [step for step, _ in tables] == [3, 4]
        assert [*tables[1][1].columns] == ["prompt", "response", "rewards", "advantage"]
        assert [*tables[1][1]["response"]] == [sample["response"] for sample in samples[-3:]]
        histograms = [(step, v["histograms/rewards"]) for step, v in logged(fake) if "histograms/rewards" in v]
        assert [step for step, _ in histograms] == [3, 4] and len(histograms[0][1]) == 8
        assert histograms[0][1].max() == pytest.approx(first["rewards/max"])
        Log(small.recipe(tmp_path / f"other {name}", f"logging.to=[{name}]")).open("sft", 0)
        key = "id" if name == "wandb" else "name"
        assert fake.init.call_args.kwargs[key] != begun[key]


def test_the_progress_line_of_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    log = Log(small.recipe(tmp_path, "logging.progress=true"))
    log.progress("rl", 1, 100, {"rewards/mean": 0.4567, "train/kl_mean": 0.0012, "speed/tokens_per_second": 12345.6})
    log.line("a line above")
    log.close()
    printed = capsys.readouterr().err
    assert "1/100" in printed and "reward 0.457, KL 0.001, tokens/s 12,346" in printed and "\ra line above\n" in printed


def test_undefined_values_are_left_out_and_a_tracker_that_refuses_is_named(
    tmp_path: Path, fakes: dict[str, Any]
) -> None:
    recipe, fake = small.recipe(tmp_path, "logging.to=[wandb]"), fakes["wandb"]
    log = Log(recipe)
    log.metrics("rl", 3, {"a": math.nan, "b": 0.0, "c": math.inf})
    assert [lines(tmp_path)[0][name] for name in "abc"] == [None, 0.0, None]
    log.histograms("rl", 3, {"x": torch.tensor([[0.0, math.nan], [1.0, math.inf]]), "y": torch.tensor([math.nan])})
    metrics, (step, values) = logged(fake)
    assert metrics == (7, {"b": 0.0, "c": math.inf})
    assert step == 7 and [*values] == ["x"] and values["x"].tolist() == [0.0, 1.0]
    fake.Error, fake.init.side_effect = (
        RuntimeError,
        RuntimeError("No API key configured.\nUse `wandb login` to log in."),
    )
    refused = r"^logging\.to: wandb refuses the run: No API key configured\. Use `wandb login` to log in\.$"
    with pytest.raises(ValueError, match=refused):
        Log(recipe).open("sft", 0)


@pytest.mark.full
def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    train(small.recipe(tmp_path / "run", *SHORT, "logging.to=[wandb]"))
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    samples = lines(tmp_path / "run", "samples")
    assert sorted(row[1] for table in tables for row in table["data"]) == sorted(line["response"] for line in samples)


def test_tensorboard_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(small.recipe(tmp_path, "logging.to=[tensorboard]"))
    log.open("sft", 0)
    log.metrics("sft", 4, {"train/loss": 2.0})
    log.metrics("rl", 1, {"train/loss": 8.0})
    log.close()  # a kill after a checkpoint, from which the run goes on
    log.open("sft", 4)
    log.metrics("rl", 1, {"train/loss": 0.5, "train/kl_mean": math.nan})
    log.samples("rl", 1, [{"prompt": "1 | 2", "response": "a\nb", "rewards": [0.5], "advantage": 0.25}])
    log.histograms("rl", 1, {"histograms/rewards": torch.tensor([0.0, 1.0, 1.0])})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(4, 2.0), (5, 0.5)]
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[2] == "| 1 \\| 2 | a<br>b | [0.5] | 0.25 |"
    (histogram,) = events.Histograms("histograms/rewards")
    assert histogram.step == 5 and histogram.histogram_value.num == 3 and histogram.histogram_value.sum == 2
