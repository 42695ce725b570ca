"""Writes results as tables, between the marks of their device in a document.

python -m benchmarks.tables cpu.json scaling.json --into docs/performance.md
python -m benchmarks.tables gpu_check.tar.gz --into docs/performance.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import tarfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import gpu_lines
from benchmarks.run import short, why_not
from benchmarks.timings import share

Result = dict[str, Any]
WIDTH = 100  # columns of the document
ARCHIVED = ("timings.json", "peers.json", "scaling.json")
MOST_FAILURES = 40  # shown on the page


def case_rows(result: Result) -> list[str]:
    lines = ["| case | ours | floor | against | ratio |", "|---|---|---|---|---|"]
    for case in result["cases"]:
        ours = f"{time(case['ours']['us'])} | {case['ours']['of_ceiling']:.0%}"
        name = f"`{case['op']}`, {case['name']}, {case['dtype']}"
        for provider, numbers in case["providers"].items() or {"": {"missing": ""}}.items():
            ratio = "" if "ratio" in numbers else why_not(numbers)
            if "ratio" in numbers:
                ratio = f"{short(numbers['ratio'])}x ({short(numbers['low'])} to {short(numbers['high'])})"
            lines.append(f"| {name} | {ours} | {provider} | {ratio} |")
            name, ours = "", " | "
    return lines


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
    for sweep in result.get("sweeps", []):
        first, last = sweep["points"][0], sweep["points"][-1]
        lines.append(
            f"| `{sweep['op']}`, {sweep['name']} | {first['size']:,} {sweep['unit']}, {time(first['us'])} | "
            f"{last['size']:,}, {time(last['us'])} | {sweep['exponent']:.2f} | {last['us'] / last['floor_us']:.1f} |"
        )
    return lines


def memory_rows(result: Result) -> list[str]:
    lines = ["| case | peak memory in MiB, without the inputs, and for heads without the gradients |", "|---|---|"]
    for case in result["cases"]:
        sizes = [f"{name} {size / 2**20:.1f}" for name, size in case["memory"].items() if name != "missing"]
        if sizes:
            lines.append(f"| `{case['op']}`, {case['name']} | {'; '.join(sizes)} |")
    return lines


def timing_rows(result: Result) -> list[str]:
    """Rows of our times on each backend, beside a copy of the same bytes or, for products, the floor."""
    lines = [
        "| case | backend | host | cold | warm | graph replay | MB | of the floor | launches | waits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for timing in result["timings"]:
        if "is not implemented for this op" in timing.get("missing", ""):
            continue
        case = f"| {timing['op']}, {timing['name']}, {timing['dtype']} | {timing['backend']} |"
        if "missing" in timing:
            lines.append(f"{case} {timing['missing']} | | | | | | | |")
            continue
        part = share(timing)
        warm = time(timing["warm_us"]) + ("" if timing.get("is_gapless", True) else " with the host's gaps")
        graph = time(timing["graph_us"]) if "graph_us" in timing else timing.get("graph_missing", "")
        cells = [
            time(timing["host_us"]) if "host_us" in timing else "",
            time(timing["cold_us"]) if "cold_us" in timing else "",
            warm,
            graph,
            f"{timing['bytes'] / 1e6:,.1f}" if timing["bytes"] else "",
            "" if part is None else f"{part:.0%}",
            str(timing.get("launches", timing.get("counts_missing", ""))),
            str(timing.get("synchronisations", "")),
        ]
        lines.append(f"{case} {' | '.join(cells)} |")
    return lines


def time(us: float) -> str:
    return f"{us:.3g} us" if us < 1000 else f"{us / 1e3:.3g} ms"


def machine_line(result: Result) -> str:
    m, limits = result["machine"], result["ceiling"]
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items() if version)
    speeds = ", ".join(f"{value / 1e9:,.0f} Gflop/s in {name}" for name, value in limits.items() if name != "copy")
    where = m["gpu"] + ", driver " + str(m["driver"]) if result["device"] == "cuda" else m["cpu"]
    line = (
        f"{where}, {m['cores']} cores, threads: {m['threads']}; grpo-kernels {m['grpo_kernels']}, {packages}. "
        f"Ceiling of the same run: a copy moves {limits['copy'] / 1e9:.1f} GB/s; bare products do {speeds}."
    )
    return textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False)


def ratios(head: list[Result], other: list[Result]) -> str:
    """The times of another commit over those of this one, from the shortest of each."""
    sides: list[dict[str, dict[str, float]]] = [{}, {}]
    for side, runs in zip(sides, (head, other), strict=True):
        for timing in (timing for run in runs for timing in run["timings"]):
            times = side.setdefault(f"{timing['op']}, {timing['name']}, {timing['dtype']} | {timing['backend']}", {})
            for kind in ("cold_us", "warm_us", "graph_us"):
                times[kind] = min(timing.get(kind, math.inf), times.get(kind, math.inf))
    lines = ["| case | backend | cold | warm | graph replay |", "|---|---|---|---|---|"]
    for case in sides[0].keys() & sides[1].keys():
        both = [(sides[1][case][kind], sides[0][case][kind]) for kind in ("cold_us", "warm_us", "graph_us")]
        cells = [f"{theirs / ours:.3f}" if math.isfinite(theirs + ours) else "" for theirs, ours in both]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def loaded(folder: Path, *names: str) -> list[Result]:
    """Results in a folder, without those that are missing or were cut off."""
    results = []
    for name in names:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            results.append(json.loads((folder / name).read_text()))
    return results


def page(folder: Path) -> str:
    """Summary of the results of gpu_check so far."""
    check = loaded(folder, "gpu_check.json")[0]
    facts = ", ".join(f"{name} {value}" for name, value in check["machine"].items())
    parts = [f"# GPU check: {check['machine']['gpu']}", facts, "## Steps"]
    table = ["| part | step | state | seconds | |", "|---|---|---|---|---|"]
    for row in check["steps"]:
        state = f"**{row['state']}**" if row["state"] == "FAILED" else row["state"]
        table.append(f"| {row['part']} | {row['step']} | {state} | {row['seconds']:.1f} | {row['why']} |")
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in gpu_lines.read(path)]
    states = gpu_lines.results(lines)
    counts = Counter(line["state"] for line in states.values())
    parts += ["\n".join(table), "Tests: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))]
    failed = [f"- `{name}`: {line['why']}" for name, line in states.items() if line["state"] == "failed"]
    parts += ["## What failed", "\n".join(failed[:MOST_FAILURES])] if failed else []
    parts += [f"and {len(failed) - MOST_FAILURES} more"] if len(failed) > MOST_FAILURES else []
    parts += [text(results)] if (results := loaded(folder, *ARCHIVED)) else []
    head, other = (loaded(folder, f"{side}_1.json", f"{side}_2.json") for side in ("head", "other"))
    parts += ["## The other commit's times over ours", ratios(head, other)] if head and other else []
    return "\n\n".join(parts) + "\n"


def text(results: list[Result]) -> str:
    parts = []
    for result in results:
        rows = [case_rows, bar_rows, memory_rows] if result["cases"] else [sweep_rows, bar_rows]
        if "timings" in result:
            rows = [timing_rows]
        parts += [machine_line(result), *("\n".join(rows_of(result)) for rows_of in rows)]
        parts += [f"Not measured: {name}." for name in result.get("failed", [])]
    return "\n\n".join(parts)


def read(path: Path) -> list[Result]:
    """The results in a JSON file, or in an archive of gpu_check."""
    if not path.name.endswith(".tar.gz"):
        return [json.loads(path.read_text())]
    with tarfile.open(path) as archive:
        files = [archive.extractfile(name) for name in ARCHIVED if name in archive.getnames()]
        return [json.loads(file.read()) for file in files if file is not None]


def replaced(document: str, device: str, new: str) -> str:
    """The document with new text between the marks of the device."""
    begin, end = f"<!-- measured on {device} -->", f"<!-- end of {device} -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise SystemExit(f"tables: the document must have {begin} and {end} once each")
    marked = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    return marked.sub(lambda _: f"{begin}\n\n{new}\n\n{end}", document)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results of one device")
    parser.add_argument("--into", type=Path, help="the document; default: print the tables")
    options = parser.parse_args(arguments)
    results = [result for path in options.results for result in read(path)]
    devices = {result["device"] for result in results}
    if len(devices) != 1:
        raise SystemExit(f"tables: results must be of one device, got {', '.join(sorted(devices))}")
    if options.into is None:
        print(text(results))
    else:
        options.into.write_text(replaced(options.into.read_text(), devices.pop(), text(results)))


if __name__ == "__main__":
    main()
