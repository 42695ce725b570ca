"""Checks everything that needs a GPU in one command, without a network, most valuable parts first.

    python -m tools.gpu_check [--seconds 600] [--parts PART ...] [--resume [ARCHIVE]] [--device cpu]
    python -m tools.gpu_check --variants linear_policy_loss grpo_kernels.ops.linear_head.sizes.TILE_TOKENS=64,128

build      the libraries for this GPU, in place, unless the one that is there loads
values     each kernel's cases against float64
benchmarks times of ours for all ops, then of the installed peers, in one process
step       a whole GRPO step beside TRL's
tests      values, gradients and promises of tests/ops
trainer    the trainer's default recipe
sanitizer  the CUDA kernels' cases under the tools of compute-sanitizer

Each part ends after the seconds that PARTS gives it; what it does not need goes to later ones. A second command with
--resume continues: parts that ended are left out, and the benchmarks measure the rows that are missing. --device cpu
rehearses all parts without a GPU. --variants times ours with each value of a private switch.

Packages in .wheels, which tools/gpu_wheels.sh fills, are imported first; without its packages a part is refused or left
out in the first second. Results are written one by one, and summary.md and gpu_check.tar.gz in $OUT
(benchmarks/results/gpu) after every step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.resolve()
WORK = ROOT / "build" / "gpu_check"
WHEELS = ROOT / ".wheels"
# Parts in the order of their value, with the seconds that each has at most.
PARTS = {"build": 180, "values": 60, "benchmarks": 240, "step": 75, "tests": 110, "trainer": 60, "sanitizer": 240}
TESTS = ("pytest>=9", "pytest-xdist>=3.5", "hypothesis", "numpy")
NEEDS = {
    "build": ("torch>=2.11", *TESTS),
    "compile": ("setuptools>=77", "cmake>=3.25", "ninja"),
    "values": TESTS,
    "tests": TESTS,
    "benchmarks": ("pytest-benchmark>=5", *TESTS),
    "sanitizer": ("compute-sanitizer",),
    "trainer": ("transformers>=5.5", "datasets>=4", "pydantic>=2.7", "scipy>=1.15", "matplotlib", "peft"),
    "step": ("datasets", "transformers>=5.5", "trl"),
}
REPORT = r"========= (?!COMPUTE-SANITIZER|(?:ERROR|RACECHECK) SUMMARY: 0 )[^\n]*"
MOST_FAILURES = 40  # shown on the page
LEFT = "rows are left"
LAST_ROW = 10  # seconds that the last row of the benchmarks may take


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


def build(machine: dict[str, Any]) -> Step:
    """Compiles the libraries, unless the GPU's loads, which may have been built elsewhere; a rehearsal needs none."""
    wanted = "cuda" if "gpu" in machine else "cpu"
    check = f"import grpo_kernels as gk; k = gk.available_kernels(); print(k); assert k['{wanted}'] == 'ok'"
    command = f'PYTHONPATH=.:$PYTHONPATH "$0" -c "{check}"'
    flags = []
    if machine["kernels"][wanted] != "ok":
        capability = "".join(map(str, machine["capability"]))
        flags = ["GRPO_KERNELS_BUILD=cuda", f"CMAKE_ARGS=-DGRPO_CUDA_ARCHITECTURES={capability}-real"]
        command = f'"$0" setup.py build_ext --inplace && {command}'
    return Step("build", "build", ["env", *flags, "bash", "-c", command, sys.executable], False)


def tests(part: str, machine: dict[str, Any], *selection: str) -> Step:
    """Tests marked gpu in the order of the files, one at a time, so that the first results are the most valuable."""
    # a test that compiles many kernels of Triton takes minutes; the worker of a hung one is replaced
    patience = ["-o", "faulthandler_timeout=300", "-o", "faulthandler_exit_on_timeout=true"]
    xdist = ["-n", str(max(1, machine["cores"] - 4)), "--maxschedchunk=1", "--max-worker-restart=30"]
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "--results", f"{WORK}/results/{part}.jsonl"]
    return Step(part, part, [sys.executable, "-m", "pytest", *options, *patience, *xdist, *selection])


def steps(part: str, machine: dict[str, Any], seconds: float, variants: list[str] | None = None) -> list[Step]:
    """Steps of a part, one after the other."""
    results, device = WORK / "results", "cuda" if "gpu" in machine else "cpu"
    if part == "build":
        return [build(machine)]
    if part == "values":
        return [tests(part, machine, "tests/test_kernel_cases.py")]
    if part == "benchmarks":
        command = [sys.executable, "-m", "pytest", "benchmarks", "-q", "-p", "no:cacheprovider", "--report-limits"]
        command += ["--device", device, "--resume", "--seconds", f"{seconds - min(LAST_ROW, seconds / 3):.0f}"]
        if variants:
            op, switch = variants
            command += ["--save", f"{results}/variants.json", "--op", op, "--variants", switch, "-k", "case"]
        else:
            command += ["--save", f"{results}/benchmarks.json"]
        return [Step(part, part, command)]
    if part == "step":
        command = ["-m", "benchmarks.step", "--device", device, "--steps", "4", "--json", f"{results}/step.json"]
        return [Step(part, part, [sys.executable, *command])]
    if part == "trainer":
        recipe = ["-m", "grpo_trainer", "train", "arithmetic", "--fresh", f"output={WORK / 'run'}"]
        return [Step(part, part, [sys.executable, *recipe])]
    if part == "sanitizer":
        # without torch's caching allocator, memory after a tensor is unallocated
        check = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", "--error-exitcode", "1"]
        # torch's kernels have hazards of their own; without what they write, reports of initcheck are to be read
        check += ["--kernel-name", "kernel_substring=grpo_kernels", "--tool"]
        module = [sys.executable, "-m", "tests.kernel_cases"]
        return [
            Step(part, tool, [*check, tool, *module]) for tool in ("memcheck", "racecheck", "synccheck", "initcheck")
        ]
    # the tests of peers and of process groups are on the CPU
    return [tests(part, machine, "tests/ops", "--ignore-glob=*peers*", "--ignore-glob=*sharded*")]


def summary(machine: dict[str, Any], rows: list[dict[str, Any]], results: Path) -> str:
    """The page: the machine, the steps, the tests that failed, and the tables of the benchmarks and of a whole step."""
    from benchmarks import step, tables  # import torch

    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    cells = []
    for row in rows:
        state = f"**{row['state']}**" if row["state"] == "FAILED" else row["state"]
        cells.append([row["part"], row["step"], state, f"{row['seconds']:.1f}", row["why"]])
    steps = tables.markdown(["part", "step", "state", "seconds", ""], cells)
    lines = [line for path in sorted(results.glob("*.jsonl")) for line in lines_of(path)]
    states = {line["item"]: line for line in lines}
    counts = Counter(line["state"] for line in states.values())
    parts = [f"# GPU check: {machine.get('gpu', 'a rehearsal without a GPU')}", facts, "## Steps", steps]
    parts.append("Tests: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    failed = [f"- `{name}`: {line['why']}" for name, line in states.items() if line["state"] == "failed"]
    parts += ["## What failed", "\n".join(failed[:MOST_FAILURES])] if failed else []
    parts += [f"and {len(failed) - MOST_FAILURES} more"] if len(failed) > MOST_FAILURES else []
    for name, text in (("step", step.table), ("benchmarks", tables.text_of), ("variants", tables.text_of)):
        if (path := results / f"{name}.json").exists():
            parts.append(text(json.loads(path.read_text())))
    return "\n\n".join(parts) + "\n"


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
    elif rows := re.search(rf"\d+ {LEFT}", output):
        state, why = ("stopped" if state == "ok" else state), rows[0]
    if step.part == "sanitizer" and (report := re.search(REPORT, output)):
        state, why = "reports" if step.name == "initcheck" else "FAILED", report[0]
    if state == "FAILED":
        print(f"--- the end of {log.name}:", *output.splitlines()[-12:], sep="\n")
    return state, why


class Check:
    """The rows of a run so far, after those of the run that it continues."""

    def __init__(self, machine: dict[str, Any], results: Path, out: Path, rows: list[dict[str, Any]]) -> None:
        self.machine, self.results, self.out, self.rows = machine, results, out, rows
        out.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None
        signal.signal(signal.SIGINT, self.interrupted)
        signal.signal(signal.SIGTERM, self.interrupted)

    def interrupted(self, *_: object) -> None:
        if self.process is not None:
            stop(self.process)
        self.write()  # an interrupted step has results, too
        os._exit(1)

    def run(self, step: Step, seconds: float, missing: str) -> None:
        if missing:
            self.ended(step, 0.0, "left out", f"needs {missing}")
            return
        began, log = time.monotonic(), self.results / f"{step.part}_{step.name}.log"
        with log.open("wb") as file:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(step.command, cwd=ROOT, start_new_session=True, **streams)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        status = self.process.poll()
        stop(self.process)
        self.ended(step, time.monotonic() - began, *judged(step, status, log))

    def ended(self, step: Step, seconds: float, state: str, why: str) -> None:
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="parts to run; default: all")
    parser.add_argument("--seconds", type=float, default=600, help="time for all parts; default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses; default: %(default)s")
    parser.add_argument("--resume", nargs="?", const="", help="continue the last run, or that of a gpu_check.tar.gz")
    parser.add_argument(
        "--variants", nargs=2, metavar=("OP", "MODULE.NAME=VALUE,..."), help="build, and time an op with each value"
    )
    options = parser.parse_args(arguments)
    began, results = time.monotonic(), WORK / "results"
    parts = options.parts or (["build", "benchmarks"] if options.variants else [*PARTS])
    import_wheels()
    missing = {part: lacking(part) for part in parts}
    if refused := [f"{part} needs {what}" for part, what in missing.items() if what and part in ("build", "values")]:
        raise SystemExit(f"gpu-check: {'; '.join(refused)} (tools/gpu_wheels.sh)")
    code = "import json; from benchmarks import measure; print(json.dumps(measure.machine()))"
    machine = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT).splitlines()[-1])
    if options.device == "cuda" and "gpu" not in machine:
        version = machine["packages"]["torch"]
        raise SystemExit(f"gpu-check: needs an NVIDIA GPU, and torch {version} sees none; --device cpu rehearses")
    if options.device == "cpu":
        machine.pop("gpu", None)
    elif "build" in parts and machine["kernels"]["cuda"] != "ok" and (what := lacking("compile")):
        raise SystemExit(f"gpu-check: build needs {what}, or a CUDA library that loads (tools/gpu_wheels.sh)")
    if options.resume is None:
        shutil.rmtree(results, ignore_errors=True)  # results of another run would count
    results.mkdir(parents=True, exist_ok=True)
    if options.resume:
        shutil.unpack_archive(options.resume, results)
    file = results / "gpu_check.json"
    rows = json.loads(file.read_text())["steps"] if file.exists() else []
    ended = [row for row in rows if row["part"] != "build" and is_over(row)]
    known = [(row["part"], row["step"]) for row in ended]
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "gpu").resolve()
    check = Check(machine, results, out, ended)
    todo = [part for part in PARTS if part in parts]
    for number, part in enumerate(todo):
        left = options.seconds - (time.monotonic() - began)
        seconds = min(left, PARTS[part])
        if options.device == "cpu":  # each part has a share, as one that had no time would hide a mistake
            seconds = (
                left * PARTS[part] / sum(PARTS[other] for other in todo[number:] if not missing[other] or other == part)
            )
        wanted = [
            step for step in steps(part, machine, seconds, options.variants) if (step.part, step.name) not in known
        ]
        for step in wanted if left > 0 else ():
            check.run(step, seconds / len(wanted), missing[part])
    print(f"\n{out / 'summary.md'}\n{out / 'gpu_check.tar.gz'}")
    if any(row["state"] == "FAILED" for row in check.rows):
        raise SystemExit(1)


def is_over(row: dict[str, Any]) -> bool:
    """Whether a step has nothing left to do."""
    return row["state"] not in ("stopped", "left out") and not row["why"].endswith(LEFT)


if __name__ == "__main__":
    main()
