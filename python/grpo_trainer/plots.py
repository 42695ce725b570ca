"""Plots of a run, each as two transparent PNGs: one to lie on a light page, one on a dark one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_trainer.page import DARK, LIGHT, Picture, Theme, visible
from grpo_trainer.run_folder import has_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _BELOW, _DPI = 5.6, 0.48, 160  # inches, and dots in one
_LINE = 58  # letters of a legend that fit beside each other
_BARS = 40
_MOST_OF_NAME = 16  # characters in a legend
_MARKED = 30  # curves with fewer points show them


class Curve(NamedTuple):
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()  # of a band around it
    high: Sequence[float] = ()


class Panel(NamedTuple):
    title: str
    curves: Sequence[Curve]
    is_share: bool = False


class Point(NamedTuple):
    label: str
    x: float
    y: float
    cluster: int
    responses: int


def window_of(points: int) -> int:
    """How many neighbours a bold curve is the mean of; odd."""
    return 2 * (points // 40) + 1


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Of the window around each value, of what is known there. Gaps stay gaps."""
    half = window // 2
    found = []
    for i, value in enumerate(values):
        known = [v for v in values[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        found.append(sum(known) / len(known) if math.isfinite(value) else math.nan)
    return found


def draw_panels(folder: Path, name: str, panels: Sequence[Panel], xlabel: str) -> Picture:
    """One under the other, over the same steps."""
    from matplotlib.ticker import MaxNLocator

    labels = [labels_of(curve.label for curve in panel.curves) for panel in panels]

    def paint(figure: Figure, theme: Theme) -> None:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel, names in zip(rows, panels, labels, strict=True):
            for i, curve in enumerate(panel.curves):
                _paint_curve(axes, curve, theme.colour(i))
            axes.set_title(panel.title, loc="left", color=theme.ink, fontsize=10)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            _dress(axes, theme, panel.is_share)
            _add_legend(axes, theme, names, columns(panel.title, names))
        rows[-1].set_xlabel(xlabel)

    above = max(_above(panel.title, names) for panel, names in zip(panels, labels, strict=True))
    return _draw(folder, name, paint, 1.3 * len(panels) if len(panels) > 1 else 1.9, above, len(panels))


def draw_stack(folder: Path, name: str, steps: Sequence[float], parts: dict[str, list[float]]) -> Picture:
    """Stacked bars; of many steps, means of neighbours. A step without any figure has no bar."""
    size = max(1, math.ceil(len(steps) / _BARS))
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
        _dress(axes, theme, False)
        _add_legend(axes, theme, labels, columns("", labels))
        axes.set_xlabel("step")
        axes.set_ylabel("seconds")

    return _draw(folder, name, paint, 2.0, _above("", labels))


def draw_map(folder: Path, name: str, points: Sequence[Point], axis_titles: tuple[str, str]) -> Picture:
    """Numbered points, coloured by cluster, as large as the responses that they stand for are many."""

    def paint(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for point in points:
            in_none = point.cluster < 0
            colour, edge = (theme.grid, theme.ink) if in_none else (theme.colour(point.cluster), "none")
            on_it = theme.ink if in_none else theme.paper
            axes.scatter([point.x], [point.y], s=90 + 45 * point.responses, color=colour, edgecolors=edge, alpha=0.9)
            axes.text(point.x, point.y, point.label, ha="center", va="center_baseline", fontsize=8, color=on_it)
        _dress(axes, theme, False)
        axes.grid(axis="x", color=theme.grid, linewidth=0.7)
        axes.margins(0.15)
        axes.set_xlabel(axis_titles[0])
        axes.set_ylabel(axis_titles[1])

    return _draw(folder, name, paint, 2.8, 0.1)


def _paint_curve(axes: Axes, curve: Curve, colour: str) -> None:
    window = window_of(len(curve.y))
    marker: dict[str, Any] = {"marker": "o", "markersize": 3} if len(curve.y) <= _MARKED else {}
    if window > 1:
        axes.plot(curve.x, curve.y, color=colour, linewidth=0.7, alpha=0.4)
    if curve.low:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(curve.x, rolling_mean(curve.y, window), color=colour, linewidth=1.7, label=curve.label, **marker)
    alone = [i for i, value in enumerate(curve.y) if math.isfinite(value) and not _has_neighbour(curve.y, i)]
    if not marker and alone:
        axes.plot([curve.x[i] for i in alone], [curve.y[i] for i in alone], "o", color=colour, markersize=3)


def _has_neighbour(values: Sequence[float], i: int) -> bool:
    return has_value(values[max(0, i - 1) : i]) or has_value(values[i + 1 : i + 2])


def labels_of(names: Iterable[str]) -> list[str]:
    return [visible(name[:_MOST_OF_NAME]) for name in names]


def columns(title: str, labels: Sequence[str]) -> int:
    """Of the legend, so that it lies beside the title."""
    return max(1, min(len(labels), (_LINE - len(title)) // (max(map(len, labels)) + 4)))


def _above(title: str, labels: Sequence[str]) -> float:
    """Inches for the title and the legend."""
    return 0.1 + 0.2 * math.ceil(len(labels) / columns(title, labels))


def _dress(axes: Axes, theme: Theme, is_share: bool) -> None:
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


def _add_legend(axes: Axes, theme: Theme, labels: Sequence[str], columns: int) -> None:
    from matplotlib.lines import Line2D

    if len(labels) > 1:
        handles = [Line2D([], [], color=theme.colour(i), linewidth=3) for i in range(len(labels))]
        # a name that begins with an underscore would be left out
        axes.legend(
            handles, [f" {label}" for label in labels], loc="lower right", bbox_to_anchor=(1.0, 0.98),
            frameon=False, ncols=columns, fontsize=9.5, labelcolor=theme.ink, handlelength=0.9, borderaxespad=0,
            columnspacing=1.1, handletextpad=0.3,
        )  # fmt: skip


def _draw(
    folder: Path, name: str, paint: Callable[[Figure, Theme], None], height: float, above: float, panels: int = 1
) -> Picture:
    """height and above, of the axes and over each of them, are inches; so margins do not depend on what is drawn."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    picture = Picture(folder / f"{name}.png", folder / f"{name}-dark.png")
    for theme, path in zip((LIGHT, DARK), picture, strict=True):
        # names of rewards come from recipes: a dollar sign in one is no formula
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
