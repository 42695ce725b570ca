"""Plots of benchmark results, in light and dark, made to be read 830 pixels wide.

python -m benchmarks.plot cpu.json cpu_50304.json step.json runs/arithmetic-0/metrics.jsonl --out docs/images
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measure import short

THEMES = {"light": ("#ffffff", "#1f2328", "#d1d9e0"), "dark": ("#0d1117", "#e6edf3", "#3d444d")}
# of rcParams, which have in each theme the background, the ink, or the colour of what should be faint
COLOURED = (
    ("figure.facecolor", "axes.facecolor"),
    ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "lines.color"),
    ("axes.edgecolor", "grid.color"),
)
STYLE = {
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
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
FAMILIES = (("trl",), ("verl",), ("torch", "F.", "naive"), ("",))  # projects, by the starts of their peers' names
LEGEND = "outside lower center"
Result = dict[str, Any]


def peers_of(case: Result) -> dict[str, Result]:
    """Providers of a case whose results agree with ours and that were timed."""
    return {name: p for name, p in case["providers"].items() if p.get("agrees") and "ratio" in p}


def summary_cases(cases: list[Result]) -> list[Result]:
    """The first case of each op of SUMMARY, with its peers there, for the README."""
    firsts = {case["op"]: case for case in reversed(cases)}
    peers = {op: peers_of(firsts[op]) for op in SUMMARY if op in firsts}
    return [
        firsts[op] | {"providers": {name: known[name] for name in SUMMARY[op] if name in known}}
        for op, known in peers.items()
    ]


def ratios(cases: list[Result]) -> Figure:
    """Draw a heading for each case and, below it, one bar per peer: its time divided by ours."""
    height = sum(1 + len(peers_of(case)) for case in cases)
    figure, axes = plt.subplots(figsize=(WIDTH, 0.19 * height + 0.9))
    axes.axvline(1, linewidth=0.8, zorder=0)
    names: dict[int, str] = {}
    y, low, high = 0, 0.8, 10.0
    for case in cases:
        heading = {"va": "center", "weight": "bold", "backgroundcolor": plt.rcParams["axes.facecolor"]}
        axes.text(0.005, y, f"{case['op']}, {case['name']}", transform=axes.get_yaxis_transform(), **heading)
        for name, peer in peers_of(case).items():
            y += 1
            colour = next(i for i, starts in enumerate(FAMILIES) if name.startswith(starts))
            axes.barh(y, peer["ratio"] - 1, left=1, height=0.7, color=COLOURS[colour])
            axes.hlines(y, peer["low"], peer["high"], linewidth=0.8)
            number = short(float(f"{peer['ratio']:.3g}"))
            axes.text(max(1, peer["high"]) * 1.08, y, f"{number}x", va="center")
            names[y] = name
            low, high = min(low, peer["low"]), max(high, peer["high"])
        y += 1
    axes.set_yticks(list(names), list(names.values()))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda ratio, _: f"{ratio:,g}x")
    axes.set_xlim(0.9 * low, 2.5 * high)
    axes.set_ylim(y - 0.4, -0.5)
    axes.set_xlabel("time of the peer divided by that of grpo-kernels, with its range in one run")
    axes.spines["left"].set_visible(False)  # the headings would interrupt it
    return figure


def scaling(sweeps: list[Result]) -> Figure:
    """Draw the time of each op over its size on the left, and that time divided by its floor on the right."""
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 5.4))
    for i, sweep in enumerate(sweeps):
        sizes, times, floors = zip(
            *((p["size"], p["us"], p["us"] / p["floor_us"]) for p in sweep["points"]), strict=True
        )
        again, i = divmod(i, len(COLOURS))  # colours repeat with other markers, and dashed
        style = f"{MARKERS[(i + again) % 8]}{'--' if again else '-'}"
        label = f"{sweep['op']}, {sweep['name']}: n = {sweep['unit']}, time ~ n^{sweep['exponent']:.2f}"
        panels[0].loglog(sizes, times, style, color=COLOURS[i], label=label)
        panels[1].loglog(sizes, floors, style, color=COLOURS[i])
    panels[0].set_title("microseconds per call")
    panels[1].set_title("time divided by the floor at the measured ceiling")
    for panel in panels:
        panel.set_xlabel("n")
        panel.grid(True)
    panels[1].axhline(1, linewidth=0.8)
    figure.legend(loc=LEGEND)
    return figure


def step(results: list[Result]) -> Figure:
    """Draw a bar for each trainer, made of the median times of its phases."""
    result = results[0]
    who = [total["who"] for total in result["totals"]]
    figure, axes = plt.subplots(figsize=(WIDTH, 0.45 * len(who) + 1.2))
    ends = [0.0] * len(who)
    for phase, colour in zip(dict.fromkeys(row["phase"] for row in result["rows"]), COLOURS, strict=False):
        widths = [row["seconds_median"] * 1e3 for row in result["rows"] if row["phase"] == phase]
        axes.barh(who, widths, left=ends, height=0.6, color=colour, label=phase)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for total, end in zip(result["totals"], ends, strict=True):
        # the median step, which is not quite the sum of the phases' medians
        axes.text(end * 1.01, total["who"], f"{total['seconds_median'] * 1e3:.0f}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08 * max(ends))
    axes.set_xlabel(f"milliseconds per step, {result['model']['name']} model on {result['device']}")
    figure.legend(loc=LEGEND, ncols=6)
    return figure


def over_steps(height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(WIDTH, height))
    axes.grid(True, axis="y")
    axes.set_xlabel("step of reinforcement learning")
    return figure, axes


def curve(runs: list[Result]) -> Figure:
    """Draw the exact match of a run's evaluations, and the mean reward of its samples, over the steps of its RL."""
    figure, axes = over_steps(2.4)
    for name, label, colour, width in (
        ("rewards/mean", "mean reward of the sampled responses", COLOURS[1], 0.8),
        ("eval/validation_exact", "exact match of greedy answers to the validation split", COLOURS[0], 2.0),
    ):
        lines = [line for line in runs[0]["run"] if line["phase"] == "rl" and line.get(name) is not None]
        steps, values = zip(*((line["step"], line[name]) for line in lines), strict=True)
        axes.plot(steps, values, color=colour, linewidth=width, label=label)
    axes.margins(y=0)
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    figure.legend(loc=LEGEND, ncols=2)
    return figure


def curves(runs: list[Result]) -> Figure:
    """Draw the mean reward of the samples over the steps of RL, of each run and of each name's seeds together."""
    rewards = defaultdict(list)
    for run in runs:
        steps = [line for line in run["run"] if (line["kind"], line["phase"]) == ("train", "rl")]
        values = [math.nan if line["rewards/mean"] is None else line["rewards/mean"] for line in steps]
        rewards[run["name"].rpartition("-")[0]].append(values)
    figure, axes = over_steps(3)
    for colour, (name, seeds) in zip(COLOURS, rewards.items(), strict=False):
        means = [sum(values) / len(values) for values in zip(*seeds, strict=False)]  # to the end of the shortest
        for values, width, label in [(values, 0.6, "_") for values in seeds] + [(means, 2.0, name)]:
            axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=width, label=label)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("mean reward of the samples")
    figure.legend(loc=LEGEND, ncols=len(rewards))
    return figure


def write_all(results: list[Result], out: Path) -> list[Path]:
    cases = [case for result in results for case in result.get("cases", []) if peers_of(case)]
    runs = [result for result in results if "run" in result]
    figures = {
        "summary": (ratios, summary_cases(cases)),
        "ratios": (ratios, cases),
        "scaling": (scaling, [sweep for result in results for sweep in result.get("sweeps", [])]),
        "step": (step, [result for result in results if "rows" in result]),
        **({"curve": (curve, runs)} if len(runs) == 1 else {"curves": (curves, runs)}),
    }
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (draw, data) in figures.items():
        for theme, colours in THEMES.items() if data else ():
            parts = {key: colour for keys, colour in zip(COLOURED, colours, strict=True) for key in keys}
            with plt.rc_context(STYLE | parts):
                figure = draw(data)
                written.append(out / f"{name}_{theme}.png")
                figure.savefig(written[-1])
                plt.close(figure)
    if not written:
        raise SystemExit("plot: results must hold peers, sweeps, the rows of a step or a run, got none of them")
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
