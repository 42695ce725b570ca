"""The report of a run, finished or not: plots, and a page that contains everything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_trainer.report import page
from grpo_trainer.report.evaluations import evaluations_section, examples_section, headline
from grpo_trainer.report.map import map_section
from grpo_trainer.report.page import shown
from grpo_trainer.report.plots import (
    Curve,
    Panel,
    banded,
    component_panels,
    draw_panels,
    draw_stack,
    known_panels,
    window_of,
)
from grpo_trainer.report.run_folder import INSIDE, Line, RunFolder, has_value, mean, number, series

__all__ = ["write_report"]


class Plot(NamedTuple):
    """Panels of curves: (title, {label: metric}, whether the values are shares)."""

    name: str
    title: str
    panels: tuple[tuple[str, dict[str, str], bool], ...]
    caption: str


POLICY = (
    Plot(
        "kl",
        "KL from the reference",
        (("nats per token", {"in the update": "train/kl_mean", "at sampling": "train/kl_rollout"}, False),),
        "Distance of the policy from the reference, mean over tokens: the estimate in the loss, and k3 on the sampled "
        "tokens.",
    ),
    Plot(
        "entropy",
        "Entropy",
        (("nats per token", {"entropy": "train/entropy"}, False),),
        "Entropy of the next token, mean over response tokens. Near 0 the policy always gives the same response.",
    ),
    Plot(
        "clip",
        "Clipping",
        (
            ("share of tokens", {"below": "train/clip_low", "above": "train/clip_high"}, True),
            ("importance ratio", {"smallest": "train/ratio_min", "largest": "train/ratio_max"}, False),
        ),
        "Share of tokens with a clipped importance ratio, and the extremes of the ratio.",
    ),
    Plot(
        "length",
        "Length of responses",
        (
            ("tokens", {"mean": "rollout/length_mean", "longest": "rollout/length_max"}, False),
            ("truncated", {"truncated": "rollout/truncated"}, True),
        ),
        "Length of the sampled responses, and the share that was cut off before its end.",
    ),
)
OPTIMISATION = (
    Plot(
        "optimizer",
        "Gradient and learning rate",
        (
            ("gradient norm before clipping", {"norm": "train/grad_norm"}, False),
            ("learning rate", {"rate": "train/lr"}, False),
        ),
        "Means over the optimizer steps of a rollout.",
    ),
    Plot(
        "loss",
        "Loss",
        (("loss", {"total": "train/total_loss", "policy": "train/policy_loss"}, False),),
        "The value says little about progress in RL, because advantages have mean 0.",
    ),
    Plot(
        "advantages",
        "Advantages",
        (
            ("responses with a nonzero advantage", {"nonzero": "train/nonzero_advantages"}, True),
            ("standard deviation", {"deviation": "train/advantages_std"}, False),
        ),
        "Only responses with a nonzero advantage carry a learning signal. If all responses to a prompt get the same "
        "reward, none does.",
    ),
    Plot(
        "sft",
        "Supervised phase",
        (("loss, nats per token", {"loss": "train/loss"}, False),),
        "Cross-entropy of the demonstrations.",
    ),
)
CLUSTERS = (
    Plot(
        "clusters",
        "Similarity groups",
        (
            ("groups per prompt", {"groups": "similarity_groups/avg_groups_per_prompt"}, False),
            ("silhouette", {"silhouette": "similarity_groups/avg_silhouette_score"}, False),
        ),
        "Number of clusters among the responses to a prompt, and their separation (the best silhouette, at most 1). "
        "Means over the prompts of a step.",
    ),
    Plot(
        "verdicts",
        "Verdicts",
        (
            (
                "share of prompts",
                {
                    "clustered": "similarity_groups/share_clustered",
                    "same": "similarity_groups/share_all_same",
                    "different": "similarity_groups/share_all_different",
                    "unclear": "similarity_groups/share_unclear",
                },
                True,
            ),
        ),
        "Prompts by the verdict of the clustering.",
    ),
)
SEGMENTS = (
    Plot(
        "segments",
        "Segments",
        (
            ("tokens that are not endpoints", {"compression": "group/compression_ratio"}, True),
            ("endpoints per response", {"endpoints": "group/avg_endpoints_per_sequence"}, False),
            ("threshold", {"threshold": "group/threshold"}, False),
        ),
        "Token groups of group_ppo: the share of tokens merged into segments, and the threshold that ends a segment.",
    ),
)


def write_report(folder: Path, beside: Sequence[Path] = ()) -> Path:
    """Writes plots/ and report.html into a run's folder.

    Args:
        folder: the run's folder.
        beside: folders of other runs whose step times are compared with this one's.

    Returns:
        Path of the page.
    """
    folder = Path(folder)
    run = RunFolder.read(folder)
    rl = run.lines("rl")
    sections = [
        _header(run),
        _rewards(run, rl),
        evaluations_section(run),
        examples_section(run),
        _plots(run, "Policy", POLICY, rl),
        _plots(run, "Optimisation", OPTIMISATION, rl),
        _plots(run, "Similarity groups", CLUSTERS, rl),
        map_section(run),
        _plots(run, "Token groups", SEGMENTS, rl),
        _time(run, rl, [RunFolder.read(Path(other)) for other in beside]),
        _events(run),
        page.section("Recipe", page.details("all settings of this run", page.element("pre", shown(_yaml(run.recipe))))),
    ]
    target = folder / "report.html"
    target.write_text(page.document(f"{run.setting('name') or folder.name}: report", "\n".join(sections)), "utf-8")
    return target


def _header(run: RunFolder) -> str:
    phases = []
    for i, kind in enumerate(run.phases):
        algorithm = "SFT" if kind == "sft" else run.setting("phases", i, "rl", "algorithm", "name")
        phases.append(f"{run.setting('phases', i, kind, 'steps')} steps of {algorithm}")
    model = str(run.setting("model", "path") or "unknown")
    if model == "tiny":
        layers, hidden = run.setting("model", "tiny", "layers"), run.setting("model", "tiny", "hidden")
        model += f" ({layers} layers of {hidden})"
    facts = [
        ("Model", model),
        ("Data", run.setting("data", "task") or run.setting("data", "train") or "unknown"),
        ("Training", ", then ".join(phases) or "unknown"),
        *((f"Algorithm of {phase}", text) for phase, text in run.algorithms.items()),
        ("Seed", run.setting("seed")),
        ("Started", run.date),
        ("Duration", page.format_duration(run.seconds) if run.metrics else "nothing was logged"),
        ("State", _state(run)),
    ]
    rows = "".join(page.element("tr", page.element("th", name) + page.element("td", shown(v))) for name, v in facts)
    title = page.element("h1", shown(run.setting("name") or run.path.name))
    return title + page.element("table", rows, "facts") + headline(run)


def _state(run: RunFolder) -> str:
    phases = run.phases
    last = next((line for line in reversed(run.metrics) if line.get("phase") in ("sft", "rl")), None)
    if any(evaluated.phase == len(phases) for evaluated in run.evaluations) and phases:
        return "finished"
    if last is None:
        return "no step was logged"
    kind, step = str(last["phase"]), number(last.get("step"))
    steps = [number(run.setting("phases", i, kind, "steps")) for i, phase in enumerate(phases) if phase == kind]
    if phases and kind == phases[-1] and step >= steps[-1]:
        return "all steps are done; no evaluation on a test split followed"
    total = f" of {steps[0]:.0f}" if len(steps) == 1 else ""
    return f"not finished: the last logged step of {kind} is {step:.0f}{total}"


def _rewards(run: RunFolder, rl: list[Line]) -> str:
    reward = series(rl, "rewards/mean")
    if not has_value(reward):
        return page.section("Reward in training", _not_drawn("rewards/mean"))
    steps = run.steps(rl)
    prompts = series(rl, "group_stats/num_groups")
    deviations = zip(series(rl, "rewards/std"), prompts, strict=True)
    errors = [1.96 * std / math.sqrt(n) if n > 0 else math.nan for std, n in deviations]
    folder = run.path / "plots"
    curve = banded("reward", steps, reward, errors)
    caption = (
        "Mean reward of the sampled responses. Band: ± 1.96 standard deviations of the rewards, divided by the square "
        "root of the number of prompts. Responses to one prompt are not independent, so prompts are counted and not "
        "responses; the band is conservative."
    )
    figures = [page.figure("Reward", draw_panels(folder, "reward", [Panel("reward", [curve])], "step"), caption)]
    names = [str(setting.get("name")) for setting in _reward_settings(run)]
    parts = {name: values for name in names if has_value(values := series(rl, f"rewards/{name}"))}
    if len(parts) > 1:
        curves = [Curve(name, steps, values) for name, values in parts.items()]
        picture = draw_panels(folder, "reward_parts", [Panel("mean, before weights", curves)], "step")
        figures.append(page.figure("Rewards by name", picture, "Means over the responses that the reward scored."))
    panels = component_panels(rl, "rewards/components/", steps)
    if panels:
        picture = draw_panels(folder, "reward_components", panels, "step")
        caption = "Components that the rewards report, before weights: means over the responses that were scored."
        figures.append(page.figure("Components of the reward", picture, caption))
    within = Curve("within prompts", steps, series(rl, "rewards/group_std"))
    flat = [f / n if n else math.nan for f, n in zip(series(rl, "group_stats/flat_groups"), prompts, strict=True)]
    panels = [
        Panel("deviation within a prompt", [within]),
        Panel("prompts without any", [Curve("flat", steps, flat)], True),
    ]
    caption = (
        "Standard deviation of the rewards of a prompt's responses, mean over prompts; and the share of prompts whose "
        "responses all have the same reward, which carry no learning signal."
    )
    figures.append(page.figure("Spread of rewards", draw_panels(folder, "spread", panels, "step"), caption))
    window = window_of(len(steps))
    smoothing = f"Thin lines, here and below, are single steps, bold lines the mean of {window} neighbouring steps."
    return page.section(
        "Reward in training", page.paragraph(smoothing, "soft") if window > 1 else "", page.grid(figures)
    )


def _plots(run: RunFolder, title: str, plots: Sequence[Plot], rl: list[Line]) -> str:
    figures, missing = [], []
    for plot in plots:
        lines = run.lines("sft") if plot.name == "sft" else rl
        steps, panels = run.steps(lines), []
        for panel_title, keys, is_share in plot.panels:
            values_by_label = {label: series(lines, key) for label, key in keys.items()}
            panels += known_panels(panel_title, steps, values_by_label, is_share)
        if panels:
            picture = draw_panels(run.path / "plots", plot.name, panels, "step")
            figures.append(page.figure(plot.title, picture, plot.caption))
        else:
            missing.append(f"{plot.title} ({', '.join(key for _, keys, _ in plot.panels for key in keys.values())})")
    return page.section(title, page.grid(figures), _not_drawn("; ".join(missing)) if missing else "")


def _not_drawn(metrics: str) -> str:
    return page.paragraph(f"Not drawn, as nothing was logged: {shown(metrics)}.", "soft")


def _time(run: RunFolder, rl: list[Line], beside: Sequence[RunFolder]) -> str:
    times = run.times
    step_seconds = times.pop("step", None)
    if step_seconds is None:
        return page.section("Time", _not_drawn("time/step"))
    parts = {name: times[name] for name in sorted(times, key=lambda name: (name not in INSIDE, name))}
    timed = [_finite_sum(step) for step in zip(*parts.values(), strict=True)] or [0.0] * len(step_seconds)
    parts["other"] = [max(0.0, whole - part) for whole, part in zip(step_seconds, timed, strict=True)]
    picture = draw_stack(run.path / "plots", "time", run.steps(rl), parts)
    total = _finite_sum(step_seconds)
    rows = [
        [shown(name), page.format_number(mean(values)), page.format_percent(_finite_sum(values) / total)]
        for name, values in parts.items()
    ]
    summary = f"{page.format_percent(run.share_outside)} of the time of RL steps is spent outside generation and model."
    caption = (
        "Seconds per step, averaged over neighbouring steps if there are many; without evaluations and checkpoints."
    )
    return page.section(
        "Time",
        page.paragraph(summary),
        page.grid([page.figure("A step", picture, caption), page.table(["part", "seconds per step", "share"], rows)]),
        _compare_times([run, *beside]) if beside else "",
    )


def _finite_sum(values: Sequence[float]) -> float:
    return sum(value for value in values if math.isfinite(value))


def _compare_times(runs: Sequence[RunFolder]) -> str:
    """Table of the seconds of each part of a step, with a column per run."""
    seconds = [run.seconds_of_parts for run in runs]
    parts = list(dict.fromkeys(part for column in seconds for part in column))
    rows = [
        [shown(part), *(page.format_number(column[part]) if part in column else "" for column in seconds)]
        for part in parts
    ]
    return page.table(["seconds per step", *(str(run.setting("name") or run.path.name) for run in runs)], rows)


def _events(run: RunFolder) -> str:
    counts = Counter(str(event.get("event")) for event in run.events)
    last = {str(event.get("event")): event for event in run.events}
    rows = []
    for kind, count in counts.items():
        facts = ", ".join(f"{name} {value}" for name, value in last[kind].items() if name not in ("event", "time"))
        rows.append([shown(kind), str(count), shown(facts)])
    rl = run.lines("rl")
    skipped = {
        "rewards left out, as their function failed": "rewards/skipped",
        "responses without any reward": "rewards/unscored",
        "steps without an update, as no response had an advantage": "train/skipped",
    }
    totals = {label: sum(value for value in series(rl, key) if value > 0) for label, key in skipped.items()}
    summary = "; ".join(f"{total:.0f} {label}" for label, total in totals.items() if total)
    table = page.table(["event", "times", "last"], rows, "events") if rows else page.paragraph("No events.", "soft")
    return page.section(
        "Skipped, saved, resumed",
        page.paragraph(f"{summary}." if summary else "No response and no step was skipped."),
        table,
        page.paragraph(f"Could not be read: {shown('; '.join(run.unreadable))}.") if run.unreadable else "",
    )


def _reward_settings(run: RunFolder) -> list[Line]:
    rewards: Any = []
    for i, kind in enumerate(run.phases):
        rewards = rewards or (run.setting("phases", i, "rl", "rewards") if kind == "rl" else [])
    return [reward for reward in rewards if isinstance(reward, dict)] if isinstance(rewards, list) else []


def _yaml(recipe: Line) -> str:
    import yaml

    if not recipe:
        return "no recipe could be read"
    return str(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100))
