"""Errors about the arguments of the commands, before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from grpo_trainer import cli


@pytest.mark.parametrize(
    ("command", "arguments", "near"),
    [
        (cli.train, ["arithmetic", "--resum"], "--resume"),
        (cli.evaluate, ["arithmetic", "a", "--jsn", "x"], "--json"),
        (cli.data, ["convert", "gsm8k", "a.jsonl", "--leave-ot"], "--leave-out"),
        (cli.report, ["--comparee", "a"], "--compare"),
    ],
)
def test_the_nearest_option_is_named(
    command: Callable[[list[str]], int], arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(arguments)
    assert capsys.readouterr().err.endswith(f"; the nearest is {near!r}\n")


@pytest.mark.parametrize("written", ["--seed=3", "--rl.steps=3"])
@pytest.mark.parametrize(("command", "more"), [(cli.train, []), (cli.evaluate, ["model"])])
def test_a_key_written_as_an_option_is_explained(
    command: Callable[[list[str]], int], more: list[str], written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(["arithmetic", *more, written])
    key = written.removeprefix("--").removesuffix("=3")
    assert capsys.readouterr().err.endswith(f"; a key of the recipe is set without dashes: {key}=VALUE\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["arithmetic", "--processes", "2"],
            "--processes is that of --dry-run; several processes are started by "
            "torchrun --nproc_per_node 2 -m grpo_trainer arithmetic",
        ),
        (["arithmetic", "seed=1", "threads=1", "seed=2"], "a key can be set once, got seed=1 and seed=2"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.train(arguments)
    assert capsys.readouterr().err.endswith(f"error: {error}\n")


def test_an_option_of_another_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.data(["split", "a.jsonl", "--by", "likes", "--output", "x"])
    assert capsys.readouterr().err.endswith("--output x; it belongs to grpo-data convert\n")


def test_a_file_in_the_place_of_a_page_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for command, arguments, option in (
        (cli.evaluate, ["arithmetic", str(tmp_path), "--report", str(file)], "--report"),
        (cli.report, ["--compare", str(tmp_path), "--output", str(file)], "--output"),
    ):
        assert command(arguments) == 2
        assert capsys.readouterr().err == f"error: {option}: must be a folder, got the file {str(file)!r}\n"


def test_a_gradient_that_is_not_finite_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise FloatingPointError("phase 0: the gradient's norm must be finite, got nan")

    assert cli._run(fails) == 2
    assert capsys.readouterr().err == "error: phase 0: the gradient's norm must be finite, got nan\n"
