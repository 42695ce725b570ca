"""The page of a run, finished or not, and its summary for the terminal."""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import yaml

from grpo_trainer.diversity_measures import collapse_point, diversity_efficiency
from grpo_trainer.report.compare import Comparison, Difference, bootstrap_interval, compare, in_order
from grpo_trainer.report.page import (
    Curve,
    Figure,
    Point,
    Response,
    Section,
    draw_curves,
    draw_points,
    format_number,
    shorten,
    table_of,
    write_page,
)
from grpo_trainer.report.run_folder import Evaluated, Line, RunFolder, number

_MAX_EXAMPLES = 4  # prompts with their responses
_MAX_LISTED = 40  # responses of a map
_MAX_SAMPLES = 4  # samples beside a greedy response


def write_report(folder: Path) -> Path:
    """Writes report.html into a run's folder, and returns its path."""
    run = RunFolder(folder)
    comparison, lead = _lead(run)
    sections = [
        Section("Learning", _explanation(run, comparison), _learning(run)),
        _examples(run),
        _before_and_after(run, comparison),
        _evaluations(run),
        *_metrics(run),
        _maps(run),
        _events(run),
        Section("Recipe", folded=yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True, width=100)),
    ]
    return write_page(run.path / "report.html", run.name, lead, sections)


def summary(folder: Path) -> str:
    """The first sentence of a run's page, and a table of the measures before and after training."""
    comparison, lead = _lead(RunFolder(folder))
    return lead if comparison is None else f"{lead}\n\n{comparison.table()}"


def _lead(run: RunFolder) -> tuple[Comparison | None, str]:
    """The sentence that opens the page, and the comparison that it reports."""
    pair, final = run.before_and_after(), run.final_evaluation()
    logged = run.frame(run.phase).index
    done = logged.max() if len(logged) else 0
    total = "" if math.isnan(run.steps) else f" of {run.steps:.0f}"
    unfinished = "" if final else f"; {done:.0f}{total} {run.phase.upper()} steps are done"
    before, after = pair or (final, final)
    if before is None or after is None:
        sampled = _reward_of_samples(run)
        return None, f"There are no evaluations before and after training{unfinished}.{sampled}"
    trained = run.training(after.phase, after.step)
    try:
        comparison = compare(before.content, after.content, after.solved)
    except ValueError as error:
        return None, f"The evaluations before and after {trained} do not compare{unfinished}: {error}."
    exact = comparison.measures["exact"]
    is_exact = run.reports_correctness and (exact.before > 0 or exact.after > 0)
    name = "exact" if is_exact else "reward"  # some rewards are on a continuous scale
    change = comparison.measures[name]
    if change.prompts == 0:
        return None, f"No prompt has a reward before and after {trained}{unfinished}."
    title = {"exact": "Exact match", "reward": "Mean reward"}[name]
    where = f"on {change.prompts} {'unseen' if after.split == 'test' else after.split} prompts"
    if pair is None:
        return None, f"{title} {_short(change.after)} {where} after {trained}; nothing was evaluated before."
    values = f"{title} {_short(change.before)} to {_short(change.after)}"
    return comparison, f"{values} {where}, {_interval(change)}, in {trained}{unfinished}."


def _reward_of_samples(run: RunFolder) -> str:
    """Whether the mean reward of the sampled responses rose, from the first tenth of the steps to the last."""
    rewards = run.series("rl", "rewards/mean").dropna()
    if len(rewards) < 2:
        return ""
    part = max(1, len(rewards) // 10)
    first, last = rewards.iloc[:part].mean(), rewards.iloc[-part:].mean()
    steps = f"{part} steps" if part > 1 else "step"
    verdict = "rose" if last > first else "did not rise"
    return (
        f" The mean reward of the sampled responses {verdict}: {_short(first)} in the first {steps}, "
        f"{_short(last)} in the last."
    )


def _interval(change: Difference) -> str:
    low, high = change.interval
    verdict = "" if low > 0 or high < 0 else " (no significant change)"
    if not verdict and not change.p_value < 0.05:
        verdict = f" (p = {change.p_value:.2f}: too few prompts differ)"
    gain = f"95 % interval of the gain {_short(low, '+')} to {_short(high, '+')}"
    return f"{gain}{verdict}" if change.prompts > 1 else "too few for an interval"


def _short(value: float, sign: str = "") -> str:
    """Two digits without the zero before the point: .48, +.42."""
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{sign}.2f}").replace("-", "\u2212")


def _explanation(run: RunFolder, comparison: Comparison | None) -> list[str]:
    times = pd.Series([number(line.get("time")) for line in run.metrics], dtype=float).dropna()
    seconds = times.diff().where(lambda gap: gap >= 0, times).sum()  # a resumed run may count from 0 again
    data, duration = run.setting("data.task") or run.setting("data.train"), datetime.timedelta(seconds=round(seconds))
    about = f"Model {run.setting('model.path')}, data {data}, seed {run.setting('seed')}, duration {duration}."
    text = (
        "Intervals and bands of validation are bootstraps over the prompts: they cover other prompts of the same kind, "
        "but not another seed. Thin lines are single steps, bold lines their means."
    )
    return [about, text, *(comparison.notes if comparison else [])]


def _learning(run: RunFolder) -> list[Figure]:
    tables = {e.step: e.table for e in run.evaluations_of("validation")}
    curves = {}
    for name in ("exact", "reward"):
        band = pd.DataFrame([bootstrap_interval(table[name]) for table in tables.values()], index=list(tables))
        curves[name] = Curve(run.series("validation", name), band if tables else None)
    if curves["reward"].y.equals(curves["exact"].y):
        del curves["reward"]
    training = {"reward": Curve(run.series("rl", "rewards/mean"))}
    return draw_curves("Greedy responses to validation prompts", curves) + draw_curves("Reward in training", training)


def _metrics(run: RunFolder) -> list[Section]:
    """Every metric; names that differ after the last _ or @ alone, such as kl_mean and kl_rollout, share a figure."""
    sections = []
    for source, title in (("validation", "Validation"), ("rl", "RL"), ("sft", "SFT")):
        frame, figures = run.frame(source), list[Figure]()
        stems = {name: re.sub(r"(?<=^time)/.*|[_@][^_@]*$", "", name) for name in in_order(frame)}
        for stem in dict.fromkeys(stems.values()):
            curves = {name: Curve(frame[name]) for name in stems if stems[name] == stem}
            figures += draw_curves(stem if len(curves) > 1 else next(iter(curves)), curves)
        sections.append(Section(f"{title}, all metrics", figures=figures))
    return sections


def _examples(run: RunFolder) -> Section:
    """The first prompts with the responses before and after training."""
    pair = run.before_and_after()
    if pair is None:
        return Section("")
    before, after = pair
    places = after.table.index.get_indexer(before.table.index)[:_MAX_EXAMPLES]
    examples = [
        (shorten(line["prompt"]), [_response("before", line), _response("after", after.prompts[place])])
        for line, place in zip(before.prompts, places, strict=False)
        if place >= 0
    ]
    note = f"The first {len(examples)} prompts of the {after.split} split, not a selection; greedy responses."
    return Section("Responses before and after", [note] if examples else [], examples=examples)


def _response(title: str, line: Line) -> Response:
    rewards = line.get("rewards", [])[:_MAX_SAMPLES]
    samples = [
        Response(f"sample, reward {format_number(number(reward))}", shorten(text))
        for text, reward in zip(line.get("samples", []), rewards, strict=False)
    ]
    return Response(f"{title}, reward {format_number(number(line['reward']))}", shorten(line["greedy"]), samples)


def _before_and_after(run: RunFolder, comparison: Comparison | None) -> Section:
    pair = run.before_and_after()
    if comparison is None or pair is None:
        return Section("")
    notes = [f"Means over the {pair[1].split} prompts; p by a sign-flip test; numbers of prompts that rose or fell."]
    if embedder := pair[1].content.get("embedder"):
        notes.append(f"Embeddings by {embedder}.")
    if (quantile := run.setting("evaluation.solved_quantile")) is not None:
        notes.append(
            f"A response counts as correct from a reward of {format_number(pair[1].solved, 6)} on: the quantile "
            f"{format_number(quantile, 2)} of the rewards of the validation split's demonstrations."
        )
    figures = samples_figures({"before": [pair[0]], "after": [pair[1]]})
    return Section("Before and after", notes, figures, comparison.rows())


def samples_figures(rows: Mapping[str, Sequence[Evaluated]]) -> list[Figure]:
    """pass@k and DER@k for each number of samples, also for those that evaluation.pass_k does not name."""
    passes, ratios = {}, {}
    for label, evaluations in rows.items():
        by_seed = [
            e.table.filter(regex="^pass@").mean().rename(lambda name: int(name[5:])).dropna() for e in evaluations
        ]
        passes[label] = Curve(pd.concat(by_seed, axis=1, join="inner").mean(axis=1))
        efficiencies = [pd.Series(diversity_efficiency(of_seed.to_dict()), dtype=float) for of_seed in by_seed]
        ratios[label] = Curve(pd.concat(efficiencies, axis=1).mean(axis=1))
    titles = {"pass@k by the number of samples": passes, "DER@k = pass@k / (k pass@1)": ratios}
    return [figure for title, curves in titles.items() for figure in draw_curves(title, curves, "samples k")]


def _evaluations(run: RunFolder) -> Section:
    metrics = {f"{e.split}, {e.phase} step {e.step:.0f}": e.metrics for e in run.evaluations}
    frame = pd.DataFrame(metrics, dtype=float).T
    steps = run.series("validation", "semantic_diversity")
    step = collapse_point(steps.index.tolist(), steps.tolist())
    notes = [f"From step {step:.0f} on, semantic diversity stays below half of its start."]
    notes = [] if math.isnan(step) else notes
    return Section("Evaluations", notes, table=table_of("evaluation", frame[in_order(frame)]))


def _maps(run: RunFolder) -> Section:
    """First and last map of the prompt that was mapped last."""
    maps = [(e.step, content) for e in run.evaluations if (content := e.content.get("map"))]
    same = {step: content for step, content in maps if content["prompt"] == maps[-1][1]["prompt"]}
    if not same:
        return Section("")
    notes = [
        shorten(maps[-1][1]["prompt"]),
        "Each point is a response, or several equal ones, coloured by cluster and numbered as in the list. The axes "
        "are the first two principal components of the normalised embeddings of each map, so distances compare only "
        "within a map.",
    ]
    return Section(
        "Map of one prompt's responses", notes, [_map(step, same[step]) for step in sorted({min(same), max(same)})]
    )


def _map(step: float, content: Line) -> Figure:
    groups: dict[tuple[str, float, str], list[Line]] = {}  # equal responses
    for line in content["responses"]:
        key = line["text"], number(line["cluster"]), str(line["xy"])
        groups.setdefault(key, []).append(line)
    points, listed = [], []
    for i, ((text, cluster, _), lines) in enumerate(groups.items(), 1):
        colour = int(cluster) if cluster >= 0 else None
        where = "excluded from the clustering" if colour is None else f"cluster {colour}"
        reward = format_number(pd.Series([number(line["reward"]) for line in lines]).mean())
        times = f"{len(lines)} times, " if len(lines) > 1 else ""
        listed.append(Response(f"{i}: {times}{where}, reward {reward}", shorten(text), colour=colour))
        if (xy := lines[0]["xy"]) is not None:
            points.append(Point(str(i), xy[0], xy[1], colour, size=90 + 45 * len(lines)))
    titles = [f"axis {i}, {100 * share:.0f} % of the variance" for i, share in enumerate(content["explained"], 1)]
    figure = draw_points(f"Step {step:.0f}", points, titles)
    caption = f"{sum(map(len, groups.values()))} responses, {len(groups)} distinct"
    return figure._replace(caption=caption, responses=listed[:_MAX_LISTED])


def _events(run: RunFolder) -> Section:
    counts = Counter(event["event"] for event in run.events)
    last = {event["event"]: event for event in run.events}
    rows = [
        [kind, str(count), ", ".join(f"{k} {v}" for k, v in last[kind].items() if k not in ("event", "time"))]
        for kind, count in counts.items()
    ]
    notes = [f"Could not be read: {', '.join(run.unreadable)}."] if run.unreadable else []
    return Section("Events", notes, table=[["event", "times", "last"], *rows] if rows else [])
