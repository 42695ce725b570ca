"""Pictures of results, light and dark, made to be read 830 pixels wide.

python -m benchmarks.plot cpu.json scaling.json step.json --out docs/images
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.run import short

THEMES = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "faint": "#d1d9e0"},
    "dark": {"paper": "#0d1117", "ink": "#e6edf3", "faint": "#3d444d"},
}
# told apart on both papers, and by those who do not see red and green
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a8a00", "#8c6bb1")
MARKERS = "osD^vP*X"
WIDTH = 8.3  # inches: at 200 dots an inch twice the 830 pixels, for fine screens
FAMILIES = ("trl", "verl", "torch")
Result = dict[str, Any]


def family(provider: str) -> str:
    """Whose it is, for the colour."""
    if provider.startswith(("F.", "naive")):
        return "torch"
    return next((name for name in FAMILIES if provider.startswith(name)), "others")


def peers_of(case: Result) -> dict[str, Result]:
    """Those that compute the same and were timed."""
    return {name: p for name, p in case["providers"].items() if p.get("agrees") and "ratio" in p}


def with_peers(results: list[Result]) -> list[Result]:
    return [case for result in results for case in result.get("cases", []) if peers_of(case)]


def write_summary(results: list[Result], theme: str, path: Path) -> None:
    """The first case of each op, for a README."""
    firsts = {case["op"]: case for case in reversed(with_peers(results))}
    draw_ratios([case for _, case in sorted(firsts.items())], theme, path)


def write_ratios(results: list[Result], theme: str, path: Path) -> None:
    draw_ratios(with_peers(results), theme, path)


def draw_ratios(cases: list[Result], theme: str, path: Path) -> None:
    """A heading for each case, and below it a bar for each peer: how many times our time it takes."""
    height = sum(1 + len(peers_of(case)) for case in cases)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.19 * height + 0.9), layout="constrained")
    ink, paper = THEMES[theme]["ink"], THEMES[theme]["paper"]
    axes.axvline(1, color=ink, linewidth=0.8, zorder=0)
    names: dict[int, str] = {}
    at, low, high = 0, 0.8, 10.0
    for case in cases:
        title = f"{case['op']}, {case['name']}"
        heading = {"va": "center", "fontsize": 8, "weight": "bold"}
        axes.text(0.005, at, title, transform=axes.get_yaxis_transform(), backgroundcolor=paper, **heading)
        for at, (name, found) in enumerate(peers_of(case).items(), at + 1):  # noqa: B020
            colour = COLOURS[[*FAMILIES, "others"].index(family(name))]
            axes.barh(at, found["ratio"] - 1, left=1, height=0.7, color=colour)
            axes.plot([found["low"], found["high"]], [at, at], color=ink, linewidth=0.8)
            number = short(float(f"{found['ratio']:.3g}"))
            axes.text(max(1, found["high"]) * 1.08, at, f"{number}x", va="center", fontsize=8)
            names[at] = name
            low, high = min(low, found["low"]), max(high, found["high"])
        at += 1
    axes.set_yticks(list(names), list(names.values()), fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(0.9 * low, 2.5 * high)
    axes.set_ylim(at - 0.4, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    what = "the line: the range, of ten pairs and more without the outer tenths"
    axes.set_xlabel(f"time over that of grpo-kernels, in turns in one run; {what}", fontsize=8)
    axes.spines["left"].set_visible(False)  # headings would cut it in pieces
    finish(figure, theme, path)


def write_scaling(results: list[Result], theme: str, path: Path) -> None:
    """Left the time over the size, right how many times the floor that is."""
    sweeps = [sweep for result in results for sweep in result.get("sweeps", [])]
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 5.4), layout="constrained")
    for i, sweep in enumerate(sweeps):
        sizes = [point["size"] for point in sweep["points"]]
        times = [point["us"] for point in sweep["points"]]
        floors = [point["us"] / point["floor_us"] for point in sweep["points"]]
        look = {"color": COLOURS[i % 8], "marker": MARKERS[i % 8], "markersize": 4, "linewidth": 1.4}
        label = f"{sweep['op']}, {sweep['name']}: n = {sweep['unit']}, time ~ n^{sweep['exponent']:.2f}"
        panels[0].loglog(sizes, times, label=label, **look)
        panels[1].loglog(sizes, floors, **look)
    panels[0].set_title("microseconds a call", fontsize=9)
    panels[1].set_title("times the floor at the measured ceiling", fontsize=9)
    for panel in panels:
        panel.set_xlabel("n", fontsize=9)
        panel.grid(True, which="major", color=THEMES[theme]["faint"], linewidth=0.5)
        panel.tick_params(labelsize=8)
    panels[1].axhline(1, color=THEMES[theme]["ink"], linewidth=0.8)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=1)
    finish(figure, theme, path)


def write_step(results: list[Result], theme: str, path: Path) -> None:
    """A bar for each trainer, in it the medians of its phases one after another."""
    (result, *_) = [result for result in results if "rows" in result]
    who = [total["who"] for total in result["totals"]]
    figure, axes = plt.subplots(figsize=(WIDTH, 0.45 * len(who) + 1.2), layout="constrained")
    ends = dict.fromkeys(who, 0.0)
    for i, phase in enumerate(dict.fromkeys(row["phase"] for row in result["rows"])):
        widths = [row["seconds_median"] * 1e3 for row in result["rows"] if row["phase"] == phase]
        axes.barh(who, widths, left=list(ends.values()), height=0.6, color=COLOURS[i], label=phase)
        ends = {name: end + width for (name, end), width in zip(ends.items(), widths, strict=True)}
    for total in result["totals"]:  # the median step, which is not quite the sum of the phases' medians
        number = f"{total['seconds_median'] * 1e3:.0f}"
        axes.text(ends[total["who"]] * 1.01, total["who"], number, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * max(ends.values()))
    axes.tick_params(labelsize=8)
    axes.set_xlabel(f"milliseconds a step, {result['model']['name']} model on {result['device']}", fontsize=8)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=6)
    finish(figure, theme, path)


def finish(figure: Figure, theme: str, path: Path) -> None:
    colours = THEMES[theme]
    figure.set_facecolor(colours["paper"])
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        axes.set_facecolor(colours["paper"])
        axes.tick_params(colors=colours["ink"], which="both")
        for side, spine in axes.spines.items():
            spine.set_color(colours["faint"])
            if side in ("top", "right"):
                spine.set_visible(False)
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    for text in texts:
        text.set_color(colours["ink"])
    figure.savefig(path, dpi=200)
    plt.close(figure)


def write_all(results: list[Result], out: Path) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, Callable[[list[Result], str, Path], None]] = {}
    if any(result.get("cases") for result in results):
        wanted |= {"summary": write_summary, "ratios": write_ratios}
    if any(result.get("sweeps") for result in results):
        wanted["scaling"] = write_scaling
    if any("rows" in result for result in results):
        wanted["step"] = write_step
    if not wanted:
        raise SystemExit("plot: results must have cases, sweeps or a step's rows, got none of them")
    written = []
    for name, write in wanted.items():
        for theme in THEMES:
            written.append(out / f"{name}_{theme}.png")
            write(results, theme, written[-1])
    return written


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    for path in write_all([json.loads(path.read_text()) for path in given.results], given.out):
        print(path)


if __name__ == "__main__":
    main()
