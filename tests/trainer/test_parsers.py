"""Errors about the arguments of the commands, before anything is read."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parametrize("written", ["--seed=3", "--phases.1.rl.steps=3"])
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
