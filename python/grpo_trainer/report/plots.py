"""Plots of a run, each as two transparent PNGs for light and dark pages."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_trainer.report.page import DARK, LIGHT, Picture, Theme, visible
from grpo_trainer.report.run_folder import has_value, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _BELOW, _DPI = 5.6, 0.48, 160  # width and bottom margin in inches, dots per inch
_LINE_LENGTH = 58  # characters of a title and a legend that fit on one line
_MAX_BARS = 40
_MAX_LABEL = 26  # characters of a name in a legend
_MAX_MARKERS = 30  # curves with more points have no markers


class Curve(NamedTuple):
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()  # limits of a band around the curve
    high: Sequence[float] = ()


class Panel(NamedTuple):
    title: str
    curves: Sequence[Curve]
    is_share: bool = False
    colours: Sequence[int] = ()  # of the curves; empty: in order


def banded(label: str, x: Sequence[float], y: Sequence[float], errors: Sequence[float]) -> Curve:
    """A curve with a band of the errors on either side."""
    low = [value - error for value, error in zip(y, errors, strict=True)]
    high = [value + error for value, error in zip(y, errors, strict=True)]
    return Curve(label, x, y, low, high)


def known_panels(
    title: str, x: Sequence[float], values: Mapping[str, Sequence[float]], is_share: bool = False
) -> list[Panel]:
    """A panel with the curves that have a value, by label; no panel if none has."""
    curves = [Curve(label, x, y) for label, y in values.items() if has_value(y)]
    return [Panel(title, curves, is_share)] if curves else []


def component_panels(lines: Sequence[Mapping[str, Any]], prefix: str, x: Sequence[float]) -> list[Panel]:
    """Panels of at most four curves with the metrics that begin with `prefix`, one value per line."""
    keys = list(dict.fromkeys(key for line in lines for key in line if key.startswith(prefix)))
    panels = []
    for i in range(0, len(keys), 4):
        values = {key.removeprefix(prefix): series(lines, key) for key in keys[i : i + 4]}
        panels += known_panels("mean, before weights", x, values)
    return panels


class Mark(NamedTuple):
    """A labelled value in two dimensions, each with the limits of its interval or NaN."""

    label: str
    x: tuple[float, float, float]
    y: tuple[float, float, float]


class Point(NamedTuple):
    label: str
    x: float
    y: float
    cluster: int
    responses: int


def window_of(points: int) -> int:
    """Window of the rolling mean for a number of points; odd."""
    return 2 * (points // 40) + 1


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the finite values in a centred window; gaps stay gaps."""
    half = window // 2
    means = []
    for i, value in enumerate(values):
        known = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        means.append(sum(known) / len(known) if math.isfinite(value) else math.nan)
    return means


def draw_panels(folder: Path, name: str, panels: Sequence[Panel], xlabel: str) -> Picture:
    """Draws panels below one another with a shared x axis."""
    from matplotlib.ticker import MaxNLocator

    labels = [labels_of(curve.label for curve in panel.curves) for panel in panels]

    def paint(figure: Figure, theme: Theme) -> None:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel, names in zip(rows, panels, labels, strict=True):
            colours = [theme.colour(i) for i in panel.colours or range(len(panel.curves))]
            for curve, colour in zip(panel.curves, colours, strict=True):
                _paint_curve(axes, curve, colour)
            axes.set_title(panel.title, loc="left", color=theme.ink, fontsize=10)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            _style_axes(axes, theme, panel.is_share)
            _add_legend(axes, colours, theme.ink, names, columns(panel.title, names))
        rows[-1].set_xlabel(xlabel)

    above = max(_above(panel.title, names) for panel, names in zip(panels, labels, strict=True))
    return _draw(folder, name, paint, 1.3 * len(panels) if len(panels) > 1 else 1.9, above, len(panels))


def draw_stack(folder: Path, name: str, steps: Sequence[float], parts: dict[str, list[float]]) -> Picture:
    """Draws stacked bars, one for several steps if there are many; a step without values has no bar."""
    size = max(1, math.ceil(len(steps) / _MAX_BARS))
    starts = range(0, len(steps), size)
    labels = labels_of(parts)

    def mean_of(values: Sequence[float]) -> float:
        known = [value for value in values if math.isfinite(value)]
        return sum(known) / len(known) if known else 0.0

    def paint(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        x = [mean_of(steps[i : i + size]) for i in starts]
        widths = [0.85 * size * (max(steps) - min(steps)) / max(len(steps) - 1, 1) or 0.8] * len(x)
        bottom = [0.0] * len(x)
        for number, values in enumerate(parts.values()):
            heights = [mean_of(values[i : i + size]) for i in starts]
            axes.bar(x, heights, widths, bottom=bottom, color=theme.colour(number), linewidth=0)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        _style_axes(axes, theme, False)
        _add_legend(axes, [theme.colour(i) for i in range(len(labels))], theme.ink, labels, columns("", labels))
        axes.set_xlabel("step")
        axes.set_ylabel("seconds")

    return _draw(folder, name, paint, 2.0, _above("", labels))


def draw_map(folder: Path, name: str, points: Sequence[Point], axis_titles: tuple[str, str]) -> Picture:
    """Draws numbered points, coloured by cluster and sized by the number of responses."""

    def paint(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for point in points:
            is_excluded = point.cluster < 0
            colour, edge = (theme.grid, theme.ink) if is_excluded else (theme.colour(point.cluster), "none")
            label_colour = theme.ink if is_excluded else theme.paper
            axes.scatter([point.x], [point.y], s=90 + 45 * point.responses, color=colour, edgecolors=edge, alpha=0.9)
            axes.text(point.x, point.y, point.label, ha="center", va="center_baseline", fontsize=8, color=label_colour)
        _style_axes(axes, theme, False)
        axes.grid(axis="x", color=theme.grid, linewidth=0.7)
        axes.margins(0.15)
        axes.set_xlabel(axis_titles[0])
        axes.set_ylabel(axis_titles[1])

    return _draw(folder, name, paint, 2.8, 0.1)


def draw_scatter(
    folder: Path, name: str, marks: Sequence[Mark], front: Sequence[tuple[float, float]], axis_titles: tuple[str, str]
) -> Picture:
    """Draws numbered marks with the bars of their intervals, and a dashed line of steps through a front."""

    def paint(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        # from one point of the front to the next: nothing is known to be on the diagonal between them
        if len(front) > 1:
            x, y = zip(*front, strict=True)
            axes.step(x, y, where="pre", color=theme.ink, linewidth=1, linestyle="--", alpha=0.7)
        for mark in marks:
            colour = theme.colour(int(mark.label) - 1)
            (x0, *across), (y0, *along) = mark.x, mark.y
            axes.plot(across, [y0, y0], color=colour, linewidth=1.2, alpha=0.7)
            axes.plot([x0, x0], along, color=colour, linewidth=1.2, alpha=0.7)
            axes.scatter([x0], [y0], s=150, color=colour, linewidths=0, zorder=3)
            axes.text(x0, y0, mark.label, ha="center", va="center_baseline", fontsize=8, color=theme.paper, zorder=4)
        _style_axes(axes, theme, False)
        axes.grid(axis="x", color=theme.grid, linewidth=0.7)
        axes.margins(0.12)
        axes.set_xlabel(axis_titles[0])
        axes.set_ylabel(axis_titles[1])

    return _draw(folder, name, paint, 2.8, 0.1)


def _paint_curve(axes: Axes, curve: Curve, colour: str) -> None:
    window = window_of(len(curve.y))
    marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(curve.y) <= _MAX_MARKERS else {}
    if window > 1:
        axes.plot(curve.x, curve.y, color=colour, linewidth=0.7, alpha=0.4)
    if curve.low:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(curve.x, rolling_mean(curve.y, window), color=colour, linewidth=1.7, label=curve.label, **marker)
    isolated = [i for i, value in enumerate(curve.y) if math.isfinite(value) and not _has_neighbour(curve.y, i)]
    if not marker and isolated:
        axes.plot([curve.x[i] for i in isolated], [curve.y[i] for i in isolated], "o", color=colour, markersize=3)


def _has_neighbour(values: Sequence[float], i: int) -> bool:
    return has_value(values[max(0, i - 1) : i]) or has_value(values[i + 1 : i + 2])


def labels_of(names: Iterable[str]) -> list[str]:
    return [visible(name[:_MAX_LABEL]) for name in names]


def columns(title: str, labels: Sequence[str]) -> int:
    """Number of legend columns that fit beside the title."""
    return max(1, min(len(labels), (_LINE_LENGTH - len(title)) // (max(map(len, labels)) + 4)))


def _above(title: str, labels: Sequence[str]) -> float:
    """Height of the title and the legend in inches."""
    return 0.1 + 0.2 * math.ceil(len(labels) / columns(title, labels))


def _style_axes(axes: Axes, theme: Theme, is_share: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.tick_params(colors=theme.ink, labelsize=10, length=0)
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    axes.grid(axis="y", color=theme.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if is_share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))


def _add_legend(axes: Axes, colours: Sequence[str], ink: str, labels: Sequence[str], columns: int) -> None:
    from matplotlib.lines import Line2D

    if len(labels) > 1:
        handles = [Line2D([], [], color=colour, linewidth=3) for colour in colours]
        # matplotlib omits labels that start with an underscore
        axes.legend(
            handles,
            [f" {label}" for label in labels],
            loc="lower right",
            bbox_to_anchor=(1.0, 0.98),
            frameon=False,
            ncols=columns,
            fontsize=9.5,
            labelcolor=ink,
            handlelength=0.9,
            borderaxespad=0,
            columnspacing=1.1,
            handletextpad=0.3,
        )


def _draw(
    folder: Path, name: str, paint: Callable[[Figure, Theme], None], height: float, above: float, panels: int = 1
) -> Picture:
    """Draws a figure in both themes, with margins that do not depend on its contents.

    Args:
        folder: folder of the PNGs.
        name: stem of their names.
        paint: draws onto a figure.
        height: height of the axes in inches.
        above: space above each of the axes in inches.
        panels: number of axes.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    picture = Picture(folder / f"{name}.png", folder / f"{name}-dark.png")
    for theme, path in zip((LIGHT, DARK), picture, strict=True):
        # names of rewards come from recipes: a dollar sign in them does not start a formula
        with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")
            whole = height + _BELOW + above + (panels - 1) * (above + 0.12)
            figure = Figure(figsize=(_WIDTH, whole))
            FigureCanvasAgg(figure)
            paint(figure, theme)
            between = (above + 0.12) / (height / panels)
            figure.subplots_adjust(0.72 / _WIDTH, _BELOW / whole, 1 - 0.08 / _WIDTH, 1 - above / whole, hspace=between)
            figure.savefig(path, dpi=_DPI, transparent=True)
    return picture
