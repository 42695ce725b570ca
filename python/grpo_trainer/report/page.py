"""Building blocks of a self-contained HTML page, without scripts, fonts or external images.

Every text from a model, from data or from a recipe is escaped by `shown`.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_SHOWN = 3_000  # characters of one text
NO_VALUE = "none"

# Control characters except tab and newline, bidirectional controls, surrogates and noncharacters.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


class Picture(NamedTuple):
    """The same plot for light and dark pages."""

    light: Path
    dark: Path


@dataclasses.dataclass(frozen=True)
class Theme:
    name: str
    paper: str
    ink: str
    grid: str
    colours: tuple[str, ...]

    def colour(self, i: int) -> str:
        return self.colours[i % len(self.colours)]


LIGHT = Theme(
    "light",
    "#ffffff",
    "#3a434d",
    "#dde1e6",
    ("#1f6fb4", "#d1690a", "#23855a", "#8a4fb0", "#c2374a", "#6d7f14", "#0d8a99", "#8c6239"),
)
DARK = Theme(
    "dark",
    "#14181d",
    "#b4bec9",
    "#333b44",
    ("#6cb2f2", "#f5a04e", "#5fcf9b", "#c79bea", "#ff8794", "#c3d553", "#55d0de", "#d3a878"),
)


def visible(text: object) -> str:
    """Replaces invisible characters that a browser would interpret."""
    return _INVISIBLE.sub(lambda match: "\ufffd" if ord(match[0]) > 0x20 else chr(0x2400 + ord(match[0])), str(text))


def shown(text: object) -> str:
    """Escapes a text, and shortens it to MAX_SHOWN characters."""
    content = str(text)
    omitted = len(content) - MAX_SHOWN
    return html.escape(visible(content[:MAX_SHOWN]), quote=True) + (f" … and {omitted:,} more" if omitted > 0 else "")


def shown_prompt(prompt: object) -> str:
    """Escapes a text or a chat, whose lines start with the roles."""
    if isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        return shown("\n".join(f"{m['role']}: {m['content']}" for m in prompt))
    return shown(prompt)


def element(name: str, inside: str, kind: str = "") -> str:
    """An element with a class; `inside` is HTML."""
    return f'<{name} class="{kind}">{inside}</{name}>' if kind else f"<{name}>{inside}</{name}>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; `text` is HTML."""
    return element("p", text, kind)


def section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{shown(title)}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def grid(parts: Iterable[str]) -> str:
    inside = "\n".join(parts)
    return element("div", inside, "grid") if inside else ""


def figure(title: str, picture: Picture, caption: str) -> str:
    """A picture with a title and a caption; `caption` is HTML."""
    dark, light = (_data(path) for path in (picture.dark, picture.light))
    image = f'<img src="{light}" alt="{shown(title)}: see the caption">'
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    return (
        f"<figure><h3>{shown(title)}</h3><picture>{source}{image}</picture><figcaption>{caption}</figcaption></figure>"
    )


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    """A table; cells are HTML, titles are text."""
    head = "".join(element("th", shown(title)) for title in titles)
    body = "".join(element("tr", "".join(element("td", cell) for cell in row)) for row in rows)
    inside = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return element("div", element("table", inside, kind), "wide")


def card(title: str, value: str, *remarks: str) -> str:
    """A card with one number; the value and the remarks are HTML."""
    inside = element("h3", shown(title)) + paragraph(value, "value") + "".join(map(paragraph, remarks))
    return element("div", inside, "card")


def details(title: str, inside: str) -> str:
    return f"<details><summary>{shown(title)}</summary>{inside}</details>"


def format_number(value: float, digits: int = 3) -> str:
    """A number with a fixed number of digits; NO_VALUE for NaN."""
    if math.isnan(value):
        return NO_VALUE
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:,.0f}"


def format_percent(value: float) -> str:
    return NO_VALUE if math.isnan(value) else f"{100 * value:.1f} %"


def format_duration(seconds: float) -> str:
    if math.isnan(seconds):
        return NO_VALUE
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (minutes > 0) + [f"{rest} s"] * (hours == 0)
    return " ".join(parts)


def document(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # a second barrier: even unescaped text could neither run nor fetch anything
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{shown(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _data(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _swatches(theme: Theme) -> str:
    return "".join(f".c{i}{{background:{colour}}}" for i, colour in enumerate(theme.colours))


_STYLE = (
    """
:root{--ink:#1d2329;--soft:#5c6670;--line:#dde1e6;--paper:#fff;--panel:#f6f7f9;--good:#1a7f37;--bad:#b3261e}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
main{max-width:1160px;margin:0 auto;padding:24px 20px 64px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.2rem;margin:44px 0 10px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:.95rem;margin:0 0 6px}
p{margin:6px 0;max-width:78ch}
.soft,figcaption,summary{color:var(--soft);font-size:.9rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));gap:26px 32px;margin:14px 0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,230px),1fr));gap:14px;margin:18px 0}
.card{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.card h3{color:var(--soft);font-weight:500}
.card p{margin:2px 0;font-size:.88rem;color:var(--soft)}
.card .value{font-size:1.35rem;font-weight:600;color:var(--ink);font-variant-numeric:tabular-nums}
figure{margin:0;min-width:0}
figure img{width:100%;height:auto;display:block}
figcaption{margin-top:4px}
.wide{overflow-x:auto;margin:12px 0}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:5px 14px 5px 0;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500;white-space:nowrap}
.numbers td,.numbers th{overflow-wrap:normal;white-space:nowrap}
.facts th{width:9em}
.compared tr>:first-child{position:sticky;left:0;background:var(--paper)}
pre,.said{font:.84rem/1.45 ui-monospace,monospace;white-space:pre-wrap;unicode-bidi:isolate}
.said{display:block}
pre{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px;overflow-x:auto}
.example{border:1px solid var(--line);border-radius:8px;padding:10px 14px;margin:12px 0}
.sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:8px 24px;margin-top:8px}
.reward{margin-top:7px;font-variant-numeric:tabular-nums;color:var(--soft);font-size:.85rem}
.up{color:var(--good)}.down{color:var(--bad)}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:50%;border:1px solid var(--line);margin-right:.4em;
vertical-align:-.05em}
details{margin:10px 0}summary{cursor:pointer}
"""
    + _swatches(LIGHT)
    + """
@media(prefers-color-scheme:dark){
:root{--ink:#e3e7ec;--soft:#9aa5b1;--line:#333b44;--paper:#14181d;--panel:#1b2027;--good:#56d364;--bad:#ff8a80}
"""
    + _swatches(DARK)
    + "}\n@media(max-width:600px){main{padding:16px 14px 48px}h1{font-size:1.4rem}}\n"
)
