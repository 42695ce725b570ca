"""Everything that needs a GPU, in one go, without a network, in under nine minutes: build, test, sanitize, benchmark.

    python tools/gpu_check.py [--parts build test sanitize bench] [--python PYTHON] [--list]

build     the package with its kernels for this GPU's architecture, into build/gpu_check of the checkout: the given
          Python stays as it is, and a later call can leave this part out
test      tests/ops on the backends that need the GPU, some processes at a time; tools/gpu_tests.py says which cases.
          It fails, too, if there is an op and one of these backends that no test which passed has run
sanitize  tools/kernel_cases.py, a case of every CUDA kernel, under the four tools of compute-sanitizer
bench     the benchmarks, small ones

Needs torch 2.11 or later, nvcc, compute-sanitizer, pytest and hypothesis; matplotlib for plots, and datasets,
transformers and trl for the end-to-end step, which without them are left out, and said to be. A part has so many
seconds, and what earlier parts left over; what takes longer is stopped with all processes that it started. Results and
a log of each step go to $OUT if set, else to benchmarks/results. The exit status is 1 if anything failed. Never run on
a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.resolve()
PACKAGE = ROOT / "build" / "gpu_check"
BUDGETS = {"build": 90, "test": 220, "sanitize": 90, "bench": 130}  # seconds
TOGETHER = ("test", "sanitize")  # parts whose steps run at the same time
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OPS = (
    "group_advantages", "token_logprobs", "linear_logprobs", "policy_loss", "linear_policy_loss", "endpoint_segments",
    "similarity_groups", "pairwise_cosine", "cluster_distances", "agglomerate", "silhouette",
)  # fmt: skip
BACKENDS = ("cuda", "triton")
NEEDS = {  # steps that are left out without
    "plots": {"matplotlib"},
    "step": {"datasets", "transformers", "trl"},
    "plot of step": {"matplotlib", "datasets", "transformers", "trl"},
}
# What the given Python and its machine are, as JSON; its arguments are modules.
ASK = """
import importlib.util, json, os, platform, sys, torch
there = torch.cuda.is_available()
print(json.dumps({
    "gpu": torch.cuda.get_device_name() if there else None,
    "capability": torch.cuda.get_device_capability() if there else None,
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    "cores": os.cpu_count(), "lacks": [module for module in sys.argv[1:] if importlib.util.find_spec(module) is None],
}))
"""
BACKENDS_WORK = """
import grpo_kernels
found = grpo_kernels.available_backends()
print(grpo_kernels.__file__, found)
assert found["cuda"] == found["triton"] == found["cpu"] == "ok"
"""


class Step(NamedTuple):
    """said     what its output must hold beside an exit status of 0, a pattern
    missing  why it cannot run here, or ""
    required  whether that is a failure
    """

    part: str
    name: str
    command: list[str]
    limit: float
    environment: dict[str, str]
    said: str = ""
    missing: str = ""
    required: bool = True


class Row(NamedTuple):
    part: str
    step: str
    state: str  # ok, FAILED, left out
    seconds: float
    why: str = ""


class Running(NamedTuple):
    step: Step
    process: subprocess.Popen[bytes]
    began: float
    end: float


def machine_of(python: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [python, "-c", ASK, *sorted(set().union(*NEEDS.values()))], capture_output=True, text=True
        )
    except OSError as error:
        raise SystemExit(f"gpu-check: --python must be a Python with torch, got {python!r}: {error}") from None
    if "No module named 'torch'" in done.stderr:
        raise SystemExit(f"gpu-check: --python must have torch, got {python!r}, which has none")
    if done.returncode != 0:
        raise SystemExit(f"gpu-check: --python must be a Python with torch, got {python!r}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["gpu"] is None:
        raise SystemExit(f"gpu-check: needs an NVIDIA GPU, and torch {found['torch']} sees none")
    if [int(number) for number in re.findall(r"\d+", str(found["torch"]))[:2]] < [2, 11]:
        raise SystemExit(f"gpu-check: torch must be 2.11 or later, got {found['torch']}")
    return found


def compute_sanitizer() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = [os.environ.get("PATH", ""), f"{home}/bin", f"{home}/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def steps_of(python: str, machine: dict[str, Any], out: Path) -> list[Step]:
    capability = "".join(map(str, machine["capability"]))
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    built = {"PYTHONPATH": paths, "TRITON_INTERPRET": "0", "TOKENIZERS_PARALLELISM": "false"}
    build = {"GRPO_KERNELS_BUILD": "cuda", "CMAKE_ARGS": f"-DGRPO_CUDA_ARCHITECTURES={capability}-real"}
    install = [python, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "--upgrade"]
    steps = [
        Step("build", "build", [*install, "--target", str(PACKAGE), str(ROOT)], BUDGETS["build"], build),
        Step("build", "backends", [python, "-c", BACKENDS_WORK], 60, built),
    ]
    shares = max(1, min(8, machine["cores"] // 2))
    # the checkout comes after the package: its folder of that name has no compiled kernels
    pytest = [python, "-m", "pytest", "-p", "tools.gpu_tests", "-p", "no:cacheprovider", "--import-mode=append"]
    pytest += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--ignore-glob", "*_parity*"]
    threads = built | {"OMP_NUM_THREADS": "2"}
    for share in range(1, shares + 1):
        where = [f"--shard={share}/{shares}", f"--junit-xml={out / f'test_{share}.xml'}", str(ROOT / "tests/ops")]
        steps.append(Step("test", f"tests {share}/{shares}", [*pytest, *where], BUDGETS["test"], threads))
    sanitizer = compute_sanitizer()
    # else what lies beside a tensor is torch's own memory, and no error
    bare = built | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in TOOLS:
        check = [sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
        steps.append(Step(
            "sanitize", tool, [*check, python, "-m", "tools.kernel_cases"], BUDGETS["sanitize"], bare,
            said=r"(?s)all cases ran.*SUMMARY: 0 (errors|hazards)",
            missing="" if sanitizer else "no compute-sanitizer on PATH or in $CUDA_HOME",
        ))  # fmt: skip
    return steps + benchmarks(python, machine, out, built)


def benchmarks(python: str, machine: dict[str, Any], out: Path, environment: dict[str, str]) -> list[Step]:
    run, scaling, whole = (str(out / f"gpu_{name}.json") for name in ("benchmarks", "scaling", "step"))
    commands: dict[str, tuple[float, list[str]]] = {
        "ops": (80, ["benchmarks.run", "--device", "cuda", "--budget", "60", "--json", run]),
        "scaling": (30, ["benchmarks.scaling", "--budget", "20", "--json", scaling]),
        "plots": (20, ["benchmarks.plot", run, scaling, "--out", str(out)]),
        "step": (60, ["benchmarks.step", "--steps", "4", "--device", "cuda", "--json", whole]),
        "plot of step": (15, ["benchmarks.plot", whole, "--out", str(out)]),
    }
    steps = []
    for name, (limit, command) in commands.items():
        lacks = ", ".join(sorted(NEEDS.get(name, set()) & {*machine["lacks"]}))
        missing = f"no {lacks}" if lacks else ""
        steps.append(Step("bench", name, [python, "-m", *command], limit, environment, missing=missing, required=False))
    return steps


def log_of(step: Step, out: Path) -> Path:
    return out / f"{step.part}_{step.name.replace(' ', '_').replace('/', '_of_')}.log"


def start(step: Step, out: Path) -> subprocess.Popen[bytes]:
    # from the folder of the built package, as a command finds that first that is where it runs
    PACKAGE.mkdir(parents=True, exist_ok=True)
    with log_of(step, out).open("wb") as log:
        return subprocess.Popen(
            step.command, cwd=PACKAGE, env=os.environ | step.environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def finish(running: Running, out: Path) -> Row:
    """Of a step that has ended, or whose time is over; nothing that it started is left."""
    step, process, began, _ = running
    why, seconds = "", time.monotonic() - began
    if process.poll() is None:
        why = f"stopped after {seconds:.0f} s"
    elif process.returncode != 0:
        why = f"exit status {process.returncode}"
    stop(process)
    output = log_of(step, out).read_text(errors="replace")
    if not why and not re.search(step.said, output):
        why = f"its output has nothing like {step.said}"
    if why:
        print(f"--- {step.part}, {step.name}: {why}; the end of {log_of(step, out)}:")
        print(*output.splitlines()[-20:], sep="\n")
    return Row(step.part, step.name, "FAILED" if why else "ok", round(seconds, 1), why)


def stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for(running: list[Running], out: Path) -> list[Row]:
    rows = []
    while running:
        for each in list(running):
            if each.process.poll() is not None or time.monotonic() >= each.end:
                rows.append(finish(each, out))
                running.remove(each)
        time.sleep(0.02)
    return rows


def run_part(steps: list[Step], deadline: float, out: Path) -> list[Row]:
    rows, running = [], []
    try:
        for step in steps:
            began = time.monotonic()
            if step.missing:
                rows.append(Row(step.part, step.name, "FAILED" if step.required else "left out", 0.0, step.missing))
            elif began >= deadline:
                rows.append(Row(step.part, step.name, "FAILED", 0.0, "no time was left for it"))
            else:
                running.append(Running(step, start(step, out), began, min(deadline, began + step.limit)))
                if step.part not in TOGETHER:
                    rows += wait_for(running, out)
        return rows + wait_for(running, out)
    finally:  # interrupted, too
        for each in running:
            stop(each.process)


def ran_on(out: Path) -> Counter[str]:
    """How many tests passed in which an op was called on a backend, as op:backend."""
    counts: Counter[str] = Counter()
    for path in out.glob("test_*.xml"):
        try:
            cases = xml.etree.ElementTree.parse(path).iter("testcase")
        except xml.etree.ElementTree.ParseError:  # stopped while it wrote: its step has failed, and counts for nothing
            continue
        for case in cases:
            if not any(case.findall(bad) for bad in ("failure", "error", "skipped")):
                counts.update({each.get("value", "") for each in case.iter("property") if each.get("name") == "ran_on"})
    return counts


def coverage(counts: Counter[str]) -> Row:
    lacking = [f"{op} on {backend}" for op in OPS for backend in BACKENDS if not counts[f"{op}:{backend}"]]
    why = f"no test that passed ran {', '.join(lacking)}" if lacking else ""
    return Row("test", "each op on each", "FAILED" if why else "ok", 0.0, why)


def run_parts(parts: list[str], steps: list[Step], out: Path) -> list[Row]:
    rows: list[Row] = []
    deadline = time.monotonic()
    for part in parts:
        deadline += BUDGETS[part]
        found = run_part([step for step in steps if step.part == part], deadline, out)
        rows += found + ([coverage(ran_on(out))] if part == "test" else [])
        if part == "build" and any(row.state == "FAILED" for row in found):
            rest = parts[parts.index(part) + 1 :]
            return rows + [Row(other, "all", "FAILED", 0.0, "not begun, as the build failed") for other in rest]
    return rows


def print_summary(machine: dict[str, Any], rows: list[Row], counts: Counter[str]) -> None:
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine.items() if name != "lacks"))
    for row in rows:
        print(f"{row.part:<10}{row.step:<18}{row.state:<10}{row.seconds:7.1f} s  {row.why}".rstrip())
    if counts:
        print(f"\n{'tests that passed':<28}" + "".join(f"{backend:>8}" for backend in BACKENDS))
        for op in OPS:
            print(f"{op:<28}" + "".join(f"{counts[f'{op}:{backend}']:>8}" for backend in BACKENDS))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=BUDGETS, default=list(BUDGETS))
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--list", action="store_true", help="show what would run, and run nothing")
    options = parser.parse_args(arguments)
    parts = [part for part in BUDGETS if part in options.parts]
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results").resolve()
    python = os.path.abspath(shutil.which(options.python) or options.python)  # steps run elsewhere
    machine = machine_of(python)
    steps = [step for step in steps_of(python, machine, out) if step.part in parts]
    if options.list:
        for step in steps:
            print(f"{step.part:<10}{step.name:<18}{BUDGETS[step.part]:4} s  {' '.join(step.command)}")
        return
    if "build" not in parts and not (PACKAGE / "grpo_kernels").exists():
        raise SystemExit(f"gpu-check: --parts must have build, as there is none in {PACKAGE}, got {parts}")
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("test_*.xml"), *out.glob("gpu_*.json")):  # of another run, which would count
        old.unlink()
    rows = run_parts(parts, steps, out)
    counts = ran_on(out)
    found = {"machine": machine, "steps": [row._asdict() for row in rows], "tests": dict(sorted(counts.items()))}
    (out / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n")
    print_summary(machine, rows, counts)
    if any(row.state == "FAILED" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu-check: terminated"))  # so that what runs is stopped, too
    main()
