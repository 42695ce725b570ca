"""Measures the table of cases, prints it, and keeps it as JSON with a description of the machine.

    python -m benchmarks.run --list
    python -m benchmarks.run --op policy_loss --json policy_loss.json
    python -m benchmarks.run --quick
    python -m benchmarks.run --budget 60 --json some.json

Ratios are a provider's time over ours, the median of pairs that took turns, and the range, of ten and more without the
outer tenths. A provider that computes something else is not timed, and the exit status is then 1, as with one that
fails; a bar that is missed is a result.
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

from benchmarks import machine
from benchmarks.case import DEVICES, Case
from benchmarks.cases import OPS, cases
from benchmarks.items import Items, add_options
from benchmarks.measure import ceiling, measure
from tools.gpu_lines import START_AGAIN

QUICK_PAIRS = 5


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def quick(case: Case, device: torch.device) -> dict[str, Any]:
    """The steady ratios alone, without memory, bars and ceiling. On one thread: where others use a core too, two
    threads wait for each other, and everybody's time is that of the scheduler."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(case, device, {}, case.quick, QUICK_PAIRS)
    finally:
        torch.set_num_threads(threads)


def usable(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device must be one that this machine has, got 'cuda', and torch sees no GPU")
    return torch.device(name)


def document(device: torch.device, found: list[dict[str, Any]], limits: dict[str, float]) -> dict[str, Any]:
    return {"machine": machine.describe(), "device": device.type, "ceiling": limits, "cases": found}


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


def show(found: dict[str, Any]) -> None:
    ours = found["ours"]
    print(f"\n{found['op']}, {found['name']}: {found['shape']}, {found['dtype']}")
    part = f", the floor is {ours['of_ceiling']:.0%} of it" if ours["floor_us"] else ""
    print(f"  {'ours':36} {ours['us']:12.1f} us  ({ours['low']:.1f} .. {ours['high']:.1f}){part}")
    for name, other in found["providers"].items():
        if "ratio" in other:
            spread = f"({other['low']:.2f} .. {other['high']:.2f})"
            print(f"  {name:36} {other['us']:12.1f} us  ratio {other['ratio']:.2f} {spread}")
        else:
            print(f"  {name:36} {why_not(other)}")
    for name, size in found["memory"].items():
        print(f"  memory of {name:26} {size if isinstance(size, str) else f'{size / 2**20:12.1f} MiB'}")
    for name, value in found.get("gpu", {}).items():
        print(f"  {name:36} {value}")
    for bar in found["bars"]:
        print(f"  {verdict(bar)}")


def short(number: float) -> str:
    """Four digits, so that a miss by little does not look like the limit."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def why_not(other: dict[str, Any]) -> str:
    """Of a provider that was not timed."""
    if "missing" in other:
        return str(other["missing"])
    return f"REFUSED: {other['refused']}" if "refused" in other else f"FAILED: {other['failed']}"


def broken(one: dict[str, Any]) -> list[str]:
    """What should have been measured of a case, and was not."""
    parts = one["providers"] | {"the GPU's counters": one.get("gpu", {})}
    return [f"{name}: {why_not(part)}" for name, part in parts.items() if {"refused", "failed"} & part.keys()]


def verdict(bar: dict[str, Any]) -> str:
    if bar["value"] is None:
        return f"bar not measured: {bar['text']}"
    return f"bar {'held' if bar['held'] else 'MISSED'}: {short(bar['value'])} {bar['text']}"


def list_cases(chosen: list[Case], device: torch.device) -> None:
    for case in chosen:
        print(f"{case.op:20} {case.name}: {case.shape}, {case.dtype}")
        for provider in case.providers:
            print(f"{'':20}   {provider.name:36} {provider.missing(device)}")
        for bar in case.bars:
            print(f"{'':20}   bar: {bar}")


def by_turns(chosen: list[Case]) -> Iterator[Case]:
    """The first case of each op, then the second of each, ..."""
    of_op = [[case for case in chosen if case.op == op] for op in OPS]
    for turn in range(max(map(len, of_op), default=0)):
        yield from (some[turn] for some in of_op if turn < len(some))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the cases, their providers and bars, without measuring")
    parser.add_argument("--op", choices=OPS, default="")
    parser.add_argument("--case", default="", help="only cases with this in their names")
    parser.add_argument("--quick", action="store_true", help="the steady ratios alone, within a minute")
    parser.add_argument(
        "--rounds", type=int, default=0, help="pairs of ours and theirs, in place of each case's own; not with --quick"
    )
    parser.add_argument("--device", choices=DEVICES, default=default_device())
    add_options(parser)
    parser.add_argument("--json", type=Path, help="written after every case")
    parser.add_argument("--date", action="store_true", help="keep today's date in the JSON")
    given = parser.parse_args(arguments)
    if given.rounds < 0:
        raise SystemExit(f"run: --rounds must be at least 1, or 0 for each case's own, got {given.rounds}")
    chosen = cases(given.op, given.case, given.device)
    if not chosen:
        raise SystemExit(f"run: no case of {given.op or 'any op'} on {given.device} has {given.case!r} in its name")
    if given.list:
        return list_cases(chosen, torch.device(given.device))
    device = usable(given.device)
    limits: dict[str, float] = {} if given.quick else ceiling(device)
    wanted = [case for case in chosen if case.quick or not given.quick]
    kept = Items(given.lines, given.budget, given.patience)
    found = kept.found
    result = document(device, found, limits)
    if given.date:
        result["date"] = datetime.date.today().isoformat()
    items: dict[str, Callable[[], dict[str, Any]]] = {
        f"{case.op}, {case.name}": lambda c=case: (  # type: ignore[misc]
            quick(c, device) if given.quick else measure(c, device, limits, pairs=given.rounds)
        )
        for case in (wanted if given.budget == math.inf else by_turns(wanted))
    }
    for one in kept.run(items):
        show(one)
        if given.json:
            write(given.json, result | kept.lost())
    status = kept.end()
    if given.json:
        write(given.json, result | kept.lost())
    bars = [bar for one in found for bar in one["bars"]]
    missed = [bar for bar in bars if bar["held"] is False]
    print(f"\n{len(found)} cases, {len(bars)} bars, {len(missed)} missed")
    lost = kept.lost().get("failed", [])
    lost += [f"{one['op']}, {one['name']}, {why}" for one in found for why in broken(one)]
    if status == START_AGAIN:
        raise SystemExit(status)
    if lost:
        raise SystemExit("run: not measured:\n" + "\n".join(lost))


if __name__ == "__main__":
    main()
