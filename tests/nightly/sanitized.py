"""Builds the CPU kernels with AddressSanitizer and UBSan, for test_random_calls.py."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

from tests.emulation import build

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "build" / "nightly" / "cpu"
# UBSan's checks of pointers are left out where AddressSanitizer has its own: in the kernels of policy_loss, which are
# instances of one template for every setting, they triple the time to compile.
POINTERS = "null,alignment,object-size,vptr,pointer-overflow,bounds,nonnull-attribute"
FLAGS = (
    f"-fsanitize=address,undefined,float-cast-overflow -fno-sanitize={POINTERS} "
    "-fno-sanitize-recover=undefined,float-cast-overflow -fno-omit-frame-pointer -g1"
)


@functools.cache
def package() -> Path:
    """Folder with a copy of the package whose CPU kernels are sanitized; builds what has changed of it."""
    folder = FOLDER / "package"
    copy = folder / "grpo_kernels"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "grpo_kernels", copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(FOLDER), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"),
        *(f"-DPython_EXECUTABLE={sys.executable}", "-DGRPO_OPTIMIZATION=-O1", f"-DCMAKE_CXX_FLAGS={FLAGS}"),
        f"-DGRPO_OUTPUT_DIR={FOLDER / 'out'}",
    ]
    for command in (configure, ["cmake", "--build", str(FOLDER)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(
                f"building the sanitized CPU kernels failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            )
    shutil.copy(FOLDER / "out" / "libgrpo_kernels_cpu.so", copy)
    return folder


def environment() -> dict[str, str]:
    """Variables of a process that loads sanitized code. Python itself leaks by design, so leaks are not reported."""
    find = [[str(build.compiler()), f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so")]
    libraries = [subprocess.run(c, capture_output=True, text=True, check=True).stdout.strip() for c in find]
    return {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
