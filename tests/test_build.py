"""Checks the commands that setup.py passes to CMake, with stubs that record them."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
import torch

ROOT = Path(__file__).parent.parent


def checkout(folder: Path) -> Path:
    """The files that setup.py reads, with empty packages."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder)
    for package in ("grpo_kernels", "python/grpo_trainer", "python/grpo_conformance", "recipes"):
        (folder / package).mkdir(parents=True)
    shutil.copy(ROOT / "grpo_kernels" / "__init__.py", folder / "grpo_kernels")
    return folder


@pytest.mark.parametrize("has_packages", [True, False])
def test_build_uses_the_programs_of_this_environment(tmp_path: Path, has_packages: bool) -> None:
    """Programs of this environment's packages take precedence over PATH, as a system CMake may be too old for nvcc.

    Ninja's path is passed each time: CMake caches that of the first build, which pip may have removed since.
    """
    log, modules = tmp_path / "log", tmp_path / "modules"
    modules.mkdir()
    for folder in ("own", "path"):
        (tmp_path / folder).mkdir()
        for name in ("cmake", "ninja"):
            (tmp_path / folder / name).write_text(f'#!/bin/sh\necho {folder} {name} "$@" >> {log}\n')
            (tmp_path / folder / name).chmod(0o755)
    for name, variable in (("cmake", "CMAKE_BIN_DIR"), ("ninja", "BIN_DIR")):
        code = f"{variable} = {str(tmp_path / 'own')!r}" if has_packages else "raise ImportError"
        (modules / f"{name}.py").write_text(code)
    stale = tmp_path / "lib" / "grpo_kernels" / "libgrpo_kernels_cuda.so"
    stale.parent.mkdir(parents=True)
    stale.touch()
    old = checkout(tmp_path / "checkout") / "build" / "kernels"
    (old / "CMakeFiles" / "3.25.1").mkdir(parents=True)
    (old / "CMakeFiles" / "an_object.o").touch()
    (old / "CMakeCache.txt").touch()
    folders = ["--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib")]
    variables = {"PATH": f"{tmp_path / 'path'}{os.pathsep}{os.environ['PATH']}", "GRPO_KERNELS_BUILD": "cpu"}
    command = [sys.executable, "setup.py", "-q", "build_ext", *folders]
    environment = os.environ | variables | {"PYTHONPATH": str(modules)}
    at = tmp_path / "checkout"
    done = subprocess.run(command, check=True, cwd=at, env=environment, timeout=120, capture_output=True, text=True)
    assert "compiling the CPU kernels with" in done.stderr and "GRPO_KERNELS_BUILD=cuda" in done.stderr
    assert [file.name for file in old.rglob("*") if file.is_file()] == ["an_object.o"], "objects alone are kept"
    assert not stale.exists(), "a library of another mode would be part of the wheel"
    configure, build = log.read_text().splitlines()
    folder = "own" if has_packages else "path"
    assert f"-DCMAKE_MAKE_PROGRAM={tmp_path / folder / 'ninja'}" in configure and "-G Ninja" in configure
    assert configure.startswith(f"{folder} cmake -S") and build.startswith(f"{folder} cmake --build")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_architectures_are_those_that_nvcc_supports(tmp_path: Path) -> None:
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DGRPO_WITH_CUDA=ON", "-DCMAKE_CUDA_COMPILER=nvcc"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([*command, "-G", "Ninja"], check=True, capture_output=True, timeout=300, env=environment)
    listed = subprocess.run(["nvcc", "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    known = [number for number in (80, 86, 89, 90, 100, 120) if f"compute_{number}" in listed]
    facts = (tmp_path / "grpo_kernels_cuda" / "build_facts.h").read_text()
    wanted = ";".join([*(f"{number}-real" for number in known[:-1]), str(known[-1])])
    assert f'#define GRPO_CUDA_ARCHITECTURES "{wanted}"' in facts


@pytest.mark.parametrize("mode", ["none", "cpu"])
def test_an_editable_install_keeps_or_replaces_kernels(tmp_path: Path, mode: str) -> None:
    """Mode none leaves those of another environment; the others remove what they do not build."""
    checkout(tmp_path)
    library = tmp_path / "grpo_kernels" / "libgrpo_kernels_cuda.so"
    library.touch()
    for name in ("cmake", "ninja"):
        (tmp_path / f"{name}.py").write_text("raise ImportError")
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    program = "from setuptools.build_meta import build_editable; build_editable('.')"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"GRPO_KERNELS_BUILD": mode, "PATH": path, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert library.exists() == (mode == "none")


@pytest.mark.parametrize(
    ("platform", "compiler", "mode", "message"),
    [
        ("linux", "a-compiler", "cpu", ""),
        ("darwin", "c++", "cpu", ""),
        ("darwin", "env false", "none", "env false does not compile C++20"),
        ("darwin", "false", "none", "false does not compile C++20"),
        ("darwin", "/no/compiler", "none", "/no/compiler does not compile C++20"),
        ("darwin", None, "none", "no C++ compiler found"),
        ("win32", "true", "none", "win32 is not supported"),
    ],
)
def test_automatic_mode_of_each_platform(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    platform: str,
    compiler: str | None,
    mode: str,
    message: str,
) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("GRPO_KERNELS_BUILD", "none")
    functions = runpy.run_path(str(ROOT / "setup.py"))
    monkeypatch.delenv("GRPO_KERNELS_BUILD")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(sys, "platform", platform)
    if compiler is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    else:
        monkeypatch.setenv("CXX", compiler)
    assert functions["build_mode"]() == mode
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("capabilities", [[], [(9, 0)], [(9, 0), (8, 0), (9, 0)]])
def test_automatic_mode_builds_for_the_gpus_that_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]]
) -> None:
    (tmp_path / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("GRPO_KERNELS_BUILD", "none")
    functions = runpy.run_path(str(ROOT / "setup.py"))
    monkeypatch.delenv("GRPO_KERNELS_BUILD")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    assert functions["build_mode"]() == ("cuda" if capabilities else "cpu")
    wanted = {0: "", 1: "90-real", 3: "80-real;90-real"}[len(capabilities)]
    assert functions["visible_gpus"]() == wanted


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("setuptools", "grpo-kernels: setuptools must be installed with --no-build-isolation; pip install"),
        ("torch", "grpo-kernels: PyTorch must be installed before the kernels are built; pip install torch"),
    ],
)
def test_a_missing_package_is_one_sentence(tmp_path: Path, missing: str, message: str) -> None:
    """pip calls the backend in a process of its own and shows what that prints."""
    folder = checkout(tmp_path / "checkout")
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError({missing!r})")
    program = "from build_backend import build_wheel; build_wheel('.')"
    environment = os.environ | {"GRPO_KERNELS_BUILD": "auto", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'tools'}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
def test_clang_compiles_every_file_without_a_warning(tmp_path: Path) -> None:
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja", "-DCMAKE_CXX_COMPILER=clang++"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    options = ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([*command, *options], check=True, capture_output=True, timeout=300, env=environment)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    assert len(commands) > 20
    for entry in commands:
        checked = [*shlex.split(entry["command"].partition(" -o ")[0]), "-fsyntax-only", "-Werror", entry["file"]]
        done = subprocess.run(checked, capture_output=True, text=True, cwd=entry["directory"], timeout=300)
        assert done.returncode == 0, done.stderr[:2000]
