"""Everything that needs a GPU, in one go and without a network: build, test, sanitize, benchmark.

    python tools/gpu_check.py [--parts build test sanitize bench] [--python PYTHON]

Uses the torch that is there (2.11 or later) and nvcc. Results go to $OUT if set, else to benchmarks/results.
NOT YET RUN on a GPU: this file has been written and dry-run without one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.resolve()
PARTS = ("build", "test", "sanitize", "bench")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

# A small case of every CUDA kernel: int groups, ids, subgroups with their groups' statistics, both batch paths.
KERNEL_CASES = """
import torch, grpo_kernels as gk
torch.manual_seed(0)
def call(rows, groups, config, **more):
    rewards = torch.randn(rows, device="cuda")
    gk.group_advantages(rewards, groups, config=config, backend="cuda", **more)
ids = torch.randint(0, 9, (500,), device="cuda")
call(512, 8, "grpo")
call(500, ids, "grpo_passk")
call(6000, torch.zeros(6000, dtype=torch.int64, device="cuda"), "rloo")
call(500, ids, gk.AdvantageConfig("grpo", shrinkage=2.0), subgroups=torch.randint(-1, 3, (500,), device="cuda"))
call(512, 8, "batch_std")
call(70000, 8, "gpg")
torch.cuda.synchronize()
"""


def run(command: list[str], log: Path, limit: float, **environment: str) -> tuple[bool, str]:
    """Whether it succeeded within the limit (seconds), and the end of what it printed; all of it goes to the log."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
        output, ok = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as expired:
        output, ok = f"{expired.stdout or ''}\nstopped after {limit} s", False
    log.write_text(output)
    return ok, "\n".join(output.strip().splitlines()[-12:])


def commands(python: str, out: Path) -> dict[str, list[tuple[str, list[str], float, dict[str, str]]]]:
    """Per part: name, command, time limit and environment of each step."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    build = {"GRPO_KERNELS_BUILD": "cuda", "CMAKE_ARGS": f"-DGRPO_CUDA_ARCHITECTURES={major}{minor}-real"}
    install = [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-e", "."]
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider"]
    tests = [*pytest, "tests/ops", "--deselect", "tests/ops/test_group_advantages_parity.py"]
    results = f"--benchmark-json={out / 'gpu_benchmarks.json'}"
    return {
        "build": [("build", install, 240, build), ("report", [python, "-m", "grpo_kernels"], 60, {})],
        "test": [("op tests", tests, 240, {})],
        "sanitize": [
            (tool, [sanitizer, "--tool", tool, "--error-exitcode", "1", python, "-c", KERNEL_CASES], 120, {})
            for tool in TOOLS
        ],
        "bench": [("benchmarks", [*pytest, "benchmarks", "--benchmark-only", "-s", results], 180, {})],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        raise SystemExit("gpu-check: this Python has no torch; pass --python") from None
    if not torch.cuda.is_available():
        raise SystemExit(f"gpu-check: torch {torch.__version__} sees no NVIDIA GPU")

    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for part in options.parts:
        for name, command, limit, environment in commands(options.python, out)[part]:
            start = time.perf_counter()
            ok, tail = run(command, out / f"{part}_{name.replace(' ', '_')}.log", limit, **environment)
            rows.append({"part": part, "step": name, "ok": ok, "seconds": round(time.perf_counter() - start, 1)})
            if not ok or part == "bench":
                print(tail)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    (out / "gpu_check.json").write_text(json.dumps({"machine": machine, "steps": rows}, indent=1))
    print(machine)
    for row in rows:
        print(f"{row['part']:<10}{row['step']:<12}{'ok' if row['ok'] else 'FAILED':<8}{row['seconds']:>8.1f} s")
    if not all(row["ok"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
