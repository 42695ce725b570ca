"""Faults of a run's surroundings: what breaks is named with what to do, and the run resumes bit by bit.

Each test states which error must end the run. After it, the fault is removed and the run is resumed and compared with
the undisturbed one.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from grpo_trainer import embed

from tests.nightly import runs

TIMES = 3  # random moments of a fault


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an undisturbed run."""
    top = tmp_path_factory.mktemp("undisturbed")
    runs.undisturbed(top)
    return top / "first"


@pytest.fixture(scope="module")
def expected(finished: Path) -> dict[str, Any]:
    return runs.contents(finished)


def assert_mended(folder: Path, child: runs.Child, message: str, expected: dict[str, Any]) -> None:
    """The run that met the fault ended with this error, and the resumed one as the undisturbed."""
    assert child.status != 0, "the run did not notice"
    assert re.search(message, child.error.strip(), re.DOTALL), f"expected {message!r}, got {child.error[-500:]!r}"
    problem = runs.finish_and_compare(folder, expected)
    assert not problem, problem


# Disks and files


@contextlib.contextmanager
def small_disk(folder: Path, kibibytes: int) -> Iterator[None]:
    """A file system of this size; needs root."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("number", range(12))
def test_a_full_disk(
    tmp_path: Path, finished: Path, expected: dict[str, Any], chance: random.Random, number: int
) -> None:
    """Full at a random moment, from the first file to the last checkpoint."""
    used = sum(path.stat().st_size for path in finished.rglob("*") if path.is_file()) // 1024
    disk = tmp_path / "disk"
    with small_disk(disk, chance.randint(4, used)):
        child = runs.start(disk / "run").wait()
        subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True)
        message = rf"(No space left on device|os error 28|Errno 28).*{disk}|{disk}.*(No space|os error 28|Errno 28)"
        assert_mended(disk / "run", child, message, expected)


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "events.jsonl", "checkpoints"])
def test_a_file_that_cannot_be_written(tmp_path: Path, expected: dict[str, Any], name: str) -> None:
    """Something else is in its place; root ignores permissions."""
    blocked = tmp_path / name
    blocked.mkdir() if name.endswith(".jsonl") else blocked.write_text("")
    child = runs.start(tmp_path).wait()
    blocked.rmdir() if blocked.is_dir() else blocked.unlink()
    assert_mended(tmp_path, child, re.escape(str(blocked)), expected)


# Damaged files of a run

DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "truncated": lambda content, chance: content[: chance.randrange(len(content))],
    "empty": lambda content, chance: b"",
    "missing": lambda content, chance: None,
}


NEWEST = "rl-4"
# the others are for a checkpoint's users; a resumed run has the recipe's tokenizer
READ = ("config.json", "model.safetensors", "optimizer.safetensors", "state.json")


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", READ)
def test_a_damaged_file_of_the_newest_checkpoint(
    tmp_path: Path, finished: Path, expected: dict[str, Any], chance: random.Random, name: str, kind: str
) -> None:
    """The message's way out works: without the checkpoint, the run resumes from the one before."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    checkpoint = folder / "checkpoints" / NEWEST
    (path,) = checkpoint.rglob(name)
    content = DAMAGES[kind](path.read_bytes(), chance)
    path.unlink() if content is None else path.write_bytes(content)
    child = runs.start(folder).wait()
    shutil.rmtree(checkpoint)
    message = rf"CheckpointError: {checkpoint}.*: must be a whole checkpoint, got .*; remove it to resume from"
    assert_mended(folder, child, message, expected)


# Rewards and embedders


NAMED = rf"RewardError: reward '{runs.REWARD}' "
MOODS = {
    "nan": NAMED + r"must be a finite number or None, got nan for response \d+",
    "inf": NAMED + r"must be a finite number or None, got inf for response \d+",
    "raise": NAMED + "raised KeyError: 'no such thing'",
    "few": NAMED + r"must return one value for each of \d+ responses",
    "exit": "SystemExit",
    "die": "^$",
}


@pytest.mark.parametrize("number", range(TIMES))
@pytest.mark.parametrize("mood", MOODS)
def test_a_reward_that_misbehaves(
    tmp_path: Path, expected: dict[str, Any], chance: random.Random, mood: str, number: int
) -> None:
    """It returns NaN, infinity or too few values, raises, calls sys.exit or kills its process, at a random call."""
    call = chance.randint(1, 6)
    child = runs.start(tmp_path, before=lambda: runs.set_mood(mood, call)).wait()
    assert_mended(tmp_path, child, MOODS[mood], expected)


@pytest.mark.parametrize("number", range(TIMES))
def test_ctrl_c_while_a_reward_hangs(
    tmp_path: Path, expected: dict[str, Any], chance: random.Random, number: int
) -> None:
    folder, sign, call = tmp_path / "run", tmp_path / "hangs", chance.randint(1, 6)
    child = runs.start(folder, before=lambda: runs.set_mood("hang", call, sign))
    while child.status is None and not sign.exists():
        time.sleep(0.01)
    child.kill(signal.SIGINT)
    child.wait(10)
    assert_mended(folder, child, "KeyboardInterrupt", expected)


def test_a_reward_that_hangs_longer_than_its_timeout(tmp_path: Path, chance: random.Random) -> None:
    """The setting is part of the recipe, so the run is compared with an undisturbed one that has it, too."""
    runs.warm_up()
    reward = f"{{name: '{runs.REWARD}'}}"
    limited = [change.replace(reward, f"{{name: '{runs.REWARD}', timeout: 2}}") for change in runs.OVERRIDES]
    child = runs.start(tmp_path / "limited", *limited).wait()
    assert child.status == 0, child.error
    expected = runs.contents(tmp_path / "limited")
    for number in range(TIMES):
        folder, call = tmp_path / f"hanging-{number}", chance.randint(1, 6)
        child = runs.start(folder, *limited, before=lambda call=call: runs.set_mood("hang", call)).wait(60)
        message = rf"RewardError: reward '{runs.REWARD}' raised TimeoutError: no result within 2 s \(rewards.timeout\)"
        assert child.status != 0 and re.search(message, child.error), child.error
        assert not (problem := runs.finish_and_compare(folder, expected, *limited)), problem


def breaks_after(calls: int, result: Callable[[list[str]], torch.Tensor]) -> Callable[[], None]:
    """Lets the embedder of a child return something else from a call on."""
    real, made = embed.hashed, [0]

    def broken(texts: Any, size: int = 512) -> torch.Tensor:
        made[0] += 1
        return real(texts, size) if made[0] <= calls else result(texts)

    def plant() -> None:
        embed.hashed = broken  # type: ignore[assignment]

    return plant


def fails(texts: list[str]) -> torch.Tensor:
    raise OSError("the model is gone")


@pytest.mark.parametrize("number", range(TIMES))
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (fails, r"EmbedderError: embedder 'hashed' raised OSError for \d+ texts, the first .*: the model is gone"),
        (lambda texts: torch.zeros(len(texts) - 1, 512), r"EmbedderError: embedder 'hashed' must return \[\d+, D\]"),
    ],
    ids=["raises", "returns too few vectors"],
)
def test_an_embedder_that_breaks(
    tmp_path: Path, expected: dict[str, Any], chance: random.Random, result: Any, message: str, number: int
) -> None:
    child = runs.start(tmp_path, before=breaks_after(chance.randint(0, 6), result)).wait()
    assert_mended(tmp_path, child, message, expected)
