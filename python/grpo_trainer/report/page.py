"""Pages with figures and tables that need no other file.

Figures are inline SVG, whose colours are variables of the page's style, so that one drawing serves light and dark. The
template escapes every text of a model, of data or of a recipe.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from markupsafe import Markup, escape

_COLOURS = ("#1f6fb4", "#d1690a", "#23855a", "#8a4fb0", "#c2374a", "#6d7f14", "#0d8a99", "#8c6239")
_INK, _GRID, _PAPER = "#3a434d", "#dde1e6", "#fefefe"
_VARIABLES = {colour: f"c{i}" for i, colour in enumerate(_COLOURS)} | {_INK: "soft", _GRID: "line", _PAPER: "paper"}
_STYLE: Any = {"svg.fonttype": "none", "axes.grid": True}
_STYLE |= {"svg.hashsalt": "report"}  # the same run always gives the same page
_STYLE |= dict.fromkeys(("axes.spines.left", "axes.spines.right", "axes.spines.top"), False)
_STYLE |= dict.fromkeys(("xtick.color", "ytick.color", "axes.labelcolor"), _INK)
_STYLE |= dict.fromkeys(("axes.edgecolor", "grid.color"), _GRID)
_STYLE |= dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0)
_MAX_MARKERS = 30  # longer curves have markers only at points between gaps
_MAX_TEXT = 3_000  # characters of a response
# control characters except tab and newline, bidirectional controls and noncharacters
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff]")


class Response(NamedTuple):
    """A text with a line about it, and others that are folded away."""

    about: str
    text: str
    samples: Sequence[Response] = ()
    colour: int | None = None


class Figure(NamedTuple):
    title: str
    svg: Markup
    legend: Sequence[tuple[str, int]] = ()  # labels with their colours
    caption: str = ""
    responses: Sequence[Response] = ()


class Section(NamedTuple):
    """A section, which is left out if it has nothing but a title."""

    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    table: Sequence[Sequence[str]] = ()  # titles first; the second line of a cell is a remark
    examples: Sequence[tuple[str, Sequence[Response]]] = ()  # prompts with responses side by side
    folded: str = ""


class Curve(NamedTuple):
    y: pd.Series  # by step
    band: pd.DataFrame | None = None  # lower and upper limits by step


class Point(NamedTuple):
    """A labelled point, optionally with the limits of an interval in each direction."""

    label: str
    x: float
    y: float
    colour: int | None
    x_interval: tuple[float, float] = (math.nan, math.nan)
    y_interval: tuple[float, float] = (math.nan, math.nan)
    size: float = 150


def draw_curves(title: str, curves: Mapping[str, Curve], xlabel: str = "step") -> list[Figure]:
    """Draws the curves that have a value, by label; no figure if none has."""
    known = {label: (i % 8, curve) for i, (label, curve) in enumerate(curves.items()) if curve.y.notna().any()}

    def paint(axes: Any) -> None:
        axes.set_xlabel(xlabel)
        axes.locator_params(axis="x", integer=True, nbins=7)
        for colour, curve in known.values():
            _paint_curve(axes, curve, _COLOURS[colour])

    values = {label: curve.y.dropna() for label, (_, curve) in known.items()}
    alt = "; ".join(f"{label} from {y.iloc[0]:.3g} to {y.iloc[-1]:.3g}" for label, y in values.items())
    legend = [(label, colour) for label, (colour, _) in known.items()] if len(curves) > 1 else []
    return [Figure(title, _draw(paint, f"{title}: {alt}"), legend)] if known else []


def draw_points(
    title: str, points: Sequence[Point], axis_titles: Sequence[str], front: Sequence[tuple[float, float]] = ()
) -> Figure:
    """Draws labelled points, and a dashed line of steps through a front."""

    def paint(axes: Any) -> None:
        axes.margins(0.15)
        axes.set(xlabel=axis_titles[0], ylabel=axis_titles[1])
        if len(front) > 1:  # steps, as nothing is known to be on the diagonal between two points
            axes.step(*zip(*front, strict=True), where="pre", color=_INK, linewidth=1, linestyle="--")
        for point in points:
            colour, ink = (_GRID, _INK) if point.colour is None else (_COLOURS[point.colour % 8], _PAPER)
            axes.plot(point.x_interval, [point.y] * 2, color=colour, linewidth=1.2)
            axes.plot([point.x] * 2, point.y_interval, color=colour, linewidth=1.2)
            axes.scatter([point.x], [point.y], s=point.size, color=colour, zorder=3)
            axes.text(point.x, point.y, point.label, ha="center", va="center_baseline", fontsize=8, color=ink, zorder=4)

    alt = "; ".join(f"{point.label} at {point.x:.3g}, {point.y:.3g}" for point in points)
    return Figure(title, _draw(paint, f"{axis_titles[1]} over {axis_titles[0]}: {alt}", 3.0))


def smoothed(y: pd.Series) -> pd.Series:
    """Mean of the values in a centred window of a twentieth of the steps; gaps stay gaps."""
    return y.rolling(2 * (len(y) // 40) + 1, center=True, min_periods=1).mean().where(y.notna())


def _paint_curve(axes: Any, curve: Curve, colour: str) -> None:
    bold = smoothed(curve.y)
    if not curve.y.equals(bold):
        axes.plot(curve.y.index, curve.y, color=colour, linewidth=0.7, alpha=0.4)
    if curve.band is not None:
        axes.fill_between(curve.band.index, *curve.band.T.to_numpy(), color=colour, alpha=0.18, linewidth=0)
    axes.plot(bold.index, bold, color=colour, linewidth=1.7)
    is_isolated = bold.shift().isna() & bold.shift(-1).isna()
    marked = bold if len(bold) <= _MAX_MARKERS else bold[is_isolated]
    axes.plot(marked.index, marked, "o", color=colour, markersize=3)


def _draw(paint: Callable[[Any], None], alt: str, height: float = 1.9) -> Markup:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, height))
        paint(figure.add_axes((0.14, 0.45 / height, 0.84, 1 - 0.55 / height)))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r' xmlns(:xlink)?="[^"]*"|<metadata>.*?</metadata>', "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # matplotlib's names are the same in every drawing
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1))


def write_page(target: Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Writes a page that needs no other file, and returns its path."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, finalize=_visible, trim_blocks=True)
    content = environment.get_template("template.html").render(title=title, lead=lead, sections=sections)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content, "utf-8")
    return target


def shorten(text: object) -> str:
    """A text, or a chat whose lines start with the roles, cut off after _MAX_TEXT characters."""
    if isinstance(text, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in text):
        text = "\n".join(f"{m['role']}: {m['content']}" for m in text)
    omitted = len(str(text)) - _MAX_TEXT
    return str(text)[:_MAX_TEXT] + (f" … and {omitted:,} more" if omitted > 0 else "")


def format_number(value: float, digits: int = 3, sign: str = "") -> str:
    return "none" if math.isnan(value) else f"{value:{sign},.{digits}f}".replace("-", "\u2212")


def table_of(corner: str, frame: pd.DataFrame) -> list[list[str]]:
    """Cells of a table, titles first."""
    rows = [[str(name), *map(format_number, row)] for name, row in zip(frame.index, frame.to_numpy(), strict=True)]
    return [[corner, *map(str, frame)], *rows] if rows else []


def _visible(text: object) -> object:
    """Replaces invisible characters that a browser would interpret."""
    if isinstance(text, Markup):
        return text
    return _INVISIBLE.sub(lambda match: "\ufffd" if ord(match[0]) > 0x20 else chr(0x2400 + ord(match[0])), str(text))
