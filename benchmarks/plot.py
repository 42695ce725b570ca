"""Plots of benchmark results, in light and dark, made to be read 830 pixels wide.

python -m benchmarks.plot cpu.json cpu_50304.json step.json runs/arithmetic-0/metrics.jsonl --out docs/images
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.measure import short

THEMES = {
    "light": {"background": "#ffffff", "ink": "#1f2328", "faint": "#d1d9e0"},
    "dark": {"background": "#0d1117", "ink": "#e6edf3", "faint": "#3d444d"},
}
# distinguishable on both backgrounds, and without telling red from green
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a8a00", "#8c6bb1")
MARKERS = "osD^vP*X"
# Bars of the README: in its first case, each op beside what a user would otherwise run.
SUMMARY = {
    "group_advantages": ("verl-grpo", "verl-grpo-vectorized", "torch.compile"),
    "policy_loss": ("trl", "torch.compile"),
    "linear_policy_loss": ("trl", "F.linear_cross_entropy"),
}
WIDTH = 8.3  # inches; at 200 dots an inch, twice the 830 pixels, for high-density screens
FAMILIES = ("trl", "verl", "torch")
Result = dict[str, Any]


def family(provider: str) -> str:
    """Project that a provider belongs to, which decides its colour."""
    if provider.startswith(("F.", "naive")):
        return "torch"
    return next((name for name in FAMILIES if provider.startswith(name)), "others")


def peers_of(case: Result) -> dict[str, Result]:
    """Providers of a case whose results agree with ours and that were timed."""
    return {name: p for name, p in case["providers"].items() if p.get("agrees") and "ratio" in p}


def with_peers(results: list[Result]) -> list[Result]:
    return [case for result in results for case in result.get("cases", []) if peers_of(case)]


def write_summary(results: list[Result], theme: str, path: Path) -> None:
    draw_ratios(summary_cases(results), theme, path)


def summary_cases(results: list[Result]) -> list[Result]:
    """The first case of each op of SUMMARY, with its peers there, for the README."""
    firsts = {case["op"]: case for case in reversed(with_peers(results))}
    cases = []
    for op, names in SUMMARY.items():
        if op in firsts:
            peers = peers_of(firsts[op])
            cases.append(firsts[op] | {"providers": {name: peers[name] for name in names if name in peers}})
    return cases


def write_ratios(results: list[Result], theme: str, path: Path) -> None:
    draw_ratios(with_peers(results), theme, path)


def draw_ratios(cases: list[Result], theme: str, path: Path) -> None:
    """Draw a heading for each case and, below it, one bar per peer: its time divided by ours."""
    height = sum(1 + len(peers_of(case)) for case in cases)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.19 * height + 0.9), layout="constrained")
    ink, background = THEMES[theme]["ink"], THEMES[theme]["background"]
    axes.axvline(1, color=ink, linewidth=0.8, zorder=0)
    names: dict[int, str] = {}
    y, low, high = 0, 0.8, 10.0
    for case in cases:
        heading = {"va": "center", "fontsize": 8, "weight": "bold", "backgroundcolor": background}
        axes.text(0.005, y, f"{case['op']}, {case['name']}", transform=axes.get_yaxis_transform(), **heading)
        for name, peer in peers_of(case).items():
            y += 1
            colour = COLOURS[[*FAMILIES, "others"].index(family(name))]
            axes.barh(y, peer["ratio"] - 1, left=1, height=0.7, color=colour)
            axes.plot([peer["low"], peer["high"]], [y, y], color=ink, linewidth=0.8)
            number = short(float(f"{peer['ratio']:.3g}"))
            axes.text(max(1, peer["high"]) * 1.08, y, f"{number}x", va="center", fontsize=8)
            names[y] = name
            low, high = min(low, peer["low"]), max(high, peer["high"])
        y += 1
    axes.set_yticks(list(names), list(names.values()), fontsize=8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:,g}x")
    axes.set_xlim(0.9 * low, 2.5 * high)
    axes.set_ylim(y - 0.4, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("time of the peer divided by that of grpo-kernels, with its range in one run", fontsize=8)
    axes.spines["left"].set_visible(False)  # the headings would interrupt it
    finish(figure, theme, path)


def write_scaling(results: list[Result], theme: str, path: Path) -> None:
    """Draw the time of each op over its size on the left, and that time divided by its floor on the right."""
    sweeps = [sweep for result in results for sweep in result.get("sweeps", [])]
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 5.4), layout="constrained")
    for i, sweep in enumerate(sweeps):
        sizes = [point["size"] for point in sweep["points"]]
        times = [point["us"] for point in sweep["points"]]
        floors = [point["us"] / point["floor_us"] for point in sweep["points"]]
        again = i // len(COLOURS)  # colours repeat with other markers, and dashed
        look: dict[str, Any] = {
            "color": COLOURS[i % 8],
            "marker": MARKERS[(i + again) % 8],
            "markersize": 4,
            "linewidth": 1.4,
        }
        look["linestyle"] = "--" if again else "-"
        label = f"{sweep['op']}, {sweep['name']}: n = {sweep['unit']}, time ~ n^{sweep['exponent']:.2f}"
        panels[0].loglog(sizes, times, label=label, **look)
        panels[1].loglog(sizes, floors, **look)
    panels[0].set_title("microseconds per call", fontsize=9)
    panels[1].set_title("time divided by the floor at the measured ceiling", fontsize=9)
    for panel in panels:
        panel.set_xlabel("n", fontsize=9)
        panel.grid(True, which="major", color=THEMES[theme]["faint"], linewidth=0.5)
        panel.tick_params(labelsize=8)
    panels[1].axhline(1, color=THEMES[theme]["ink"], linewidth=0.8)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=1)
    finish(figure, theme, path)


def write_step(results: list[Result], theme: str, path: Path) -> None:
    """Draw a bar for each trainer, made of the median times of its phases."""
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
    axes.set_xlabel(f"milliseconds per step, {result['model']['name']} model on {result['device']}", fontsize=8)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=6)
    finish(figure, theme, path)


def write_curve(results: list[Result], theme: str, path: Path) -> None:
    """Draw the exact match of a run's evaluations, and the mean reward of its samples, over the steps of its RL."""
    (lines, *_) = [result["run"] for result in results if "run" in result]
    figure, axes = plt.subplots(figsize=(WIDTH, 2.4), layout="constrained")
    top = [1.0]
    for kind, name, label, width in (
        ("train", "rewards/mean", "mean reward of the sampled responses", 0.8),
        ("eval", "eval/validation_exact", "exact match of greedy answers to the validation split", 2.0),
    ):
        points = [(line["step"], line[name]) for line in lines if line["phase"] == "rl" and line.get(name) is not None]
        axes.plot(*zip(*points, strict=True), color=COLOURS[kind == "train"], linewidth=width, label=label)
        top += [value for _, value in points]
    axes.set_ylim(0, max(top))
    axes.grid(True, axis="y", color=THEMES[theme]["faint"], linewidth=0.5)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("step of reinforcement learning", fontsize=8)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=2)
    finish(figure, theme, path)


def write_curves(results: list[Result], theme: str, path: Path) -> None:
    """Draw the mean reward of the samples over the steps of RL, of each run and of each name's seeds together."""
    runs = defaultdict(list)
    for result in results:
        if "run" in result:
            steps = [line for line in result["run"] if (line["kind"], line["phase"]) == ("train", "rl")]
            rewards = [math.nan if line["rewards/mean"] is None else line["rewards/mean"] for line in steps]
            runs[result["name"].rpartition("-")[0]].append(rewards)
    figure, axes = plt.subplots(figsize=(WIDTH, 3), layout="constrained")
    for colour, (name, seeds) in zip(COLOURS, runs.items(), strict=False):
        means = [sum(values) / len(values) for values in zip(*seeds, strict=False)]  # to the end of the shortest
        for values, width, label in [(values, 0.6, "") for values in seeds] + [(means, 2.0, name)]:
            axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=width, label=label or "_")
    axes.set_ylim(bottom=0)
    axes.grid(True, axis="y", color=THEMES[theme]["faint"], linewidth=0.5)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("step of reinforcement learning", fontsize=8)
    axes.set_ylabel("mean reward of the samples", fontsize=8)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=len(runs))
    finish(figure, theme, path)


def finish(figure: Figure, theme: str, path: Path) -> None:
    """Colour every part of the figure, and save it."""
    colours = THEMES[theme]
    figure.set_facecolor(colours["background"])
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        axes.set_facecolor(colours["background"])
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
    figures: dict[str, Callable[[list[Result], str, Path], None]] = {}
    if any(result.get("cases") for result in results):
        figures |= {"summary": write_summary, "ratios": write_ratios}
    if any(result.get("sweeps") for result in results):
        figures["scaling"] = write_scaling
    if any("rows" in result for result in results):
        figures["step"] = write_step
    if runs := [result for result in results if "run" in result]:
        figures |= {"curve": write_curve} if len(runs) == 1 else {"curves": write_curves}
    if not figures:
        raise SystemExit("plot: results must hold cases, sweeps, the rows of a step or a run, got none of them")
    written = []
    for name, write in figures.items():
        for theme in THEMES:
            written.append(out / f"{name}_{theme}.png")
            write(results, theme, written[-1])
    return written


def load(path: Path) -> Result:
    """Results of a JSON file, or under "run" the lines of a run's metrics.jsonl, with its name."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        return {"name": path.parent.name, "run": [json.loads(line) for line in text.splitlines()]}
    content: Result = json.loads(text)
    return content


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results",
        type=Path,
        nargs="+",
        help="results of `pytest benchmarks --save` and of benchmarks.step, or metrics.jsonl",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the plots")
    options = parser.parse_args(arguments)
    for path in write_all([load(path) for path in options.results], options.out):
        print(path)


if __name__ == "__main__":
    main()
