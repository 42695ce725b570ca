"""Report section with maps of one prompt's responses."""

from __future__ import annotations

import math
from typing import NamedTuple

from grpo_trainer.report import page
from grpo_trainer.report.page import LIGHT, shown
from grpo_trainer.report.plots import Point, draw_map
from grpo_trainer.report.run_folder import Line, RunFolder, has_value, mean, number

_MAX_LISTED = 40


class _Group(NamedTuple):
    """Responses with the same text, cluster and coordinates."""

    text: str
    cluster: int
    xy: tuple[float, float] | None
    rewards: list[float]


def map_section(run: RunFolder) -> str:
    """Section with the first and the last map of the prompt that was mapped last."""
    title = "Map of one prompt's responses"
    maps = [line for line in run.maps if _group_responses(line)]
    if not maps:
        return page.section(title, page.paragraph("No map was logged: the algorithm has no similarity groups.", "soft"))
    same_prompt = [line for line in maps if line.get("prompt") == maps[-1].get("prompt")]
    chosen = [same_prompt[0], same_prompt[-1]] if len(same_prompt) > 1 else same_prompt
    parts = [_draw_one(run, f"map_{i}", line) for i, line in enumerate(chosen)]
    text = (
        "Each point is a response, or several equal ones, coloured by cluster and numbered as in the list. The axes "
        "are the first two principal components of the normalised embeddings of each map, so distances compare only "
        "within a map. Differences along further axes are not visible."
    )
    prompt = page.element("span", shown(maps[-1].get("prompt")), "said")
    return page.section(title, prompt, page.paragraph(text, "soft"), page.grid(parts))


def _draw_one(run: RunFolder, name: str, line: Line) -> str:
    groups = _group_responses(line)
    points = [
        Point(str(i), *group.xy, group.cluster, len(group.rewards))
        for i, group in enumerate(groups, 1)
        if group.xy is not None
    ]
    step = f"Step {page.format_number(number(line.get('step')), 0)}"
    listed = "".join(_listed(i, group) for i, group in enumerate(groups[:_MAX_LISTED], 1))
    omitted = len(groups) - _MAX_LISTED
    more = page.paragraph(f"and {omitted} more", "soft") if omitted > 0 else ""
    if not points:
        return page.element(
            "div", page.element("h3", step) + page.paragraph("No response has coordinates.", "soft") + listed + more
        )
    explained = line.get("explained")
    shares = [number(share) for share in explained[:2]] if isinstance(explained, list) else []
    titles = [
        f"axis {i + 1}" + (f", {100 * shares[i]:.0f} % of the variance" if has_value(shares[i : i + 1]) else "")
        for i in range(2)
    ]
    picture = draw_map(run.path / "plots", name, _merge_points(points), (titles[0], titles[1]))
    clusters = len({group.cluster for group in groups if group.cluster >= 0})
    count = sum(len(group.rewards) for group in groups)
    caption = f"{count} responses, {len(groups)} distinct, in {clusters} cluster{'s' if clusters != 1 else ''}."
    return page.element("div", page.figure(step, picture, caption) + listed + more)


def _listed(position: int, group: _Group) -> str:
    colour = f"c{group.cluster % len(LIGHT.colours)}" if group.cluster >= 0 else ""
    swatch = f'<span class="swatch {colour}"></span>'
    cluster = f"cluster {group.cluster}" if group.cluster >= 0 else "excluded from the clustering"
    times = f"{len(group.rewards)} times, " if len(group.rewards) > 1 else ""
    about = f"{swatch}{position}: {times}{cluster}, reward {page.format_number(mean(group.rewards))}"
    return page.element("div", about, "reward") + page.element("span", shown(group.text), "said")


def _group_responses(line: Line) -> list[_Group]:
    groups: dict[tuple[str, int, tuple[float, float] | None], _Group] = {}
    responses = line.get("responses")
    for response in responses if isinstance(responses, list) else []:
        if not isinstance(response, dict):
            continue
        point, label = response.get("xy"), number(response.get("cluster"))
        xy = (
            (number(point[0]), number(point[1])) if isinstance(point, list) and len(point) == 2 else (number(None),) * 2
        )
        key = (
            str(response.get("text")),
            int(label) if math.isfinite(label) else -1,
            xy if all(map(math.isfinite, xy)) else None,
        )
        groups.setdefault(key, _Group(*key, [])).rewards.append(number(response.get("reward")))
    return list(groups.values())


def _merge_points(points: list[Point]) -> list[Point]:
    """Merges points of one cluster at the same position, and joins their numbers."""
    merged: dict[tuple[float, float, int], Point] = {}
    for point in points:
        key = (round(point.x, 3), round(point.y, 3), point.cluster)
        if key in merged:
            other = merged[key]
            point = other._replace(label=f"{other.label},{point.label}", responses=other.responses + point.responses)
        merged[key] = point
    return list(merged.values())
