"""What setup.py asks of CMake, with a CMake that only writes it down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_a_second_build_uses_the_ninja_of_now(tmp_path: Path) -> None:
    """CMake's cache keeps the first build's, which pip may have removed with the environment it built in."""
    tools, told = tmp_path / "bin", tmp_path / "told"
    tools.mkdir()
    for name in ("cmake", "ninja"):
        (tools / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {told}\n')
        (tools / name).chmod(0o755)
    folders = ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    variables = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "GRPO_KERNELS_BUILD": "cpu"}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        check=True, cwd=ROOT, env=os.environ | variables, timeout=120, capture_output=True,
    )  # fmt: skip
    configure, build = told.read_text().splitlines()
    assert f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}" in configure and "-G Ninja" in configure
    assert build.startswith("cmake --build")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_architectures_are_those_that_nvcc_knows(tmp_path: Path) -> None:
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DGRPO_WITH_CUDA=ON", "-DCMAKE_CUDA_COMPILER=nvcc"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([*command, "-G", "Ninja"], check=True, capture_output=True, timeout=300, env=environment)
    listed = subprocess.run(["nvcc", "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    known = [number for number in (80, 86, 89, 90, 100, 120) if f"compute_{number}" in listed]
    facts = (tmp_path / "_C_cuda" / "build_facts.h").read_text()
    wanted = ";".join([*(f"{number}-real" for number in known[:-1]), str(known[-1])])
    assert f'#define GRPO_CUDA_ARCHITECTURES "{wanted}"' in facts
