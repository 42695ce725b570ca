"""Runs the CUDA kernels on the host under AddressSanitizer and under the race detector."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.emulation import build
from tests.nightly import sanitized

# An op whose order points outside its rows.
PLANTED = """
import sys, torch, grpo_kernels as gk
torch.ops.load_library(sys.argv[1])
order, starts, settings = torch.tensor([0, 1, 2, 2_000]), torch.tensor([0, 4, 4, 4, 4]), gk.AdvantageConfig()
torch.ops.grpo_kernels._group_advantages_cuda(
    torch.randn(4), order, starts, None, None, 0, None, None, None, None, [], settings.settings
)
"""


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(build.ROOT)} | environment
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=build.ROOT, capture_output=True, text=True)


needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU, compute-sanitizer does this on the real kernels"
)
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(build.compiler() is None or not (build.ROOT / "csrc").exists(), reason="nothing to compile"),
]


@needs_no_gpu
@pytest.mark.parametrize("variant", ["address", "races"])
def test_kernels_stay_inside_their_arrays_and_have_no_races(variant: str) -> None:
    """One process for all cases, as starting Python under the sanitizer takes most of the time."""
    environment = sanitized.environment() if variant == "address" else {}
    done = run("-m", "tests.kernel_cases", "--emulated", build.library(variant), **environment)
    assert done.returncode == 0 and "all cases ran" in done.stdout, done.stderr[-4000:]


def test_an_access_outside_is_reported() -> None:
    done = run("-c", PLANTED, build.library("address", "group_advantages"), **sanitized.environment())
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-4000:]
