"""Report sections about evaluations: the headline, metrics over steps, and responses before and after."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from grpo_trainer.diversity_measures import collapse_point
from grpo_trainer.report import page
from grpo_trainer.report.compare import Comparison, Difference, compare, infer_correct, paired
from grpo_trainer.report.page import shown
from grpo_trainer.report.plots import Curve, Panel, banded, component_panels, draw_panels, known_panels
from grpo_trainer.report.run_folder import Evaluated, Line, RunFolder, mean, number

_SHARES = {
    "self-BLEU": "self_bleu",
    "distinct-1": "distinct_1",
    "distinct-2": "distinct_2",
    "semantic": "semantic_diversity",
    "ROUGE": "rouge_diversity",
}
_COUNTS = {"Vendi": "vendi", "clusters": "clusters"}
_VERDICTS = {
    "up": "better: the interval is above 0, and p below 0.05",
    "down": "worse: the interval is below 0, and p below 0.05",
    "": "no significant change: the interval contains 0",
}
_TOO_FEW = "no significant change: p is not below 0.05, as too few prompts differ"


def headline(run: RunFolder) -> str:
    """Change from before training to the last evaluation, with its uncertainty."""
    pair = run.before_and_after()
    if pair is None:
        text = "There are not yet two evaluations of one split to compare, so nothing can be said about learning."
        return page.paragraph(text, "soft")
    before, after = pair
    try:
        comparison = compare(before.content, after.content, solved=_solved(run))
    except (TypeError, ValueError) as error:
        return page.paragraph(f"The evaluations cannot be compared: {shown(error)}", "soft")
    is_share = _has_binary_rewards(before) and _has_binary_rewards(after)
    cards = [_card("Exact match, greedy", comparison.exact, True)]
    cards += [] if is_share else [_card("Reward, greedy", comparison.reward, False)]
    cards += [_card(f"pass@{k}", change, True) for k, change in list(comparison.pass_at.items())[-1:] if k > 1]
    if not math.isnan(run.share_outside):
        share = page.format_percent(run.share_outside)
        cards.append(page.card("Outside generation and model", share, "of the time of RL steps"))
    return page.element("div", "".join(cards), "cards") + _explanation(run, before, after, comparison)


def _explanation(run: RunFolder, before: Evaluated, after: Evaluated, comparison: Comparison) -> str:
    text = (
        f"On {comparison.reward.prompts} prompts of the {shown(before.split)} split: before, phase {before.phase} step "
        f"{before.step}; after, phase {after.phase} step {after.step}. The interval is a paired bootstrap over the "
        f"prompts ({comparison.resamples:,} resamples, 95 %), p a sign-flip test. Both generalise to other prompts, "
        "not to another seed."
    )
    tested = [e for e in run.evaluations if e.split == "test" and e.split != before.split]
    if tested:
        exact, count = page.format_percent(number(tested[-1].metrics.get("exact"))), len(tested[-1].prompts)
        text += f" On the test split, evaluated after training only: exact match {exact} of {count} prompts."
    return page.paragraph(text, "soft") + "".join(page.paragraph(shown(note), "soft") for note in comparison.notes)


def _card(title: str, difference: Difference, is_share: bool) -> str:
    form: Callable[[float], str] = page.format_percent if is_share else page.format_number
    scale, unit, digits = (100, " points", 1) if is_share else (1, "", 3)
    low, high = (scale * end for end in difference.interval)
    improvement = f"{scale * difference.improvement:+.{digits}f}{unit}"
    change = f"{improvement}, 95 % interval {low:+.{digits}f} to {high:+.{digits}f}"
    direction = "up" if low > 0 else "down" if high < 0 else ""
    verdict = direction if difference.p_value < 0.05 else ""
    counts = f"{difference.improved} better, {difference.worse} worse, {difference.equal} equal"
    return page.card(
        title,
        f"{form(difference.before)} → {form(difference.after)}",
        page.element("span", change.replace("-", "\u2212"), verdict),
        _VERDICTS[verdict] if verdict or not direction else _TOO_FEW,
        f"{counts}; p = {difference.p_value:.2g}",
    )


def evaluations_section(run: RunFolder) -> str:
    evaluations = run.evaluations
    if not evaluations:
        return page.section("Evaluations", page.paragraph("No evaluation was written.", "soft"))
    names = list(dict.fromkeys(name for e in evaluations for name in e.metrics if name != "prompts"))
    order = ["exact", "reward", "truncated", "length"]
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    rows = [
        [shown(e.split), str(e.phase), str(e.step), str(len(e.prompts)), *(_format_metric(e, name) for name in names)]
        for e in evaluations
    ]
    embedders = sorted({str(e.content["embedder"]) for e in evaluations if e.content.get("embedder")})
    embedder = f" Embeddings by {', '.join(embedders)}." if embedders else ""
    caption = page.paragraph(f"Greedy responses; sampled ones for pass@k and diversity.{shown(embedder)}", "soft")
    table = page.table(["split", "phase", "step", "prompts", *names], rows)
    return page.section("Evaluations", page.grid(_evaluation_plots(run)), caption, _calibration(run), table)


def _calibration(run: RunFolder) -> str:
    if not run.solved:
        return ""
    threshold, quantile = (number(run.solved.get(name)) for name in ("threshold", "quantile"))
    text = (
        f"A response counts as correct from a reward of {page.format_number(threshold, 6)} on: the quantile "
        f"{page.format_number(quantile, 2)} of the rewards of {run.solved.get('demonstrations')} demonstrations of the "
        "validation split, computed once at the start of the run."
    )
    return page.paragraph(shown(text), "soft")


def _format_metric(evaluated: Evaluated, name: str) -> str:
    is_share = name in ("exact", "truncated") or name.startswith("pass@")
    return (page.format_percent if is_share else page.format_number)(number(evaluated.metrics.get(name)))


def _evaluation_plots(run: RunFolder) -> list[str]:
    first_rl = run.phases.index("rl") if "rl" in run.phases else 0
    evaluations = [e for e in run.evaluations if e.split == "validation" and e.phase >= first_rl]
    if len(evaluations) < 2:
        return []
    steps = [run.rl_offset(e.phase) + e.step for e in evaluations]
    rewards = [[number(line.get("reward")) for line in e.prompts] for e in evaluations]
    correct = [[_is_correct(line, _solved(run)) for line in e.prompts] for e in evaluations]
    correct = [[value for value in values if math.isfinite(value)] for values in correct]
    panels = [Panel("exact match, greedy", [_with_band("exact", steps, correct)], True)]
    if not all(map(_has_binary_rewards, evaluations)):
        panels.append(Panel("reward, greedy", [_with_band("reward", steps, rewards)]))
    pass_k = {
        name: [number(e.metrics.get(name)) for e in evaluations]
        for name in evaluations[0].metrics
        if name.startswith("pass@")
    }
    if pass_k:
        panels.append(Panel("pass@k, sampled", [Curve(name, steps, values) for name, values in pass_k.items()], True))
    caption = (
        "Band: ± 1.96 standard errors over the prompts. As these are the same each time, changes are more certain than "
        "the bands suggest."
    )
    picture = draw_panels(run.path / "plots", "validation", panels, "RL step")
    figures = [page.figure("Validation", picture, caption), *_diversity_plot(run, evaluations, steps)]
    components = component_panels([e.metrics for e in evaluations], "components/", steps)
    if components:
        picture = draw_panels(run.path / "plots", "validation_components", components, "RL step")
        caption = "Components that the rewards report, before weights: means over greedy responses."
        figures.append(page.figure("Components, validation", picture, caption))
    return figures


def _diversity_plot(run: RunFolder, evaluations: list[Evaluated], steps: list[float]) -> list[str]:
    panels = []
    for title, names in (("from 0 to 1", _SHARES), ("effective number", _COUNTS)):
        values_by_label = {label: [number(e.metrics.get(name)) for e in evaluations] for label, name in names.items()}
        panels += known_panels(title, steps, values_by_label)
    if not panels:
        return []
    caption = "Diversity of a prompt's samples, mean over prompts: low self-BLEU and high values of the other measures."
    name = "semantic_diversity"
    step = collapse_point(steps, [number(e.metrics.get(name)) for e in evaluations])
    if math.isfinite(step):
        caption += f" From step {step:.0f} on, semantic diversity stays below half of its start."
    return [page.figure("Diversity", draw_panels(run.path / "plots", "diversity", panels, "RL step"), caption)]


def _with_band(label: str, steps: list[float], values_by_step: list[list[float]]) -> Curve:
    """Curve of means with a band of 1.96 standard errors."""
    means, errors = [], []
    for values in values_by_step:
        known = [value for value in values if math.isfinite(value)]
        centre = mean(known)
        squares = sum((value - centre) ** 2 for value in known)
        means.append(centre)
        errors.append(1.96 * math.sqrt(squares / (len(known) - 1) / len(known)) if len(known) > 1 else math.nan)
    return banded(label, steps, means, errors)


def examples_section(run: RunFolder) -> str:
    title = "Responses before and after"
    pair, tracked = run.before_and_after(), number(run.setting("evaluation", "tracked"))
    if pair is None or not tracked > 0:
        return page.section(title, page.paragraph("There are no two evaluations to show.", "soft"))
    before, after = pair
    try:
        lines = paired(before.prompts, after.prompts)[: int(tracked)]
    except (KeyError, ValueError) as error:
        return page.section(title, page.paragraph(f"They do not match: {shown(error)}", "soft"))
    examples = []
    for line_before, line_after in lines:
        sides = page.element("div", _answers("before", line_before) + _answers("after", line_after), "sides")
        examples.append(page.element("div", _text("prompt", line_before.get("prompt"), None) + sides, "example"))
    caption = f"The first {len(lines)} prompts of the {before.split} split, not a selection; greedy responses."
    return page.section(title, page.paragraph(shown(caption), "soft"), *examples)


def _answers(title: str, line: Any) -> str:
    samples = line.get("samples")
    content = _text(title, line.get("greedy"), number(line.get("reward")))
    if isinstance(samples, list) and isinstance(line.get("rewards"), list):
        pairs = zip(samples[:4], line["rewards"][:4], strict=False)
        texts = [_text("sample", text, number(reward)) for text, reward in pairs]
        content += page.details(f"{len(texts)} of {len(samples)} sampled", "".join(texts))
    return page.element("div", content)


def _text(title: str, text: object, reward: float | None) -> str:
    suffix = "" if reward is None else f", reward {page.format_number(reward)}"
    return page.element("div", title + suffix, "reward") + page.element("span", page.shown_prompt(text), "said")


def _is_correct(line: Line, solved: float) -> float:
    """Correctness as in `compare`, for a file with arbitrary contents."""
    if "correct" in line:
        return number(line["correct"])
    return infer_correct(number(line.get("reward")), solved)


def _solved(run: RunFolder) -> float:
    solved = number(run.solved.get("threshold", run.setting("evaluation", "solved")))
    return 1.0 if math.isnan(solved) else solved


def _has_binary_rewards(evaluated: Evaluated) -> bool:
    return all(number(line.get("reward")) in (0.0, 1.0) for line in evaluated.prompts)
