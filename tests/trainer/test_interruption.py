"""Ctrl-C and SIGTERM end a run at a step's boundary, and the resumed run has the bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("matplotlib")

from grpo_trainer import checkpoint, cli, evaluate, interruption, setup, sft
from grpo_trainer import train as training

from tests.trainer import small
from tests.trainer.small import assert_equal_runs

OVERRIDES = ("sft.steps=2", "rl.steps=3", "evaluation={every: 1, batch: 4}", "checkpoints.every=2")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    monkeypatch.setattr("grpo_trainer.report.write_report", lambda folder, beside=(): folder / "report.html")
    monkeypatch.setattr("grpo_trainer.report.summary", lambda folder: "")


def command(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_text(json.dumps(small.values(folder / "run")))
    return [str(folder / "mine.yaml"), *OVERRIDES]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert cli.main(["train", *command(folder)]) == 0
    return folder / "run"


def raising(real: Callable[..., Any], at_call: int, *numbers: int) -> Callable[..., Any]:
    """The function, which receives signals in one of its calls."""
    calls = [0]

    def function(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at_call:
            for number in numbers:
                signal.raise_signal(number)
        return real(*args, **kwargs)

    return function


# Place of the signal, number of the call, and the last checkpoint.
MOMENTS = {
    "sft": (sft, "encode_demonstration", 10, "sft-1"),
    "sampling": (setup, "roll_out", 2, "rl-1"),
    "reward": (training, "score", 3, "rl-3"),
    "first evaluation": (evaluate, "roll_out", 1, None),
    "evaluation": (evaluate, "roll_out", 5, "rl-1"),
    "last evaluation": (evaluate, "roll_out", 8, "rl-3"),
    "checkpoint": (checkpoint, "save_policy", 3, "rl-2"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_stops_at_a_step_and_resumes_with_the_same_bits(
    moment: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, name, call, last = MOMENTS[moment]
    handlers = [signal.getsignal(number) for number in interruption.SIGNALS]
    number, status = (signal.SIGTERM, 143) if moment == "reward" else (signal.SIGINT, 130)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, raising(getattr(module, name), call, number))
        assert cli.main(["train", *command(tmp_path)]) == status
    assert handlers == [signal.getsignal(number) for number in interruption.SIGNALS]
    where = "before the first" if last is None else f"the last checkpoint is {tmp_path}/run/checkpoints/{last};"
    stderr = capsys.readouterr().err
    assert f"stopped: {where}" in stderr and "the same command and --resume\n" in stderr and "Traceback" not in stderr
    assert cli.main(["train", *command(tmp_path), "--resume"]) == 0
    assert_equal_runs(tmp_path / "run", whole)


@pytest.mark.parametrize("moment", ["reward", "checkpoint"])
def test_a_second_signal_stops_at_once(
    moment: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, name, call, _ = MOMENTS[moment]
    with monkeypatch.context() as patch:
        patch.setattr(interruption, "SAME_SECONDS", -1.0)
        patch.setattr(module, name, raising(getattr(module, name), call, signal.SIGINT, signal.SIGINT))
        assert cli.main(["train", *command(tmp_path), "--fresh"]) == 130
    last = {"reward": "rl-2", "checkpoint": "rl-0"}[moment]
    way_on = "continue with the same command and --resume in place of --fresh"
    assert f"checkpoints/{last}; {way_on}" in capsys.readouterr().err
    assert not [*(tmp_path / "run").rglob(".new*")]
    assert cli.main(["train", *command(tmp_path), "--resume"]) == 0
    assert_equal_runs(tmp_path / "run", whole)


def test_a_launcher_that_forwards_the_signal_does_not_count_twice(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(training, "score", raising(training.score, 3, signal.SIGINT, signal.SIGTERM))
        assert cli.main(["train", *command(tmp_path)]) == 130
    stderr = capfd.readouterr().err
    assert stderr.count("stopping after this step; once more stops at once") == 1 and "rl-3" in stderr


def test_all_processes_stop_if_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of all processes are reduced before any process stops."""
    monkeypatch.setattr(interruption.distributed, "all_reduce_max", lambda flag: max(flag, 1))
    assert interruption.signal_number() is None
    with interruption.handled(), pytest.raises(interruption.Stopped):
        interruption.stop_if_asked()
    monkeypatch.setattr(interruption.distributed, "all_reduce_max", lambda flag: flag)
    with interruption.handled():
        interruption.stop_if_asked()


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Python's own handler, which it does not install where a shell started it in the background, without Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("arguments", [["train", "arithmetic"], ["eval", "arithmetic", "a"], ["report", "a"]])
def test_commands_end_without_a_traceback(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = {"train": "_train", "eval": "_evaluate", "report": "_report"}[arguments[0]]
    monkeypatch.setattr(cli, inner, raising(lambda *_: 0, 1, signal.SIGINT))
    assert cli.main(arguments) == 130
    assert capsys.readouterr().err == "interrupted\n"


BAR = """
from grpo_trainer.log import Log
from tests.trainer import small
from pathlib import Path
log = Log(small.recipe(Path("run"), "logging.progress=true"))
shown = {"rewards/mean": 0.4567, "train/kl_mean": 0.0012, "speed/tokens_per_second": 12345.6}
import time
for step in (1, 2, 3):
    time.sleep(0.2)
    log.progress("rl", step, 100, shown)
log.close()
"""


@pytest.mark.full
def test_the_progress_bar_fits_a_narrow_terminal() -> None:
    """Time left, reward and tokens a second are readable in 80 columns."""
    pty = pytest.importorskip("pty")
    main, terminal = pty.openpty()
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", BAR], stderr=terminal, stdout=terminal, env=environment)
    os.close(terminal)
    printed = b""
    while True:
        try:
            printed += os.read(main, 4096)
        except OSError:  # the other end is closed
            break
    os.close(main)
    assert process.wait() == 0, printed.decode()
    line = [part for part in printed.decode().replace("\r", "\n").split("\n") if "3/100" in part][-1]
    for text in ("00:", "reward 0.457", "tokens/s 12,346"):
        assert text in line, line
