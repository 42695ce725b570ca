"""The race detector of tests/emulation, tested on correct kernels and on kernels with a planted race."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest

from tests.emulation import build

SOURCE = build.ROOT / "tests" / "emulation" / "selftest_races.cu"
ORDERED = 9
# The kinds of the later and the earlier access in the message; their order may depend on the schedule.
RACING = [
    ("shared", {("read", "write"), ("write", "read")}),
    ("shared", {("write", "write")}),
    ("shared", {("read", "write"), ("write", "read")}),
    ("shared", {("read", "write")}),
    ("shared", {("read", "write"), ("write", "read")}),
    ("shared", {("read", "write"), ("write", "read")}),
    ("shared", {("read", "write"), ("write", "read")}),
    ("shared", {("read", "atomic write"), ("atomic write", "read")}),
    ("global", {("read", "write"), ("write", "read"), ("write", "write")}),
    ("global", {("write", "write")}),
    ("shared", {("read", "write"), ("write", "read")}),
    ("shared", {("read", "write"), ("write", "read")}),
    ("shared", {("read", "write"), ("write", "read")}),
    ("global", {("read", "write")}),
    ("global", {("read", "write")}),
    ("global", {("read", "write"), ("write", "read")}),
]
ACCESS = r"((?:atomic )?(?:read|write)) at (\S+):(\d+) by block \((\d),0,0\) thread \((\d+),0,0\)"
REPORT = re.compile(rf"{ACCESS} of 4 bytes of (shared|global) memory, unordered with the {ACCESS}")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("races")
    command = ["g++", "-x", "c++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    command += ["-DGRPO_KERNELS_EMULATE", *(f"-I{build.ROOT / f}" for f in ("csrc", "tests/emulation"))]
    command += [str(SOURCE), "-x", "none", str(build.race_detector(folder)), *build.VARIANTS["races"]]
    done = subprocess.run([*command, "-o", str(folder / "races.so")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(folder / "races.so"))
    loaded.selftest_error.restype = ctypes.c_char_p
    return loaded


@pytest.mark.full
@pytest.mark.parametrize("kind", range(ORDERED))
def test_ordered_accesses_are_no_race(library: ctypes.CDLL, kind: int) -> None:
    for seed in range(20):
        library.grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))
        assert library.selftest_ordered(kind) == 0, library.selftest_error().decode()


@pytest.mark.full
@pytest.mark.parametrize("kind", range(len(RACING)))
def test_a_race_is_reported_in_every_schedule(library: ctypes.CDLL, kind: int) -> None:
    lines = {n for n, text in enumerate(SOURCE.read_text().splitlines(), 1) if text.endswith(f"// race {kind}")}
    memory, kinds = RACING[kind]
    for seed in range(20):
        library.grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))
        assert library.selftest_racing(kind) == 1
        message = library.selftest_error().decode()
        assert message.startswith("race in kernel racing:\n") and f"[schedule seed {seed}, launch 1]" in message
        reports = REPORT.findall(message)
        assert len(reports) == message.count("unordered with") > 0, message
        for now, *place, where, before, earlier_file, earlier_line, earlier_block, earlier_thread in reports:
            file, line, block, thread = place
            assert (now, before) in kinds and where == memory, message
            assert {int(line), int(earlier_line)} <= lines and {file, earlier_file} == {SOURCE.name}, message
            assert (block, thread) != (earlier_block, earlier_thread), message


@pytest.mark.full
def test_the_next_launch_starts_anew(library: ctypes.CDLL) -> None:
    assert library.selftest_racing(0) == 1
    assert library.selftest_ordered(0) == 0, library.selftest_error().decode()
