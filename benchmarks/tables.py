"""Writes results as tables, between the marks of their device in a document.

python -m benchmarks.tables benchmarks/results/cpu.json benchmarks/results/scaling.json --into docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.measure import short

Result = dict[str, Any]
WIDTH = 100  # columns of the document


def case_rows(result: Result) -> list[str]:
    lines = ["| case | ours | floor | against | ratio |", "|---|---|---|---|---|"]
    for case in result["cases"]:
        ours = f"{time(case['ours']['us'])} | {case['ours']['of_ceiling']:.0%}"
        name = f"`{case['op']}`, {case['name']}, {case['dtype']}"
        for provider, numbers in case["providers"].items() or {"": {"missing": ""}}.items():
            lines.append(f"| {name} | {ours} | {provider} | {ratio(numbers)} |")
            name, ours = "", " | "
    return lines


def gpu_rows(result: Result) -> list[str]:
    """Rows of times by events, with cold and warm caches, and of ratios by the host's clock."""
    lines = ["| case | cold | warm | speed | of the ceiling | against | ratio |", "|---|---|---|---|---|---|---|"]
    for case in result["cases"]:
        ours, floor = case["ours"], case["floor"]
        warm = time(ours["warm_us"]) + ("" if ours["is_gapless"] else " with the host's gaps")
        rate, unit = (floor["flops"] / 1e6, "Tflop/s") if floor["flops"] else (floor["bytes"] / 1e3, "GB/s")
        cells = f"{time(ours['cold_us'])} | {warm} | {rate / ours['cold_us']:.3g} {unit} | {ours['of_ceiling']:.0%}"
        name = f"`{case['op']}`, {case['name']}, {case['dtype']}"
        timed = {who: numbers for who, numbers in case["providers"].items() if "ratio" in numbers}
        for provider, numbers in timed.items() or {"": {"missing": ""}}.items():
            lines.append(f"| {name} | {cells} | {provider} | {ratio(numbers)} |")
            name, cells = "", " | | | "
    return lines


def ratio(numbers: Result) -> str:
    """A ratio with its range, or the reason why there is none."""
    if "ratio" not in numbers:
        return str(numbers.get("missing", numbers.get("refused")))
    return f"{short(numbers['ratio'])}x ({short(numbers['low'])} to {short(numbers['high'])})"


def bar_rows(result: Result) -> list[str]:
    """Rows of bars, with those that are not met in bold."""
    lines = ["| bar | measured | limit | |", "|---|---|---|---|"]
    for case in [*result["cases"], *result.get("sweeps", [])]:
        for bar in case["bars"]:
            word = {True: "met", False: "**not met**", None: "not measured"}[bar["held"]]
            value = "" if bar["value"] is None else short(bar["value"])
            what, limit = bar["text"].rsplit(", ", 1)
            lines.append(f"| `{case['op']}`, {case['name']}: {what} | {value} | {limit} | {word} |")
    return lines


def sweep_rows(result: Result) -> list[str]:
    lines = ["| op | from | to | exponent | floors at the largest |", "|---|---|---|---|---|"]
    for sweep in result["sweeps"]:
        first, last = sweep["points"][0], sweep["points"][-1]
        lines.append(
            f"| `{sweep['op']}`, {sweep['name']} | {first['size']:,} {sweep['unit']}, {time(first['us'])} | "
            f"{last['size']:,}, {time(last['us'])} | {sweep['exponent']:.2f} | {last['us'] / last['floor_us']:.1f} |"
        )
    return lines


def memory_rows(result: Result) -> list[str]:
    lines = ["| case | peak memory in MiB, without the inputs, and for heads without the gradients |", "|---|---|"]
    for case in result["cases"]:
        rows = {"ours": case["ours"]} | case["providers"]
        sizes = [f"{name} {row['memory'] / 2**20:.1f}" for name, row in rows.items() if "memory" in row]
        if sizes:
            lines.append(f"| `{case['op']}`, {case['name']} | {'; '.join(sizes)} |")
    return lines


def time(us: float) -> str:
    return f"{us:.3g} us" if us < 1000 else f"{us / 1e3:.3g} ms"


def machine_line(result: Result) -> str:
    m, limits = result["machine"], result["ceiling"]
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items() if version)
    speeds = ", ".join(f"{value / 1e9:,.0f} Gflop/s in {name}" for name, value in limits.items() if name != "copy")
    where = f"{m['gpu']}, driver {m['driver']}" if result["device"] == "cuda" else m["cpu"]
    line = (
        f"{where}, {m['cores']} cores, threads: {m['threads']}; grpo-kernels {m['grpo_kernels']}, {packages}. "
        f"Ceiling of the same run: a copy moves {limits['copy'] / 1e9:.1f} GB/s; bare products do {speeds}."
    )
    return textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def text(results: list[Result]) -> str:
    parts = []
    for result in results:
        of_cases = [gpu_rows] if result["device"] == "cuda" else [case_rows]
        rows = ([*of_cases, memory_rows] if result["cases"] else []) + ([sweep_rows] if result.get("sweeps") else [])
        parts += [machine_line(result), *("\n".join(rows_of(result)) for rows_of in [*rows, bar_rows])]
    return "\n\n".join(parts)


def replaced(document: str, device: str, new: str) -> str:
    """The document with new text between the marks of the device."""
    begin, end = f"<!-- measured on {device} -->", f"<!-- end of {device} -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise SystemExit(f"tables: the document must have {begin} and {end} once each")
    marked = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    return marked.sub(lambda _: f"{begin}\n\n{new}\n\n{end}", document)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results of `pytest benchmarks --save`, of one device")
    parser.add_argument("--into", type=Path, help="the document; default: print the tables")
    options = parser.parse_args(arguments)
    results = [json.loads(path.read_text()) for path in options.results]
    devices = {result["device"] for result in results}
    if len(devices) != 1:
        raise SystemExit(f"tables: results must be of one device, got {', '.join(sorted(devices))}")
    if options.into is None:
        print(text(results))
    else:
        options.into.write_text(replaced(options.into.read_text(), devices.pop(), text(results)))


if __name__ == "__main__":
    main()
