"""Compiles the CUDA kernels for the host, once per version of their sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("csrc", "tests/emulation")


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


# Flags that each variant of the library adds to the compiler's command.
VARIANTS = {
    "plain": [],
    "address": ["-fsanitize=address", "-fno-omit-frame-pointer"],
    # for tools/soak, as it takes longer to compile; undefined behaviour ends the process, as an access outside does
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
    sources = sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*") if p.suffix in {".cu", ".cuh", ".h", ".cpp"})
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources) + torch.__version__.encode())
    folder = ROOT / "build" / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    name = variant if op == "*" else f"{variant}-{op}"
    target = folder / f"{name}-{digest.hexdigest()[:16]}.so"
    with (folder / f"{name}.lock").open("w") as lock:  # test processes start together
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial")
            _compile(partial, variant, op)
            partial.rename(target)
    return target


def race_detector(folder: Path) -> Path:
    """Object file with the callbacks of the "races" variant, which must not be instrumented."""
    target = folder / "cuda_emulator_races.o"
    source = ROOT / "tests" / "emulation" / "cuda_emulator_races.cpp"
    _run(
        [str(compiler()), "-std=c++20", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-c", str(source), "-o", str(target)]
    )
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
            list(pool.map(_run, commands))
        objects += [str(race_detector(Path(folder)))] if variant == "races" else []
        libraries = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run([str(compiler()), "-shared", "-pthread", *objects, *libraries, "-o", str(target), *VARIANTS[variant]])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"compiling the CUDA kernels for the host failed:\n{done.stderr}")
