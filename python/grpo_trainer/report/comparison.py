"""The page of several runs or models: measures, differences, diversity against quality, and learning curves."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_trainer.diversity_measures import collapse_point, pareto_front
from grpo_trainer.log import to_json
from grpo_trainer.report.compare import bootstrap_interval, in_order, paired, sorted_pairs, t_interval
from grpo_trainer.report.page import (
    Curve,
    Figure,
    Point,
    Section,
    draw_curves,
    draw_points,
    format_number,
    write_page,
)
from grpo_trainer.report.run_folder import Evaluated, RunFolder
from grpo_trainer.report.run_page import samples_figures

if TYPE_CHECKING:
    from grpo_trainer.recipe import Recipe

_DATA = ("data.", "prompts", "split")  # conditions without which runs do not compare
# keys that may differ between the seeds of a recipe
_PER_RUN = ("seed", "output", "threads", "backend", "distributed", "logging", "checkpoints")
_CONDITIONS = (
    *(f"data.{name}" for name in ("task", "options", "validation", "test", "prompt", "template")),
    *(f"evaluation.{name}" for name in ("samples", "temperature", "solved_quantile")),
)
_AXES = (("semantic_diversity", "rouge_diversity", "distinct_2"), ("sampled_reward", "reward"))  # the first measured
_CURVES = (
    *(("rl", name) for name in ("rewards/mean", "train/kl_mean", "rollout/length_mean", "train/entropy")),
    *(("validation", name) for name in ("exact", "reward", "semantic_diversity", "distinct_2")),
    ("sft", "train/loss"),
)


class Estimate(NamedTuple):
    """A mean with a 95 % interval over `units`, which are empty without an interval."""

    mean: float
    low: float
    high: float
    units: str

    @classmethod
    def of(cls, by_seed: Sequence[float], by_prompt: Sequence[float]) -> Estimate:
        """Student's t interval over several seeds, or a bootstrap interval over the prompts of one."""
        values, name = (by_seed, "seeds") if len(by_seed) > 1 else (by_prompt, "prompts")
        low, high = t_interval(values) if len(by_seed) > 1 else bootstrap_interval(values)
        known = [value for value in by_seed if math.isfinite(value)]
        units = "" if math.isnan(low) else f"{np.isfinite(values).sum()} {name}"
        return cls(float(np.mean(known)) if known else math.nan, low, high, units)

    def cell(self, sign: str = "") -> str:
        low, high = (format_number(end, 3, sign) for end in (self.low, self.high))
        return format_number(self.mean, 3, sign) + (f"\n{low} to {high}" if self.units else "")


class Row(NamedTuple):
    """Final evaluations of one recipe by seed, with the runs that they are of."""

    label: str
    evaluated: dict[Any, Evaluated]
    runs: list[RunFolder]

    @property
    def first(self) -> Evaluated:
        return next(iter(self.evaluated.values()))

    def estimate(self, name: str) -> Estimate:
        return Estimate.of(
            [e.metrics.get(name, math.nan) for e in self.evaluated.values()], self.first.table.get(name, [])
        )

    def minus(self, other: Row, name: str) -> Estimate:
        """Difference of a measure to another row's, paired by seed and by prompt."""
        pairs = [(e, other.evaluated[seed]) for seed, e in self.evaluated.items() if seed in other.evaluated]
        gaps = [a.metrics.get(name, math.nan) - b.metrics.get(name, math.nan) for a, b in pairs]
        by_prompt: Sequence[float] = []
        if len(pairs) == 1 and all(name in e.table for e in pairs[0]):
            after, before = pairs[0]
            sides = paired(before, after)
            by_prompt = sorted_pairs(sides["before", name], sides["after", name])["change"]
        return Estimate.of(gaps, by_prompt)


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Writes comparison.html and comparison.json of several runs, and returns the path of the page.

    Runs that do not compare are left out with a reason; it is an error if no run is left.
    """
    rows, left_out = select(folders)
    for path, reason in left_out.items():
        print(f"left out {path}: {reason}", file=sys.stderr)
    if not rows:
        raise ValueError(f"write_comparison: folders must have a run with a final evaluation, got {left_out}")
    count, prompts = sum(len(row.runs) for row in rows), len(rows[0].first.prompts)
    data = rows[0].runs[0].setting("data.task") or rows[0].runs[0].setting(f"data.{rows[0].first.split}")
    lead = f"{count} runs of {len(rows)} recipes, evaluated on {prompts} {rows[0].first.split} prompts of {data}."
    table = [["run", "reason"], *([str(path), reason] for path, reason in left_out.items())]
    return _write(output, "comparison", lead, rows, [Section("Left out", table=table if left_out else [])])


def write_evaluation(results: Mapping[str, Mapping[str, Any]], recipe: Recipe, split: str, output: Path) -> Path:
    """Writes evaluation.html and evaluation.json of models that were evaluated on the same prompts.

    `results` are the JSON of evaluations by the models' names. Returns the path of the page.
    """
    rows = [Row(f"{i} {name}", {"": Evaluated(content)}, []) for i, (name, content) in enumerate(results.items(), 1)]
    lead = f"{len(rows[0].first.prompts)} prompts of the {split} split, evaluated with the recipe {recipe.name}."
    return _write(output, "evaluation", lead, rows, [])


def select(folders: Sequence[Path]) -> tuple[list[Row], dict[Path, str]]:
    """Groups runs by recipe, and gives the reason for each folder that is left out."""
    rows: dict[str, Row] = {}
    left_out = {}
    for folder in folders:
        try:
            run = RunFolder(folder)
        except FileNotFoundError as error:
            left_out[folder] = str(error)
            continue
        evaluated, seed = run.final_evaluation(), run.setting("seed")
        key = json.dumps({name: value for name, value in run.recipe.items() if name not in _PER_RUN}, sort_keys=True)
        if evaluated is None:
            left_out[folder] = "it has no evaluation after its last step; finish it with --resume"
        elif gaps := [gap for row in rows.values() for gap in _gaps(run, evaluated, row, _DATA)]:
            left_out[folder] = f"it was evaluated on other data: {gaps[0]}"
        elif key in rows and seed in rows[key].evaluated:
            left_out[folder] = f"another run has its recipe and its seed, {seed}"
        elif key in rows and (gaps := _gaps(run, evaluated, rows[key], ("embedder",))):
            left_out[folder] = f"it was not evaluated like the other runs of its recipe: {gaps[0]}"
        else:
            row = rows.setdefault(key, Row(f"{len(rows) + 1} {run.name}", {}, []))
            row.evaluated[seed] = evaluated
            row.runs.append(run)
    return list(rows.values()), left_out


def _gaps(run: RunFolder, evaluated: Evaluated, row: Row, names: tuple[str, ...]) -> list[str]:
    """Conditions whose names start with one of `names` and that differ from those of a row's runs."""
    ours, theirs = _conditions(run, evaluated), dict[str, Any]()
    for other, of_other in zip(row.runs, row.evaluated.values(), strict=True):
        theirs = _conditions(other, of_other) | theirs  # prompts by seed; all else is that of the first
    different = [name for name in ours if name.startswith(names) and ours[name] != theirs.get(name, ours[name])]
    return [f"{name} is {ours[name]!r:.80}, not {theirs[name]!r:.80} as in {row.label}" for name in different]


def _conditions(run: RunFolder, evaluated: Evaluated) -> dict[str, Any]:
    prompts = sorted(str(line["prompt"]) for line in evaluated.prompts)
    return {name: run.setting(name) for name in _CONDITIONS} | {
        "split": evaluated.split,
        "prompts, number of": len(prompts),
        f"prompts of seed {run.setting('seed')}": prompts,  # data of bundled tasks follows the seed
        "evaluation.max_completion_length": run.longest_evaluated,
        "evaluation.rewards": run.setting("evaluation.rewards") or run.setting("rl.rewards"),
        "evaluation.solved": evaluated.solved,
        "embedder": evaluated.content.get("embedder"),
    }


def differences(rows: Sequence[Row]) -> list[str]:
    """Settings of the evaluations that differ from those of the first row, which make numbers compare less."""
    runs = [(row, row.runs[0]) for row in rows if row.runs]
    names = ("evaluation.", "embedder")
    return [f"{row.label}: {gap}." for row, run in runs for gap in _gaps(run, row.first, rows[0], names)]


def _write(output: Path, name: str, lead: str, rows: Sequence[Row], sections: Sequence[Section]) -> Path:
    names = in_order({name for row in rows for evaluated in row.evaluated.values() for name in evaluated.metrics})
    estimates = {row.label: {name: row.estimate(name) for name in names} for row in rows}
    axes = [name for choices in _AXES for name in [name for name in choices if name in names][:1]]
    places = [tuple(of_row[name].mean for name in axes) for of_row in estimates.values()]
    front = [rows[i].label for i in pareto_front(places)] if len(axes) == 2 else []  # type: ignore[arg-type]
    samples = samples_figures({row.label: list(row.evaluated.values()) for row in rows})
    sections = [
        *sections,
        _measures(rows, estimates, front),
        _pairs(rows, axes),
        _scatter(axes, estimates, front),
        Section("More samples", figures=samples),
        Section("Learning curves, means over seeds with a band from the lowest to the highest", (), _curves(rows)),
    ]
    content = {label: {k: v._asdict() for k, v in of_row.items()} for label, of_row in estimates.items()}
    page = write_page(output / f"{name}.html", name.capitalize(), lead, sections)
    (output / f"{name}.json").write_text(
        to_json({"measures": content, "front": front, "notes": differences(rows)}, indent=1) + "\n"
    )
    return page


def _measures(rows: Sequence[Row], estimates: dict[str, dict[str, Estimate]], front: Sequence[str]) -> Section:
    """Measures as lines and recipes as columns, which fit a narrow screen better than the reverse."""
    units = [[estimate.units for estimate in of_row.values() if estimate.units] for of_row in estimates.values()]
    table = [
        ["measure", *estimates],
        ["seeds", *(", ".join(map(str, row.evaluated)) for row in rows)],
        ["intervals over", *(of_row[0] if of_row else "none" for of_row in units)],
        ["on the Pareto front", *("yes" if label in front else "no" for label in estimates if front)],
    ]
    table = [row for row in table if any(row[1:])]
    for name in estimates[rows[0].label]:
        table.append([name, *(of_row[name].cell() for of_row in estimates.values())])
        if name in _AXES[0] and rows[0].runs:
            series = [[run.series("validation", name) for run in row.runs] for row in rows]
            steps = [[collapse_point(s.index.tolist(), s.tolist()) for s in of_row] for of_row in series]
            cells = [", ".join(format_number(s, 0) for s in of_row) for of_row in steps]
            table += [[f"collapse of {name}", *cells]] if np.isfinite(np.concatenate(steps)).any() else []
    has_collapse = any(row[0].startswith("collapse of ") for row in table)
    collapse = "Collapse: first step of RL from which the measure on the validation split stays below half its start."
    notes = [
        "Means and 95 % intervals. Over several seeds it is Student's t interval, which covers other seeds, and may "
        "exceed the range of the measure. Over prompts it is a bootstrap, which covers other prompts of the kind but "
        "no other seed, and is usually too narrow to compare recipes.",
        *[collapse] * has_collapse,
        *differences(rows),
    ]
    return Section("Measures", notes, table=table)


def _pairs(rows: Sequence[Row], axes: Sequence[str]) -> Section:
    table = []
    for row, other in itertools.combinations(rows if axes else (), 2):
        gaps = {name: other.minus(row, name) for name in axes}
        unclear = [name for name, gap in gaps.items() if not (gap.low > 0 or gap.high < 0)]
        cells = [gap.cell("+") for gap in gaps.values()]
        table.append([f"{other.label} \u2212 {row.label}", *cells, ", ".join(unclear)])
    note = (
        "Differences are paired by seed, or by prompt where the recipes have one seed in common. Of twenty intervals "
        "of a difference that is 0 one is expected to exclude it by chance."
    )
    return Section("Differences", [note], table=[["", *axes, "not told apart by"], *table]) if table else Section("")


def _scatter(axes: Sequence[str], estimates: dict[str, dict[str, Estimate]], front: Sequence[str]) -> Section:
    if not front:
        return Section("")
    pairs = {label: (of_row[axes[0]], of_row[axes[1]]) for label, of_row in estimates.items()}
    points = [
        Point(label.partition(" ")[0], x.mean, y.mean, i, (x.low, x.high), (y.low, y.high))
        for i, (label, (x, y)) in enumerate(pairs.items())
        if math.isfinite(x.mean + y.mean)
    ]
    line = [(pairs[label][0].mean, pairs[label][1].mean) for label in front]
    caption = (
        "Bars are the 95 % intervals. Dashed: the Pareto front, the recipes that no other surpasses in one measure "
        f"without falling behind in the other, intervals aside: {', '.join(front)}."
    )
    return Section("Diversity against quality", figures=[draw_points("", points, axes, line)._replace(caption=caption)])


def _curves(rows: Sequence[Row]) -> list[Figure]:
    """Means over the seeds of each recipe at the steps that all of them have, with a band from lowest to highest."""
    figures = []
    for source, name in _CURVES if rows[0].runs else ():
        curves = {}
        for row in rows:
            seeds = pd.concat([run.series(source, name) for run in row.runs], axis=1, join="inner").dropna()
            band = pd.concat([seeds.min(axis=1), seeds.max(axis=1)], axis=1)
            curves[row.label] = Curve(seeds.mean(axis=1), band if len(row.runs) > 1 else None)
        figures += draw_curves(f"{name}, {source}", curves)
    return figures
