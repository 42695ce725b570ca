"""Results as tables, into the place of a document that is marked for their device.

python -m benchmarks.tables cpu.json scaling.json --into docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.run import short, why_not

Result = dict[str, Any]


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


def gpu_rows(result: Result) -> list[str]:
    """Of ours: by events with warm and cold caches, by graph replay, launches, waits."""
    lines = ["| case | warm | cold | graph replay | launches | waits |", "|---|---|---|---|---|---|"]
    for case in result["cases"]:
        g = case["gpu"]
        if "failed" in g:
            lines.append(f"| `{case['op']}`, {case['name']} | {g['failed']} | | | | |")
            continue
        graph = time(g["graph_us"]) if "graph_us" in g else g["graph_missing"]
        counted = f"{g['launches']} | {g['synchronisations']}" if "launches" in g else f"{g['counts_missing']} | "
        lines.append(
            f"| `{case['op']}`, {case['name']} | {time(g['warm_us'])} | {time(g['cold_us'])} | {graph} | {counted} |"
        )
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
        if result["cases"] and result["device"] == "cuda":
            rows.append(gpu_rows)
        parts += [machine_line(result), *("\n".join(each(result)) for each in rows)]
    return "\n\n".join(parts)


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
    results = [json.loads(path.read_text()) for path in given.results]
    devices = {result["device"] for result in results}
    if len(devices) != 1:
        raise SystemExit(f"tables: results must be of one device, got {', '.join(sorted(devices))}")
    if given.into is None:
        print(text(results))
    else:
        given.into.write_text(replaced(given.into.read_text(), devices.pop(), text(results)))


if __name__ == "__main__":
    main()
