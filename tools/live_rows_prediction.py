#!/usr/bin/env python3
"""Predict when the products over live rows beat products over all rows on an H100. No GPU is needed.

    python tools/live_rows_prediction.py [--rows 8192] [--columns 151936] [--width 4096]

The hot loops' cycles come from machine code. What machine code does not tell is how much of the tensor cores' rate a
loop sustains that waits for nothing else: clocks, L2 and shared memory decide. The table therefore has a line for each
of several rates, the first of which is that assumed of cuBLAS. A prediction is not a measurement.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.gpu_model import GPUS, LAUNCH_SECONDS, SCHEDULERS, WGMMA_PRODUCTS, issue_cycles, memory_of  # noqa: E402
from tools.roofline_predict import compile_triton, hot_loop  # noqa: E402
from tools.sass import read_cubin  # noqa: E402

GPU, TARGET = GPUS["H100"], "sm_90"
PEAK = GPU.sms * SCHEDULERS * WGMMA_PRODUCTS * 2 * GPU.clock  # flop/s at the model's clock
CUBLAS = 700e12  # flop/s assumed of cuBLAS in large products
M, N, K = 128, 256, 64
WARPS_PER_SCHEDULER = 2
SHARED_BYTES_PER_CYCLE = 128
SM_BYTES_PER_CYCLE = 64  # between an SM and L2
DEPENDENT_LOADS = 4  # before the first product of a tile: the plan, a block, its rows, both factors
STAGED_BYTES = (M + N) * K * 2  # of a step


class Loop(NamedTuple):
    """Cycles of one step of a block, by resource, and what the kernel uses."""

    name: str
    registers: int
    local: int
    wgmmas: int
    instructions: int
    cycles: dict[str, float]

    @property
    def bound(self) -> str:
        return max(self.cycles, key=lambda name: self.cycles[name])


def read_loop(case: str, folder: Path) -> Loop:
    cubin = folder / "kernel.cubin"
    compile_triton("linear_head", case, TARGET, cubin)
    kernel = read_cubin(cubin, "")[0]
    trace = kernel.trace(hot_loop(kernel, "HGMMA"))
    by_pipe = issue_cycles(trace, TARGET).by_pipe
    cycles = {pipe: WARPS_PER_SCHEDULER * count for pipe, count in by_pipe.items()}
    # both warpgroups read half of the rows of one factor, and all of the other
    cycles["shared memory"] = (STAGED_BYTES + (M + 2 * N) * K * 2) / SHARED_BYTES_PER_CYCLE
    wgmmas = sum(instruction.name == "HGMMA" for instruction in trace)
    return Loop(case, kernel.registers, memory_of(kernel.instructions).local, wgmmas, len(trace), cycles)


class Size(NamedTuple):
    rows: int
    columns: int
    width: int


def tile_seconds(loop: Loop, steps: float, stored: float, share: float) -> float:
    """One tile: the first loads, the steps at a share of the bound's rate, and the result, none of which overlap."""
    first = DEPENDENT_LOADS * GPU.latency
    return first + (steps * loop.cycles[loop.bound] / share + stored / SM_BYTES_PER_CYCLE) / GPU.clock


def hidden_seconds(loop: Loop, size: Size, live: int, share: float) -> float:
    """The longest queue of an SM at the best number of parts, and four launches."""
    if live == 0:
        return 4 * LAUNCH_SECONDS
    tiles, steps = -(-live // M) * -(-size.width // N), -(-size.columns // K)
    best = 0.0
    for parts in range(1, 17):
        if tiles * parts > max(tiles, 8 * GPU.sms):
            break
        queue = -(-tiles * parts // GPU.sms)
        partial = 2 * tiles * parts * M * N * 4 / GPU.copy
        seconds = queue * tile_seconds(loop, -(-steps // parts), M * N * 4, share) + partial
        best = min(best or seconds, seconds)
    read = 2 * (live * size.columns + size.columns * size.width)
    return max(best, read / GPU.copy) + 4 * LAUNCH_SECONDS


def weight_seconds(loop: Loop, size: Size, live: int, share: float) -> float:
    """Adds to a float32 total: an SM's tiles, or the bytes of the whole product, and two launches."""
    if live == 0:
        return 2 * LAUNCH_SECONDS
    tiles, steps = -(-size.columns // M) * -(-size.width // N), -(-live // K)
    total = 2 * 4 * size.columns * size.width
    busy = -(-tiles // GPU.sms) * tile_seconds(loop, steps, 2 * 4 * M * N, share)
    return max(busy, (total + 2 * live * size.columns) / GPU.copy) + 2 * LAUNCH_SECONDS


def cublas_seconds(size: Size) -> float:
    return 2 * 2 * size.rows * size.columns * size.width / CUBLAS


def live_seconds(loops: Sequence[Loop], size: Size, live: int, share: float) -> tuple[float, float]:
    """Both products with that many rows in live blocks."""
    return hidden_seconds(loops[0], size, live, share), weight_seconds(loops[1], size, live, share)


def break_even(loops: Sequence[Loop], size: Size, share: float) -> float:
    """Share of rows in idle blocks from which on both products together take less time than cuBLAS."""
    counts = [*range(0, size.rows, K), size.rows]
    faster = [live for live in counts if sum(live_seconds(loops, size, live, share)) < cublas_seconds(size)]
    return 1 - max(faster, default=0) / size.rows


def describe(loops: Sequence[Loop], size: Size, share: float) -> str:
    """One line for loops that sustain a share of the peak."""
    times = {
        idle: live_seconds(loops, size, round(size.rows * (1 - idle)), share) for idle in (0, 0.25, 0.5, 0.75, 0.9)
    }
    of_peak = [2 * size.rows * size.columns * size.width / seconds / PEAK for seconds in times[0]]
    each = ", ".join(f"{idle:.0%}: {1e3 * hidden:.2f} + {1e3 * weight:.2f}" for idle, (hidden, weight) in times.items())
    return (
        f"loops at {share * PEAK / 1e12:.0f} Tflop/s ({share:.0%} of peak): with all rows live, to_hidden "
        f"{of_peak[0]:.0%} and to_weight {of_peak[1]:.0%} of peak; ms by share of idle rows {each}; break-even at "
        f"{break_even(loops, size, share):.0%} idle"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="rows of both products; default: %(default)s")
    parser.add_argument("--columns", type=int, default=151936, help="vocabulary size; default: %(default)s")
    parser.add_argument("--width", type=int, default=4096, help="width of hidden states; default: %(default)s")
    options = parser.parse_args()
    size = Size(options.rows, options.columns, options.width)
    with tempfile.TemporaryDirectory(prefix="live_rows_") as folder:
        loops = [read_loop(case, Path(folder)) for case in ("to_hidden_kernel[bf16]", "to_weight_kernel[bf16, add]")]
    print(f"predicted, not measured: {GPU.name}, peak {PEAK / 1e12:.0f} Tflop/s at {GPU.clock / 1e9:.3f} GHz")
    for loop in loops:
        ranked = sorted(loop.cycles.items(), key=lambda item: -item[1])[:5]
        print(
            f"{loop.name}: {loop.registers} registers, {loop.local} local accesses; a step has {loop.instructions} "
            f"instructions, {loop.wgmmas} of them wgmma; cycles: "
            + ", ".join(f"{name} {count:.0f}" for name, count in ranked)
        )
    print(f"cuBLAS, both products of {size.rows:,} rows: {1e3 * cublas_seconds(size):.2f} ms")
    for share in (CUBLAS / PEAK, 0.85 * CUBLAS / PEAK, 0.7 * CUBLAS / PEAK):
        print(describe(loops, size, share))


if __name__ == "__main__":
    main()
