"""Ctrl-C and SIGTERM end a run at a step's boundary, and the resumed run has the bits of an undisturbed one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo_trainer import checkpoint, cli, evaluate, interruption, setup, sft
from grpo_trainer import train as training

from tests.trainer import small
from tests.trainer.small import assert_equal_runs

HANDLERS = [signal.getsignal(number) for number in interruption.SIGNALS]
OVERRIDES = ("sft.steps=2", "rl.steps=3", "evaluation={every: 1, batch: 4}", "checkpoints.every=2")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_trainer.report.run_page.write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("grpo_trainer.report.run_page.summary", lambda folder: "")


def command(folder: Path, *more: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(json.dumps(small.values(folder / "run")))
    return ["train", str(folder / "mine.yaml"), *OVERRIDES, *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert cli.main(command(folder)) == 0
    return folder / "run"


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
    moment: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module, name, call, numbers, status, said = MOMENTS[moment]
    is_twice = moment.endswith("twice")
    with monkeypatch.context() as patch:
        if is_twice:
            patch.setattr(interruption, "SAME_SECONDS", -1.0)
        patch.setattr(module, name, raising(getattr(module, name), call, *numbers))
        assert cli.main(command(tmp_path, *["--fresh"] * is_twice)) == status
    assert [signal.getsignal(number) for number in interruption.SIGNALS] == HANDLERS
    stderr = capfd.readouterr().err
    assert said in stderr and stderr.count(ASKED) == 1 and "Traceback" not in stderr
    assert ("--resume in place of --fresh\n" if is_twice else ON) in stderr
    assert not [*(tmp_path / "run").rglob(".new*")]
    assert cli.main(command(tmp_path, "--resume")) == 0
    assert_equal_runs(tmp_path / "run", whole)


def test_all_processes_stop_if_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of all processes are reduced before any process stops."""
    monkeypatch.setattr(interruption.distributed, "all_reduce_max", lambda flag: max(flag, 1))
    with interruption.handled(), pytest.raises(interruption.Stopped):
        interruption.stop_if_asked()
    monkeypatch.setattr(interruption.distributed, "all_reduce_max", lambda flag: flag)
    with interruption.handled():
        interruption.stop_if_asked()


@pytest.mark.parametrize("name", ["train", "evaluate", "report"])
def test_commands_end_without_a_traceback(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Python does not install its own handler where a shell started it in the background, without Ctrl-C
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(cli, name, raising(lambda *_: 0, 1, signal.SIGINT))
        assert cli.main([name.replace("evaluate", "eval")]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"
