"""Checks everything that needs a GPU in one command, in nine minutes and without a network, most valuable parts first.

    python -m tools.gpu_check [--parts PART ...] [--seconds 530] [--list]

build      the libraries for this GPU, in place; beside it, Triton's kernels are compiled and checked with low priority
tests      values and gradients of every kernel's cases against float64, and tests/ops
sanitizer  the CUDA kernels' cases under the tools of compute-sanitizer, beside the tests
benchmarks times of every op and of the installed peers, and the bars, in a process for each op
trainer    the trainer's default recipe
step       a whole GRPO step beside TRL's

Packages in .wheels, which tools/gpu_wheels.sh fills, are imported first; without its packages a part is refused or left
out in the first second. Each line of STAGES has its share of the seconds and the time that earlier ones left, and is
then stopped. Results are written one by one, and summary.md and gpu_check.tar.gz in $OUT (benchmarks/results/gpu) after
every step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.resolve()
WORK = ROOT / "build" / "gpu_check"
WHEELS = ROOT / ".wheels"
# Seconds of the parts that run together.
STAGES = (
    (180, ("build",)),
    (130, ("tests", "sanitizer")),
    (120, ("benchmarks",)),
    (45, ("trainer",)),
    (80, ("step",)),
)
PARTS = [part for _, parts in STAGES for part in parts]
TESTS = ("pytest>=9", "pytest-xdist>=3.5", "hypothesis", "numpy")
NEEDS = {
    "build": ("torch>=2.11", "setuptools>=77", "cmake>=3.25", "ninja", *TESTS),
    "tests": TESTS,
    "benchmarks": ("pytest-benchmark>=5", *TESTS),
    "sanitizer": ("compute-sanitizer",),
    "trainer": ("transformers>=5.5", "datasets>=4", "pydantic>=2.7", "scipy>=1.15", "matplotlib", "peft"),
    "step": ("datasets", "transformers>=5.5", "trl"),
}
REPORT = r"========= (?!COMPUTE-SANITIZER|(?:ERROR|RACECHECK) SUMMARY: 0 )[^\n]*"
MOST_FAILURES = 40  # shown on the page


class Step(NamedTuple):
    part: str
    name: str
    command: list[str]
    fills_time: bool = True  # a stop is no failure


def import_wheels() -> None:
    """Makes the packages of .wheels those of this process and of all steps."""
    site, home = WORK / "site", os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if wheels := sorted(map(str, WHEELS.glob("*.whl"))):
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
        sys.path.insert(0, str(site))
    os.environ["PATH"] = f"{site}/bin:{os.environ['PATH']}:{home}/bin:{home}/compute-sanitizer"
    os.environ["PYTHONPATH"] = ":".join(map(str, (ROOT, ROOT / "python", site, os.environ.get("PYTHONPATH", ""))))


def lacking(part: str) -> str:
    """The requirements of a part that are not met, with the installed versions."""
    from packaging.requirements import Requirement

    wrong = []
    for requirement in map(Requirement, NEEDS.get(part, ())):
        try:
            version = importlib.metadata.version(requirement.name)
            if not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement}, which is {version}")
        except importlib.metadata.PackageNotFoundError:
            if requirement.name not in ("cmake", "ninja", "compute-sanitizer") or not shutil.which(requirement.name):
                wrong.append(str(requirement))
    return " and ".join(wrong)


def build(capability: str) -> Step:
    flags = ["GRPO_KERNELS_BUILD=cuda", f"CMAKE_ARGS=-DGRPO_CUDA_ARCHITECTURES={capability}-real"]
    check = "import grpo_kernels as gk; k = gk.available_kernels(); print(k); assert k['cuda'] == k['cpu'] == 'ok'"
    command = f'"$0" setup.py build_ext --inplace && PYTHONPATH=.:$PYTHONPATH "$0" -c "{check}"'
    return Step("build", "build", ["env", *flags, "bash", "-c", command, sys.executable], False)


def tests(part: str, name: str, machine: dict[str, Any], *selection: str) -> Step:
    """Tests marked gpu in the order of the files, one at a time, so that the first results are the most valuable."""
    # a test that compiles many kernels of Triton takes minutes; the worker of a hung one is replaced
    patience = ["-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true"]
    xdist = ["-n", str(max(1, machine["cores"] - 4)), "--maxschedchunk=1", "--max-worker-restart=30"]
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "--results", f"{WORK}/results/{part}_{name}.jsonl"]
    command = ["nice", sys.executable, "-m", "pytest", *options, *patience, *xdist, *selection]
    return Step(part, name, command, fills_time=part == "tests")


def chains(part: str, machine: dict[str, Any]) -> list[list[Step]]:
    """Steps of a part: the chains run together, the steps of a chain one after the other."""
    cases, results = "tests/test_kernel_cases.py", WORK / "results"
    if part == "build":
        capability = "".join(map(str, machine["capability"]))
        return [[build(capability)], [tests(part, "triton", machine, "-k", "triton", cases)]]
    if part == "sanitizer":
        # without torch's caching allocator, memory after a tensor is unallocated
        check = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--error-exitcode", "1"]
        # torch's kernels have hazards of their own; without what they write, reports of initcheck are to be read
        check += ["--kernel-name", "kernel_substring=grpo_kernels", "--tool"]
        module = [sys.executable, "-m", "tests.kernel_cases"]
        pairs = (("memcheck", "synccheck"), ("racecheck", "initcheck"))
        return [[Step(part, tool, [*check, tool, *module]) for tool in pair] for pair in pairs]
    if part == "benchmarks":
        command = [sys.executable, "-m", "pytest", "benchmarks", "-q", "-p", "no:cacheprovider"]
        ops = sorted(path.stem for path in (ROOT / "benchmarks" / "cases").glob("[a-z]*.py"))
        return [[Step(part, op, [*command, "--op", op, "--save", str(results / f"{op}.json")]) for op in ops]]
    if part == "trainer":
        recipe = ["-m", "grpo_trainer", "train", "arithmetic", "--fresh", f"output={WORK / 'run'}"]
        return [[Step(part, "recipe", [sys.executable, *recipe])]]
    if part == "step":
        command = ["-m", "benchmarks.step", "--device", "cuda", "--steps", "2", "--json", str(results / "step.json")]
        return [[Step(part, "step", [sys.executable, *command])]]
    # the tests of peers and of process groups are on the CPU
    return [[tests(part, part, machine, cases, "tests/ops", "--ignore-glob=*peers*", "--ignore-glob=*sharded*")]]


def summary(machine: dict[str, Any], rows: list[dict[str, Any]], results: Path) -> str:
    """The page: the machine, the steps, the tests that failed, and the tables of the benchmarks."""
    from benchmarks import tables  # imports torch

    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    steps = ["| part | step | state | seconds | |", "|---|---|---|---|---|"]
    for row in rows:
        state = f"**{row['state']}**" if row["state"] == "FAILED" else row["state"]
        steps.append(f"| {row['part']} | {row['step']} | {state} | {row['seconds']:.1f} | {row['why']} |")
    lines = [line for path in sorted(results.glob("*.jsonl")) for line in lines_of(path)]
    states = {line["item"]: line for line in lines}
    counts = Counter(line["state"] for line in states.values())
    parts = [f"# GPU check: {machine['gpu']}", facts, "## Steps", "\n".join(steps)]
    parts.append("Tests: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    failed = [f"- `{name}`: {line['why']}" for name, line in states.items() if line["state"] == "failed"]
    parts += ["## What failed", "\n".join(failed[:MOST_FAILURES])] if failed else []
    parts += [f"and {len(failed) - MOST_FAILURES} more"] if len(failed) > MOST_FAILURES else []
    found = []
    for path in sorted(results.glob("*.json")):
        if path.stem not in ("gpu_check", "step"):
            with contextlib.suppress(json.JSONDecodeError):  # cut off while it was written
                found.append(json.loads(path.read_text()))
    return "\n\n".join([*parts, tables.text(found)] if found else parts) + "\n"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Lines of a file of results, without one that was cut off while it was written."""
    lines = []
    for text in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and everything that it started."""
    with contextlib.suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judged(step: Step, status: int | None, log: Path) -> tuple[str, str]:
    """State of a step with its exit status, which is None if its time ran out, and the reason."""
    output = log.read_text(errors="replace")
    state, why = ("FAILED", f"exit status {status}") if status else ("ok", "")
    if status is None:
        state, why = "stopped" if step.fills_time else "FAILED", "its time ran out"
    if step.part == "sanitizer" and (report := re.search(REPORT, output)):
        state, why = "reports" if step.name == "initcheck" else "FAILED", report[0]
    if state == "FAILED":
        print(f"--- the end of {log.name}:", *output.splitlines()[-12:], sep="\n")
    return state, why


class Check:
    """The rows of a run so far."""

    def __init__(self, machine: dict[str, Any], missing: dict[str, str], results: Path, out: Path) -> None:
        self.machine, self.missing, self.results, self.out = machine, missing, results, out
        out.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self.processes, self.lock = list[subprocess.Popen[bytes]](), threading.RLock()
        signal.signal(signal.SIGINT, self.interrupted)
        signal.signal(signal.SIGTERM, self.interrupted)

    def interrupted(self, *_: object) -> None:
        with self.lock:  # no further step starts
            for process in self.processes:
                stop(process)
            self.write()  # an interrupted step has results, too
            os._exit(1)

    def run(self, chain: list[Step], deadline: float) -> None:
        """Runs steps one after the other, each for an equal share of the time that is left."""
        for number, step in enumerate(chain):
            if why := self.missing[step.part]:
                self.ended(step, 0.0, "left out", f"needs {why}")
                continue
            began, log = time.monotonic(), self.results / f"{step.part}_{step.name}.log"
            with log.open("wb") as file:
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
                process = subprocess.Popen(step.command, cwd=ROOT, start_new_session=True, **streams)
                self.processes.append(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - began) / (len(chain) - number))
            status = process.poll()
            stop(process)
            self.processes.remove(process)
            self.ended(step, time.monotonic() - began, *judged(step, status, log))

    def ended(self, step: Step, seconds: float, state: str, why: str) -> None:
        with self.lock:
            self.rows.append({"part": step.part, "step": step.name, "state": state, "seconds": seconds, "why": why})
            print(f"{step.part:<11}{step.name:<11}{state:<10}{seconds:7.1f} s  {why}".rstrip(), flush=True)
            self.write()

    def write(self) -> None:
        """Writes summary.md and gpu_check.tar.gz, which is renamed once it is complete."""
        (self.results / "gpu_check.json").write_text(json.dumps({"machine": self.machine, "steps": self.rows}))
        (self.results / "summary.md").write_text(summary(self.machine, self.rows, self.results))
        shutil.copy(self.results / "summary.md", self.out)
        with tarfile.open(self.out / "partial", "w:gz") as archive:
            for path in sorted(self.results.iterdir()):
                archive.add(path, path.name)
        (self.out / "partial").rename(self.out / "gpu_check.tar.gz")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run; default: all")
    parser.add_argument("--seconds", type=float, default=530, help="time for all parts; default: %(default)s")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    options = parser.parse_args(arguments)
    deadline, results = time.monotonic(), WORK / "results"
    import_wheels()
    missing = {part: lacking(part) for part in options.parts}
    if refused := [f"{part} needs {what}" for part, what in missing.items() if what and part in ("build", "tests")]:
        raise SystemExit(f"gpu-check: {'; '.join(refused)} (tools/gpu_wheels.sh)")
    code = "import json; from benchmarks import measure; print(json.dumps(measure.machine()))"
    machine = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT).splitlines()[-1])
    if "gpu" not in machine:
        raise SystemExit(f"gpu-check: needs an NVIDIA GPU, and torch {machine['packages']['torch']} sees none")
    steps = {part: chains(part, machine) if part in options.parts else [] for part in PARTS}
    plan = [(seconds, [chain for part in parts for chain in steps[part]]) for seconds, parts in STAGES]
    scale = options.seconds / sum(seconds for seconds, todo in plan if todo)
    if options.list:
        for seconds, todo in plan:
            for step in itertools.chain(*todo):
                print(f"{step.part:<11}{step.name:<11}{seconds * scale:4.0f} s  {' '.join(step.command)}")
        return
    if "build" in options.parts:
        shutil.rmtree(results, ignore_errors=True)  # results of another run would count
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "gpu").resolve()
    results.mkdir(parents=True, exist_ok=True)
    check = Check(machine, missing, results, out)
    for seconds, todo in plan:
        deadline += seconds * scale if todo else 0
        with ThreadPoolExecutor() as pool:
            list(pool.map(check.run, todo, itertools.repeat(deadline)))
    print(f"\n{out / 'summary.md'}\n{out / 'gpu_check.tar.gz'}")
    if any(row["state"] == "FAILED" for row in check.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
