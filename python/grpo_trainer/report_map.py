"""The part of the report that shows how one prompt's responses lie among each other."""

from __future__ import annotations

from typing import NamedTuple

from grpo_trainer import page
from grpo_trainer.page import LIGHT, shown
from grpo_trainer.plots import Point, draw_map
from grpo_trainer.run_folder import Line, RunFolder, has_value, mean, number

_MOST_LISTED = 40


class _Kind(NamedTuple):
    """Responses of one text, cluster and place."""

    text: str
    cluster: int
    xy: tuple[float, float] | None
    rewards: list[float]


def map_section(run: RunFolder) -> str:
    """Of the prompt of the last map, when it was drawn first and last."""
    title = "Map of one prompt's responses"
    maps = [line for line in run.maps if _kinds(line)]
    if not maps:
        return page.section(title, page.paragraph("No map was logged: the algorithm has no similarity groups.", "soft"))
    of_prompt = [line for line in maps if line.get("prompt") == maps[-1].get("prompt")]
    chosen = [of_prompt[0], of_prompt[-1]] if len(of_prompt) > 1 else of_prompt
    parts = [_one(run, f"map_{i}", line) for i, line in enumerate(chosen)]
    text = (
        "Each point is a response, or several equal ones, coloured by cluster; numbers as in the list. Places: the two "
        "axes along which the unit vectors of the embeddings differ most, found anew for each map, so only distances "
        "within a map compare. What differs along further axes is not seen."
    )
    prompt = page.element("span", shown(maps[-1].get("prompt")), "said")
    return page.section(title, prompt, page.paragraph(text, "soft"), page.grid(parts))


def _one(run: RunFolder, name: str, line: Line) -> str:
    kinds = _kinds(line)
    points = [
        Point(str(i), *kind.xy, kind.cluster, len(kind.rewards))
        for i, kind in enumerate(kinds, 1)
        if kind.xy is not None
    ]
    step = f"Step {page.figures(number(line.get('step')), 0)}"
    listed = "".join(_listed(i, kind) for i, kind in enumerate(kinds[:_MOST_LISTED], 1))
    left_out = len(kinds) - _MOST_LISTED
    more = page.paragraph(f"and {left_out} more", "soft") if left_out > 0 else ""
    if not points:
        return page.element(
            "div", page.element("h3", step) + page.paragraph("No response has a place.", "soft") + listed + more
        )
    explained = line.get("explained")
    shares = [number(each) for each in explained[:2]] if isinstance(explained, list) else []
    titles = [
        f"axis {i + 1}" + (f", {100 * shares[i]:.0f} % of the spread" if has_value(shares[i : i + 1]) else "")
        for i in range(2)
    ]
    picture = draw_map(run.path / "plots", name, _apart(points), (titles[0], titles[1]))
    clusters = len({kind.cluster for kind in kinds if kind.cluster >= 0})
    count = sum(len(kind.rewards) for kind in kinds)
    caption = f"{count} responses, {len(kinds)} different ones, in {clusters} cluster{'s' if clusters != 1 else ''}."
    return page.element("div", page.figure(step, picture, caption) + listed + more)


def _listed(number_of: int, kind: _Kind) -> str:
    colour = f"c{kind.cluster % len(LIGHT.colours)}" if kind.cluster >= 0 else ""
    swatch = f'<span class="swatch {colour}"></span>'
    cluster = f"cluster {kind.cluster}" if kind.cluster >= 0 else "left out of the clustering"
    times = f"{len(kind.rewards)} times, " if len(kind.rewards) > 1 else ""
    about = f"{swatch}{number_of}: {times}{cluster}, reward {page.figures(mean(kind.rewards))}"
    return page.element("div", about, "reward") + page.element("span", shown(kind.text), "said")


def _kinds(line: Line) -> list[_Kind]:
    found: dict[tuple[str, int, tuple[float, float] | None], _Kind] = {}
    responses = line.get("responses")
    for response in responses if isinstance(responses, list) else []:
        if not isinstance(response, dict):
            continue
        place, label = response.get("xy"), number(response.get("cluster"))
        xy = (
            (number(place[0]), number(place[1])) if isinstance(place, list) and len(place) == 2 else (number(None),) * 2
        )
        key = (
            str(response.get("text")),
            int(label) if has_value([label]) else -1,
            xy if all(map(_is_known, xy)) else None,
        )
        found.setdefault(key, _Kind(*key, [])).rewards.append(number(response.get("reward")))
    return list(found.values())


def _is_known(value: float) -> bool:
    return has_value([value])


def _apart(points: list[Point]) -> list[Point]:
    """Points at one place are drawn as one, with all their numbers."""
    found: dict[tuple[float, float, int], Point] = {}
    for point in points:
        key = (round(point.x, 3), round(point.y, 3), point.cluster)
        if key in found:
            before = found[key]
            point = before._replace(label=f"{before.label},{point.label}", responses=before.responses + point.responses)
        found[key] = point
    return list(found.values())
