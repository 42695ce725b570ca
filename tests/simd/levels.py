"""Compiles a source of this folder for one instruction set."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pytest

from tests.emulation import build

FLAGS: dict[str, list[str]] = {"baseline": [], "avx2": ["-mavx2", "-mfma"]}
FLAGS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
NEEDS = {"baseline": "", "avx2": " avx2 ", "avx512": " avx512dq "}

needs_sources = pytest.mark.skipif(
    build.compiler() is None or not (build.ROOT / "csrc").exists(), reason="needs a C++ compiler and the sources"
)


@functools.cache
def library(source: str, level: str) -> ctypes.CDLL:
    facts = Path("/proc/cpuinfo")
    if level != "baseline" and not (facts.exists() and NEEDS[level] in facts.read_text()):
        pytest.skip(f"no {level} here")
    command = [str(build.compiler()), "-std=c++20", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    command += ["-Wno-psabi", "-fPIC", "-shared", f"-DGRPO_SIMD={level}", *FLAGS[level]]
    command += [f"-I{build.ROOT / 'csrc'}", str(build.ROOT / "tests/simd" / source)]
    name = f"{Path(source).stem}-{level}"
    return ctypes.CDLL(str(build.cached(name, lambda target: build.run([*command, "-o", str(target)]))))
