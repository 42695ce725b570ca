"""Each op over four to six decades of size: time, the floor at the measured ceiling, and the fitted exponent.

python -m benchmarks.scaling --json scaling.json
python -m benchmarks.scaling --budget 20 --json some.json
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


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['op']}, {found['name']}")
    for point in found["points"]:
        each = point["us"] * 1e3 / point["size"]
        over = point["us"] / point["floor_us"]
        print(
            f"  {point['size']:>10} {found['unit']:8} {point['us']:12.1f} us {each:12.2f} ns each, {over:8.1f} floors"
        )
    print(f"  time grows like n^{found['exponent']:.3f} from {found['fit_from']} {found['unit']} on")
    for bar in found["bars"]:
        print(f"  {verdict(bar)}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="")
    parser.add_argument("--device", choices=DEVICES, default=default_device())
    parser.add_argument(
        "--budget", type=float, default=math.inf,
        help="seconds after which no further sweep is begun; those left out are named",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="written after every sweep")
    given = parser.parse_args(arguments)
    device = usable(given.device)
    end = time.monotonic() + given.budget
    limits = ceiling(device)
    result = document(device, [], limits) | {"sweeps": []}
    for sweep in sweeps(given.op):
        if time.monotonic() > end:
            result.setdefault("left_out", []).append(f"{sweep.op}, {sweep.name}")
            print(f"left out: {sweep.op}, {sweep.name}")
            continue
        result["sweeps"].append(scale(sweep, device, limits))
        show(result["sweeps"][-1])
        if given.json:
            write(given.json, result)


if __name__ == "__main__":
    main()
