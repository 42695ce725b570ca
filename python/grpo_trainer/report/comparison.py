"""The page that compares several runs: evaluations, differences, diversity against quality, and learning curves."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grpo_trainer import strict_json
from grpo_trainer.diversity_measures import diversity_efficiency, pareto_front
from grpo_trainer.report import page
from grpo_trainer.report.page import shown
from grpo_trainer.report.paradigms import SHARES, Estimate, Row, differences, select, validation_series
from grpo_trainer.report.plots import Curve, Mark, Panel, draw_panels, draw_scatter
from grpo_trainer.report.run_folder import Evaluated, RunFolder, has_value, mean, number, series
from grpo_trainer.settings import plain

if TYPE_CHECKING:
    from grpo_trainer.evaluate import Result
    from grpo_trainer.recipe import Recipe

QUALITY = ("sampled_reward", "reward")  # the first that has a value is drawn
DIVERSITY = ("semantic_diversity", "rouge_diversity", "distinct_2")
COLLAPSE_SHARE = 0.5
_FIRST = ("reward", "exact", "sampled_reward", "sampled_exact")
_OMITTED = ("prompts", "skipped")


class CurveKind(NamedTuple):
    """A learning curve: its source is "rl" or "sft" for logged steps, "validation" for evaluations during RL."""

    name: str
    title: str
    source: str
    metric: str
    unit: str
    caption: str


CURVES = (
    CurveKind("reward", "Reward", "rl", "rewards/mean", "mean reward", "Sampled responses of a training step."),
    CurveKind("validation", "Reward, validation", "validation", "reward", "mean reward", "Greedy responses."),
    CurveKind("kl", "KL from the reference", "rl", "train/kl_mean", "nats per token", "Estimate in the loss."),
    CurveKind("length", "Length of responses", "rl", "rollout/length_mean", "tokens", "Mean over responses."),
    CurveKind("entropy", "Entropy", "rl", "train/entropy", "nats per token", "Entropy of the next token."),
    CurveKind(
        "semantic",
        "Semantic diversity",
        "validation",
        "semantic_diversity",
        "cosine distance",
        "Mean distance of a validation prompt's samples.",
    ),
    CurveKind(
        "distinct",
        "Distinct-2",
        "validation",
        "distinct_2",
        "share",
        "Share of distinct bigrams in a prompt's samples.",
    ),
    CurveKind("sft", "Supervised phase", "sft", "train/loss", "nats per token", "Cross-entropy of the demonstrations."),
)


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Writes comparison.html, comparison.json and plots/ of several runs.

    Args:
        folders: the runs' folders.
        output: folder of the page, created if needed.

    Returns:
        Path of the page.
    """
    rows, left_out = select([Path(folder) for folder in folders])
    if not rows:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in left_out)
        raise ValueError(f"compare: needs a run with a final evaluation, got none: {reasons}")
    for path, reason in left_out:
        print(f"left out {path}: {reason}", file=sys.stderr)
    return _write(output, "comparison", _header(rows, left_out), rows, left_out)


def write_evaluation(results: Mapping[str, Result], recipe: Recipe, split: str, output: Path) -> Path:
    """Writes evaluation.html, evaluation.json and plots/ of models that were evaluated on the same prompts.

    Args:
        results: results of `evaluate_model` by the models' names.
        recipe: the recipe that they were evaluated with.
        split: the split.
        output: folder of the page, created if needed.

    Returns:
        Path of the page.
    """
    rows = []
    for i, (name, result) in enumerate(results.items(), 1):
        run = RunFolder(Path(name), plain(recipe) | {"name": name}, [], [], [], [], [])
        rows.append(Row(i, [run], [Evaluated(split, 0, 0, result.to_json())]))
    text = f"{_data_of(rows[0])}, evaluated with the recipe {recipe.name}."
    header = page.element("h1", "Evaluation") + page.paragraph(shown(text))
    return _write(output, "evaluation", header, rows, [])


def _write(output: Path, name: str, header: str, rows: Sequence[Row], left_out: Sequence[tuple[Path, str]]) -> Path:
    metrics = _metrics(rows)
    estimates = [{name: row.estimate(name) for name in metrics} for row in rows]
    output.mkdir(parents=True, exist_ok=True)
    sections = [
        header,
        _table(rows, metrics, estimates),
        _differences(rows, metrics),
        _scatter(output / "plots", rows, metrics, estimates),
        _samples(output / "plots", rows),
        _curves(output / "plots", rows) if any(run.metrics for row in rows for run in row.runs) else "",
    ]
    content = {
        "rows": [
            {"name": row.name, "seeds": row.seeds, "runs": [str(run.path) for run in row.runs]}
            | {"metrics": {name: value._asdict() for name, value in values.items()}}
            for row, values in zip(rows, estimates, strict=True)
        ],
        "front": [rows[i].label for i in _front(metrics, estimates)],
        "differences": differences(rows),
        "left_out": [{"run": str(path), "reason": reason} for path, reason in left_out],
    }
    (output / f"{name}.json").write_text(strict_json.to_text(content, indent=1) + "\n")
    target = output / f"{name}.html"
    title = "Comparison of runs" if name == "comparison" else "Evaluation"
    target.write_text(page.document(title, "\n".join(filter(None, sections))), "utf-8")
    return target


def _metrics(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(name for row in rows for e in row.evaluated for name in e.metrics if name not in _OMITTED)
    return sorted(names, key=_place)


def _place(name: str) -> tuple[int, str, int]:
    """Place of a measure in the table: those of _FIRST, then by name, and pass@5 before pass@10."""
    stem, _, k = name.partition("@")
    return _FIRST.index(name) if name in _FIRST else len(_FIRST), stem, int(k) if k.isdigit() else 0


def _header(rows: Sequence[Row], left_out: Sequence[tuple[Path, str]]) -> str:
    count = sum(len(row.runs) for row in rows)
    text = (
        f"{count} run{'s' * (count > 1)} of {len(rows)} recipe{'s' * (len(rows) > 1)}, evaluated on "
        f"{_data_of(rows[0])} after training."
    )
    parts = [page.element("h1", "Comparison of runs"), page.paragraph(shown(text))]
    if left_out:
        items = [[shown(path), shown(reason)] for path, reason in left_out]
        parts.append(page.section("Left out", page.table(["run", "reason"], items, "events")))
    return "".join(parts)


def _data_of(row: Row) -> str:
    evaluated, run = row.evaluated[0], row.runs[0]
    data = run.setting("data", "task") or run.setting("data", evaluated.split) or "unknown"
    return f"{len(evaluated.prompts)} prompts of the {evaluated.split} split of {data}"


def _table(rows: Sequence[Row], metrics: Sequence[str], estimates: Sequence[dict[str, Estimate]]) -> str:
    """Measures as lines and recipes as columns, which fit a narrow screen better than the reverse."""
    titles = ["measure", *(row.label for row in rows)]
    lines = [["seeds", *(shown(", ".join(map(str, row.seeds))) for row in rows)]]
    lines.append(["intervals", *(shown(_kinds(values)) for values in estimates)])
    if all(name is not None for name in _axes(metrics)):
        front = _front(metrics, estimates)
        lines.append(["on the Pareto front", *("yes" if i in front else "no" for i in range(len(rows)))])
    solved = [[number(e.content.get("solved")) for e in row.evaluated] for row in rows]
    if any(map(has_value, solved)):
        lines.append(["correct from a reward of", *(_range(values, page.format_number) for values in solved)])
    lines += [[shown(name), *(_cell(name, values[name]) for values in estimates)] for name in metrics]
    has_runs = any(run.evaluations for row in rows for run in row.runs)
    for name in DIVERSITY if has_runs else ():
        if name in metrics:
            points = [row.collapse(name, COLLAPSE_SHARE) for row in rows]
            cells = [_range(values, "{:.0f}".format) for values in points]
            lines.append([f"collapse of {shown(name)}, RL step", *cells])
    caption = (
        "Mean and 95 % interval. With several seeds the interval is Student's t over "
        "the seeds' means and covers other seeds. With a single seed it is a bootstrap over the prompts, which covers "
        "other prompts of the kind but no other seed; it is usually too narrow for a comparison of recipes. Intervals "
        "of shares end at 0 and 100 %. No spread: the seeds, or the prompts, have the same value, which tells nothing "
        "about others. A value without an interval is not a mean over prompts, or the run did not write the values of "
        "each prompt."
    )
    if has_runs:
        start = f"{COLLAPSE_SHARE:.0%} of its start"
        caption += f" Collapse: first RL step from which the measure on the validation split stays below {start}."
    notes = [page.paragraph(shown(note), "soft") for note in differences(rows)]
    return page.section(
        "Measures", page.table(titles, lines, "numbers compared"), page.paragraph(shown(caption), "soft"), *notes
    )


def _differences(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """Each pair of recipes, with the differences in the two measures of the scatter plot."""
    names = [name for name in _axes(metrics) if name is not None]
    lines = []
    for row, other in itertools.combinations(rows, 2):
        gaps = [other.minus(row, name) for name in names]
        cells = [_cell(name, gap, "+") for name, gap in zip(names, gaps, strict=True)]
        unclear = [_words(name) for name, gap in zip(names, gaps, strict=True) if not gap.excludes_0]
        lines.append([shown(f"{other.label} \u2212 {row.label}"), *cells, shown(", ".join(unclear))])
    if not names or not lines:
        return ""
    caption = (
        "Mean and 95 % interval of the difference. With several seeds in common it is Student's t over "
        "the differences of the seeds, which share data and initial weights; with one, a bootstrap over the prompts. "
        "Where the interval contains 0, or is missing, the two recipes cannot be told apart by the measure. Of twenty "
        "intervals of a difference that is 0 one is expected to exclude it by chance."
    )
    titles = ["", *map(_words, names), "not told apart by"]
    return page.section(
        "Differences", page.table(titles, lines, "numbers compared"), page.paragraph(shown(caption), "soft")
    )


def _kinds(values: dict[str, Estimate]) -> str:
    kinds = [value.kind for value in values.values() if value.kind]
    return max(set(kinds), key=kinds.count) if kinds else "none"


def _cell(name: str, value: Estimate, sign: str = "") -> str:
    is_share = name in SHARES or name.startswith("pass@")
    scale, digits = (100, 1) if is_share else (1, 3)
    if math.isnan(value.mean):
        return page.NO_VALUE
    if is_share and not sign:  # Student's t knows no bounds
        value = value._replace(low=max(value.low, 0.0), high=min(value.high, 1.0))
    centre, low, high = (f"{scale * v:{sign}.{digits}f}".replace("-", "\u2212") for v in value[:3])
    text = f"{centre}{' %' * is_share}"
    if value.kind and value.low == value.high:
        return text + page.element("div", "no spread", "soft")
    return text + page.element("div", f"{low} to {high}", "soft") if value.kind else text


def _range(values: Sequence[float], form: Callable[[float], str]) -> str:
    known = [value for value in values if math.isfinite(value)]
    texts = list(dict.fromkeys([form(min(known)), form(max(known))])) if known else [page.NO_VALUE]
    return " to ".join(texts)


def _scatter(
    folder: Path, rows: Sequence[Row], metrics: Sequence[str], estimates: Sequence[dict[str, Estimate]]
) -> str:
    title = "Diversity against quality"
    x_name, y_name = _axes(metrics)
    if x_name is None or y_name is None:
        text = "Not drawn, as no evaluation has samples: set evaluation.samples."
        return page.section(title, page.paragraph(text, "soft"))
    points = [(values[x_name].mean, values[y_name].mean) for values in estimates]
    front = _front(metrics, estimates)
    marks = [
        Mark(str(row.number), values[x_name][:3], values[y_name][:3])
        for row, values in zip(rows, estimates, strict=True)
        if all(math.isfinite(values[name].mean) for name in (x_name, y_name))
    ]
    if not marks:
        return page.section(title, page.paragraph("Not drawn, as no run has both measures.", "soft"))
    picture = draw_scatter(folder, "pareto", marks, [points[i] for i in front], (_words(x_name), _words(y_name)))
    names = ", ".join(rows[i].label for i in front)
    missing = [row.label for row, point in zip(rows, points, strict=True) if not all(map(math.isfinite, point))]
    caption = (
        f"Numbers are those of the table; bars are the 95 % intervals. Dashed: the Pareto front, the runs that no "
        f"other surpasses in one measure without falling behind in the other: {names}. Intervals are not considered."
    )
    caption += f" Without a value: {', '.join(missing)}." if missing else ""
    return page.section(
        title, page.grid([page.figure(f"{_words(y_name)} and {_words(x_name)}", picture, shown(caption))])
    )


def _axes(metrics: Sequence[str]) -> tuple[str | None, str | None]:
    """Measures of diversity and of quality that the scatter plot shows; None where no run has one."""
    x_name, y_name = (next((name for name in names if name in metrics), None) for names in (DIVERSITY, QUALITY))
    return x_name, y_name


def _front(metrics: Sequence[str], estimates: Sequence[dict[str, Estimate]]) -> list[int]:
    x_name, y_name = _axes(metrics)
    if x_name is None or y_name is None:
        return []
    return pareto_front([(values[x_name].mean, values[y_name].mean) for values in estimates])


def _words(name: str) -> str:
    return name.replace("_", " ")


def _samples(folder: Path, rows: Sequence[Row]) -> str:
    """pass@k and DER@k for each number of samples, also for those that evaluation.pass_k does not name."""
    passed, efficiency = [], []
    for row in rows:
        passes = [_passes(evaluated) for evaluated in row.evaluated]
        ks = sorted(set.intersection(*map(set, passes)))
        means = {k: mean([of[k] for of in passes]) for k in ks}
        if not has_value(list(means.values())):
            continue
        by_seed = [diversity_efficiency(of) for of in passes]
        efficiencies = [mean([of.get(k, math.nan) for of in by_seed]) for k in ks]
        passed.append((row.number - 1, Curve(row.label, ks, list(means.values()))))
        efficiency.append((row.number - 1, Curve(row.label, ks, efficiencies)))
    if not passed:
        return ""
    panels = [
        Panel(title, [curve for _, curve in curves], is_share, [i for i, _ in curves])
        for title, curves, is_share in (("pass@k", passed, True), ("DER@k", efficiency, False))
        if any(has_value(curve.y) for _, curve in curves)
    ]
    caption = (
        "pass@k: probability that one of k samples is correct. DER@k, the diversity-efficiency ratio: pass@k divided "
        "by k times pass@1, which is 1 if each further sample adds as much as the first, and 1 / k if it adds nothing; "
        "undefined where pass@1 is 0. Means over the seeds of a recipe."
    )
    picture = draw_panels(folder, "samples", panels, "samples k")
    return page.section("More samples", page.grid([page.figure("pass@k and DER@k", picture, shown(caption))]))


def _passes(evaluated: Evaluated) -> dict[int, float]:
    """pass@k by k, up to the number of samples."""
    from grpo_trainer.evaluate import estimate_pass_at_k

    marked = [[number(v) for v in line["right"]] for line in evaluated.prompts if isinstance(line.get("right"), list)]
    most = max(map(len, marked), default=0)
    return {k: mean([estimate_pass_at_k(marks, k) for marks in marked]) for k in range(1, most + 1)}


def _curves(folder: Path, rows: Sequence[Row]) -> str:
    figures, missing = [], []
    for kind in CURVES:
        curves = [(row.number - 1, curve) for row in rows if has_value((curve := _curve(row, kind)).y)]
        absent = [row.label for row in rows if row.number - 1 not in dict(curves)]
        if not curves:
            missing.append(f"{kind.title} ({kind.metric})")
            continue
        # a row has the same colour in every plot
        panel = Panel(kind.unit, [curve for _, curve in curves], False, [i for i, _ in curves])
        picture = draw_panels(folder, kind.name, [panel], "step" if kind.source == "sft" else "RL step")
        caption = kind.caption + (f" Not logged by {', '.join(absent)}." if absent else "")
        figures.append(page.figure(kind.title, picture, shown(caption)))
    text = (
        "A curve is the mean over the seeds of a recipe, with a band from the lowest to the highest seed, at the steps "
        "that all of them have."
    )
    if missing:
        text += f" Not drawn, as nothing was logged: {'; '.join(missing)}."
    return page.section("Learning curves", page.paragraph(shown(text), "soft"), page.grid(figures))


def _curve(row: Row, kind: CurveKind) -> Curve:
    """Mean over the seeds at the steps that all of them have."""
    by_run = [_points(run, kind) for run in row.runs]
    steps = sorted(set.intersection(*(set(points) for points in by_run)))
    values = [[points[step] for points in by_run] for step in steps]
    means = [mean(at_step) for at_step in values]
    if len(row.runs) == 1:
        return Curve(row.label, steps, means)
    return Curve(row.label, steps, means, [min(v) for v in values], [max(v) for v in values])


def _points(run: RunFolder, kind: CurveKind) -> dict[float, float]:
    if kind.source == "validation":
        steps, values = validation_series(run, kind.metric)
    else:
        lines = run.lines(kind.source)
        steps, values = run.steps(lines), series(lines, kind.metric)
    return {step: value for step, value in zip(steps, values, strict=True) if math.isfinite(value)}
