"""Compiles the CUDA kernels for the host. What is compiled is kept by the content of its sources, for all checkouts."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("csrc", "tests/emulation", "tests/simd")
SUFFIXES = {".cu", ".cuh", ".h", ".cpp", ".py"}  # of sources, and of what holds the flags
KEPT_SECONDS = 14 * 24 * 3600  # since the last use


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


# Flags that each variant of the library adds to the compiler's command.
VARIANTS = {
    "plain": [],
    "address": ["-fsanitize=address", "-fno-omit-frame-pointer"],
    # for tests/nightly, as it takes longer to compile; undefined behaviour ends the process, as an access outside does
    "sanitized": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"],
    # ThreadSanitizer's instrumentation without its runtime, which cuda_emulator_races.cpp replaces
    "races": [
        "-fsanitize=thread",
        "--param=tsan-instrument-func-entry-exit=0",
        "-nodefaultlibs",
        "-lstdc++",
        "-lm",
        "-lc",
        "-lgcc_s",
        "-lgcc",
    ],
}


def library(variant: str = "plain", op: str = "*") -> Path:
    """Shared library that, once loaded, implements the CUDA kernels of `op`, or of all ops, for CPU tensors."""
    name = variant if op == "*" else f"{variant}-{op}"
    return cached(name, lambda target: _compile(target, variant, op))


def cached(name: str, compile_to: Callable[[Path], None]) -> Path:
    """The shared library of this name for the current sources, compiled if no process has done so before."""
    sources = sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*") if p.suffix in SUFFIXES)
    content = b"".join(p.read_bytes() for p in sources)
    digest = hashlib.sha256(content + f"{torch.__version__} {compiler()}".encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_kernels" / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{digest[:16]}.so"
    with (folder / f"{name}.lock").open("w") as lock:  # test processes start together
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial")
            compile_to(partial)
            partial.rename(target)
        target.touch()
        for other in folder.glob(f"{name}-*.so"):
            if time.time() - other.stat().st_mtime > KEPT_SECONDS:
                other.unlink(missing_ok=True)
    return target


def race_detector(folder: Path) -> Path:
    """Object file with the callbacks of the "races" variant, which must not be instrumented."""
    target = folder / "cuda_emulator_races.o"
    source = ROOT / "tests" / "emulation" / "cuda_emulator_races.cpp"
    run([str(compiler()), "-std=c++20", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-c", str(source), "-o", str(target)])
    return target


def _compile(target: Path, variant: str, op: str) -> None:
    torch_dir = Path(torch.__file__).parent
    compiling = [str(compiler()), "-std=c++20", "-O1", "-g", "-fPIC", "-pthread", "-Wno-psabi"]
    compiling += ["-fvisibility=hidden", "-ffp-contract=off"]  # as in the release
    compiling += ["-DGRPO_KERNELS_EMULATE", "-DTORCH_TARGET_VERSION=0x020B000000000000ULL"]
    compiling += [f"-I{ROOT / f}" for f in ("csrc", "tests/emulation")]
    compiling += ["-isystem", str(torch_dir / "include"), *VARIANTS[variant]]
    sources = [source for name in ("*.cu", "cuda_op.cpp") for source in sorted((ROOT / "csrc").glob(f"{op}/{name}"))]
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / f"{i}.o") for i in range(len(sources))]
        commands = [[*compiling, "-x", "c++", "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the other test processes wait for the library
            list(pool.map(run, commands))
        objects += [str(race_detector(Path(folder)))] if variant == "races" else []
        libraries = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]
        run([str(compiler()), "-shared", "-pthread", *objects, *libraries, "-o", str(target), *VARIANTS[variant]])


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
