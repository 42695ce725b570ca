"""Times two commits alternately in one run, and fails if the second is slower.

    python -m benchmarks.commits BASE [HEAD]
    python -m benchmarks.commits v0.1.0 --case policy_loss

Each commit is unpacked into .benchmarks/commits with CPU kernels of its own, whose compilation takes minutes the first
time; commits with the same C++ share them. Then one process for each times the calls of commit_cases.py on one thread,
in turns: base, head, head, base. The table has the median of the ratios, head over base, and its 95 % interval. A case
is slower if the median exceeds the threshold and the interval lies above 1. It is measured again by new processes, up
to --tries times, and counts if it was slower each time; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.commit_cases import CASES

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".benchmarks" / "commits"
LIBRARY = Path("grpo_kernels") / "libgrpo_kernels_cpu.so"
SECONDS = 0.05  # of a turn, or one call

Timer = Callable[[str], "float | str"]  # seconds of a case, or why it cannot run
Start = Callable[[], "tuple[Timer, Timer]"]


class Result(NamedTuple):
    """Seconds of both commits, and the median and interval of the ratios head / base; or why there are none."""

    base: float = math.nan
    head: float = math.nan
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    note: str = ""

    def is_slower(self, threshold: float) -> bool:
        return self.ratio > 1 + threshold and self.low > 1


def compare(name: str, base: Timer, head: Timer, rounds: int) -> Result:
    """Times base, head, head, base in each round, so that a steady drift of the machine's speed cancels."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        turns = [side(name) for side in (base, head, head, base)]
        for side, turn in zip(("base", "head"), turns, strict=False):
            if isinstance(turn, str):
                return Result(note=f"not in {side}: {turn}")
        first, second, third, fourth = (float(turn) for turn in turns)
        times.append((first + fourth, second + third))
    ratios = sorted(of_head / of_base for of_base, of_head in times)
    outer = max(0, math.floor((rounds - 1.96 * math.sqrt(rounds)) / 2))  # order statistics of the sign test
    base_time, head_time = (statistics.median(side) / 2 for side in zip(*times, strict=True))
    return Result(base_time, head_time, statistics.median(ratios), ratios[outer], ratios[-1 - outer])


def compare_all(names: Iterable[str], start: Start, rounds: int, threshold: float, tries: int) -> dict[str, Result]:
    """Results by case; of a case that was slower once, those of the try in which it was least so."""
    results: dict[str, Result] = {}
    left = list(names)
    for _ in range(tries):
        if not left:
            break
        base, head = start()
        for name in left:
            result = compare(name, base, head, rounds)
            if name not in results or result.ratio < results[name].ratio:
                results[name] = result
        left = [name for name in left if results[name].is_slower(threshold)]
    return results


def table(results: dict[str, Result], threshold: float) -> str:
    lines = ["| case | base | head | ratio | 95 % interval | |", "|---|---:|---:|---:|---|---|"]
    for name, result in results.items():
        if result.note:
            lines.append(f"| {name} | | | | | {result.note} |")
            continue
        times = f"{result.base * 1e6:.1f} us | {result.head * 1e6:.1f} us"
        mark = "**slower**" if result.is_slower(threshold) else ""
        lines.append(f"| {name} | {times} | {result.ratio:.3f} | {result.low:.3f} .. {result.high:.3f} | {mark} |")
    return "\n".join(lines)


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"commits: git {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def checkout(commit: str) -> Path:
    """A folder with the files of a commit and its CPU kernels."""
    sha = git("rev-parse", "--verify", f"{commit}^{{commit}}")
    folder = FOLDER / sha[:12]
    if not folder.exists():
        folder.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", sha], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    sources = "\n".join(git("rev-parse", f"{sha}:{path}") for path in ("csrc", "CMakeLists.txt", "setup.py"))
    kept = FOLDER / f"{hashlib.sha1(sources.encode()).hexdigest()[:12]}.so"
    if not kept.exists():
        print(f"commits: compiling the CPU kernels of {commit}", flush=True)
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", ".", "--build-temp", "build"]
        environment = os.environ | {"GRPO_KERNELS_BUILD": "cpu"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"commits: {commit} does not compile:\n{done.stdout}{done.stderr}")
        shutil.copy(folder / LIBRARY, kept)
    if not (folder / LIBRARY).exists():
        shutil.copy(kept, folder / LIBRARY)
    shutil.copy(Path(__file__).with_name("commit_cases.py"), folder)
    return folder


def process(folder: Path) -> Timer:
    """A process that times cases in a checkout; it ends with this one, whose end closes its stdin."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "commit_cases"],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None and worker.stdout is not None
    stdin, stdout = worker.stdin, worker.stdout

    def timer(name: str) -> float | str:
        print(json.dumps((name, SECONDS)), file=stdin, flush=True)
        answer = stdout.readline()
        if not answer:
            raise SystemExit(f"commits: {name} ended the process in {folder}")
        seconds: float | str = json.loads(answer)
        return seconds

    return timer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the earlier commit")
    parser.add_argument("head", nargs="?", default="HEAD", help="the later commit; default: %(default)s")
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    parser.add_argument("--rounds", type=int, default=15, help="of base, head, head, base; default: %(default)s")
    parser.add_argument("--threshold", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--tries", type=int, default=3, help="measurements of a slower case; default: %(default)s")
    options = parser.parse_args(arguments)
    names = [name for name in CASES if options.case in name]
    if not names:
        raise SystemExit(f"commits: --case must be part of a name, got {options.case!r}")
    folders = [checkout(commit) for commit in (options.base, options.head)]

    def start() -> tuple[Timer, Timer]:
        base, head = map(process, folders)
        return base, head

    results = compare_all(names, start, options.rounds, options.threshold, options.tries)
    print(table(results, options.threshold))
    slower = [name for name, result in results.items() if result.is_slower(options.threshold)]
    if slower:
        raise SystemExit(f"commits: slower by more than {options.threshold:.0%}: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
