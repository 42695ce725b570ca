"""Times our own calls on each backend, beside a copy of the bytes that they must move.

    python -m benchmarks.timings --device cuda --json timings.json

With --lines, a line per case and backend is written as it ends, and lines of an earlier run are not repeated: after a
crash the same command resumes.
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
from benchmarks.run import default_device, document, round_robin, usable, write
from grpo_kernels import backends

BACKENDS = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}
Result = dict[str, Any]


def time_case(case: Case, backend: str, device: torch.device, limits: dict[str, float]) -> Result:
    torch.manual_seed(0)
    inputs = case.inputs(device, 0)
    call = lambda: case.ours(inputs)  # noqa: E731
    result: Result = {"op": case.op, "name": case.name, "shape": case.shape, "dtype": case.dtype, "backend": backend}
    result |= {"bytes": case.floor.bytes, "flops": case.floor.flops}
    result["floor_us"] = case.floor.seconds(limits, case.dtype) * 1e6
    try:
        with gk.use_backend(backend):
            call()  # loads and compiles
            result |= gpu.describe(call, device)
    except RuntimeError as error:
        if "cannot run here" not in str(error):
            raise
        return result | {"missing": str(error)}
    if case.floor.bytes:
        result["copy_us"] = gpu.copy_time(case.floor.bytes, device)
    return result


def share(result: Result) -> float | None:
    """Share of our time that a copy of the same bytes takes, or for products the floor."""
    ours = result.get("cold_us", result.get("warm_us"))
    least = result.get("copy_us") if result["bytes"] and not result["flops"] else result["floor_us"]
    return None if ours is None or not least else least / ours


def show(result: Result) -> None:
    print(f"\n{result['op']}, {result['name']} on {result['backend']}: {result['shape']}, {result['dtype']}")
    in_title = ("op", "name", "shape", "dtype", "backend")
    for key, value in result.items():
        if key not in in_title:
            print(f"  {key:20} {value:.4g}" if isinstance(value, float) else f"  {key:20} {value}")
    if (part := share(result)) is not None:
        print(f"  {'of the floor':20} {part:.0%}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="", help="only the cases of this op")
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    parser.add_argument(
        "--device", choices=DEVICES, default=default_device(), help="where to measure; default: %(default)s"
    )
    parser.add_argument("--backend", nargs="+", choices=backends.IMPLEMENTATIONS, help="default: those of the device")
    add_options(parser)
    parser.add_argument("--json", type=Path, help="the result file, written after every case")
    options = parser.parse_args(arguments)
    backends.name_implementations()
    device = usable(options.device)
    limits = ceiling(device)
    items: dict[str, Callable[[], Result]] = {
        f"{case.op}, {case.name}, {backend}": lambda c=case, b=backend: time_case(c, b, device, limits)  # type: ignore[misc]
        for case in round_robin(cases(options.op, options.case, options.device))
        for backend in options.backend or BACKENDS[options.device]
    }
    if not items:
        raise SystemExit(
            f"timings: no case of {options.op or 'any op'} on {options.device} has {options.case!r} in its name"
        )
    measurements = Items(options.lines, options.budget)
    result = document(device, [], limits)
    for timing in measurements.run(items):
        show(timing)
        gc.collect()
        if options.json:
            write(options.json, result | {"timings": measurements.results} | measurements.lost())
    if options.json:
        write(options.json, result | {"timings": measurements.results} | measurements.lost())
    sys.exit(measurements.end())


if __name__ == "__main__":
    main()
