"""nvcc compiles every CUDA source for every architecture of the release, without spilling a register."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "csrc/cuda").glob("*.cu"))
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin")
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def resources(source: Path, architecture: str, folder: Path) -> list[tuple[str, int, int]]:
    """(kernel, registers, bytes spilled) for every kernel in the source."""
    command = [str(NVCC), "-std=c++20", "-O3", f"-arch={architecture}", "-Xptxas=-v", "-cubin"]
    command += [f"-I{ROOT / 'csrc' / f}" for f in ("include", "common", "cuda")]
    command += [str(source), "-o", str(folder / "out.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = re.findall(r"Compiling entry function '(\w+)'", done.stderr)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    assert len(kernels) == len(spills) == len(registers) > 0, done.stderr
    return [(k, int(r), int(s[0]) + int(s[1])) for k, r, s in zip(kernels, registers, spills, strict=True)]


@pytest.mark.grid(strength=1)  # a source takes seconds for each
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_compiles_without_spills(source: Path, architecture: str, tmp_path: Path) -> None:
    for kernel, registers, spilled in resources(source, architecture, tmp_path):
        print(f"{architecture} {registers:4d} registers {kernel}")
        assert spilled == 0, f"{kernel} spills {spilled} bytes on {architecture}"


def test_a_spill_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "spill.cu"
    source.write_text(
        "__global__ void __launch_bounds__(1024, 2) spill(const float* in, float* out, int n) {\n"
        "  float a[64];\n"
        "  for (int i = 0; i < 64; ++i) a[i] = in[threadIdx.x + i * n];\n"
        "  for (int r = 0; r < n; ++r)\n"
        "    for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i + 7) % 64] + in[r];\n"
        "  for (int i = 0; i < 64; ++i) out[threadIdx.x + i * n] = a[i];\n}\n"
    )
    assert sum(spilled for _, _, spilled in resources(source, "sm_80", tmp_path)) > 0
