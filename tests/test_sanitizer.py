"""Runs the CUDA kernels on the host under AddressSanitizer and under the race detector."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.emulation import build

# One process for all cases, because starting Python under the sanitizer takes most of the time.
CASES = """
import ctypes, sys, torch, grpo_kernels as gk
from grpo_kernels import registry
from tests import kernel_cases
torch.ops.load_library(sys.argv[1])
registry.enable_emulated_cuda()
if len(sys.argv) > 2:  # an op whose order points outside its rows
    order = torch.tensor([0, 1, 2, 2_000])
    starts = torch.tensor([0, 4, 4, 4, 4])
    settings = gk.AdvantageConfig()
    torch.ops.grpo_kernels._group_advantages_cuda(
        torch.randn(4), order, starts, None, None, 0, None, None, None, None, [], settings.modes, settings.coefficients
    )
for name in kernel_cases.CASES:
    kernel_cases.check(name, torch.device("cpu"))
assert ctypes.CDLL(sys.argv[1]).grpo_kernels_launches() > 0, "the CPU kernels have run"
print("clean")
"""


def run(library: Path, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CASES, str(library), *arguments]
    environment = os.environ | {"PYTHONPATH": str(build.ROOT)} | (environment or {})
    return subprocess.run(command, env=environment, cwd=build.ROOT, capture_output=True, text=True)


def run_address_sanitizer(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    compiler = str(build.compiler())
    find = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    libraries = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.strip() for c in find]
    environment = {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    return run(library, *arguments, environment=environment)


needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, compute-sanitizer does this on the real kernels"
)
pytestmark = pytest.mark.skipif(
    build.compiler() is None or not (build.ROOT / "csrc").exists(), reason="needs a C++ compiler and the sources"
)


@needs_no_gpu
@pytest.mark.full
def test_kernels_stay_inside_their_arrays() -> None:
    done = run_address_sanitizer(build.library("address"))
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]


@pytest.mark.full
def test_an_access_outside_is_reported() -> None:
    done = run_address_sanitizer(build.library("address", "group_advantages"), "planted")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-4000:]


@needs_no_gpu
@pytest.mark.full
def test_kernels_have_no_races() -> None:
    """No kernel has a race; tests/test_races.py tests the detector itself on planted ones."""
    done = run(build.library("races"))
    assert done.returncode == 0 and "clean" in done.stdout, done.stderr[-4000:]
