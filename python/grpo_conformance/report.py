"""Tables of results, as text, Markdown, HTML and JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_conformance.run import ERROR, FAILS, NOT_OFFERED, PASSES, Case, Convention, Result

REPOSITORIES = {
    "agent-lightning": "microsoft/agent-lightning",
    "AReaL": "inclusionAI/AReaL",
    "miles": "radixark/miles",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "rllm": "rllm-org/rllm",
    "SkyRL": "NovaSky-AI/SkyRL",
    "slime": "THUDM/slime",
    "trl": "huggingface/trl",
    "verl": "verl-project/verl",
}
MARKS = {PASSES: "yes", FAILS: "NO", ERROR: "ERROR", NOT_OFFERED: "-"}
Results = Mapping[str, Sequence[Result]]  # by the adapter's name
TABLES = "<!-- written by grpo-conformance --markdown -->"
Cell = str | list[tuple[str, str]]  # a text, or names and addresses of links


def has_failed(results: Results) -> bool:
    return any(result.status in (FAILS, ERROR) for of in results.values() for result in of)


def links(case: Case) -> list[tuple[str, str]]:
    """Names and addresses of a case's threads."""
    threads = [thread.split("#") for thread in case.threads.split()]
    return [(f"{of}#{number}", f"https://github.com/{REPOSITORIES[of]}/issues/{number}") for of, number in threads]


def number(value: float) -> str:
    return f"{value:.4g}"


def what_went_wrong(result: Result, limit: int = 3) -> str:
    """The first of the wrong numbers beside the right ones."""
    if result.text:
        return result.text
    named = [f"{name} is {number(got)}, not {number(expected)}" for name, expected, got in result.numbers]
    more = len(named) - limit
    return "; ".join(named[:limit]) + (f"; and {more} more" if more > 0 else "")


def tables(results: Results) -> list[tuple[str, list[str], list[list[Cell]]]]:
    """Title, header and rows of: the invariants, what went wrong in them, and the conventions."""
    names, by_case = list(results), list(zip(*results.values(), strict=True))
    invariants: list[list[Cell]] = []
    conventions: list[list[Cell]] = []
    wrong: list[list[Cell]] = []
    for row in by_case:
        case = row[0].case
        if isinstance(case, Convention):
            texts = ["-" if result.status == NOT_OFFERED else result.text for result in row]
            conventions.append([case.title, *texts, links(case)])
            continue
        invariants.append([case.name, case.title, *(MARKS[result.status] for result in row), links(case)])
        failed = [(name, r) for name, r in zip(names, row, strict=True) if r.status in (FAILS, ERROR)]
        wrong += [[case.name, name, what_went_wrong(result)] for name, result in failed]
    return [
        ("Invariants", ["case", "what must hold", *names, "met in"], invariants),
        ("What went wrong", ["case", "trainer", "numbers"], wrong),
        ("Conventions", ["choice", *names, "met in"], conventions),
    ]


def text(results: Results) -> str:
    """The tables for a terminal, without the titles and links of cases."""
    width = max((len(result.case.name) for of in results.values() for result in of), default=0)
    lines = [" " * width + "  " + "  ".join(results)]
    for row in zip(*results.values(), strict=True):
        if not isinstance(row[0].case, Convention):
            marks = [MARKS[result.status].ljust(len(name)) for name, result in zip(results, row, strict=True)]
            lines.append(f"{row[0].case.name:<{width}}  {'  '.join(marks)}".rstrip())
    for title, _, rows in tables(results)[1:]:
        lines += ["", title, *(" | ".join(cell for cell in row if isinstance(cell, str)) for row in rows)]
    return "\n".join(lines)


def markdown(results: Results, page: str = "") -> str:
    """A page with the tables after its introduction, which ends at the comment."""
    introduction, comment, _ = page.partition(TABLES)
    parts = [introduction + TABLES + "\n\n" if comment else ""]
    for title, header, rows in tables(results):
        lines = [header, ["---"] * len(header), *([_in_markdown(cell) for cell in row] for row in rows)]
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    return parts[0] + "\n".join(parts[1:])


def _in_markdown(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    return " ".join(f"[{name}]({address})" for name, address in cell)


def page(results: Results, before: str = "") -> str:
    """An HTML page that needs nothing else."""
    parts = []
    for title, header, rows in tables(results):
        head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
        body = "\n".join(f"<tr>{''.join(map(_in_html, row))}</tr>" for row in rows)
        parts.append(f"<h2>{title}</h2>\n<table>\n<tr>{head}</tr>\n{body}\n</table>")
    return _PAGE.format(parts="\n".join(parts))


def _in_html(cell: Cell) -> str:
    if isinstance(cell, str):
        kind = f' class="{cell}"' if cell in MARKS.values() and cell != "-" else ""
        return f"<td{kind}>{html.escape(cell)}</td>"
    return f"<td>{' '.join(f'<a href={json.dumps(address)}>{name}</a>' for name, address in cell)}</td>"


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Right counting</title>
<style>body {{ font: 15px sans-serif; margin: 2em }} td, th {{ text-align: left; padding: .2em .6em }}
.yes {{ background: #d9f2d9 }} .NO, .ERROR {{ background: #f8c9c4; font-weight: bold }}</style>
<h1>Right counting</h1>
<p>yes: it holds. NO: it does not, with the numbers below. -: the trainer has no such thing.</p>
{parts}
</html>
"""


def as_json(results: Results, before: str = "") -> str:
    def fields(result: Result) -> dict[str, Any]:
        wrong = [{"name": n, "expected": number(e), "got": number(g)} for n, e, g in result.numbers]
        return {"case": result.case.name, "status": result.status, "text": result.text, "wrong": wrong}

    return json.dumps({name: [fields(result) for result in of] for name, of in results.items()}, indent=1)
