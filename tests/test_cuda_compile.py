"""Compiles every CUDA source with nvcc for each major architecture of the release, without register spills.

Sources that compare results of arithmetic must be compiled without fused multiply-add.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.aot_compile import contractions, widest_load

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "csrc").glob("*/*.cu"))
# -fmad=false in CMakeLists.txt
ROUND_AS_WRITTEN = tuple(f"{op}/cuda.cu" for op in ("group_advantages", "similarity_groups", "endpoint_segments"))
# Kernels that stream through tokens or rewards.
WIDE = tuple(f"{op}/cuda.cu" for op in ("policy_loss", "group_advantages", "endpoint_segments"))
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin")
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc")


def name_of(source: Path) -> str:
    return f"{source.parent.name}/{source.name}"


def resources(source: Path, architecture: str, folder: Path) -> list[tuple[str, int, int]]:
    """Returns (kernel, registers, bytes spilled) for every kernel in the source.

    The host's half is compiled, too: nvcc rewrites it, and can make wrong code of what g++ takes.
    """
    command = [str(NVCC), "-std=c++20", "-O3", f"-arch={architecture}", "-Xptxas=-v", "-c"]
    command += ["-fmad=false"] if name_of(source) in ROUND_AS_WRITTEN else []
    command += [f"-I{ROOT / 'csrc'}"]
    command += [str(source), "-o", str(folder / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = re.findall(r"Compiling entry function '(\w+)'", done.stderr)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    assert len(kernels) == len(spills) == len(registers) > 0, done.stderr
    return [(k, int(r), int(s[0]) + int(s[1])) for k, r, s in zip(kernels, registers, spills, strict=True)]


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: name_of(p))
def test_compiles_without_spills(source: Path, architecture: str, tmp_path: Path) -> None:
    for kernel, registers, spilled in resources(source, architecture, tmp_path):
        print(f"{architecture} {registers:4d} registers {kernel}")
        assert spilled == 0, f"{kernel} spills {spilled} bytes on {architecture}"


def build_commands(folder: Path) -> dict[str, list[str]]:
    """Compile commands of the CUDA sources in a build for sm_90, by name."""
    search = os.pathsep.join([str(Path(sys.executable).parent), str(Path(str(NVCC)).parent), os.environ["PATH"]])
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    command += ["-DGRPO_WITH_CUDA=ON", "-DGRPO_CUDA_ARCHITECTURES=90", f"-DPython_EXECUTABLE={sys.executable}"]
    done = subprocess.run(command, env=os.environ | {"PATH": search}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entries = json.loads((folder / "compile_commands.json").read_text())
    return {name_of(Path(e["file"])): shlex.split(e["command"]) for e in entries if e["file"].endswith(".cu")}


def compile_to_ptx(command: list[str], target: Path) -> str:
    output = command.index("-o") + 1
    command = [*command[:output], str(target), *command[output + 1 :]]
    command[command.index("-c")] = "-ptx"
    done = subprocess.run(command, cwd=target.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target.read_text()


@pytest.mark.full
def test_aligned_arrays_are_read_16_bytes_at_a_time(tmp_path: Path) -> None:
    commands = build_commands(tmp_path)
    widths = {source: widest_load(compile_to_ptx(commands[source], tmp_path / "source.ptx")) for source in WIDE}
    assert widths == dict.fromkeys(WIDE, 16)


@pytest.mark.full
def test_sources_that_decide_round_as_the_host_does(tmp_path: Path) -> None:
    commands = build_commands(tmp_path)
    for source in ROUND_AS_WRITTEN:
        assert contractions(compile_to_ptx(commands[source], tmp_path / "source.ptx")) == []
