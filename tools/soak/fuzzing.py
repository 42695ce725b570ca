"""The part fuzz: runs tools/soak/fuzz.py on each backend in a process of its own, and survives its crashes."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.emulation import build
from tools.soak import sanitized
from tools.soak.outcome import Outcome

ROOT = Path(__file__).parent.parent.parent
SEEDS = 1_000_000  # as in fuzz.py, which is not imported here as it needs the ops
VALID = "values and gradients within the budget of the float64 reference; integers equal; no sanitizer report"
INVALID = "results, or ValueError, TypeError or RuntimeError; no crash, no sanitizer report"


def run(options: argparse.Namespace) -> Iterator[Outcome]:
    for backend in options.backends:
        yield from fuzz(backend, options.seconds, options.seed * SEEDS)


def worker(backend: str) -> tuple[list[str], dict[str, str]]:
    """The command that fuzzes a backend, and its environment."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}
    plain = [sys.executable, "-m", "tools.soak.fuzz"]
    if backend == "cpu":
        return [*plain, "--backend", "cpu"], environment
    if backend == "triton":
        return [*plain, "--backend", "triton"], environment | {"TRITON_INTERPRET": "1"}
    environment |= sanitized.environment()
    if backend == "cpu-sanitized":
        folder = str(sanitized.package())
        return [sys.executable, "-m", "tools.soak.sanitized", folder, "--backend", "cpu"], environment
    return [*plain, "--backend", "cuda", "--emulated", str(build.library("sanitized"))], environment


def fuzz(backend: str, seconds: float, first: int) -> Iterator[Outcome]:
    """Rows for valid and for changed calls of a backend."""
    command, environment = worker(backend)
    valid = Outcome("fuzz", f"`{backend}`: random valid calls", 0, VALID)
    invalid = Outcome("fuzz", f"`{backend}`: calls with a random change", 0, INVALID)
    counts: Counter[str] = Counter()
    end, crashes = time.monotonic() + seconds, 0
    while (left := end - time.monotonic()) > 0 and crashes < 20:
        result, crash = run_worker([*command, "--seconds", str(left), "--first", str(first)], environment)
        first = result["next"]
        counts.update(result["counts"])
        crashes += bool(crash)
        for seed, changed, text in result["failures"]:
            (invalid if changed else valid).failures.append(f"--replay {seed}: {text}")
        if crash:
            valid.failures.append(f"--replay {first - 1}: {crash}")
        elif result["failures"]:
            break  # a worker stops early only after many failures
    valid.times, invalid.times = counts["valid"], counts["changed"]
    unnamed = sum(count for name, count in counts.items() if name.startswith("unnamed"))
    valid.note = f"{seconds:g} s, {sum(name.startswith('op ') for name in counts)} ops"
    invalid.note = f"{unnamed} errors came from torch and named no op" if unnamed else ""
    for name in sorted(name for name in counts if name.startswith("unnamed")):
        print(f"           {counts[name]} {name}", flush=True)
    yield valid
    yield invalid


def run_worker(command: list[str], environment: dict[str, str]) -> tuple[dict[str, Any], str]:
    """The result of a worker, and the report of a crash; the result then has only the seed to go on with."""
    with tempfile.TemporaryDirectory(prefix="soak-fuzz-") as folder:
        progress, result = Path(folder) / "progress", Path(folder) / "result"
        command = [*command, "--progress", str(progress), "--result", str(result)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())
            return found, ""
        if not progress.exists():
            raise RuntimeError(f"the fuzz must start, got status {done.returncode}:\n{done.stderr[-3000:]}")
        seed = int(progress.read_text())
        lines = re.findall(r"^.*(?:runtime error|ERROR: AddressSanitizer).*$", done.stderr, re.MULTILINE)
        crash = " ".join(lines[:2]) or f"status {done.returncode}: {done.stderr[-300:]}"
        return {"next": seed + 1, "failures": [], "counts": {}}, crash
