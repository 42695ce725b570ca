"""The race detector of tests/emulation, by kernels that are ordered or have a race.

Faults that this is for: a race that is not reported in every schedule; an order by barriers, warp barriers, fences and
atomics that is taken for a race; a report without the kernel, the line, the thread, the memory or the kinds of the
accesses; races of an earlier launch.
"""

from __future__ import annotations

import ctypes
import re
import shutil

import pytest

from tests.emulation import build

SOURCE = build.ROOT / "tests" / "emulation" / "selftest_races.cu"
# Memory, and the kinds of the later and the earlier access, whose order may depend on the schedule.
EITHER = {("read", "write"), ("write", "read")}
RACES = dict.fromkeys(range(18), ("shared", EITHER)) | {
    1: ("shared", {("write", "write")}),
    3: ("shared", {("read", "write")}),
    7: ("shared", {("read", "atomic write"), ("atomic write", "read")}),
    8: ("global", EITHER | {("write", "write")}),
    9: ("global", {("write", "write")}),
    13: ("global", {("read", "write")}),
    14: ("global", {("read", "write")}),
    15: ("global", EITHER),
    16: ("shared", {("write", "write")}),
}
ACCESS = r"((?:atomic )?(?:read|write)) at (\S+):(\d+) by block \((\d),0,0\) thread \((\d+),0,0\)"
REPORT = re.compile(rf"{ACCESS} of (\d) bytes of (shared|global) memory, unordered with the {ACCESS}")

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"), pytest.mark.full]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("races")
    command = ["g++", "-x", "c++", "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    command += ["-DGRPO_KERNELS_EMULATE", *(f"-I{build.ROOT / f}" for f in ("csrc", "tests/emulation"))]
    command += [str(SOURCE), "-x", "none", str(build.race_detector(folder)), *build.VARIANTS["races"]]
    build.run([*command, "-o", str(folder / "races.so")])
    loaded = ctypes.CDLL(str(folder / "races.so"))
    loaded.selftest.restype = ctypes.c_char_p
    return loaded


@pytest.mark.parametrize("kind", RACES)
def test_a_race_is_reported_in_every_schedule_and_nothing_else(library: ctypes.CDLL, kind: int) -> None:
    lines = {n for n, text in enumerate(SOURCE.read_text().splitlines(), 1) if re.search(rf"// race.* {kind}\b", text)}
    memory, kinds = RACES[kind]
    for seed in range(20):
        library.grpo_kernels_set_schedule_seed(ctypes.c_uint64(seed))
        message = library.selftest(kind, 0).decode()
        assert message.startswith("race in kernel walk:\n") and f"[schedule seed {seed}, launch 1]" in message
        reports = REPORT.findall(message)
        assert len(reports) == message.count("unordered with") > 0, message
        for now, *place, size, where, before, earlier_file, earlier_line, earlier_block, earlier_thread in reports:
            file, line, block, thread = place
            assert (now, before) in kinds and (where, size) == (memory, "1" if kind == 16 else "4"), message
            assert {int(line), int(earlier_line)} <= lines and {file, earlier_file} == {SOURCE.name}, message
            assert (block, thread) != (earlier_block, earlier_thread), message
        assert library.selftest(kind, 1) == b"", "ordered accesses, in the next launch"
