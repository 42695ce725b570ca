"""Times our own calls on each backend beside a copy of the bytes that they must move.

    python -m benchmarks.timings --device cuda --json timings.json

With --lines a line is kept for each case and backend as it ends, and what the file holds is not measured again: after a
crash the same command goes on behind it.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import grpo_kernels as gk
from benchmarks import gpu
from benchmarks.case import DEVICES, Case
from benchmarks.cases import OPS, cases
from benchmarks.items import Items, add_options
from benchmarks.measure import ceiling
from benchmarks.run import by_turns, default_device, document, usable, write

BACKENDS = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}
Found = dict[str, Any]


def time_case(case: Case, backend: str, device: torch.device, limits: dict[str, float]) -> Found:
    torch.manual_seed(0)
    inputs = case.inputs(device, 0)
    call = lambda: case.ours(inputs)  # noqa: E731
    found: Found = {"op": case.op, "name": case.name, "shape": case.shape, "dtype": case.dtype, "backend": backend}
    found |= {"bytes": case.floor.bytes, "flops": case.floor.flops}
    found["floor_us"] = case.floor.seconds(limits, case.dtype) * 1e6
    try:
        with gk.use_backend(backend):
            call()  # loads and compiles
            found |= gpu.describe(call, device)
    except RuntimeError as error:
        if "cannot run here" not in str(error):
            raise
        return found | {"missing": str(error)}
    if case.floor.bytes:
        found["copy_us"] = gpu.copy_time(case.floor.bytes, device)
    return found


def share(found: Found) -> float | None:
    """Part of our time that a copy of the same bytes takes; for products, the floor."""
    ours = found.get("cold_us", found.get("warm_us"))
    least = found.get("copy_us") if found["bytes"] and not found["flops"] else found["floor_us"]
    return None if ours is None or not least else least / ours


def show(found: Found) -> None:
    print(f"\n{found['op']}, {found['name']} on {found['backend']}: {found['shape']}, {found['dtype']}")
    left_out = ("op", "name", "shape", "dtype", "backend")
    for key, value in found.items():
        if key not in left_out:
            print(f"  {key:20} {value:.4g}" if isinstance(value, float) else f"  {key:20} {value}")
    if (part := share(found)) is not None:
        print(f"  {'of the floor':20} {part:.0%}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="")
    parser.add_argument("--case", default="", help="only cases with this in their names")
    parser.add_argument("--device", choices=DEVICES, default=default_device())
    parser.add_argument("--backend", nargs="+", choices=gk.available_backends(), help="those of the device if left out")
    add_options(parser)
    parser.add_argument("--json", type=Path, help="written after every case")
    given = parser.parse_args(arguments)
    device = usable(given.device)
    limits = ceiling(device)
    items: dict[str, Callable[[], Found]] = {
        f"{case.op}, {case.name}, {backend}": lambda c=case, b=backend: time_case(c, b, device, limits)  # type: ignore[misc]
        for case in by_turns(cases(given.op, given.case, given.device))
        for backend in given.backend or BACKENDS[given.device]
    }
    if not items:
        raise SystemExit(f"timings: no case of {given.op or 'any op'} on {given.device} has {given.case!r} in its name")
    kept = Items(given.lines, given.budget, given.patience)
    result = document(device, [], limits)
    for found in kept.run(items):
        show(found)
        gc.collect()
        if given.json:
            write(given.json, result | {"timings": kept.found} | kept.lost())
    if given.json:
        write(given.json, result | {"timings": kept.found} | kept.lost())
    sys.exit(kept.end())


if __name__ == "__main__":
    main()
