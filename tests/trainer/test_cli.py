"""The command grpo, called with the arguments that a user types: what it lists, runs, resumes, evaluates, refuses."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_trainer import cli
from grpo_trainer.dry_run import dry_run
from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import bundled
from grpo_trainer.train import train
from safetensors import SafetensorError

import grpo_kernels as gk
from tests import harness
from tests.trainer import small
from tests.trainer.small import assert_equal_runs, lines, newest, steps

HERE = "tests.trainer.test_cli"
SHORT = ["sft.steps=2", "rl.steps=2", "evaluation.every=0", "rl.rollout.prompts=3", "checkpoints.every=1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a recipe and its finished run, runs/mine."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mine.yaml").write_text(json.dumps(small.values(folder / "runs" / "mine")))
    assert cli.main(["train", str(folder / "mine.yaml"), *SHORT, "checkpoints.keep=9"]) == 0
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(small.values(tmp_path / "run")))
    return str(path)


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a command that fails."""
    capsys.readouterr()
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    printed = capsys.readouterr()
    assert status == 2 and "Traceback" not in printed.err and "  reward " not in printed.out
    return printed.err


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
    assert "  gspo  " in printed("train", "--list")
    assert "runs/mine/checkpoints/rl-2/model" in printed("eval") and "  runs/mine\n" in printed("report")
    keys = printed("train", "--keys").splitlines()
    assert keys == list(cli._keys(Recipe)) and len(keys) > 130
    assert all(line.split(": ", 1)[1].strip() for line in keys)
    assert any(line.startswith("rl.rollout.temperature (") and "default 1.0): sampling" in line for line in keys)
    assert any(line.startswith("rl.rewards[].name (str, default 'exact'): ") for line in keys)


def test_a_reader_may_want_the_beginning_only() -> None:
    command = f"{sys.executable} -m grpo_trainer train --keys | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr


# Errors

number = 1


class OfLength:
    """A reward with a state, of which a recipe must name an instance."""

    def __call__(self, prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        return [float(len(text) == 3) for text in completions]


def without_columns(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


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
        ("eval RECIPE a b c", "one or two models, got 3"),
        ("eval RECIPE a a", "two different models, got a twice"),
        ("eval RECIPE RUN/checkpoints/rl2/model", "no such model 'RUN/checkpoints/rl2/model'.*/rl-2'"),
        ("eval RECIPE RUN/checkpoints/rl-2/model --json RUN", "Is a directory: 'RUN'$"),
        ("report a --compare b", "one of a run's folder, --compare and --adapters is needed"),
        ("report a --output b", "--output is that of --compare and --adapters"),
        ("report RUN/none", "folder must have a recipe.yaml or metrics.jsonl, got RUN/none"),
    ],
)
def test_wrong_arguments_are_named(
    finished: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RECIPE": str(finished / "mine.yaml"), "RUN": str(finished / "runs" / "mine")}
    for name, place in places.items():
        arguments, message = arguments.replace(name, place), message.replace(name, place)
    assert re.search(message, failed(capsys, *arguments.split()).strip())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("seed=[3", r"seed: must be YAML, got '\[3'"),
        ("data.task=arithmetik", "got 'arithmetik'; the nearest is 'arithmetic'"),
        ("rl.rewards=[{name: exat}]", r"rl\.rewards\.0\.name: must be one of exact, gsm8k,"),
        ("model.path=/no/such/folder", "/no/such/folder"),
        ("model.path=no_such_package:model.gguf", "pip install --no-deps no-such-package"),
        ("data={task: null, train: /no/such/file.jsonl}", "/no/such/file.jsonl"),
        ("backend=kernel", "backend: must be auto or reference where no kernel runs"),
        ("output=FILE/run", r"output: must be a folder, got '.*', where '.*' is a file"),
        (f"rl.rewards=[{{name: '{HERE}:number'}}]", r"rl\.rewards\.0\.name: must name a function, got .* int"),
        (f"rl.rewards=[{{name: '{HERE}:without_columns'}}]", r"rl\.rewards\.0: .* must take prompts, completions"),
        (f"rl.rewards=[{{name: '{HERE}:OfLength'}}]", r"rl\.rewards\.0\.name: .* name an instance of the class"),
        ("evaluation.samples=2 + evaluation.embedder=./none", r"evaluation\.embedder: no such model './none'"),
        ("rl.algorithm.similarity={embedder: 'FOLDER'}", r"rl\.algorithm\.similarity\.embedder: must be a model"),
        (
            "model.max_prompt_length=2",
            r"data: sft has no usable line; prompts left out: .* model\.max_prompt_length, 2",
        ),
        (
            "rl=null + data={task: null, train: 'LINES', demonstration: d, test: 'LINES'}",
            r"evaluation\.rewards\.0: 'exact' needs the column 'answer'; .*; set evaluation\.rewards for others",
        ),
        (  # it is evaluated before and after all the same
            "rl=null + evaluation.every=0 + data={task: null, train: 'LINES', demonstration: d, validation: 'LINES'}",
            r"evaluation\.rewards\.0: 'exact' needs the column 'answer'",
        ),
        ("model.chat_template=true", r"model\.chat_template: true needs a tokenizer with a chat template"),
    ],
)
def test_a_dry_run_and_a_run_refuse_alike(
    recipe: str,
    tmp_path: Path,
    overrides: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gk, "available_kernels", lambda: {"cuda": "no GPU", "cpu": "none"})
    (tmp_path / "file").write_text("")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"prompt": "1 + 1", "d": "2"}) + "\n")
    for name, place in (("FILE", tmp_path / "file"), ("FOLDER", tmp_path), ("LINES", tmp_path / "lines.jsonl")):
        overrides = overrides.replace(name, str(place))
    for more in ([], ["--dry-run"]):
        error = failed(capsys, "train", recipe, *overrides.split(" + "), *more)
        assert re.search(rf"^(error:|error: this run cannot start:\n) .*{message}", error)


def test_each_missing_thing_is_named_at_once(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    assert f"output: must be writable, got '{tmp_path}/run', where '{tmp_path}' is not" in failed(
        capsys, "train", recipe
    )
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    overrides = ("model.lora={rank: 2}", "logging.to=[trackio]", "rl.rewards=[{name: 'no_such_module:reward'}]")
    _, problems = dry_run(small.recipe(tmp_path / "run", *overrides, "model.attention=flash_attention_2"))
    starts = [problem.split(":")[0] for problem in problems]
    assert starts == ["output", "model.lora", "rl.rewards.0.name", "logging.to", "model.attention"]
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert 'pip install "grpo-kernels[trainer]"' in failed(capsys, "train", recipe)


# Runs


def test_runs_are_resumed_or_started_afresh(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, whole = tmp_path / "run", finished / "runs" / "mine"
    command = ["train", str(finished / "mine.yaml"), *SHORT, "checkpoints.keep=9"]
    here = [*command, f"output={folder}"]
    shutil.copytree(whole, folder)
    for gone in ("rl-1", "rl-2"):
        shutil.rmtree(folder / "checkpoints" / gone)
    assert "continue the run in it with --resume" in failed(capsys, *here)
    assert cli.main([*here, "--resume"]) == 0
    assert_equal_runs(whole, folder)
    assert "resumed" in {event["event"] for event in lines(folder, "events")}
    failed(capsys, *here, "--fresh", "model.path=/no/such")
    assert len(steps(folder)) == 2, "a run that cannot start deletes nothing"
    (folder / "report.html").unlink()
    assert cli.main([*here, "--fresh", "seed=3"]) == 0
    assert "resumed" not in {event["event"] for event in lines(folder, "events")}
    assert "report: " in capsys.readouterr().out and (folder / "report.html").stat().st_size > 10_000
    assert cli.main([*command, f"output={tmp_path}/new-{{seed}}", "seed=4", "--resume"]) == 0
    assert f"{tmp_path}/new-4 contains no run to resume: starting from the beginning" in capsys.readouterr().err


def test_a_reward_of_the_current_folder_is_found(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed command has its own folder first on sys.path instead of the current one."""
    (tmp_path / "my_module.py").write_text("def my_reward(prompts, **_):\n    return [1.0] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert cli.main(["train", recipe, "rl.rewards=[{name: 'my_module:my_reward'}]", "--dry-run"]) == 0


def ones(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def test_one_model_is_evaluated_and_two_are_compared(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, page = finished / "runs" / "mine", tmp_path / "made" / "out.json", tmp_path / "page"
    command, before, after = ["eval", str(finished / "mine.yaml")], f"{run}/checkpoints/sft-2/model", str(newest(run))
    # evaluations sample with the policy, so they need no engine
    rewards = f"evaluation.rewards=[{{name: '{HERE}:ones'}}]"
    assert cli.main([*command, after, "evaluation.test_prompts=5", rewards, "rl.rollout.engine=vllm"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"{after}\n  reward +1\.0000\n(.*\n)+  prompts +5\.0000\n", printed) and "before" not in printed
    reported = ["--json", str(out), "--report", str(page), "evaluation.samples=3", "evaluation.embedder=hashed"]
    assert cli.main([*command, before, after, *reported, "--split", "validation"]) == 0
    printed = capsys.readouterr().out
    assert before in printed and after in printed and "page: " in printed and list(page.glob("*.html"))
    results = json.loads(out.read_text())
    assert set(results) == {before, after, "comparison"} and len(results[before]["prompts"]) == 8
    logged = [e for e in lines(run) if "eval/validation_reward" in e]
    assert results[after]["metrics"]["reward"] == logged[-1]["eval/validation_reward"]


FULL: Any = OSError(errno.ENOSPC, "No space left on device")
# a function, the number of its argument with the path, its error, and the path that the error names
DISKS = {
    "weights": ("grpo_trainer.checkpoint.save_policy", 1, FULL, "checkpoints/rl-2"),
    "optimizer": ("safetensors.torch.save_file", 1, SafetensorError("No space left on device"), "checkpoints/rl-2"),
    "flush": ("grpo_trainer.checkpoint._flush", 0, FULL, "checkpoints/rl-2"),
    "log": ("pathlib.Path.open", 0, FULL, "samples.jsonl"),
}


@pytest.mark.parametrize("where", harness.quick(DISKS, "weights", "log"))
def test_a_full_disk_leaves_the_last_checkpoint(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, (target, place, error, named) = ["train", recipe, *SHORT, "rl.algorithm.beta=0.0"], DISKS[where]
    module, _, name = target.rpartition(".")
    real = getattr(pytest.importorskip(module) if module != "pathlib.Path" else Path, name)

    def full(*args: Any, **kwargs: Any) -> Any:
        if re.search("rl-2|samples", str(args[place])):
            raise error
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(target, full)
        stderr = failed(capsys, *command)
    assert f"{tmp_path}/run/{named}" in stderr and "No space left on device" in stderr
    left = ["sft-1", "sft-2"] if where == "log" else ["rl-1", "sft-2"]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == left
    assert cli.main([*command, "--resume"]) == 0


def test_a_dry_run_describes_a_run_and_starts_nothing(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", recipe, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "small: 4 supervised steps of 16 demonstrations, 4 steps of grpo with 6 x 4 responses" in printed
    assert "grpo: advantages: the defaults; loss: kl=k3" in printed and re.search(r"rl: 24 lines; .* tokens", printed)
    assert printed.endswith("nothing is missing\n") and not (tmp_path / "run").exists()
    shortest = [int(least) for least in re.findall(r"prompts have (\d+) to", printed)]
    for length, status in ((max(shortest), 0), (min(shortest) - 1, 2)):  # one prompt that fits is enough
        assert cli.main(["train", recipe, "--dry-run", f"model.max_prompt_length={length}"]) == status
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: x")
    for options, status in ((["--resume"], 0), (["--fresh"], 0), ([], 2)):
        assert cli.main(["train", recipe, "--dry-run", *options]) == status


def if_answered(prompts: list[str], completions: list[str], answer: list[int | None], **_: Any) -> list[float | None]:
    return [value and float(value % 2) for value in answer]


def test_notes_on_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reward of files without one is named, and lines without a column that a reward takes are counted."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1", "answer": i or None, "d": "2"}) + "\n" for i in range(8)))
    data = f"data={{task: null, train: '{path}', demonstration: d, test: '{path}'}}"
    for reward, note in (
        ("[]", "rl.rewards: none is named, so exact rewards the responses"),
        (f"[{{name: '{HERE}:if_answered'}}]", "if_answered' gets None for 'answer', which 1 of 8 lines lack"),
    ):
        recipe = small.recipe(tmp_path / "run", data, f"rl.rewards={reward}", "logging.progress=true", "rl.steps=1")
        assert note in "\n".join(dry_run(recipe)[0])
    train(recipe)
    assert capsys.readouterr().err.count(note) == 1


def test_threads_are_set_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("os.getloadavg", lambda: (2.0, 0, 0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)), raising=False)
    for threads, expected in ((4, 4), (None, 3)):
        cli._set_threads(threads)
        assert torch.get_num_threads() == expected
