"""Measures the cases, prints the results, and stores them as JSON with a description of the machine.

    python -m benchmarks.run --list
    python -m benchmarks.run --op policy_loss --json policy_loss.json
    python -m benchmarks.run --quick
    python -m benchmarks.run --budget 60 --json part.json

A ratio is a provider's time over ours, measured alternately: the median over the pairs, and their range, without the
outer tenths if there are ten or more. A provider is timed only if its results match ours. The exit status is 1 if they
do not, or if one fails, but not if a bar is not met.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import grpo_kernels as gk
from benchmarks import machine
from benchmarks.case import DEVICES, Case
from benchmarks.cases import OPS, cases
from benchmarks.gpu_lines import START_AGAIN
from benchmarks.items import Items, add_options
from benchmarks.measure import ceiling, measure

QUICK_PAIRS = 5

KERNELS = {"cpu": ["cpu"], "cuda": ["cuda", "triton"]}  # backends by the device that they run on


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def quick(case: Case, device: torch.device) -> dict[str, Any]:
    """Measures only the steady ratios, without memory, bars and ceiling. It uses one thread: on a busy machine two
    threads wait for each other, and every time is that of the scheduler."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(case, device, {}, case.quick, QUICK_PAIRS)
    finally:
        torch.set_num_threads(threads)


def usable(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device must be available, got 'cuda', and torch sees no GPU")
    known = gk.available_kernels()
    missing = [f"{backend}: {known[backend]}" for backend in KERNELS[name] if known[backend] != "ok"]
    if len(missing) == len(KERNELS[name]):
        raise SystemExit(
            f"no kernels run on {name} here, so that the reference would be timed as ours: {'; '.join(missing)}; in a "
            "checkout, build them in place: pip install --no-build-isolation -e ."
        )
    return torch.device(name)


def document(device: torch.device, results: list[dict[str, Any]], limits: dict[str, float]) -> dict[str, Any]:
    return {"machine": machine.describe(), "device": device.type, "ceiling": limits, "cases": results}


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def show(result: dict[str, Any]) -> None:
    ours = result["ours"]
    print(f"\n{result['op']}, {result['name']}: {result['shape']}, {result['dtype']}")
    part = f", the floor is {ours['of_ceiling']:.0%} of it" if ours["floor_us"] else ""
    print(f"  {'ours':36} {ours['us']:12.1f} us  ({ours['low']:.1f} .. {ours['high']:.1f}){part}")
    for name, other in result["providers"].items():
        if "ratio" in other:
            spread = f"({other['low']:.2f} .. {other['high']:.2f})"
            print(f"  {name:36} {other['us']:12.1f} us  ratio {other['ratio']:.2f} {spread}")
        else:
            print(f"  {name:36} {why_not(other)}")
    for name, size in result["memory"].items():
        print(f"  memory of {name:26} {size if isinstance(size, str) else f'{size / 2**20:12.1f} MiB'}")
    for name, value in result.get("gpu", {}).items():
        print(f"  {name:36} {value}")
    for bar in result["bars"]:
        print(f"  {verdict(bar)}")


def short(number: float) -> str:
    """Four digits, so that a near miss does not look like the limit."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def why_not(other: dict[str, Any]) -> str:
    """Reason why a provider was not timed."""
    if "missing" in other:
        return str(other["missing"])
    return f"REFUSED: {other['refused']}" if "refused" in other else f"FAILED: {other['failed']}"


def broken(result: dict[str, Any]) -> list[str]:
    """Measurements of a case that failed, with the reason."""
    parts = result["providers"] | {"the GPU's counters": result.get("gpu", {})}
    return [f"{name}: {why_not(part)}" for name, part in parts.items() if {"refused", "failed"} & part.keys()]


def verdict(bar: dict[str, Any]) -> str:
    if bar["value"] is None:
        return f"bar not measured: {bar['text']}"
    return f"bar {'met' if bar['held'] else 'NOT MET'}: {short(bar['value'])} {bar['text']}"


def list_cases(selected: list[Case], device: torch.device) -> None:
    for case in selected:
        print(f"{case.op:20} {case.name}: {case.shape}, {case.dtype}")
        for provider in case.providers:
            print(f"{'':20}   {provider.name:36} {provider.missing(device)}")
        for bar in case.bars:
            print(f"{'':20}   bar: {bar}")


def round_robin(selected: list[Case]) -> Iterator[Case]:
    """Yields the first case of each op, then the second of each, and so on."""
    by_op = [[case for case in selected if case.op == op] for op in OPS]
    for turn in range(max(map(len, by_op), default=0)):
        yield from (of_op[turn] for of_op in by_op if turn < len(of_op))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the cases, their providers and bars, and exit")
    parser.add_argument("--op", choices=OPS, default="", help="only the cases of this op")
    parser.add_argument(
        "--case", default="", help="only cases whose names contain this; --list prints each before a colon"
    )
    parser.add_argument("--quick", action="store_true", help="measure only the steady ratios, within a minute")
    parser.add_argument(
        "--rounds", type=int, default=0, help="alternating pairs, in place of each case's own number; not with --quick"
    )
    parser.add_argument(
        "--device", choices=DEVICES, default=default_device(), help="where to measure; default: %(default)s"
    )
    add_options(parser)
    parser.add_argument("--json", type=Path, help="the result file, written after every case")
    parser.add_argument("--date", action="store_true", help="store today's date in the JSON")
    options = parser.parse_args(arguments)
    if options.rounds < 0:
        raise SystemExit(f"run: --rounds must be at least 1, or 0 for each case's own number, got {options.rounds}")
    selected = cases(options.op, options.case, options.device)
    if not selected:
        raise SystemExit(
            f"run: no case of {options.op or 'any op'} on {options.device} has {options.case!r} in its name"
        )
    if options.list:
        return list_cases(selected, torch.device(options.device))
    device = usable(options.device)
    limits: dict[str, float] = {} if options.quick else ceiling(device)
    to_measure = [case for case in selected if case.quick or not options.quick]
    measurements = Items(options.lines, options.budget)
    results = measurements.results
    result = document(device, results, limits)
    if options.date:
        result["date"] = datetime.date.today().isoformat()
    items: dict[str, Callable[[], dict[str, Any]]] = {
        f"{case.op}, {case.name}": lambda c=case: (  # type: ignore[misc]
            quick(c, device) if options.quick else measure(c, device, limits, pairs=options.rounds)
        )
        for case in (to_measure if options.budget == math.inf else round_robin(to_measure))
    }
    for measured in measurements.run(items):
        show(measured)
        if options.json:
            write(options.json, result | measurements.lost())
    status = measurements.end()
    if options.json:
        write(options.json, result | measurements.lost())
    bars = [bar for case in results for bar in case["bars"]]
    missed = [bar for bar in bars if bar["held"] is False]
    print(f"\n{len(results)} cases, {len(bars)} bars, {len(missed)} not met")
    lost = measurements.lost().get("failed", [])
    lost += [f"{case['op']}, {case['name']}, {why}" for case in results for why in broken(case)]
    if status == START_AGAIN:
        raise SystemExit(status)
    if lost:
        raise SystemExit("run: not measured:\n" + "\n".join(lost))


if __name__ == "__main__":
    main()
