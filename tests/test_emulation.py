"""The kernel emulator of tests/emulation, by a program of correct kernels and of kernels with a planted mistake.

Faults that this is for: a warp operation, barrier, atomic, product or copy with a wrong result; an order of threads
that hides a missing barrier, or does not follow the seed; shared memory that does not start as garbage; a misuse that
is no error, or whose message lacks the place; an error that spoils the next launch; an overrun that AddressSanitizer
does not see; a launch that CUDA would refuse.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "emulation"
CSRC = ROOT / "csrc"
COMMAND = ["g++", "-x", "c++", "-std=c++20", "-O1", "-pthread", "-DGRPO_KERNELS_EMULATE", f"-I{CSRC}"]
COMMAND += [f"-I{EMULATION}", str(EMULATION / "selftest.cu"), "-Wall", "-Wextra", "-Werror"]
SEEDS = 40
Selftest = Callable[..., str]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compile_(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module", params=[[], ["-DGRPO_EMULATOR_UCONTEXT"]], ids=["default", "ucontext"])
def selftest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Selftest:
    """Reports of a mode of the program, in a library like that of the kernels."""
    path = tmp_path_factory.mktemp("emulation") / "selftest.so"
    compile_([*COMMAND, *request.param, "-fPIC", "-shared", "-o", str(path)])
    report = ctypes.CDLL(str(path)).selftest
    report.restype = ctypes.c_char_p
    return lambda mode, argument=0: report(mode.encode(), argument).decode()


@pytest.mark.parametrize("mode", ["checks", "orders", "threads", "sizes"])
def test_nothing_is_wrong(selftest: Selftest, mode: str) -> None:
    """Kernels are right with every seed, those with a planted mistake wrong with some."""
    assert selftest(mode) == ""


def test_launches_that_cuda_refuses_are_errors(selftest: Selftest) -> None:
    *refused, last = selftest("refused").splitlines()
    assert all("invalid configuration" in error for error in refused[:4])
    assert refused[4:] == ["kernel launch: no DeviceGuard"] * 3 and last == ""


MISUSES = [
    ("deadlock in block (0,", "wait in __syncthreads at selftest.cu:", "wait in __syncwarp with mask 0xffffffff"),
    ("reaches __syncthreads while thread (", "waits in another barrier, __syncthreads at selftest.cu:"),
    ("__shfl_sync with mask 0x0000ffff, which omits its own lane",),
    ("of its warp waits for it in __", "__shfl_sync with mask", "__ballot_sync with mask"),
    ("__shfl_sync reads lane 20, which its mask omits: 0x0000ffff",),
    ("__shfl_sync reads lane 20, which has returned or does not exist",),
    ("waits in another barrier, __syncthreads", "reaches __syncthreads"),
    ("__shfl_sync with width 5",),
    ("mma.sync in a warp with lanes that have returned or do not exist",),
    (" at selftest.cu:", ": cp.async was not waited for, and its shared memory was written"),
]


@pytest.mark.parametrize("kind", range(len(MISUSES)))
def test_misuse_is_an_error(selftest: Selftest, kind: int) -> None:
    messages = selftest("misuse", kind).splitlines()
    assert len(messages) == SEEDS
    for seed, message in enumerate(messages):
        for part in (*MISUSES[kind], "block (0,", f"[schedule seed {seed}, launch 1]"):
            assert part in message, message


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulation") / "selftest"
    compile_([*COMMAND, "-g", "-fsanitize=address", "-fno-omit-frame-pointer", "-o", str(path)])
    return path


@pytest.mark.full
@pytest.mark.parametrize("memory", range(4), ids=["global", "static", "template", "dynamic"])
def test_overrun_is_caught_by_address_sanitizer(sanitized: Path, memory: int) -> None:
    right = subprocess.run([sanitized, str(memory), "0"], capture_output=True, text=True, check=False)
    assert (right.returncode, right.stdout) == (0, "finished\n"), right.stderr
    wrong = subprocess.run([sanitized, str(memory), "1"], capture_output=True, text=True, check=False)
    report = "heap-buffer-overflow" if memory in (0, 3) else "global-buffer-overflow"
    assert wrong.returncode != 0
    for part in (f"ERROR: AddressSanitizer: {report}", "WRITE of size 4", "selftest.cu", "in write"):
        assert part in wrong.stderr, wrong.stderr


@pytest.mark.full
def test_errors_leave_nothing_behind(sanitized: Path) -> None:
    done = subprocess.run([sanitized], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("finished\n"), done.stderr


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", ["selftest.cu", "selftest_races.cu"])
def test_same_source_compiles_with_nvcc(source: str, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torch")
    include = Path(str(spec and spec.origin)).parent / "include"
    if not include.exists():
        pytest.skip("needs torch's headers")
    command = ["nvcc", "-c", "-std=c++20", "-arch=sm_90", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020B000000000000ULL"]
    # without the emulator, its host code refers to nothing
    command += ["-Werror", "all-warnings", "-diag-suppress=177", f"-I{CSRC}", "-isystem", str(include)]
    compile_([*command, str(EMULATION / source), "-o", str(tmp_path / "selftest.o")])
