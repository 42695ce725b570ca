"""The kernel emulator of tests/emulation and its race detector, by kernels with a planted mistake.

Faults that this is for: an order of threads that hides a missing barrier, or does not follow the seed; shared memory
that does not start as garbage; a misuse that is no error, or whose message lacks the place; an error that spoils the
next launch; a launch that CUDA would refuse; a race that is not reported in every schedule; an order by barriers, warp
barriers, fences and atomics that is taken for a race. A wrong result of an operation shows in the kernels that use it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest

from tests.emulation import build

SOURCE = build.ROOT / "tests" / "emulation" / "selftest.cu"
SEEDS = 40
THREADS = 128
MISSING_BARRIER = range(3)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Selftest:
    """The kernels of selftest.cu, compiled as one of build.VARIANTS."""

    def __init__(self, folder: Path, variant: str) -> None:
        command = ["g++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread"]
        command += ["-DGRPO_KERNELS_EMULATE", *(f"-I{build.ROOT / f}" for f in ("csrc", "tests/emulation"))]
        command += ["-x", "c++", str(SOURCE), "-x", "none"]
        command += [str(build.race_detector(folder))] if variant == "races" else []
        build.run([*command, *build.VARIANTS[variant], "-o", str(folder / "selftest.so")])
        self.library = ctypes.CDLL(str(folder / "selftest.so"))

    def error(self, name: str, *arguments: object) -> str:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        return str(function(*arguments).decode())

    def walk(self, kind: int, is_ordered: bool, seed: int | None) -> list[int]:
        """Results of the kernel's threads; the next schedule of the last seed, or the first one of a new."""
        if seed is not None:
            self.library.grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))
        out = (ctypes.c_int * (THREADS + 1))()
        assert self.error("walk_error", kind, is_ordered, out) == ""
        return out[:THREADS]


@pytest.fixture(scope="module")
def selftest(tmp_path_factory: pytest.TempPathFactory) -> Selftest:
    return Selftest(tmp_path_factory.mktemp("plain"), "plain")


@pytest.mark.parametrize("kind", MISSING_BARRIER)
def test_a_missing_barrier_shows_with_some_seed(selftest: Selftest, kind: int) -> None:
    right = {tuple(selftest.walk(kind, True, seed)) for seed in range(SEEDS)}
    assert len(right) == 1 and {tuple(selftest.walk(kind, False, seed)) for seed in range(SEEDS)} - right


def test_threads_run_in_an_order_of_the_seed(selftest: Selftest) -> None:
    orders = [[selftest.walk(13, True, seed), selftest.walk(13, True, None)] for seed in [*range(SEEDS)] * 2]
    assert orders[:SEEDS] == orders[SEEDS:]
    different = {tuple(order) for pair in orders for order in pair}
    assert len(different) > SEEDS and {order[0] // 64 for order in different} == {0, 1}
    assert all(sorted(order) == [*range(THREADS)] for order in different)


def test_shared_memory_starts_as_garbage(selftest: Selftest) -> None:
    assert selftest.walk(14, True, 0) == [2] * THREADS


def test_launches_that_cuda_refuses_are_errors(selftest: Selftest) -> None:
    for grid, threads, kilobytes in ((0, 32, 0), (1, 0, 0), (1, 1025, 0), (1, 32, 228)):
        assert "invalid configuration" in selftest.error("launch_error", grid, threads, kilobytes * 1024, 0)
    assert selftest.error("launch_error", 1, 32, 128, 1) == "kernel launch: no DeviceGuard"
    assert selftest.error("launch_error", 1, 32, 128, 0) == ""


def test_a_launch_with_less_shared_memory_leaves_the_limit_of_another_thread(selftest: Selftest) -> None:
    assert selftest.error("two_sizes_error") == ""


MISUSES = [
    ("deadlock in block (0,", "wait in __syncthreads at selftest.cu:", "wait in __syncwarp with mask 0xffffffff"),
    ("reaches __syncthreads while thread (", "waits in another barrier, __syncthreads at selftest.cu:"),
    ("__shfl_sync with mask 0x0000ffff, which omits its own lane",),
    ("of its warp waits for it in __", "__shfl_sync with mask", "__ballot_sync with mask"),
    ("__shfl_sync reads lane 20, which its mask omits: 0x0000ffff",),
    ("__shfl_sync reads lane 20, which has returned or does not exist",),
    (" at selftest.cu:", ": cp.async was not waited for, and its shared memory was written"),
]


@pytest.mark.parametrize("kind", range(len(MISUSES)))
def test_misuse_is_an_error(selftest: Selftest, kind: int) -> None:
    right = selftest.walk(0, True, 0)
    for seed in range(SEEDS):
        selftest.library.grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))
        message = selftest.error("misuse_error", kind)
        for part in (*MISUSES[kind], "block (0,", f"[schedule seed {seed}, launch 1]"):
            assert part in message, message
        assert selftest.walk(0, True, None) == right


# Races: memory, and the kinds of the later and the earlier access, whose order may depend on the schedule

EITHER = {("read", "write"), ("write", "read")}
RACES = dict.fromkeys(range(13), ("shared", EITHER)) | {
    3: ("shared", {("write", "write")}),
    4: ("shared", {("read", "write")}),
    6: ("shared", {("read", "atomic write"), ("atomic write", "read")}),
    7: ("global", {("write", "write")}),
    10: ("global", {("read", "write")}),
    11: ("global", {("read", "write")}),
    12: ("global", EITHER),
}
ACCESS = r"((?:atomic )?(?:read|write)) at selftest.cu:(\d+) by thread \d+ of a block"
REPORT = re.compile(rf"{ACCESS} of 4 bytes of (shared|global) memory, unordered with the {ACCESS}")


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Selftest:
    return Selftest(tmp_path_factory.mktemp("races"), "races")


@pytest.mark.full
@pytest.mark.parametrize("kind", RACES)
def test_a_race_is_reported_in_every_schedule_and_nothing_else(detector: Selftest, kind: int) -> None:
    lines = {n for n, text in enumerate(SOURCE.read_text().splitlines(), 1) if re.search(rf"// race.* {kind}\b", text)}
    memory, kinds = RACES[kind]
    for seed in range(20):
        detector.library.grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))
        out = (ctypes.c_int * (THREADS + 1))()
        message = detector.error("walk_error", kind, False, out)
        assert message.startswith("race in kernel walk:\n") and f"[schedule seed {seed}, launch 1]" in message
        reports = REPORT.findall(message)
        assert len(reports) == message.count("unordered with") > 0, message
        for now, line, where, before, earlier_line in reports:
            assert (now, before) in kinds and where == memory and {int(line), int(earlier_line)} <= lines, message
        detector.walk(kind, True, None)  # ordered accesses, in the next launch
