"""Compiles the CUDA kernels for the host, once per version of their sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
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


def library(variant: str = "plain") -> Path:
    """The shared library that implements the CUDA ops for CPU tensors once it is loaded."""
    sources = sorted(p for f in FOLDERS for p in (ROOT / f).rglob("*") if p.suffix in {".cu", ".cuh", ".h", ".cpp"})
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources) + torch.__version__.encode())
    folder = ROOT / "build" / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{variant}-{digest.hexdigest()[:16]}.so"
    with (folder / f"{variant}.lock").open("w") as lock:  # test processes start together
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial")
            _compile(partial, variant)
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


def _compile(target: Path, variant: str) -> None:
    torch_dir = Path(torch.__file__).parent
    command = [str(compiler()), "-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-Wno-psabi"]
    command += ["-fvisibility=hidden", "-ffp-contract=off"]  # as in the release
    command += ["-DGRPO_KERNELS_EMULATE", "-DTORCH_TARGET_VERSION=0x020B000000000000ULL"]
    command += [f"-I{ROOT / f}" for f in ("csrc", "tests/emulation")]
    command += ["-isystem", str(torch_dir / "include")]
    command += ["-x", "c++", *map(str, sorted((ROOT / "csrc").glob("*/*.cu")))]
    command += [*map(str, sorted((ROOT / "csrc").glob("*/cuda_op.cpp"))), "-x", "none"]
    command += [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(target)]
    with tempfile.TemporaryDirectory() as folder:
        command += [str(race_detector(Path(folder)))] if variant == "races" else []
        _run([*command, *VARIANTS[variant]])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"compiling the CUDA kernels for the host failed:\n{done.stderr}")
