"""Tables of results, as text, Markdown, HTML, JSON and JUnit, and a badge."""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from grpo_conformance.run import (
    CHOICE,
    ERROR,
    FAILS,
    FAULT,
    IGNORED,
    NOT_OFFERED,
    PASSES,
    REPORTS,
    ROBUSTNESS,
    Convention,
    Invariant,
    Result,
)

Results = Mapping[str, Sequence[Result]]  # by the adapter's name
Table = tuple[str, list[str], list[list[str]]]  # title, header, rows
THREADS = {  # of public projects, in which users met what a case is about
    "loo-std-outlier": "NVIDIA-NeMo/RL#4158 NVIDIA-NeMo/RL#4161",
    "uneven-groups": "THUDM/slime#1414 THUDM/slime#2230 THUDM/slime#2204",
    "rollout-in-mean": "radixark/miles#2378 radixark/miles#1931 THUDM/slime#2302 rllm-org/rllm#924",
    "rollout-leave-one-out": "verl-project/verl#7580 microsoft/agent-lightning#593",
    "rollout-in-std": "radixark/miles#1931",
    "pad-rows": "verl-project/verl#7771",
    "filter-whole-groups": "NVIDIA-NeMo/RL#3469 THUDM/slime#2381",
    "gae-gap": "NVIDIA-NeMo/RL#4156 verl-project/verl#336",
    "whiten-masked": "NovaSky-AI/SkyRL#1305 THUDM/slime#2235 radixark/miles#3229",
    "filter-mask": "alibaba/ROLL#444 Tencent-Hunyuan/UniRL#448",
    "parts-tokens": "huggingface/trl#5619 NovaSky-AI/SkyRL#794",
    "parts-rows": "verl-project/verl#6609",
    "ranks-tokens": "NovaSky-AI/SkyRL#1751 inclusionAI/AReaL#1730",
    "ranks-rows": "verl-project/verl#7200",
    "slices-rows": "verl-project/verl#7200",
    "kl-share": "verl-project/verl#6609",
    "teacher-share": "verl-project/verl#7200 NVIDIA-NeMo/RL#4172 huggingface/trl#6006",
    "value-share": "verl-project/verl#6957",
    "auxiliary-share": "NVIDIA-NeMo/RL#3791 NovaSky-AI/SkyRL#1504",
    "rollout-mean": "verl-project/verl#7580 rllm-org/rllm#924 radixark/miles#2378 THUDM/slime#2302",
    "rollout-in-parts": "radixark/miles#2378",
    "pad-rows-tokens": "verl-project/verl#7771",
    "truncated-denominator": "huggingface/trl#6439",
    "temperature": "huggingface/trl#3029 NVIDIA-NeMo/RL#316 OpenRLHF/OpenRLHF#1319",
    "alignment": "InternLM/xtuner#2095 PrimeIntellect-ai/prime-rl#1525 verl-project/verl#3287",
    "voters": "verl-project/verl#6375 NVIDIA-NeMo/RL#4061 NVIDIA-NeMo/RL#3467",
    "scored-voters": "huggingface/trl#7068",
    "siblings": "radixark/miles#2498",
    "discount": "NVIDIA-NeMo/RL#4156",
}
START = "<!-- written by grpo-conformance --markdown -->"
COLOURS = {False: "brightgreen", True: "red"}


def tables(results: Results, link: str = "{thread}") -> list[Table]:
    """Faults and what went wrong in them, choices, and robustness; the last column has the threads."""
    rows: dict[str, list[list[str]]] = {FAULT: [], ROBUSTNESS: [], CHOICE: []}
    wrong: dict[str, list[list[str]]] = {FAULT: [], ROBUSTNESS: []}
    for row in zip(*results.values(), strict=True):
        case, threads = row[0].case, _threads(row[0].case.name, link)
        if isinstance(case, Convention):
            said = [result.text if result.status == REPORTS else result.status for result in row]
            rows[CHOICE].append([case.title, *said, threads])
            continue
        rows[case.kind].append([case.name, case.title, *(result.status for result in row), threads])
        if any(result.status == CHOICE for result in row):
            said = [result.text if result.status == CHOICE else result.status for result in row]
            rows[CHOICE].append([case.title, *said, threads])
        failed = [(name, result) for name, result in zip(results, row, strict=True) if result.has_failed]
        wrong[case.kind] += [[case.name, name, of.where, settings_of(of), of.text, threads] for name, of in failed]
    header = ["case", "what must hold", *results, "met in"]
    details = ["case", "trainer", "where", "asked for", "numbers", "met in"]
    return [
        ("Faults", header, rows[FAULT]),
        ("What went wrong", details, wrong[FAULT]),
        ("Choices", ["choice", *results, "met in"], rows[CHOICE]),
        ("Robustness", header, rows[ROBUSTNESS]),
        ("Where numbers were not finite or not exact", details, wrong[ROBUSTNESS]),
    ]


def settings_of(result: Result) -> str:
    return result.case.settings if isinstance(result.case, Invariant) else ""


def _threads(name: str, link: str) -> str:
    listed = [(thread, thread.replace("#", "/issues/")) for thread in THREADS.get(name, "").split()]
    return " ".join(link.format(thread=thread, address=f"https://github.com/{path}") for thread, path in listed)


def text(results: Results) -> str:
    """The tables for a terminal, with settings and inputs of each case that went wrong, and why others were not run."""
    (_, _, faults), _, (_, _, choices), (_, _, robustness), _ = tables(results)
    everything = [*faults, *robustness]
    width = max((len(name) for name, *_ in everything), default=0)
    lines = [" " * width + "  " + "  ".join(results)]
    for name, _, *marks, _ in everything:
        cells = [mark.ljust(len(of)) for of, mark in zip(results, marks, strict=True)]
        lines.append(f"{name:<{width}}  {'  '.join(cells)}".rstrip())
    for kind, title in ((FAULT, "Faults"), (ROBUSTNESS, "Robustness")):
        wrong = [_failure(trainer, result) for trainer, result in _failed(results, kind)]
        lines += ["", title, *wrong] if wrong else []
    absent = defaultdict[tuple[str, str, str], list[str]](list)
    for trainer, of in results.items():
        for result in of:
            if result.status in (NOT_OFFERED, IGNORED):
                absent[trainer, result.status, result.text].append(result.case.name)
    for status, title in ((IGNORED, "Ignored"), (NOT_OFFERED, "Not offered")):
        found = [(trainer, reason, names) for (trainer, kind, reason), names in absent.items() if kind == status]
        lines += ["", title] if found else []
        lines += [f"{trainer} | {reason} | {', '.join(names)}" for trainer, reason, names in found]
    lines += ["", "Choices", *(" | ".join(cells[:-1]) for cells in choices)]
    return "\n".join(lines)


def _failed(results: Results, kind: str) -> list[tuple[str, Result]]:
    """The failures of a kind, each after the trainer's name."""
    pairs = [(trainer, result) for trainer, of in results.items() for result in of if result.has_failed]
    return [(trainer, of) for trainer, of in pairs if isinstance(of.case, Invariant) and of.case.kind == kind]


def _failure(trainer: str, result: Result) -> str:
    """A failure in one line: the case, the trainer, what it was given, and the numbers."""
    case = result.case
    assert isinstance(case, Invariant)
    cells = [f"{case.name}: {case.title}", trainer, result.where, case.settings, case.inputs, result.text]
    return " | ".join(cell for cell in cells if cell)


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
something of another shape. choice: it does not, as the trainer documents. ignored: what the case
changes changes nothing. -: the trainer has no such thing.</p>
{parts}
</html>
"""


def as_json(results: Results, before: str = "") -> str:
    return json.dumps({title: [header, *rows] for title, header, rows in tables(results)}, indent=1)


def junit(results: Results, before: str = "") -> str:
    """JUnit's XML, a suite per trainer: faults fail, robustness and choices do not."""
    suites = ElementTree.Element("testsuites")
    for trainer, of in results.items():
        suite = ElementTree.SubElement(suites, "testsuite", name=trainer)
        for result in of:
            kind = result.case.kind if isinstance(result.case, Invariant) else CHOICE
            case = ElementTree.SubElement(suite, "testcase", classname=f"{trainer}.{kind}", name=result.case.name)
            if result.is_fault:
                tag = "error" if result.status == ERROR else "failure"
                ElementTree.SubElement(case, tag, message=result.text).text = _failure(trainer, result)
            elif result.status != PASSES:
                ElementTree.SubElement(case, "skipped", message=f"{result.status}: {result.text}")
        suite.set("tests", str(len(of)))
        suite.set("failures", str(sum(result.is_fault and result.status != ERROR for result in of)))
        suite.set("errors", str(sum(result.is_fault and result.status == ERROR for result in of)))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, "unicode") + "\n"


def badge(results: Results, before: str = "") -> str:
    """The JSON of an endpoint badge of shields.io, with the number of faults."""
    count = sum(result.is_fault for of in results.values() for result in of)
    message = f"{count} fault{'s' * (count != 1)}" if count else "no faults"
    fields = {"schemaVersion": 1, "label": "conformance", "message": message, "color": COLOURS[count > 0]}
    return json.dumps(fields) + "\n"
