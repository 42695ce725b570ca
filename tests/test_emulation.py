"""The kernel emulator of tests/emulation, tested on correct kernels and on kernels with a planted mistake."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "tests" / "emulation"
SELFTEST = EMULATION / "selftest.cu"
CSRC = ROOT / "csrc"
EMULATED = ["-x", "c++", "-std=c++20", "-O1", "-DGRPO_KERNELS_EMULATE", f"-I{CSRC}", f"-I{EMULATION}"]
SEEDS = range(40)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def compile_(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.selftest_error.restype = ctypes.c_char_p
    library.grpo_kernels_set_schedule_seed.argtypes = [ctypes.c_uint64]
    library.grpo_kernels_schedule_seed.restype = ctypes.c_uint64
    library.selftest_geometry.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    return library


def build(folder: Path, *flags: str) -> ctypes.CDLL:
    path = folder / "selftest.so"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    compile_(["g++", *EMULATED, *warnings, *flags, "-fPIC", "-shared", str(SELFTEST), "-o", str(path)])
    return load(path)


@pytest.fixture(scope="module", params=["", "-DGRPO_EMULATOR_UCONTEXT"], ids=["default", "ucontext"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("emulation"), *filter(None, [request.param]))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("emulation") / "selftest"
    flags = ["-g", "-fsanitize=address", "-fno-omit-frame-pointer"]
    compile_(["g++", *EMULATED, *flags, str(SELFTEST), "-o", str(path)])
    return path


def check(library: ctypes.CDLL, status: int) -> None:
    assert status == 0, library.selftest_error().decode()


def seeds_right(library: ctypes.CDLL, attempt: Callable[[], bool]) -> int:
    """Number of seeds with which the attempt gives the right result."""
    right = 0
    for seed in SEEDS:
        library.grpo_kernels_set_schedule_seed(seed)
        right += attempt()
    return right


def row_sums(library: ctypes.CDLL, block: int, barrier: bool) -> bool:
    rows, columns = 5, 300
    values = (ctypes.c_float * (rows * columns))(*(i % 7 for i in range(rows * columns)))
    sums = (ctypes.c_float * rows)()
    check(library, library.selftest_row_sums(values, sums, rows, columns, block, barrier))
    return list(sums) == [sum(values[r * columns : (r + 1) * columns]) for r in range(rows)]


def reverse_warps(library: ctypes.CDLL, syncwarp: bool) -> bool:
    values = (ctypes.c_int * 256)(*range(256))
    check(library, library.selftest_reverse_warps(values, syncwarp))
    return list(values) == [i ^ 31 for i in range(256)]


def rotate_rounds(library: ctypes.CDLL, second_barrier: bool) -> bool:
    values = (ctypes.c_int * 96)(*range(96))
    check(library, library.selftest_rotate_rounds(values, 96, 5, second_barrier))
    return list(values) == [(i + 5) % 96 for i in range(96)]


@pytest.mark.full
@pytest.mark.parametrize("block", [32, 128, 1024])
def test_block_reduction(library: ctypes.CDLL, block: int) -> None:
    assert seeds_right(library, lambda: row_sums(library, block, barrier=True)) == len(SEEDS)


def test_block_reduction_in_double(library: ctypes.CDLL) -> None:
    values = (ctypes.c_double * 2000)(*(i / 8 for i in range(2000)))
    sums = (ctypes.c_double * 2)()
    check(library, library.selftest_row_sums_double(values, sums, 2, 1000, 256))
    assert list(sums) == [sum(values[:1000]), sum(values[1000:])]


def test_missing_barrier_shows(library: ctypes.CDLL) -> None:
    assert seeds_right(library, lambda: row_sums(library, 128, barrier=False)) < len(SEEDS)


def test_missing_syncwarp_shows(library: ctypes.CDLL) -> None:
    assert seeds_right(library, lambda: reverse_warps(library, syncwarp=True)) == len(SEEDS)
    assert seeds_right(library, lambda: reverse_warps(library, syncwarp=False)) < len(SEEDS)


def test_missing_barrier_before_overwriting_shows(library: ctypes.CDLL) -> None:
    assert seeds_right(library, lambda: rotate_rounds(library, second_barrier=True)) == len(SEEDS)
    assert seeds_right(library, lambda: rotate_rounds(library, second_barrier=False)) < len(SEEDS)


# The last size exceeds the 48 KiB that a kernel gets by default.
@pytest.mark.parametrize("count", [1, 100, 7000])
def test_dynamic_shared_memory(library: ctypes.CDLL, count: int) -> None:
    values = (ctypes.c_double * count)(*range(count))
    check(library, library.selftest_reverse_dynamic(values, count))
    assert list(values) == list(reversed(range(count)))


def test_grid_stride_loop_with_atomics(library: ctypes.CDLL) -> None:
    bins = [i * i % 10 for i in range(1003)]

    def attempt() -> bool:
        counts, total, largest = (ctypes.c_int * 10)(), ctypes.c_float(), ctypes.c_int()
        values = (ctypes.c_int * len(bins))(*bins)
        status = library.selftest_histogram(values, len(bins), counts, ctypes.byref(total), ctypes.byref(largest))
        check(library, status)
        return list(counts) == [bins.count(i) for i in range(10)] and total.value == 1003 and largest.value == 9

    assert seeds_right(library, attempt) == len(SEEDS)


def order(library: ctypes.CDLL) -> tuple[int, ...]:
    threads = (ctypes.c_uint * 160)()
    check(library, library.selftest_record_order(ctypes.byref(ctypes.c_uint()), threads, 5, 32))
    return tuple(threads)


def test_order_follows_the_seed(library: ctypes.CDLL) -> None:
    orders = []
    for seed in SEEDS:
        library.grpo_kernels_set_schedule_seed(seed)
        assert library.grpo_kernels_schedule_seed() == seed
        orders.append((order(library), order(library)))
        library.grpo_kernels_set_schedule_seed(seed)
        assert orders[-1] == (order(library), order(library))
    flat = [one for both in orders for one in both]
    assert all(sorted(one) == list(range(160)) for one in flat)
    assert len(set(flat)) > len(flat) // 2
    assert {one[0] // 32 for one in flat} == set(range(5)), "any block may come first"


def test_waiting_loop_ends(library: ctypes.CDLL) -> None:
    def attempt() -> bool:
        flag, seen = ctypes.c_int(), ctypes.c_int()
        check(library, library.selftest_hand_over(ctypes.byref(flag), ctypes.byref(seen)))
        return seen.value == 42

    assert seeds_right(library, attempt) == len(SEEDS)


def expected_votes(values: list[int], thread: int) -> list[int]:
    first = thread // 32 * 32
    warp, lane = values[first : first + 32], thread - first
    value = warp[lane]
    ballot = sum(1 << i for i, v in enumerate(warp) if v > 3)
    match = sum(1 << i for i, v in enumerate(warp) if v == value)
    bits = 0
    for v in warp:
        bits |= 1 << v
    xor = 0
    for v in warp[16:]:
        xor ^= 1 << v
    lowest = (match & -match).bit_length()
    half = sum(1 << i for i, v in enumerate(warp[:16]) if v & 1) if lane < 16 else xor
    return [
        ballot,
        match,
        sum(warp),
        (min(warp) - 4) % 2**32,
        max((v - 4) % 2**32 for v in warp),
        bits,
        (7 in warp) + 2 * all(v < 8 for v in warp),
        ballot.bit_count() + 100 * lowest + 10000 * (32 - value.bit_length()),
        half,
        sum(v > 3 for v in values),
        (7 in values) + 2 * all(v < 7 for v in values),
        [1, 10, 100, 1000][value % 4],
    ]


def test_votes_matches_and_reductions(library: ctypes.CDLL) -> None:
    numbers = [(i * i + i // 3) % 8 for i in range(64)]
    values = (ctypes.c_int * 64)(*numbers)
    expected = [word for thread in range(64) for word in expected_votes(numbers, thread)]

    def attempt() -> bool:
        out = (ctypes.c_uint * (64 * 12))()
        check(library, library.selftest_votes(values, out))
        return list(out) == expected

    assert seeds_right(library, attempt) == len(SEEDS)


def test_shuffles_of_doubles_in_segments(library: ctypes.CDLL) -> None:
    values = (ctypes.c_double * 32)(*(i + 0.25 for i in range(32)))
    out = (ctypes.c_double * 128)()
    check(library, library.selftest_shuffle_segments(values, out))
    for lane in range(32):
        place = lane % 8
        # A shuffle by XOR can only reach earlier segments beyond its own; 5 stays within a segment of 8.
        sources = [lane - place + 3, lane - 2 * (place >= 2), lane + 2 * (place < 6), lane ^ 5]
        assert list(out[lane * 4 : lane * 4 + 4]) == [values[source] for source in sources]


def test_threads_that_returned_take_no_part(library: ctypes.CDLL) -> None:
    out = (ctypes.c_int * 128)()
    check(library, library.selftest_early_return(out, 72))
    assert list(out) == [32] * 64 + [8] * 8 + [0] * 56


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fragments_multiply_as_rows_do(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Products and sums of small integers are exact."""
    a, b, sums = torch.randint(-8, 9, (16, 16)), torch.randint(-8, 9, (16, 16)), torch.randint(-8, 9, (16, 16))
    narrow = a.to(dtype), b.to(dtype)
    for seed in SEEDS:
        library.grpo_kernels_set_schedule_seed(seed)
        got = sums.float()
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*narrow, got)]
        check(library, library.selftest_multiply_rows(*pointers, dtype is torch.float16))
        assert got.tolist() == (sums + a @ b.T).tolist()


def test_digits_beyond_float32_are_cut_off(library: ctypes.CDLL) -> None:
    a, got = torch.zeros(16, 16, dtype=torch.bfloat16), torch.ones(16, 16)
    a[:, 0] = 2.0**-12 * 1.75  # squared 0.77 units of the last place of 1 are rounded up by any other unit
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, a, got)]
    check(library, library.selftest_multiply_rows(*pointers, 0))
    assert got.unique().tolist() == [1 + math.floor(1.75**2 / 2) * 2.0**-23]


@pytest.mark.parametrize("count", [0, 5, 64])
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_copies_arrive_when_they_are_waited_for(library: ctypes.CDLL, groups: int, count: int) -> None:
    source = torch.randn(64, 4)
    got = torch.zeros(32, 4)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, got)]
    check(library, library.selftest_copy_pieces(*pointers, count, groups))
    expected = torch.where(torch.arange(32)[:, None] < count, source[:32], 0.0).flip(0)
    if groups == 2:  # garbage, zeros included
        assert got.isnan().all()
    else:
        assert torch.equal(got, expected)


def test_shared_memory_starts_as_garbage(library: ctypes.CDLL) -> None:
    before = library.selftest_next_host_value()
    count = ctypes.c_int()
    check(library, library.selftest_count_unpoisoned(ctypes.byref(count), 5))
    assert count.value == 0
    assert library.selftest_next_host_value() == before + 1, "other thread-local state must survive"


MISUSES = [
    (
        r"deadlock in block (0,",
        "wait in __syncthreads at selftest.cu:",
        "wait in __syncwarp with mask 0xffffffff",
    ),
    ("reaches __syncthreads while thread (", "waits in another barrier, __syncthreads at selftest.cu:"),
    ("__shfl_sync with mask 0x0000ffff, which omits its own lane",),
    ("of its warp waits for it in __", "__shfl_sync with mask", "__ballot_sync with mask"),
    ("__shfl_sync reads lane 20, which its mask omits: 0x0000ffff",),
    ("__shfl_sync reads lane 20, which has returned or does not exist",),
    ("waits in another barrier, __syncthreads_", "reaches __syncthreads_"),
    ("__shfl_sync with width 5",),
    ("mma.sync in a warp with lanes that have returned or do not exist",),
    (" at selftest.cu:", ": cp.async was not waited for, and its shared memory was written"),
]


@pytest.mark.parametrize("kind", range(len(MISUSES)))
def test_misuse_is_an_error(library: ctypes.CDLL, kind: int) -> None:
    for seed in SEEDS:
        library.grpo_kernels_set_schedule_seed(seed)
        assert library.selftest_misuse(kind, (ctypes.c_int * 64)()) == 1
        message = library.selftest_error().decode()
        parts = (*MISUSES[kind], "block (0,", f"[schedule seed {seed}, launch 1]")
        assert all(part in message for part in parts), message
    assert row_sums(library, 128, barrier=True), "the next launch is not affected"


@pytest.mark.parametrize("geometry", [(0, 32, 0), (1, 0, 0), (1, 1025, 0), (1, 32, 228 * 1024)])
def test_impossible_launch_is_an_error(library: ctypes.CDLL, geometry: tuple[int, int, int]) -> None:
    assert library.selftest_geometry(*geometry) == 1
    assert "invalid configuration" in library.selftest_error().decode()


def test_any_thread_may_launch(library: ctypes.CDLL) -> None:
    right: list[bool] = []

    def work() -> None:
        right.extend(row_sums(library, 256, barrier=True) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 80


@pytest.mark.full
@pytest.mark.parametrize(
    ("memory", "report", "kernel"),
    [
        ("global", "heap-buffer-overflow", "write_global"),
        ("static", "global-buffer-overflow", "write_static"),
        ("template", "global-buffer-overflow", "write_static_template"),
        ("dynamic", "heap-buffer-overflow", "write_dynamic"),
    ],
)
def test_overrun_is_caught_by_address_sanitizer(sanitized: Path, memory: str, report: str, kernel: str) -> None:
    right = subprocess.run([sanitized, memory, "0"], capture_output=True, text=True, check=False)
    assert (right.returncode, right.stdout) == (0, "finished\n"), right.stderr
    wrong = subprocess.run([sanitized, memory, "1"], capture_output=True, text=True, check=False)
    assert wrong.returncode != 0
    assert f"ERROR: AddressSanitizer: {report}" in wrong.stderr
    assert "WRITE of size 4" in wrong.stderr
    assert "selftest.cu" in wrong.stderr and f"in {kernel}" in wrong.stderr, wrong.stderr


@pytest.mark.full
def test_errors_leave_nothing_behind(sanitized: Path) -> None:
    done = subprocess.run([sanitized, "errors"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr


TORCH_SOURCE = """
#include "common/cuda/launch.h"
#include "common/cuda/torch_stream.h"
__global__ void set(int* out) {
  GRPO_DYNAMIC_SHARED(int, copy);
  copy[threadIdx.x] = 1;
  out[threadIdx.x] = copy[threadIdx.x];
}
void run(int* out) {
  const grpo_kernels::DeviceGuard guard(0);
  grpo_kernels::launch(set, 1, 32, 32 * sizeof(int), grpo_kernels::current_stream(0), out);
}
"""


def test_stream_header_needs_no_torch_when_emulated(tmp_path: Path) -> None:
    source = tmp_path / "stream.cu"
    source.write_text(TORCH_SOURCE)
    compile_(["g++", *EMULATED, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(source)])


GUARDED_SOURCE = """
#include <cstdio>
#include <stdexcept>
#include "common/cuda/torch_stream.h"
__global__ void set(int* out) { *out = 1; }
int main() {
  int out = 0, refused = 0;
  {
    const grpo_kernels::DeviceGuard guard(1);
    grpo_kernels::launch(set, 1, 1, 0, grpo_kernels::current_stream(1), &out);
  }
  try {
    grpo_kernels::launch(set, 1, 1, 0, grpo_kernels::current_stream(1), &out);
  } catch (const std::runtime_error&) { ++refused; }
  const grpo_kernels::DeviceGuard guard(0);
  for (void* stream : {grpo_kernels::current_stream(1), static_cast<void*>(nullptr)}) {
    try {
      grpo_kernels::launch(set, 1, 1, 0, stream, &out);
    } catch (const std::runtime_error&) { ++refused; }
  }
  std::printf("%d %d", out, refused);
}
"""


def test_a_launch_needs_a_guard_for_the_device_of_its_stream(tmp_path: Path) -> None:
    source = tmp_path / "guarded.cu"
    source.write_text(GUARDED_SOURCE)
    compile_(["g++", *EMULATED, str(source), "-o", str(tmp_path / "guarded")])
    done = subprocess.run([tmp_path / "guarded"], capture_output=True, text=True, check=True)
    assert done.stdout == "1 3"


SIZES_SOURCE = """
#include <cstdio>
#include <latch>
#include <stdexcept>
#include <string>
#include <thread>
#include "common/cuda/launch.h"
__global__ void nothing() {}
thread_local int bytes = 0;
int main() {
  constexpr int kSmall = 60 * 1024, kLarge = 100 * 1024;
  std::latch both_read(2), large_is_set(1), small_is_set(1);
  grpo_kernels::emulation::dynamic_shared_limits.after_call = [&](bool has_set) {
    if (!has_set) both_read.arrive_and_wait();
    if (!has_set && bytes == kSmall) large_is_set.wait();
    if (has_set) (bytes == kLarge ? large_is_set : small_is_set).count_down();
    if (has_set && bytes == kLarge) small_is_set.wait();
  };
  std::string errors[2];
  const auto launch = [&errors](int thread, int size) {
    bytes = size;
    try {
      grpo_kernels::launch(nothing, 1, 1, size, nullptr);
    } catch (const std::runtime_error& error) { errors[thread] = error.what(); }
  };
  std::thread large(launch, 0, kLarge), small(launch, 1, kSmall);
  large.join();
  small.join();
  std::printf("%s;%s", errors[0].c_str(), errors[1].c_str());
}
"""


def test_two_threads_launch_with_shared_memory_of_two_sizes(tmp_path: Path) -> None:
    """The second has read the kernel's limit before the first raises it, and raises it before the first launches."""
    source = tmp_path / "sizes.cu"
    source.write_text(SIZES_SOURCE)
    compile_(["g++", *EMULATED, "-pthread", str(source), "-o", str(tmp_path / "sizes")])
    done = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ";"


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", ["selftest.cu", "selftest_races.cu"])
def test_same_source_compiles_with_nvcc(source: str, tmp_path: Path) -> None:
    command = ["nvcc", "-c", "-arch=sm_90", "-Werror", "all-warnings", f"-I{CSRC}"]
    compile_([*command, str(EMULATION / source), "-o", str(tmp_path / "selftest.o")])


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_stream_header_compiles_with_nvcc(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("needs torch's headers")
    include = Path(spec.origin).parent / "include"
    if not include.exists():
        pytest.skip("needs torch's headers")
    source = tmp_path / "stream.cu"
    source.write_text(TORCH_SOURCE)
    defines = ["-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020B000000000000ULL"]
    command = ["nvcc", "-c", "-std=c++20", "-arch=sm_90", *defines, f"-I{CSRC}", "-isystem", str(include)]
    compile_([*command, str(source), "-o", str(tmp_path / "stream.o")])
