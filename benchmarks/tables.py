"""Writes results as tables, into the place of a document that is marked for their device.

python -m benchmarks.tables cpu.json scaling.json --into docs/performance.md
python -m benchmarks.tables gpu_check.tar.gz --into docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import re
import tarfile
from pathlib import Path
from typing import Any

from benchmarks.run import short, why_not
from benchmarks.timings import share

Result = dict[str, Any]
ARCHIVED = ("timings.json", "peers.json", "scaling.json")


def case_rows(result: Result) -> list[str]:
    lines = ["| case | ours | floor | against | ratio |", "|---|---|---|---|---|"]
    for case in result["cases"]:
        ours = f"{time(case['ours']['us'])} | {case['ours']['of_ceiling']:.0%}"
        name = f"`{case['op']}`, {case['name']}, {case['dtype']}"
        for other, found in case["providers"].items() or {"": {"missing": ""}}.items():
            ratio = "" if "ratio" in found else why_not(found)
            if "ratio" in found:
                ratio = f"{short(found['ratio'])}x ({short(found['low'])} to {short(found['high'])})"
            lines.append(f"| {name} | {ours} | {other} | {ratio} |")
            name, ours = "", " | "
    return lines


def bar_rows(result: Result) -> list[str]:
    """Missed ones are said in bold."""
    lines = ["| bar | found | limit | |", "|---|---|---|---|"]
    for case in [*result["cases"], *result.get("sweeps", [])]:
        for bar in case["bars"]:
            word = {True: "held", False: "**missed**", None: "not measured"}[bar["held"]]
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
    lines = ["| case | peak memory beside the inputs, of heads without the gradients, MiB |", "|---|---|"]
    for case in result["cases"]:
        sizes = [f"{name} {size / 2**20:.1f}" for name, size in case["memory"].items() if name != "missing"]
        if sizes:
            lines.append(f"| `{case['op']}`, {case['name']} | {'; '.join(sizes)} |")
    return lines


def timing_rows(result: Result) -> list[str]:
    """Ours on each backend, beside a copy of the same bytes or, for products, the floor."""
    lines = [
        "| case | backend | cold | warm | graph replay | MB | of the floor | launches | waits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for found in result["timings"]:
        case = f"| {found['op']}, {found['name']}, {found['dtype']} | {found['backend']} |"
        if "missing" in found:
            lines.append(f"{case} {found['missing']} | | | | | | |")
            continue
        part = share(found)
        warm = time(found["warm_us"]) + ("" if found.get("is_gapless", True) else " with the host's gaps")
        graph = time(found["graph_us"]) if "graph_us" in found else found.get("graph_missing", "")
        cells = [
            time(found["cold_us"]) if "cold_us" in found else "",
            warm,
            graph,
            f"{found['bytes'] / 1e6:,.1f}" if found["bytes"] else "",
            "" if part is None else f"{part:.0%}",
            str(found.get("launches", found.get("counts_missing", ""))),
            str(found.get("synchronisations", "")),
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
    return (
        f"{where}, {m['cores']} cores, threads: {m['threads']}; grpo-kernels {m['grpo_kernels']}, {packages}. "
        f"Ceiling of the same run: a copy moves {limits['copy'] / 1e9:.1f} GB/s; bare products do {speeds}."
    )


def text(results: list[Result]) -> str:
    parts = []
    for result in results:
        rows = [case_rows, bar_rows, memory_rows] if result["cases"] else [sweep_rows, bar_rows]
        if "timings" in result:
            rows = [timing_rows]
        parts += [machine_line(result), *("\n".join(each(result)) for each in rows)]
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
    """The document with what stands between the device's marks replaced."""
    begin, end = f"<!-- measured on {device} -->", f"<!-- end of {device} -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise SystemExit(f"tables: the document must have {begin} and {end} once each")
    marked = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    return marked.sub(lambda _: f"{begin}\n\n{new}\n\n{end}", document)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="all of one device")
    parser.add_argument("--into", type=Path, help="else it is printed")
    given = parser.parse_args(arguments)
    results = [result for path in given.results for result in read(path)]
    devices = {result["device"] for result in results}
    if len(devices) != 1:
        raise SystemExit(f"tables: results must be of one device, got {', '.join(sorted(devices))}")
    if given.into is None:
        print(text(results))
    else:
        given.into.write_text(replaced(given.into.read_text(), devices.pop(), text(results)))


if __name__ == "__main__":
    main()
