"""Checks everything that needs a GPU in one command, in nine minutes and without a network, most valuable parts first.

    python -m tools.gpu_check [--parts PART ...] [--seconds 530] [--python PYTHON] [--list]

build      the package with its kernels for this GPU's architecture, into build/gpu_check of the checkout; the Python
           environment does not change, and a later call can skip this part
smoke      one small call of each op on each backend
values     values and gradients of every kernel's cases on each backend, against float64
timings    every op on each backend, beside a copy of the same bytes
peers      ratios to the installed peers
sanitizer  the cases under the four tools of compute-sanitizer, restricted to our kernels
trainer    the trainer's default recipe
tests      tests/ops on the backends that need the GPU, as selected by tools/gpu_tests.py
step       a whole GRPO step beside TRL's
scaling    each op over decades of size

Needs torch 2.11 or later, nvcc, pytest and hypothesis. Further packages are installed from the folder .wheels, if
tools/gpu_wheels.sh has filled it; a part that lacks a package says so. A part has its share of the seconds and the time
that earlier parts left, and is then stopped with all of its processes. Results are written line by line as they come:
summary.md and gpu_check.tar.gz in $OUT, by default benchmarks/results/gpu, are rewritten after every step. The exit
status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from tools import gpu_steps, gpu_summary
from tools.gpu_steps import Row, Step

ROOT = Path(__file__).parent.parent.resolve()
WORK = ROOT / "build" / "gpu_check"
WHEELS = ROOT / ".wheels"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ON_CPU = re.compile("parity|peers|distributed|sharded")  # tests of peers and of process groups, which run on the CPU
REFUSED = r"Device not supported[^\n]*"  # the sanitizer's message in a sandbox without access to the driver


class Stage(NamedTuple):
    """Parts that run concurrently, and their share of the seconds."""

    parts: tuple[str, ...]
    seconds: float


# Triton's kernels need no build: their values are checked during it.
STAGES = (
    Stage(("build", "smoke triton", "values triton"), 110),
    Stage(("smoke", "values"), 30),
    Stage(("timings",), 90),
    Stage(("peers",), 80),
    Stage(("sanitizer", "trainer", "tests"), 130),
    Stage(("step",), 60),
    Stage(("scaling",), 30),
)
PARTS = ("build", "smoke", "values", "timings", "peers", "sanitizer", "trainer", "tests", "step", "scaling")
ALONE = {"timings", "peers", "step", "scaling"}  # nothing runs beside these timings
NEEDS = {
    "trainer": {"accelerate", "matplotlib", "peft", "rich", "tokenizers", "transformers", "yaml"},
    "step": {"datasets", "transformers", "trl"},
    "tests": {"hypothesis", "numpy", "pytest"},
}
# Prints facts about a Python and its machine as JSON; the arguments are modules to look for.
FACTS = """
import importlib.util, json, os, platform, sys, torch
has_gpu = torch.cuda.is_available()
print(json.dumps({
    "gpu": torch.cuda.get_device_name() if has_gpu else None,
    "capability": torch.cuda.get_device_capability() if has_gpu else None,
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    "cores": os.cpu_count(), "lacks": [module for module in sys.argv[1:] if importlib.util.find_spec(module) is None],
}))
"""
CHECK_KERNELS = """
import grpo_kernels, sys
kernels = grpo_kernels.available_kernels()
print(grpo_kernels.__file__, kernels)
wrong = {name: kernels[name] for name in sys.argv[1:] if kernels[name] != "ok"}
assert not wrong, wrong
"""


def machine_of(python: str, environment: dict[str, str]) -> dict[str, Any]:
    modules = sorted(set().union(*NEEDS.values()))
    try:
        done = subprocess.run(
            [python, "-c", FACTS, *modules], capture_output=True, text=True, env=os.environ | environment
        )
    except OSError as error:
        raise SystemExit(f"gpu-check: --python must be a Python with torch, got {python!r}: {error}") from None
    if "No module named 'torch'" in done.stderr:
        raise SystemExit(f"gpu-check: --python must have torch, got {python!r}, which has none")
    if done.returncode != 0:
        raise SystemExit(f"gpu-check: --python must be a Python with torch, got {python!r}: {done.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if facts["gpu"] is None:
        raise SystemExit(f"gpu-check: needs an NVIDIA GPU, and torch {facts['torch']} sees none")
    if [int(number) for number in re.findall(r"\d+", str(facts["torch"]))[:2]] < [2, 11]:
        raise SystemExit(f"gpu-check: torch must be 2.11 or later, got {facts['torch']}")
    return facts


def compute_sanitizer() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = [os.environ.get("PATH", ""), f"{home}/bin", f"{home}/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def install_wheels(python: str, folder: Path) -> Path | None:
    """Installs the wheels in `folder` without a network, and returns the folder to import them from."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        return None
    site = WORK / "site"
    command = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    done = subprocess.run([*command, "--target", str(site), *wheels], capture_output=True, text=True)
    if done.returncode != 0:
        print(f"gpu-check: the wheels of {folder.name} were not installed: {done.stderr.strip()[-500:]}")
        return None
    return site


class Plan:
    """The steps for one machine."""

    def __init__(self, python: str, machine: dict[str, Any], results: Path, site: Path | None) -> None:
        self.python, self.machine, self.results = python, machine, results
        self.package = WORK / "package"
        paths = [
            str(ROOT),
            str(ROOT / "python"),
            *([str(site)] if site else []),
            *os.environ.get("PYTHONPATH", "").split(":"),
        ]
        common = {
            "TRITON_INTERPRET": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(WORK / "triton"),
            "OMP_NUM_THREADS": "2",
            "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),  # its own cmake and ninja
        }
        # The package precedes the checkout, whose grpo_kernels has no compiled kernels.
        self.of_package = common | {"PYTHONPATH": os.pathsep.join(filter(None, [str(self.package), *paths]))}
        self.of_checkout = common | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def step(self, part: str, name: str, command: list[str], **more: Any) -> Step:
        lacks = ", ".join(sorted(NEEDS.get(part, set()) & {*self.machine["lacks"]}))
        missing = f"no {lacks}" if lacks else ""
        settings = {"environment": self.of_package, "folder": self.package, "missing": missing} | more
        return Step(part, name, [self.python, *command], **settings)

    def build(self) -> list[Step]:
        capability = "".join(map(str, self.machine["capability"]))
        flags = {"GRPO_KERNELS_BUILD": "cuda", "CMAKE_ARGS": f"-DGRPO_CUDA_ARCHITECTURES={capability}-real"}
        install = '"$0" -m pip install --no-index --no-build-isolation --no-deps --upgrade'
        then = f'{install} --target "$1" "$2" && cd "$1" && "$0" -c "$3" cpu cuda triton'
        command = ["bash", "-c", then, self.python, str(self.package), str(ROOT), CHECK_KERNELS]
        return [Step("build", "build", command, self.of_package | flags, WORK)]

    def cases(self, part: str, backend: str, shares: int) -> list[Step]:
        """Smoke calls or value cases on a backend. Triton's run from the checkout, while the package is being built."""
        more: dict[str, Any] = {}
        if backend == "triton":
            more = {"environment": self.of_checkout, "folder": ROOT}
        steps = []
        for share in range(1, shares + 1):
            name = backend if shares == 1 else f"{backend} {share}/{shares}"
            lines = self.results / f"{part}_{backend}_{share}.jsonl"
            command = ["-m", "tools.kernel_cases", "--backend", backend, "--results", str(lines)]
            command += ["--share", f"{share}/{shares}"] + (["--smoke"] if part == "smoke" else [])
            steps.append(self.step(part, name, command, lines=lines, **more))
        return steps

    def sanitizer(self) -> list[Step]:
        sanitizer = compute_sanitizer()
        steps = []
        for tool in TOOLS:
            check = [sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
            # torch's kernels have hazards of their own; initcheck must see the writers of all memory that ours read
            check += [] if tool == "initcheck" else ["--kernel-name", "kernel_substring=grpo_kernels"]
            # without torch's caching allocator, memory after a tensor is unallocated
            environment = self.of_package | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            steps.append(
                Step(
                    "sanitizer",
                    tool,
                    [*check, self.python, "-m", "tools.kernel_cases"],
                    environment,
                    self.package,
                    expects=r"(?s)all cases ran.*SUMMARY: 0 (errors|hazards)",
                    refused=REFUSED,
                    is_optional=True,
                    missing="" if sanitizer else "no compute-sanitizer on PATH or in $CUDA_HOME",
                )
            )
        return steps

    def tests(self) -> list[Step]:
        shares = max(1, min(14, self.machine["cores"] - 2))
        pytest = ["-m", "pytest", "-p", "tools.gpu_tests", "-p", "no:cacheprovider", "--import-mode=append"]
        folder = ROOT / "tests" / "ops"
        pytest += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        files = [str(path) for path in sorted(folder.glob("**/test_*.py")) if not ON_CPU.search(path.name)]
        steps = []
        for share in range(1, shares + 1):
            lines = self.results / f"tests_{share}.jsonl"
            where = [f"--shard={share}/{shares}", f"--results={lines}", *files]
            steps.append(self.step("tests", f"{share}/{shares}", [*pytest, *where], lines=lines, fills_time=True))
        return steps

    def benchmark(self, part: str, module: str, *options: str, resumes: bool = True, **more: Any) -> Step:
        command = ["-m", f"benchmarks.{module}", "--device", "cuda", *options]
        command += ["--json", str(self.results / f"{part}.json")]
        if resumes:
            more["lines"] = self.results / f"{part}.lines"
            command += ["--lines", str(more["lines"])]
        return self.step(part, part, command, is_optional=True, fills_time=True, **more)

    def trainer(self) -> list[Step]:
        command = ["-m", "grpo_trainer", "arithmetic", "--fresh", f"output={WORK / 'run'}"]
        return [self.step("trainer", "default recipe", command, is_optional=True, fills_time=True)]

    def steps(self, part: str) -> list[Step]:
        shares = max(1, self.machine["cores"] - 6)
        make = {
            "build": self.build,
            "smoke triton": lambda: self.cases("smoke", "triton", 1),
            "values triton": lambda: self.cases("values", "triton", shares),
            "smoke": lambda: self.cases("smoke", "cuda", 1),
            "values": lambda: self.cases("values", "cuda", max(1, min(4, shares))),
            "timings": lambda: [self.benchmark("timings", "timings")],
            "peers": lambda: [self.benchmark("peers", "run", "--rounds", "5", "--budget", "1000")],
            "sanitizer": self.sanitizer,
            "trainer": self.trainer,
            "tests": self.tests,
            "step": lambda: [self.benchmark("step", "step", "--steps", "4", resumes=False)],
            "scaling": lambda: [self.benchmark("scaling", "scaling", resumes=False)],
        }
        return make[part]()


def stages_of(plan: Plan, parts: list[str], seconds: float) -> list[tuple[float, bool, list[Step]]]:
    """Each stage with its time, whether it runs alone, and its steps. The seconds are shared among `parts`."""
    selected = [
        Stage(tuple(part for part in stage.parts if part.partition(" ")[0] in parts), stage.seconds) for stage in STAGES
    ]
    selected = [stage for stage in selected if stage.parts]
    share = seconds / sum(stage.seconds for stage in selected)
    return [
        (stage.seconds * share, stage.parts[0] in ALONE, [step for part in stage.parts for step in plan.steps(part)])
        for stage in selected
    ]


def coverage(results: Path) -> Row:
    missing = gpu_summary.lacking(gpu_summary.ran_on(gpu_summary.results(results)))
    why = f"nothing that passed ran {', '.join(missing)}" if missing else ""
    return Row("tests", "each op on each", "FAILED" if why else "ok", 0.0, why)


class Check:
    """The rows of a run so far, written to disk with every new one."""

    def __init__(self, machine: dict[str, Any], results: Path, out: Path) -> None:
        self.machine, self.results, self.out = machine, results, out
        self.rows: list[Row] = []
        self.write()

    def ended(self, row: Row) -> None:
        self.rows.append(row)
        print(f"{row.part:<11}{row.step:<18}{row.state:<10}{row.seconds:7.1f} s  {row.why}".rstrip(), flush=True)
        self.write()

    def write(self) -> None:
        content = {"machine": self.machine, "steps": [row._asdict() for row in self.rows]}
        (self.results / "gpu_check.json").write_text(json.dumps(content, indent=1) + "\n")
        gpu_summary.bundle(self.results, self.out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run; default: all")
    parser.add_argument("--seconds", type=float, default=530, help="time for all parts; default: %(default)s")
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch; default: this one")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    options = parser.parse_args(arguments)
    deadline = time.monotonic()
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "gpu").resolve()
    python = os.path.abspath(shutil.which(options.python) or options.python)  # steps run in other folders
    results = WORK / "results"
    site = None if options.list else install_wheels(python, WHEELS)
    machine = machine_of(python, {"PYTHONPATH": str(site)} if site else {})
    plan = Plan(python, machine, results, site)
    stages = stages_of(plan, options.parts, options.seconds)
    if options.list:
        for seconds, _, steps in stages:
            for step in steps:
                print(f"{step.part:<11}{step.name:<18}{seconds:4.0f} s  {step.missing or ' '.join(step.command)}")
        return
    if "build" not in options.parts and not (plan.package / "grpo_kernels").exists():
        raise SystemExit(f"gpu-check: --parts must have build, as there is none in {plan.package}, got {options.parts}")
    if "build" in options.parts:
        shutil.rmtree(results, ignore_errors=True)  # results of another run would count
        shutil.rmtree(plan.package, ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    check = Check(machine, results, out)
    try:
        for seconds, is_alone, steps in stages:
            deadline += seconds
            together = 1 if is_alone else machine["cores"] + 4
            gpu_steps.run(steps, deadline, results, together, check.ended)
    finally:  # an interrupted step has results, too
        check.write()
    if {"smoke", "tests"} & {*options.parts}:
        check.ended(coverage(results))
    print(f"\n{out / 'summary.md'}\n{out / 'gpu_check.tar.gz'}")
    if any(row.state == "FAILED" for row in check.rows):
        raise SystemExit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu-check: terminated"))  # stops the running steps, too
    main()
