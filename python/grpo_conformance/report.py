"""Tables of results, as text, Markdown, HTML and JSON."""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from grpo_conformance.run import ERROR, FAILS, NOT_OFFERED, PASSES, REPORTS, Convention, Invariant, Result

Results = Mapping[str, Sequence[Result]]  # by the adapter's name
Table = tuple[str, list[str], list[list[str]]]  # title, header, rows
THREADS = {  # of public projects, in which users met what a case is about
    "uneven-groups": "THUDM/slime#1414 THUDM/slime#2230 THUDM/slime#2204",
    "rollout-in-mean": "radixark/miles#2378 radixark/miles#1931 THUDM/slime#2302 rllm-org/rllm#924",
    "rollout-leave-one-out": "verl-project/verl#7580 microsoft/agent-lightning#593",
    "rollout-in-std": "radixark/miles#1931",
    "masked-vote": "verl-project/verl#6375 NVIDIA-NeMo/RL#4061 NVIDIA-NeMo/RL#3467",
    "unscored": "huggingface/trl#7068",
    "pad-rows": "verl-project/verl#7771",
    "gae-gap": "NVIDIA-NeMo/RL#4156 verl-project/verl#336",
    "parts-tokens": "huggingface/trl#5619 NovaSky-AI/SkyRL#794",
    "parts-rows": "verl-project/verl#6609",
    "ranks-tokens": "NovaSky-AI/SkyRL#1751 inclusionAI/AReaL#1730",
    "ranks-rows": "verl-project/verl#7200",
    "slices-rows": "verl-project/verl#7200",
    "kl-share": "verl-project/verl#6609",
    "rollout-mean": "verl-project/verl#7580 rllm-org/rllm#924 radixark/miles#2378",
    "rollout-sum": "THUDM/slime#2302",
    "rollout-in-parts": "radixark/miles#2378",
    "pad-rows-loss": "verl-project/verl#7771",
    "siblings": "radixark/miles#2498",
    "discount": "NVIDIA-NeMo/RL#4156",
}
START = "<!-- written by grpo-conformance --markdown -->"


def tables(results: Results, link: str = "{thread}") -> list[Table]:
    """The invariants, what went wrong in them, and the conventions; their last column has the threads."""
    invariants, wrong, conventions = list[list[str]](), list[list[str]](), list[list[str]]()
    for row in zip(*results.values(), strict=True):
        case = row[0].case
        listed = [(name, name.replace("#", "/issues/")) for name in THREADS.get(case.name, "").split()]
        threads = " ".join(link.format(thread=name, address=f"https://github.com/{path}") for name, path in listed)
        if isinstance(case, Convention):
            said = [result.text if result.status == REPORTS else result.status for result in row]
            conventions.append([case.title, *said, threads])
            continue
        invariants.append([case.name, case.title, *(result.status for result in row), threads])
        failed = [(name, of) for name, of in zip(results, row, strict=True) if of.has_failed]
        wrong += [[case.name, name, result.text, threads] for name, result in failed]
    return [
        ("Invariants", ["case", "what must hold", *results, "met in"], invariants),
        ("What went wrong", ["case", "trainer", "numbers", "met in"], wrong),
        ("Conventions", ["choice", *results, "met in"], conventions),
    ]


def text(results: Results) -> str:
    """The tables for a terminal, with settings and inputs of each case that went wrong, and why others were not run."""
    (_, _, invariants), (_, _, wrong), (_, _, conventions) = tables(results)
    cases = {one.case.name: one.case for of in results.values() for one in of if isinstance(one.case, Invariant)}
    width = max((len(name) for name, *_ in invariants), default=0)
    lines = [" " * width + "  " + "  ".join(results)]
    for name, _, *marks, _ in invariants:
        cells = [mark.ljust(len(of)) for of, mark in zip(results, marks, strict=True)]
        lines.append(f"{name:<{width}}  {'  '.join(cells)}".rstrip())
    lines += ["", "What went wrong"] if wrong else []
    for name, trainer, numbers, _ in wrong:
        case = cases[name]
        cells = [f"{name}: {case.title}", trainer, case.settings, case.inputs, numbers]
        lines.append(" | ".join(cell for cell in cells if cell))
    absent = defaultdict[tuple[str, str], list[str]](list)
    for trainer, of in results.items():
        for result in of:
            if result.status == NOT_OFFERED:
                absent[trainer, result.text].append(result.case.name)
    lines += ["", "Not offered"] if absent else []
    lines += [f"{trainer} | {reason} | {', '.join(names)}" for (trainer, reason), names in absent.items()]
    lines += ["", "Conventions", *(" | ".join(cells[:-1]) for cells in conventions)]
    return "\n".join(lines)


def markdown(results: Results, page: str = "") -> str:
    """A page with the tables after its introduction, which ends at the comment."""
    introduction = page.partition(START)[0]
    parts = []
    for title, header, rows in tables(results, "[{thread}]({address})"):
        if not rows:
            continue
        lines = [[cell.replace("|", "\\|") for cell in cells] for cells in (header, ["---"] * len(header), *rows)]
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    return f"{introduction}{START}\n\n" + "\n".join(parts)


def page(results: Results, before: str = "") -> str:
    """An HTML page that needs nothing else."""
    parts = []
    for title, header, rows in tables(results, '<a href="{address}">{thread}</a>'):
        if not rows:
            continue
        lines = ["".join(f"<th>{html.escape(name)}</th>" for name in header)]
        for *cells, threads in rows:
            kinds = [f' class="{cell}"' if cell in (PASSES, FAILS, ERROR) else "" for cell in cells]
            filled = [f"<td{kind}>{html.escape(cell)}</td>" for kind, cell in zip(kinds, cells, strict=True)]
            lines.append("".join(filled) + f"<td>{threads}</td>")
        parts.append(f"<h2>{title}</h2>\n<table>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>")
    return _PAGE.format(parts="\n".join(parts))


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Right counting</title>
<style>body {{ font: 15px sans-serif; margin: 2em }} td, th {{ text-align: left; padding: .2em .6em }}
.yes {{ background: #d9f2d9 }} .NO, .ERROR {{ background: #f8c9c4; font-weight: bold }}</style>
<h1>Right counting</h1>
<p>yes: it holds. NO: it does not, with the numbers below. ERROR: a method raised, or returned
something of another shape. -: the trainer has no such thing.</p>
{parts}
</html>
"""


def as_json(results: Results, before: str = "") -> str:
    return json.dumps({title: [header, *rows] for title, header, rows in tables(results)}, indent=1)
