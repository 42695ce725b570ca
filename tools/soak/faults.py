"""Faults of a run's surroundings: what breaks must be named with its way out, and the run must resume bit by bit.

Each row states beforehand which error must end the run. After it, the fault is removed and the run is resumed and
compared with the undisturbed one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from grpo_trainer import cli, embed

from tools.soak import kills, runs
from tools.soak.outcome import Outcome

ROOT = Path(__file__).parent.parent.parent
EQUAL = "; once mended, the run resumes bit by bit"


def run(options: argparse.Namespace) -> Iterator[Outcome]:
    chance = random.Random(options.seed)
    with runs.scratch("faults") as top:
        expected, _ = kills.undisturbed(top)
        finished = top / "first"
        yield from unreadable_inputs(top)
        yield full_disk(top, expected, chance)
        yield blocked_files(top, expected)
        yield from damaged_checkpoints(top, finished, expected, chance)
        yield embedder_raises(top, expected, chance)
        yield embedder_returns_too_few(top, expected)
        yield from rewards(top, expected, chance)
        yield own_tests("an embedder's Ray actor dies, raises or cannot be placed", "tests/trainer/test_ray_pool.py")
        yield own_tests("a judge that hangs, drips, refuses or answers nonsense", "tests/trainer/test_judge.py")


def mended(top: Path, name: str, child: runs.Child, message: str, expected: dict[str, Any]) -> str:
    """Deviations in the error of the run that met the fault, or in the resumed run; empty if there is none."""
    error = child.error.strip()
    if child.status == 0:
        return f"{name}: the run did not notice"
    if not re.search(message, error, re.DOTALL):
        return f"{name}: expected {message!r}, got {error[-500:]!r}"
    problem = runs.finish_and_compare(top, expected)
    return f"{name}: {problem}" if problem else ""


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


def full_disk(top: Path, expected: dict[str, Any], chance: random.Random, times: int = 12) -> Outcome:
    """The disk is full at a random moment, from the first file to the last checkpoint."""
    outcome = Outcome("faults", "a full disk", 0, f"an error with the path and `No space left on device`{EQUAL}")
    if os.geteuid() != 0:
        outcome.not_run = "mounting a small file system needs root"
        return outcome
    used = sum(path.stat().st_size for path in (top / "first").rglob("*") if path.is_file()) // 1024
    disk = top / "disk"
    for _ in range(times):
        size = chance.randint(4, used)
        with small_disk(disk, size):
            child = runs.start(disk / "run").wait()
            subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True)
            message = rf"(No space left on device|os error 28|Errno 28).*{disk}|{disk}.*(No space|os error 28|Errno 28)"
            problem = mended(disk / "run", f"{size} KiB", child, message, expected)
        outcome.check(not problem, problem)
    return outcome


BLOCKED = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "events.jsonl", "checkpoints")


def blocked_files(top: Path, expected: dict[str, Any]) -> Outcome:
    """Something else is in the place of each file and folder that a run writes; root ignores permissions."""
    outcome = Outcome("faults", "a file that cannot be written, each in turn", 0, f"an error with the path{EQUAL}")
    for name in BLOCKED:
        folder = top / "blocked"
        folder.mkdir()
        blocked = folder / name
        if name.endswith(".jsonl"):
            blocked.mkdir()
        else:
            blocked.write_text("")
        child = runs.start(folder).wait()
        blocked.rmdir() if blocked.is_dir() else blocked.unlink()
        problem = mended(folder, name, child, re.escape(str(blocked)), expected)
        outcome.check(not problem, problem)
        shutil.rmtree(folder)
    return outcome


# Damaged files of a run

DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "truncated": lambda content, chance: content[: chance.randrange(len(content))],
    "empty": lambda content, chance: b"",
    "missing": lambda content, chance: None,
}


def damage(path: Path, kind: str, chance: random.Random) -> None:
    content = DAMAGES[kind](path.read_bytes(), chance)
    path.unlink() if content is None else path.write_bytes(content)


def files_of(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def damaged_checkpoints(
    top: Path, finished: Path, expected: dict[str, Any], chance: random.Random
) -> Iterator[Outcome]:
    """Every file of the newest checkpoint is damaged in every way; the message's way out must work."""
    newest = "rl-4"
    for kind in DAMAGES:
        row = Outcome(
            "faults", f"a file of a checkpoint {kind}, each in turn", 0,
            "refused with folder and way out; resumed bit by bit from the checkpoint before",
        )  # fmt: skip
        for file in files_of(finished / "checkpoints" / newest):
            if "tokenizer" in file.name or "generation" in file.name:
                continue  # for the checkpoint's users; a resumed run has the recipe's
            folder = top / "damaged"
            shutil.copytree(finished, folder)
            checkpoint = folder / "checkpoints" / newest
            damage(checkpoint / file, kind, chance)
            child = runs.start(folder).wait()
            shutil.rmtree(checkpoint)
            message = rf"CheckpointError: {checkpoint}.*: must be a whole checkpoint, got .*; remove it to resume from"
            problem = mended(folder, f"{file} {kind}", child, message, expected)
            row.check(not problem, problem)
            shutil.rmtree(folder)
        yield row


# Files and functions that a user hands in

LINE = '{"prompt": "1 + 1", "answer": "2"}\n'
BROKEN_DATA = {
    "missing": None,
    "not text": LINE.encode() + b"\xff\xfe\x00" + LINE.encode(),
    "not JSON": LINE.encode() + b'{"prompt": ',
    "not an object": b"[1, 2]\n",
    "without the column": b'{"question": "1 + 1"}\n',
    "a folder": b"",
}
BROKEN_RECIPES = {
    "missing": None,
    "not text": b"name: \xff\xfe",
    "not YAML": b"rl: {steps: 3\nname: x",
    "not a mapping": b"- 1\n- 2\n",
    "an unknown key": b"sfft: {}\n",
    "a folder": b"",
}


def unreadable_inputs(top: Path) -> list[Outcome]:
    """Unreadable data and recipes; `grpo train` must end with one line that names the file, or the key."""
    rows = []
    for title, broken, suffix in (("data", BROKEN_DATA, "jsonl"), ("recipe", BROKEN_RECIPES, "yaml")):
        row = Outcome("faults", f"a {title} file that cannot be read", 0, "one line with the file or key, and status 2")
        for kind, content in broken.items():
            path = top / f"{kind.replace(' ', '-')}.{suffix}"
            if kind == "a folder":
                path.mkdir()
            elif content is not None:
                path.write_bytes(content)
            good = top / "good.yaml"
            good.write_text(f"data: {{task: null, train: {path}}}\nrl: {{steps: 1}}\noutput: {top}/none\n")
            status, text = command(str(good if suffix == "jsonl" else path))
            is_named = path.name in text or "sfft" in text
            is_one_line = text.startswith("error: ") and text.count("\n") == 1
            row.check(status == 2 and is_named and is_one_line, f"{kind}: status {status}, {text[-400:]!r}")
        rows.append(row)
    return rows


def command(*arguments: str) -> tuple[int | None, str]:
    """Exit status and error output of grpo train; status None if it raised, with the exception."""
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            return cli.main(["train", *arguments]), error.getvalue()
    except BaseException as raised:
        return None, f"{type(raised).__name__}: {raised}"


# Rewards and embedders


def rewards(top: Path, expected: dict[str, Any], chance: random.Random) -> Iterator[Outcome]:
    """A reward that misbehaves at a random call, and a user who interrupts one that hangs."""
    named = rf"RewardError: reward '{runs.REWARD}' "
    cases = {
        "nan": ("returns NaN", named + r"must be a finite number or None, got nan for response \d+"),
        "inf": ("returns infinity", named + r"must be a finite number or None, got inf for response \d+"),
        "raise": ("raises", named + "raised KeyError: 'no such thing'"),
        "few": ("returns too few values", named + r"must return one value for each of \d+ responses"),
        "exit": ("calls sys.exit", "SystemExit"),
        "die": ("kills its process", "^$"),
    }
    for mood, (title, message) in cases.items():
        row = Outcome("faults", f"a reward that {title}", 0, f"the run ends with an error that names it{EQUAL}")
        if mood in ("exit", "die"):
            row.expected = f"the process ends{EQUAL}"
        for _ in range(3):
            folder, call = top / "moody", chance.randint(1, 6)
            child = runs.start(folder, before=lambda mood=mood, call=call: runs.set_mood(mood, call)).wait()
            problem = mended(folder, f"call {call}", child, message, expected)
            row.check(not problem, problem)
            shutil.rmtree(folder)
        yield row
    yield interrupted(top, expected, chance)
    yield hangs_with_a_limit(top, chance)


def interrupted(top: Path, expected: dict[str, Any], chance: random.Random) -> Outcome:
    row = Outcome("faults", "Ctrl-C while a reward hangs", 0, f"the run ends within 10 s{EQUAL}")
    for _ in range(3):
        folder, call = top / "hanging", chance.randint(1, 6)
        child = runs.start(folder, before=lambda call=call, sign=folder / "hangs": runs.set_mood("hang", call, sign))
        while not child.poll() and not (folder / "hangs").exists():
            time.sleep(0.01)
        (folder / "hangs").unlink(missing_ok=True)
        child.kill(signal.SIGINT)
        child.wait(10)
        problem = mended(folder, f"call {call}", child, "KeyboardInterrupt", expected)
        row.check(not problem, problem)
        shutil.rmtree(folder)
    return row


def hangs_with_a_limit(top: Path, chance: random.Random) -> Outcome:
    """The setting is part of the recipe, so the run is compared with an undisturbed one that has it, too."""
    row = Outcome("faults", "a reward that hangs, with `timeout: 2`", 0, f"an error that names reward and limit{EQUAL}")
    reward = f"{{name: '{runs.REWARD}'}}"
    limited = [change.replace(reward, f"{{name: '{runs.REWARD}', timeout: 2}}") for change in runs.OVERRIDES]
    child = runs.start(top / "limited", *limited).wait()
    row.check(child.status == 0, child.error)
    expected = runs.contents(top / "limited")
    for _ in range(3):
        folder, call = top / "hanging", chance.randint(1, 6)
        child = runs.start(folder, *limited, before=lambda call=call: runs.set_mood("hang", call)).wait(60)
        message = rf"RewardError: reward '{runs.REWARD}' raised TimeoutError: no result within 2 s \(rewards.timeout\)"
        is_named = child.status != 0 and re.search(message, child.error) is not None
        problem = runs.finish_and_compare(folder, expected, *limited) if is_named else f"call {call}: {child.error}"
        row.check(not problem, problem)
        shutil.rmtree(folder)
    return row


def breaks_after(calls: int, result: Callable[[list[str]], torch.Tensor]) -> Callable[[], None]:
    """Lets the embedder of a child return something else from a call on."""
    real, made = embed.hashed, [0]

    def broken(texts: Any, size: int = 512) -> torch.Tensor:
        made[0] += 1
        return real(texts, size) if made[0] <= calls else result(texts)

    def plant() -> None:
        embed.hashed = broken  # type: ignore[assignment]

    return plant


def embedder_raises(top: Path, expected: dict[str, Any], chance: random.Random) -> Outcome:
    row = Outcome("faults", "an embedder that raises", 0, f"an error that names it, and a text{EQUAL}")

    def fails(texts: Any) -> torch.Tensor:
        raise OSError("the model is gone")

    for _ in range(3):
        folder, calls = top / "embedder", chance.randint(0, 6)
        child = runs.start(folder, before=breaks_after(calls, fails)).wait()
        message = r"EmbedderError: embedder 'hashed' raised OSError for \d+ texts, the first .*: the model is gone"
        problem = mended(folder, f"after {calls} calls", child, message, expected)
        row.check(not problem, problem)
        shutil.rmtree(folder)
    return row


def embedder_returns_too_few(top: Path, expected: dict[str, Any]) -> Outcome:
    row = Outcome("faults", "an embedder that returns too few vectors", 0, f"an error that names it{EQUAL}")
    folder = top / "embedder"
    child = runs.start(folder, before=breaks_after(2, lambda texts: torch.zeros(len(texts) - 1, 512))).wait()
    problem = mended(folder, "", child, r"EmbedderError: embedder 'hashed' must return \[\d+, D\]", expected)
    row.check(not problem, problem)
    shutil.rmtree(folder)
    return row


def own_tests(title: str, path: str) -> Outcome:
    """A file of tests that tries this; each test counts."""
    row = Outcome("faults", title, 0, f"as `{path}` says")
    done = subprocess.run([sys.executable, "-m", "pytest", path], cwd=ROOT, capture_output=True, text=True)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
    row.times = counts.get("passed", 0) + counts.get("failed", 0)
    if done.returncode != 0:
        row.failures = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE) or [done.stdout[-500:]]
    if row.times == 0:
        row.not_run = "its packages are not installed"
    return row
