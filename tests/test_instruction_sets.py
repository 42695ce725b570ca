"""The CPU kernels as machines with another instruction set run them.

Faults that this is for: a loop of one instruction set that leaves out a tail or a check. A machine
runs its own set alone, and only token_logprobs compares the sets with each other.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.build import ROOT, run
from tests.harness import needs_cpu_kernels
from tests.simd.levels import FLAGS, NEEDS, needs_sources

FILES = ("test_backends", "test_wide", "test_options", "test_refused_values", "test_distillation")
SELECTED = f"cpu and ({' or '.join(FILES)})"


def build(level: str, folder: Path) -> None:
    """Compiles all code of the kernels for one set, as for a processor of which CMake knows no other."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGRPO_OPTIMIZATION=-O1", f"-DCMAKE_CXX_FLAGS={' '.join(FLAGS[level])}"]
    options += ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=another"]
    options += [f"-DGRPO_OUTPUT_DIR={folder / 'grpo_kernels'}", f"-DPython_EXECUTABLE={sys.executable}"]
    run(["cmake", "-S", str(ROOT), "-B", str(folder / "build"), "-G", "Ninja", *options])
    run(["cmake", "--build", str(folder / "build")])


def in_folder(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | variables)


@pytest.mark.full
@needs_cpu_kernels
@needs_sources
@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="has one instruction set")
@pytest.mark.parametrize("level", ["baseline", "avx2"])
def test_kernels_of_an_instruction_set(level: str, tmp_path: Path) -> None:
    if NEEDS[level] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"no {level} here")
    for name in ("grpo_kernels", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    build(level, tmp_path)
    tests = ["-m", "pytest", "-p", "no:cacheprovider", "-x", "-vv", "tests/ops", "-k", SELECTED]
    facts = "import grpo_kernels.backends as b; print(b.cpu_library.build_facts()['simd_compiled'])"
    for arguments, expected in ((["-c", facts], "baseline\n"), (tests, " passed")):
        done = in_folder(tmp_path, *arguments)
        assert done.returncode == 0 and expected in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
