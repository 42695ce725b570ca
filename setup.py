"""Builds the compiled libraries; everything else is in pyproject.toml.

GRPO_KERNELS_BUILD   result
  none               a pure-Python wheel with the Triton and reference backends
  cpu                the CPU kernels; needs a C++ compiler
  cuda               the CPU and CUDA kernels; needs nvcc, but neither a GPU nor a CUDA build of torch
  auto (default)     cuda for the GPUs of this machine, with nvcc and a CUDA build of torch; else cpu with a C++
                     compiler, else none. A name of a compiler exists on macOS without Xcode's tools, so it must first
                     compile a line of C++20.
torch is the installed one with pip's --no-build-isolation, else the one that pip fetches for the build. A failed
compilation is an error in every mode. The libraries use no header of Python's, so a wheel serves every version of
Python on its platform. Objects are kept in build/kernels, so another build compiles only what has changed.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
MODES = ("auto", "none", "cpu", "cuda")
OBJECTS = ROOT / "build" / "kernels"
# Minutes that an idle core of an AMD EPYC compiles: the CPU kernels, and the CUDA kernels for one architecture.
CPU_MINUTES, CUDA_MINUTES, ALL_ARCHITECTURES = 2, 1, 6


def say(message: str) -> None:
    print(f"grpo-kernels: {message}", file=sys.stderr, flush=True)


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))


def program(package: str, folder: str) -> str | None:
    """Path of a package's program: this Python's, or else that on PATH, which may be too old for nvcc."""
    try:
        own = shutil.which(package, path=str(getattr(importlib.import_module(package), folder)))
    except (ImportError, AttributeError):
        own = None
    return own or shutil.which(package)


def compiles(compiler: str) -> bool:
    command = [*shlex.split(compiler), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    try:
        return subprocess.run(command, input=b"#include <concepts>\n", capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def visible_gpus() -> str:
    """The architectures of this machine's GPUs as CMake names them; empty without one that torch and nvcc serve."""
    try:
        import torch
    except ImportError:
        raise SystemExit(
            "grpo-kernels: PyTorch must be installed before the kernels are built; pip install torch, or set "
            "GRPO_KERNELS_BUILD=none to do without them"
        ) from None
    if not torch.version.cuda or not nvcc() or not torch.cuda.is_available():
        return ""
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return ";".join(f"{major}{minor}-real" for major, minor in sorted(capabilities))


def build_mode() -> str:
    mode = os.environ.get("GRPO_KERNELS_BUILD", "auto")
    if mode not in MODES:
        raise SystemExit(f"GRPO_KERNELS_BUILD must be one of {', '.join(MODES)}, got {mode!r}")
    if mode != "auto":
        return mode
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    why = ""
    if sys.platform not in ("linux", "darwin"):
        why = f"{sys.platform} is not supported"
    elif not compiler:
        why = "no C++ compiler found"
    elif sys.platform == "darwin" and not compiles(compiler):
        why = f"{compiler} does not compile C++20"
    if why:
        say(f"{why}, building without compiled kernels")
        return "none"
    return "cuda" if visible_gpus() else "cpu"


class FreshBuild(build_py):
    """Leaves out of a wheel what only an earlier build had.

    Kernels in a checkout stay, even with mode none: they may be those of another environment, such as .venv's beside
    .venv-engine.
    """

    def run(self) -> None:
        if not self.editable_mode:
            for package in ("grpo_kernels", "grpo_conformance", "grpo_trainer"):
                shutil.rmtree(Path(self.build_lib) / package, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Builds all libraries in one CMake run, into the folder where setuptools expects them."""

    def finalize_options(self) -> None:
        in_checkout = self.inplace or self.editable_mode
        has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
        has_tools = has_headers and importlib.util.find_spec("pybind11")
        if in_checkout and self.distribution.ext_modules and has_tools:  # for a test
            self.distribution.ext_modules.append(Extension("grpo_kernels._codes", sources=[]))
        super().finalize_options()

    def get_ext_filename(self, fullname: str) -> str:
        package, _, name = fullname.rpartition(".")
        if not name.startswith("libgrpo_kernels_"):
            return str(super().get_ext_filename(fullname))
        return os.path.join(*package.split("."), f"{name}.so") if package else f"{name}.so"

    def run(self) -> None:
        if not self.extensions:
            return
        names = {extension.name.rpartition(".")[2] for extension in self.extensions}
        has_cuda = "libgrpo_kernels_cuda" in names
        output = Path(self.get_ext_fullpath(self.extensions[0].name)).parent.resolve()
        for library in output.glob("libgrpo_kernels_*.so"):  # of an earlier build of another mode
            if library.stem not in names:
                library.unlink()
        OBJECTS.mkdir(parents=True, exist_ok=True)
        # options and compilers of an earlier build
        (OBJECTS / "CMakeCache.txt").unlink(missing_ok=True)
        for folder in OBJECTS.glob("CMakeFiles/[0-9]*"):
            shutil.rmtree(folder)
        cmake = program("cmake", "CMAKE_BIN_DIR")
        if cmake is None:
            raise SystemExit("grpo-kernels: CMake must be installed before the kernels are built; pip install cmake")
        gpus = visible_gpus()
        configure = [
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(OBJECTS),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DGRPO_OUTPUT_DIR={output}",
            f"-DGRPO_WITH_CUDA={'ON' if has_cuda else 'OFF'}",
            f"-DGRPO_WITH_CODES={'ON' if '_codes' in names else 'OFF'}",
        ]
        ninja = program("ninja", "BIN_DIR")
        if ninja:
            # passed each time, because the cache may name the ninja of a build environment that pip has removed
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        if has_cuda:
            compiler = nvcc()
            if compiler is None:
                raise SystemExit("GRPO_KERNELS_BUILD=cuda needs nvcc, on PATH or in $CUDA_HOME/bin; found none")
            configure.append(f"-DCMAKE_CUDA_COMPILER={compiler}")
            if os.environ.get("GRPO_KERNELS_BUILD", "auto") == "auto":
                configure.append(f"-DGRPO_CUDA_ARCHITECTURES={gpus}")
        # for example -DGRPO_CUDA_ARCHITECTURES=90-real for the GPU at hand
        configure += os.environ.get("CMAKE_ARGS", "").split()
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        announce(configure, has_cuda, int(jobs))
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(OBJECTS), "--parallel", jobs], check=True)


def announce(configure: list[str], has_cuda: bool, jobs: int) -> None:
    """Says what is compiled and about how long that takes; pip shows it with -v."""
    what, minutes = "the CPU kernels", CPU_MINUTES
    if has_cuda:
        chosen = [option for option in configure if option.startswith("-DGRPO_CUDA_ARCHITECTURES=")]
        names = chosen[-1].partition("=")[2] if chosen else ""
        what += f" and the CUDA kernels for {names or 'all architectures'}"
        minutes += CUDA_MINUTES * (len(names.split(";")) if names else ALL_ARCHITECTURES)
    say(f"compiling {what} with {jobs} jobs, about {max(1, round(minutes / jobs))} minutes unless built before")
    if not has_cuda:
        say("those for GPUs need nvcc and are built for the GPUs found; GRPO_KERNELS_BUILD=cuda builds them for all")


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


backends = {"none": [], "cpu": ["cpu"], "cuda": ["cpu", "cuda"]}[build_mode()]

recipes = [
    f"grpo_trainer.recipes.{name}" for name in sorted({path.parent.name for path in ROOT.glob("recipes/*/*.yaml")})
]

setup(
    packages=find_packages(include=["grpo_kernels*"]) + find_packages("python") + ["grpo_trainer.recipes", *recipes],
    package_dir={
        "grpo_conformance": "python/grpo_conformance",
        "grpo_trainer": "python/grpo_trainer",
        "grpo_trainer.recipes": "recipes",
    },
    package_data={
        "grpo_kernels": ["py.typed"],
        "grpo_trainer.recipes": ["*/*.yaml", "*/*.py"],
        "grpo_trainer.report": ["template.html"],
    },
    ext_modules=[Extension(f"grpo_kernels.libgrpo_kernels_{name}", sources=[]) for name in backends],
    cmdclass={"build_py": FreshBuild, "build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
