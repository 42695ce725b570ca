"""The report of a run: plots, and one page that holds everything. Also of a run that is not finished."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_trainer import page
from grpo_trainer.page import shown
from grpo_trainer.plots import Curve, Panel, draw_panels, draw_stack, window_of
from grpo_trainer.report_evaluations import evaluations_section, examples_section, headline
from grpo_trainer.report_map import map_section
from grpo_trainer.run_folder import INSIDE, Line, RunFolder, has_value, mean, number, series


class Plot(NamedTuple):
    """Panels of curves: (title, {label: metric}, whether it is a share)."""

    name: str
    title: str
    panels: tuple[tuple[str, dict[str, str], bool], ...]
    caption: str


POLICY = (
    Plot("kl", "KL from the reference", (
        ("nats a token", {"in the update": "train/kl_mean", "at sampling": "train/kl_rollout"}, False),),
        "How far the policy has moved: mean over tokens of the estimate that the loss uses, and of k3 on the tokens as "
        "they were sampled."),
    Plot("entropy", "Entropy", (("nats a token", {"entropy": "train/entropy"}, False),),
         "Of the policy's next token, mean over response tokens. Near 0 it says the same thing each time."),
    Plot("clip", "Clipping", (
        ("share of tokens", {"below": "train/clip_low", "above": "train/clip_high"}, True),
        ("ratio to the sampling policy", {"least": "train/ratio_min", "largest": "train/ratio_max"}, False)),
        "Tokens whose ratio was cut off, and the extremes of the ratio."),
    Plot("length", "Length of responses", (
        ("tokens", {"mean": "rollout/length_mean", "longest": "rollout/length_max"}, False),
        ("truncated", {"truncated": "rollout/truncated"}, True)),
        "Sampled responses of each step, and the share that was cut off before its end."),
)  # fmt: skip
OPTIMISATION = (
    Plot("optimizer", "Gradient and learning rate", (
        ("norm of the gradient, before clipping", {"norm": "train/grad_norm"}, False),
        ("learning rate", {"rate": "train/lr"}, False)), "Means over the optimizer steps of a rollout."),
    Plot("loss", "Loss", (("loss", {"total": "train/total_loss", "policy": "train/policy_loss"}, False),),
         "Its sign and size say little about progress in RL: advantages have mean 0."),
    Plot("advantages", "Advantages", (
        ("responses with an advantage", {"with": "train/nonzero_advantages"}, True),
        ("standard deviation", {"deviation": "train/advantages_std"}, False)),
        "Only these responses teach anything. Of a prompt whose responses all get the same reward, none has one."),
    Plot("sft", "Supervised phase", (("loss, nats a token", {"loss": "train/loss"}, False),),
         "Cross-entropy of the demonstrations."),
)  # fmt: skip
CLUSTERS = (
    Plot("clusters", "Similarity groups", (
        ("groups a prompt", {"groups": "similarity_groups/avg_groups_per_prompt"}, False),
        ("silhouette", {"silhouette": "similarity_groups/avg_silhouette_score"}, False)),
        "How many clusters the responses to a prompt fall into, and how well apart they are (mean of the best cut's "
        "silhouette, 1 is best). Means over the prompts of a step."),
    Plot("verdicts", "What was found about prompts", (
        ("share of prompts", {
            "clustered": "similarity_groups/share_clustered", "same": "similarity_groups/share_all_same",
            "different": "similarity_groups/share_all_different", "unclear": "similarity_groups/share_unclear",
        }, True),),
        "Prompts by verdict of the clustering."),
)  # fmt: skip
SEGMENTS = (
    Plot("segments", "Segments", (
        ("tokens that are no endpoint", {"compression": "group/compression_ratio"}, True),
        ("endpoints a response", {"endpoints": "group/avg_endpoints_per_sequence"}, False),
        ("threshold", {"threshold": "group/threshold"}, False)),
        "Token groups of group_ppo: how many tokens share an endpoint, and the threshold that ends a group."),
)  # fmt: skip


def write_report(folder: Path, beside: Sequence[Path] = ()) -> Path:
    """Plots under folder/plots and folder/report.html; with the step's time in other runs beside this one's."""
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
    tiny = run.setting("model", "path") == "tiny"
    size = (
        f" ({run.setting('model', 'tiny', 'layers')} layers of {run.setting('model', 'tiny', 'hidden')})"
        if tiny
        else ""
    )
    facts = [
        ("Model", f"{run.setting('model', 'path') or 'unknown'}{size}"),
        ("Data", run.setting("data", "task") or run.setting("data", "train") or "unknown"),
        ("Training", ", then ".join(phases) or "unknown"),
        ("Seed", run.setting("seed")),
        ("Started", run.date),
        ("Took", page.duration(run.seconds) if run.metrics else "nothing was logged"),
        ("State", _state(run)),
    ]
    listed = "".join(page.element("tr", page.element("th", name) + page.element("td", shown(v))) for name, v in facts)
    title = page.element("h1", shown(run.setting("name") or run.path.name))
    return title + page.element("table", listed, "facts") + headline(run)


def _state(run: RunFolder) -> str:
    phases = run.phases
    last = next((line for line in reversed(run.metrics) if line.get("phase") in ("sft", "rl")), None)
    if any(found.phase == len(phases) for found in run.evaluations) and phases:
        return "finished"
    if last is None:
        return "no step was logged"
    kind, step = str(last["phase"]), number(last.get("step"))
    wanted = [number(run.setting("phases", i, kind, "steps")) for i, each in enumerate(phases) if each == kind]
    if phases and kind == phases[-1] and step >= wanted[-1]:
        return "all steps done; no evaluation on a test split followed"
    of_all = f", of {wanted[0]:.0f}" if len(wanted) == 1 else ""
    return f"not finished: the last step logged is {step:.0f} of {kind}{of_all}"


def _rewards(run: RunFolder, rl: list[Line]) -> str:
    reward = series(rl, "rewards/mean")
    if not has_value(reward):
        return page.section("Reward in training", _nothing("rewards/mean"))
    steps = run.steps(rl)
    prompts = series(rl, "group_stats/num_groups")
    half = [
        1.96 * std / math.sqrt(n) if n > 0 else math.nan
        for std, n in zip(series(rl, "rewards/std"), prompts, strict=True)
    ]
    low = [value - each for value, each in zip(reward, half, strict=True)]
    high = [value + each for value, each in zip(reward, half, strict=True)]
    folder = run.path / "plots"
    curve = Curve("reward", steps, reward, low, high)
    band = (
        "Mean reward of the sampled responses of each step. Band: ± 1.96 standard deviations of the rewards over the "
        "square root of the number of prompts. Responses to one prompt are not independent, so prompts are counted and "
        "not responses; the band is wide rather than narrow."
    )
    drawn = [page.figure("Reward", draw_panels(folder, "reward", [Panel("reward", [curve])], "step"), band)]
    names = [str(reward.get("name")) for reward in _reward_settings(run)]
    parts = {name: values for name in names if has_value(values := series(rl, f"rewards/{name}"))}
    if len(parts) > 1:
        curves = [Curve(name, steps, values) for name, values in parts.items()]
        picture = draw_panels(folder, "reward_parts", [Panel("mean, before weights", curves)], "step")
        drawn.append(
            page.figure("Rewards by name", picture, "Means over responses that the reward said something about.")
        )
    within = Curve("within prompts", steps, series(rl, "rewards/group_std"))
    flat = [f / n if n else math.nan for f, n in zip(series(rl, "group_stats/flat_groups"), prompts, strict=True)]
    panels = [
        Panel("deviation within a prompt", [within]),
        Panel("prompts without any", [Curve("flat", steps, flat)], True),
    ]
    drawn.append(page.figure(
        "Spread of rewards", draw_panels(folder, "spread", panels, "step"),
        "Standard deviation of the rewards of one prompt's responses, mean over prompts; and the share of prompts "
        "whose responses all have the same reward, from which nothing is learned.",
    ))  # fmt: skip
    window = window_of(len(steps))
    smooth = f"Here and below: thin lines are single steps, bold ones the mean of {window} neighbouring steps."
    return page.section("Reward in training", page.paragraph(smooth, "soft") if window > 1 else "", page.grid(drawn))


def _plots(run: RunFolder, title: str, plots: Sequence[Plot], rl: list[Line]) -> str:
    drawn, missing = [], []
    for plot in plots:
        lines = run.lines("sft") if plot.name == "sft" else rl
        steps, panels = run.steps(lines), []
        for panel_title, keys, is_share in plot.panels:
            curves = [
                Curve(label, steps, values) for label, key in keys.items() if has_value(values := series(lines, key))
            ]
            panels += [Panel(panel_title, curves, is_share)] if curves else []
        if panels:
            drawn.append(
                page.figure(plot.title, draw_panels(run.path / "plots", plot.name, panels, "step"), plot.caption)
            )
        else:
            missing.append(f"{plot.title} ({', '.join(key for _, keys, _ in plot.panels for key in keys.values())})")
    return page.section(title, page.grid(drawn), _nothing("; ".join(missing)) if missing else "")


def _nothing(what: str) -> str:
    return page.paragraph(f"Not drawn, as nothing was logged: {shown(what)}.", "soft")


def _time(run: RunFolder, rl: list[Line], beside: Sequence[RunFolder]) -> str:
    whole = series(rl, "time/step")
    if not has_value(whole):
        return page.section("Time", _nothing("time/step"))
    names = sorted({key for line in rl for key in line if key.startswith("time/")} - {"time/step"})
    names.sort(key=lambda name: name.removeprefix("time/") not in INSIDE)
    parts = {name.removeprefix("time/"): series(rl, name) for name in names}
    parts = {name: values for name, values in parts.items() if has_value(values)}
    known = [sum(v for v in step if math.isfinite(v)) for step in zip(*parts.values(), strict=True)] or [0.0] * len(
        whole
    )
    parts["other"] = [max(0.0, all_of_it - some) for all_of_it, some in zip(whole, known, strict=True)]
    picture = draw_stack(run.path / "plots", "time", run.steps(rl), parts)
    total = sum(value for value in whole if math.isfinite(value))
    rows = [
        [shown(name), page.figures(mean(values)), page.percent(sum(v for v in values if math.isfinite(v)) / total)]
        for name, values in parts.items()
    ]
    told = (
        f"{page.percent(run.share_outside)} of the time of RL steps is spent outside generation and the model's passes."
    )
    caption = (
        "Seconds of each step, stacked; of many steps, means of neighbours. Evaluations and checkpoints are not in it."
    )
    return page.section(
        "Time",
        page.paragraph(told),
        page.grid([page.figure("A step", picture, caption), page.table(["part", "seconds a step", "share"], rows)]),
        _beside([run, *beside]) if beside else "",
    )


def _beside(runs: Sequence[RunFolder]) -> str:
    """Seconds of each part of the step, a column for each run."""
    seconds = [run.seconds_of_parts for run in runs]
    parts = list(dict.fromkeys(part for each in seconds for part in each))
    rows = [[shown(part), *(page.figures(each[part]) if part in each else "" for each in seconds)] for part in parts]
    return page.table(["seconds a step", *(str(run.setting("name") or run.path.name) for run in runs)], rows)


def _events(run: RunFolder) -> str:
    kinds = Counter(str(event.get("event")) for event in run.events)
    last = {str(event.get("event")): event for event in run.events}
    rows = []
    for kind, count in kinds.items():
        facts = ", ".join(f"{name} {value}" for name, value in last[kind].items() if name not in ("event", "time"))
        rows.append([shown(kind), str(count), shown(facts)])
    rl = run.lines("rl")
    skipped = {
        "responses without a reward, as its function failed": sum(v for v in series(rl, "rewards/skipped") if v > 0),
        "steps without an update, as no response had an advantage": sum(
            v for v in series(rl, "train/skipped") if v > 0
        ),
    }
    told = [f"{count:.0f} {what}" for what, count in skipped.items() if count]
    return page.section(
        "Skipped, saved, resumed",
        page.paragraph("; ".join(told) + "." if told else "No response and no step was skipped."),
        page.table(["event", "times", "the last one"], rows, "events")
        if rows
        else page.paragraph("No events.", "soft"),
        page.paragraph(f"Could not be read: {shown('; '.join(run.unreadable))}.") if run.unreadable else "",
    )


def _reward_settings(run: RunFolder) -> list[Line]:
    found: Any = []
    for i, kind in enumerate(run.phases):
        found = found or (run.setting("phases", i, "rl", "rewards") if kind == "rl" else [])
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _yaml(recipe: Line) -> str:
    import yaml

    return (
        yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100) if recipe else "no recipe could be read"
    )
