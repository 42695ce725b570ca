"""The part of the report about evaluations: what changed, over which steps, and in which words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from grpo_trainer import page
from grpo_trainer.compare import Comparison, Difference, compare, paired, right_by_reward
from grpo_trainer.page import shown
from grpo_trainer.plots import Curve, Panel, draw_panels
from grpo_trainer.run_folder import Evaluated, Line, RunFolder, has_value, mean, number

_BETWEEN_0_AND_1 = {
    "self-BLEU": "self_bleu", "distinct-1": "distinct_1", "distinct-2": "distinct_2", "semantic": "semantic_diversity",
}  # fmt: skip
_VERDICTS = {
    "up": "better: the interval is above 0, and p below 0.05",
    "down": "worse: the interval is below 0, and p below 0.05",
    "": "no change is shown: the interval holds 0",
}
_COUNTS = {"Vendi": "vendi", "clusters": "clusters"}


def headline(run: RunFolder) -> str:
    """What changed from before training to the last evaluation, and how sure that is."""
    found = run.before_and_after()
    if found is None:
        return page.paragraph(
            "There are not yet two evaluations of one split to compare: nothing can be said about what was learned.",
            "soft",
        )
    before, after = found
    try:
        compared = compare(before.content, after.content, solved=_solved(run))
    except (TypeError, ValueError) as error:
        return page.paragraph(f"The evaluations cannot be compared: {shown(error)}", "soft")
    is_share = _is_share(before) and _is_share(after)
    cards = [_card("Exact match, greedy", compared.exact, True)]
    cards += [] if is_share else [_card("Reward, greedy", compared.reward, False)]
    cards += [_card(f"pass@{k}", each, True) for k, each in list(compared.pass_at.items())[-1:] if k > 1]
    if not math.isnan(run.share_outside):
        cards.append(
            page.card("Outside generation and model", page.percent(run.share_outside), "of the time of RL steps")
        )
    return page.element("div", "".join(cards), "cards") + _explained(run, before, after, compared)


def _explained(run: RunFolder, before: Evaluated, after: Evaluated, compared: Comparison) -> str:
    text = (
        f"On {compared.reward.prompts} prompts of the {shown(before.split)} split: before, phase {before.phase} step "
        f"{before.step}; after, phase {after.phase} step {after.step}. Interval: paired bootstrap over the prompts, "
        f"{compared.resamples:,} resamples, 95 %; p: signs of the differences flipped at random. Both are about other "
        "prompts, not about another seed."
    )
    tested = [found for found in run.evaluations if found.split == "test" and found.split != before.split]
    if tested:
        exact, count = page.percent(number(tested[-1].metrics.get("exact"))), len(tested[-1].prompts)
        text += f" The test split, after training alone: exact match {exact} of {count} prompts."
    return page.paragraph(text, "soft") + "".join(page.paragraph(shown(note), "soft") for note in compared.notes)


def _card(title: str, found: Difference, is_share: bool) -> str:
    form: Callable[[float], str] = page.percent if is_share else page.figures
    scale, unit, digits = (100, " points", 1) if is_share else (1, "", 3)
    low, high = (scale * end for end in found.interval)
    change = f"{scale * found.improvement:+.{digits}f}{unit}, 95 % interval {low:+.{digits}f} to {high:+.{digits}f}"
    beyond = "up" if low > 0 else "down" if high < 0 else ""
    verdict = beyond if found.p_value < 0.05 else ""
    return page.card(
        title,
        f"{form(found.before)} → {form(found.after)}",
        page.element("span", change.replace("-", "\u2212"), verdict),
        _VERDICTS[verdict]
        if verdict or not beyond
        else "no change is shown: p is not below 0.05, too few prompts differ",
        f"{found.improved} better, {found.worse} worse, {found.equal} equal; p = {found.p_value:.2g}",
    )


def evaluations_section(run: RunFolder) -> str:
    if not run.evaluations:
        return page.section("Evaluations", page.paragraph("No evaluation was written.", "soft"))
    names = list(dict.fromkeys(name for found in run.evaluations for name in found.metrics if name != "prompts"))
    order = ["exact", "reward", "truncated", "length"]
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    rows = [
        [shown(found.split), str(found.phase), str(found.step), str(len(found.prompts))]
        + [page.percent(number(found.metrics.get(name))) if name in ("exact", "truncated") or name.startswith("pass@")
           else page.figures(number(found.metrics.get(name))) for name in names]
        for found in run.evaluations
    ]  # fmt: skip
    embedders = sorted({str(found.content["embedder"]) for found in run.evaluations if found.content.get("embedder")})
    told = f" Semantic measures by {', '.join(embedders)}." if embedders else ""
    caption = page.paragraph(f"Greedy answers; sampled ones where there is pass@k.{shown(told)}", "soft")
    table = page.table(["split", "phase", "step", "prompts", *names], rows)
    return page.section("Evaluations", page.grid(_evaluation_plots(run)), caption, table)


def _evaluation_plots(run: RunFolder) -> list[str]:
    first_rl = run.phases.index("rl") if "rl" in run.phases else 0
    found = [each for each in run.evaluations if each.split == "validation" and each.phase >= first_rl]
    if len(found) < 2:
        return []
    steps = [run.rl_offset(each.phase) + each.step for each in found]
    rewards = [[number(line.get("reward")) for line in each.prompts] for each in found]
    right = [[_is_right(line, _solved(run)) for line in each.prompts] for each in found]
    right = [[value for value in each if math.isfinite(value)] for each in right]
    panels = [Panel("exact match, greedy", [_with_band("exact", steps, right)], True)]
    if not all(_is_share(each) for each in found):
        panels.append(Panel("reward, greedy", [_with_band("reward", steps, rewards)]))
    passes = {
        name: [number(each.metrics.get(name)) for each in found]
        for name in found[0].metrics
        if name.startswith("pass@")
    }
    if passes:
        panels.append(Panel("pass@k, sampled", [Curve(name, steps, values) for name, values in passes.items()], True))
    caption = (
        "Band: ± 1.96 standard errors over the prompts, which are the same each time: changes are surer than it says."
    )
    folder = run.path / "plots"
    drawn = [page.figure("Validation", draw_panels(folder, "validation", panels, "RL step"), caption)]
    return [*drawn, *_diversity_plot(run, found, steps)]


def _diversity_plot(run: RunFolder, found: list[Evaluated], steps: list[float]) -> list[str]:
    panels = []
    for title, names in (("from 0 to 1", _BETWEEN_0_AND_1), ("how many different ones", _COUNTS)):
        curves = [
            Curve(label, steps, values)
            for label, name in names.items()
            if has_value(values := [number(each.metrics.get(name)) for each in found])
        ]
        panels += [Panel(title, curves)] if curves else []
    if not panels:
        return []
    caption = (
        "Of the samples of one prompt, mean over prompts. Where they differ, self-BLEU is low and the others are high."
    )
    return [page.figure("Diversity", draw_panels(run.path / "plots", "diversity", panels, "RL step"), caption)]


def _with_band(label: str, steps: list[float], of_prompts: list[list[float]]) -> Curve:
    middles, halves = [], []
    for values in of_prompts:
        known = [value for value in values if math.isfinite(value)]
        middle = mean(known)
        squares = sum((value - middle) ** 2 for value in known)
        middles.append(middle)
        halves.append(1.96 * math.sqrt(squares / (len(known) - 1) / len(known)) if len(known) > 1 else math.nan)
    low = [middle - half for middle, half in zip(middles, halves, strict=True)]
    high = [middle + half for middle, half in zip(middles, halves, strict=True)]
    return Curve(label, steps, middles, low, high)


def examples_section(run: RunFolder) -> str:
    found, tracked = run.before_and_after(), number(run.setting("evaluation", "tracked"))
    if found is None or not tracked > 0:
        return page.section(
            "Responses before and after", page.paragraph("There are no two evaluations to show.", "soft")
        )
    try:
        pairs = paired(found[0].prompts, found[1].prompts)[: int(tracked)]
    except (KeyError, ValueError) as error:
        return page.section("Responses before and after", page.paragraph(f"They do not match: {shown(error)}", "soft"))
    shown_pairs = [
        page.element("div", _said("prompt", a.get("prompt"), None)
                     + page.element("div", _answers("before", a) + _answers("after", b), "sides"), "example")
        for a, b in pairs
    ]  # fmt: skip
    title = f"The first {len(pairs)} prompts of the {found[0].split} split, not a choice; greedy answers."
    return page.section("Responses before and after", page.paragraph(shown(title), "soft"), *shown_pairs)


def _answers(title: str, line: Any) -> str:
    samples = line.get("samples")
    inside = _said(title, line.get("greedy"), number(line.get("reward")))
    if isinstance(samples, list) and isinstance(line.get("rewards"), list):
        said = [_said("sample", text, number(r)) for text, r in zip(samples[:4], line["rewards"][:4], strict=False)]
        inside += page.details(f"{len(said)} of {len(samples)} sampled", "".join(said))
    return page.element("div", inside)


def _said(title: str, text: object, reward: float | None) -> str:
    worth = "" if reward is None else f", reward {page.figures(reward)}"
    return page.element("div", title + worth, "reward") + page.element("span", page.prompt(text), "said")


def _is_right(line: Line, solved: float) -> float:
    """As `compare` has it, of a file that may hold anything."""
    if "correct" in line:
        return number(line["correct"])
    return right_by_reward(number(line.get("reward")), solved)


def _solved(run: RunFolder) -> float:
    told = number(run.setting("evaluation", "solved"))
    return 1.0 if math.isnan(told) else told


def _is_share(found: Evaluated) -> bool:
    return all(number(line.get("reward")) in (0.0, 1.0) for line in found.prompts)
