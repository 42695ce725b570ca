"""Writes results as tables, between the marks of their device in a document.

python -m benchmarks.tables benchmarks/results/cpu.json benchmarks/results/cpu_50304.json --into docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import short

Result = dict[str, Any]
WIDTH = 100  # columns of the document


def case_table(result: Result) -> str:
    """A row for each case, with all peers in one cell; times on a GPU are by its events."""
    is_gpu = any("cold_us" in case["ours"] for case in result["cases"])
    times = ["cold", "warm", "wall (host)", "launches", "speed"] if is_gpu else ["time"]
    rows = []
    for case in result["cases"]:
        ours = case["ours"]
        dtype = "" if case["dtype"] == "float32" or case["dtype"] in case["name"] else f", {case['dtype']}"
        cells = gpu_times(case) if is_gpu else [time(ours["us"])]
        peers = [
            peer(who, numbers, case["bars"], origin(result, numbers)) for who, numbers in case["providers"].items()
        ]
        own = [missed(bar) for bar in case["bars"] if bar["of"] not in case["providers"]]
        compared = "<br>".join(filter(None, [*peers, *own]))
        cells += [f"{ours['of_ceiling']:.0%}", mebibytes(ours), compared]
        rows.append([f"`{case['op']}`, {case['name']}{dtype}{origin(result, ours)}", *cells])
    return markdown(["case", *times, "floor", "MiB", "peers"], rows)


def origin(result: Result, row: Result) -> str:
    """The commit or the machine of a row, if the newest run has another one."""
    newest, run = result["runs"][-1], result["runs"][row["run"]]
    if run is newest:
        return ""
    commit = run["machine"]["commit"] or "unknown"
    is_same = commit == newest["machine"]["commit"]
    return " (another machine)" if is_same else f" (commit {commit[:7]})"


def gpu_times(case: Result) -> list[str]:
    """Times with cold and with warm caches, with and of the host, the kernels, and the speed with cold caches."""
    ours, floor = case["ours"], case["floor"]
    warm = time(ours["warm_us"]) + ("" if ours["is_gapless"] else " with the host's gaps")
    walls = [time(ours["us"])] if "us" in ours else []
    walls += [f"({time(ours['host_us'])})"] if "host_us" in ours else []
    rate, unit = (floor["flops"] / 1e6, "Tflop/s") if floor["flops"] else (floor["bytes"] / 1e3, "GB/s")
    launches = str(ours.get("launches", ""))
    return [time(ours["cold_us"]), warm, " ".join(walls), launches, f"{rate / ours['cold_us']:.3g} {unit}"]


def peer(who: str, numbers: Result, bars: list[Result], where: str = "") -> str:
    """A ratio with its range, on a GPU the time by events and the kernels, the memory and the limits not met.

    Or why there is no ratio; "" for a peer of another device.
    """
    if "ratio" not in numbers:
        reason = numbers.get("missing") or numbers.get("refused") or numbers["raised"]
        return "" if reason.startswith("not made for") else f"{who}: {reason}{where}"
    figures = [f"{who} {short(numbers['ratio'])} ({short(numbers['low'])} to {short(numbers['high'])}){where}"]
    figures += [
        f"cold {time(numbers['cold_us'])}, {numbers.get('launches', 'many')} launches" if "cold_us" in numbers else ""
    ]
    figures += [f"{mebibytes(numbers)} MiB" if "memory" in numbers else ""]
    return ", ".join(filter(None, [*figures, *(missed(bar) for bar in bars if bar["of"] == who)]))


def mebibytes(numbers: Result) -> str:
    size = numbers.get("memory", math.nan) / 2**20
    return "" if math.isnan(size) else f"{size:.1f}" if size < 100 else f"{size:,.0f}"


def missed(bar: Result) -> str:
    """A limit that is not met, in bold; that of a cost as one of its inverse, the ratio."""
    if bar["held"] is not False:
        return ""
    quantity, relation = bar["kind"].split(" ", 1)
    if quantity == "cost":
        return f"**limit at least {short(1 / bar['limit'])}**"
    if quantity == "ratio":
        return f"**limit {relation} {short(bar['limit'])}**"
    of = f" of {bar['of']}" if bar["of"] else ""
    return f"**{quantity} {short(bar['value'])}{of}, limit {relation} {short(bar['limit'])}**"


def sweep_table(result: Result) -> str:
    rows = []
    for sweep in result["sweeps"]:
        first, last = sweep["points"][0], sweep["points"][-1]
        floors = [f"{last['us'] / last['floor_us']:.1f}", *filter(None, map(missed, sweep["bars"]))]
        rows.append(
            [
                f"`{sweep['op']}`, {sweep['name']}{origin(result, sweep)}",
                f"{first['size']:,} {sweep['unit']}, {time(first['us'])}",
                f"{last['size']:,}, {time(last['us'])}",
                f"{sweep['exponent']:.2f}",
                ", ".join(floors),
            ]
        )
    return markdown(["op", "from", "to", "exponent", "floors at the largest"], rows)


def time(us: float) -> str:
    unit, size = ("us", 1) if us < 1e3 else ("ms", 1e3) if us < 1e6 else ("s", 1e6)
    return f"{us / size:.3g} {unit}"


def machine_line(result: Result) -> str:
    """The machine, the commit and the ceiling of the newest run."""
    newest = result["runs"][-1]
    m, limits = newest["machine"], newest["ceiling"]
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items() if version)
    speeds = ", ".join(f"{value / 1e9:,.0f} Gflop/s in {name}" for name, value in limits.items() if name != "copy")
    where = f"{m['gpu']}, driver {m['driver']}" if newest["device"] == "cuda" else m["cpu"]
    clocks = [case["ours"]["sm_mhz"] for case in result["cases"] if case["ours"].get("sm_mhz")]
    where += f", multiprocessors at {min(clocks)} to {max(clocks)} MHz" if clocks else ""
    line = (
        f"{where}, {m['cores']} cores, threads: {m['threads']}; grpo-kernels {m['grpo_kernels']} "
        f"(commit {str(m['commit'])[:7]}), {packages}. "
        f"Ceiling of the same run: a copy moves {limits['copy'] / 1e9:.1f} GB/s; bare products do {speeds}."
    )
    return textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def text(results: list[Result]) -> str:
    return "\n\n".join(map(text_of, results))


def text_of(result: Result) -> str:
    parts = [machine_line(result)]
    parts += [case_table(result)] if result["cases"] else []
    parts += [sweep_table(result)] if result.get("sweeps") else []
    return "\n\n".join(parts)


def replaced(document: str, begin: str, end: str, new: str) -> str:
    """The document with new text between two marks."""
    if document.count(begin) != 1 or document.count(end) != 1:
        raise SystemExit(f"tables: the document must have {begin} and {end} once each")
    before, _, rest = document.partition(begin)
    return f"{before}{begin}\n\n{new}\n\n{end}{rest.partition(end)[2]}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results of `pytest benchmarks --save`, of one device")
    parser.add_argument("--into", type=Path, help="the document; default: print the tables")
    options = parser.parse_args(arguments)
    results = [json.loads(path.read_text()) for path in options.results]
    devices = {run["device"] for result in results for run in result["runs"]}
    if len(devices) != 1:
        raise SystemExit(f"tables: results must be of one device, got {', '.join(sorted(devices))}")
    if options.into is None:
        print(text(results))
    else:
        device = devices.pop()
        marks = f"<!-- measured on {device} -->", f"<!-- end of {device} -->"
        options.into.write_text(replaced(options.into.read_text(), *marks, text(results)))


if __name__ == "__main__":
    main()
