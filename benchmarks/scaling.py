"""Scaling of each op over four to six decades of size: time, floor at the measured ceiling, and fitted exponent.

python -m benchmarks.scaling --json scaling.json
python -m benchmarks.scaling --budget 20 --json part.json
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.case import DEVICES
from benchmarks.cases import OPS, sweeps
from benchmarks.measure import ceiling, scale
from benchmarks.run import default_device, document, usable, verdict, write


def show(sweep: dict[str, Any]) -> None:
    print(f"\n{sweep['op']}, {sweep['name']}")
    for point in sweep["points"]:
        per_unit = point["us"] * 1e3 / point["size"]
        over = point["us"] / point["floor_us"]
        size = f"{point['size']:>10} {sweep['unit']:8}"
        print(f"  {size} {point['us']:12.1f} us {per_unit:12.2f} ns each, {over:8.1f} floors")
    print(f"  time grows like n^{sweep['exponent']:.3f} from {sweep['fit_from']} {sweep['unit']} on")
    for bar in sweep["bars"]:
        print(f"  {verdict(bar)}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="", help="only this op")
    parser.add_argument(
        "--device", choices=DEVICES, default=default_device(), help="where to measure; default: %(default)s"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        help="seconds after which no further sweep starts; omissions are listed",
    )
    parser.add_argument("--json", type=Path, help="the result file, written after every sweep")
    options = parser.parse_args(arguments)
    device = usable(options.device)
    end = time.monotonic() + options.budget
    limits = ceiling(device)
    result = document(device, [], limits) | {"sweeps": []}
    for sweep in sweeps(options.op):
        if time.monotonic() > end:
            result.setdefault("left_out", []).append(f"{sweep.op}, {sweep.name}")
            print(f"left out: {sweep.op}, {sweep.name}")
            continue
        result["sweeps"].append(scale(sweep, device, limits))
        show(result["sweeps"][-1])
        if options.json:
            write(options.json, result)


if __name__ == "__main__":
    main()
