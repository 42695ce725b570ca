"""Writes the results of gpu_check: a one-minute summary page, and an archive of everything.

python -m tools.gpu_summary FOLDER    # prints the page for a folder of results
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import gpu_lines
from benchmarks.tables import timing_rows

MOST_LOG = 400_000  # bytes kept from the end of a log
MOST_FAILURES = 40  # shown on the page
BACKENDS = ("cuda", "triton")
# Those that each op has kernels for
OPS = {
    "group_advantages": ("cuda",),
    "token_logprobs": BACKENDS,
    "linear_logprobs": BACKENDS,
    "linear_distillation_loss": BACKENDS,
    "policy_loss": ("cuda",),
    "linear_policy_loss": BACKENDS,
    "endpoint_segments": ("cuda",),
    "token_advantages": ("triton",),
    "similarity_groups": ("cuda",),
    "pairwise_cosine": ("cuda",),
    "cluster_distances": ("cuda",),
    "agglomerate": ("cuda",),
    "silhouette": ("cuda",),
}
PAIRS = [(op, backend) for op, backends in OPS.items() for backend in backends]
Result = dict[str, Any]


def results(folder: Path) -> dict[str, gpu_lines.Line]:
    """Last line of each test and case, by name."""
    return {
        item: line
        for path in sorted(folder.glob("*.jsonl"))
        for item, line in gpu_lines.results(gpu_lines.read(path)).items()
    }


def ran_on(lines: dict[str, gpu_lines.Line]) -> Counter[str]:
    """Number of passed tests and cases that called an op on a backend, by op:backend."""
    counts: Counter[str] = Counter()
    for item, line in lines.items():
        if line["state"] == "passed":
            counts.update({item.removeprefix("smoke:")} if item.startswith("smoke:") else line.get("ran_on", []))
    return counts


def lacking(counts: Counter[str]) -> list[str]:
    return [f"{op} on {backend}" for op, backend in PAIRS if not counts[f"{op}:{backend}"]]


def load(path: Path) -> Result:
    """Content of a JSON file, or {} if it is missing or was cut off."""
    try:
        content: Result = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return content


def peer_rows(result: Result) -> list[str]:
    rows = ["| op, case | a peer's time over ours |", "|---|---|"]
    for case in result["cases"]:
        ratios = [
            f"{name} {other['ratio']:.2f}" if "ratio" in other else f"{name}: {next(iter(other.values()))}"[:80]
            for name, other in case["providers"].items()
        ]
        rows.append(f"| {case['op']}, {case['name']} | {'; '.join(ratios)} |")
    return rows


def failures(lines: dict[str, gpu_lines.Line]) -> list[str]:
    bad = [(item, line) for item, line in lines.items() if line["state"] in gpu_lines.BAD]
    shown = [f"- `{item}` {line['state']}: {line.get('why', '')}" for item, line in bad[:MOST_FAILURES]]
    return shown + ([f"- and {len(bad) - MOST_FAILURES} more"] if len(bad) > MOST_FAILURES else [])


def page(folder: Path) -> str:
    """Summary of the results that the folder holds so far."""
    check, lines = load(folder / "gpu_check.json"), results(folder)
    counts, states = ran_on(lines), Counter(line["state"] for line in lines.values())
    machine = check.get("machine", {})
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "lacks")
    parts = [f"# GPU check: {machine.get('gpu', 'unknown GPU')}", facts, "## Steps"]
    table = ["| part | step | state | seconds | |", "|---|---|---|---|---|"]
    for row in check.get("steps", []):
        state = f"**{row['state']}**" if row["state"] == "FAILED" else row["state"]
        table.append(f"| {row['part']} | {row['step']} | {state} | {row['seconds']:.1f} | {row['why']} |")
    parts.append("\n".join(table))
    parts.append("## Tests and cases")
    parts.append(", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none")
    table = ["| passed | " + " | ".join(BACKENDS) + " |", "|---|" + "---|" * len(BACKENDS)]
    for op, backends in OPS.items():
        passed = [str(counts[f"{op}:{backend}"]) if backend in backends else "" for backend in BACKENDS]
        table.append(f"| {op} | {' | '.join(passed)} |")
    parts.append("\n".join(table))
    if bad := failures(lines):
        parts += ["## What failed", "\n".join(bad)]
    for title, file, rows in (("Times", "timings", timing_rows), ("Peers", "peers", peer_rows)):
        if result := load(folder / f"{file}.json"):
            parts += [f"## {title}", "\n".join(rows(result))]
            for what in ("failed", "left_out"):
                parts += [f"{what.replace('_', ' ')}: {name}" for name in result.get(what, [])]
    if limits := load(folder / "timings.json").get("ceiling"):
        most = ", ".join(f"{name} {value / 1e12:.3g} T/s" for name, value in limits.items())
        parts.append(f"Measured ceilings: {most}.")
    return "\n\n".join(parts) + "\n"


def bundle(folder: Path, out: Path) -> None:
    """Writes summary.md and gpu_check.tar.gz, each renamed once it is complete, so that neither is ever partial."""
    out.mkdir(parents=True, exist_ok=True)
    text = page(folder)
    (folder / "summary.md").write_text(text)
    partial = out / "partial"
    partial.write_text(text)
    partial.rename(out / "summary.md")
    with tarfile.open(partial, "w:gz") as archive:
        for path in sorted(file for file in folder.iterdir() if file.is_file()):
            if path.suffix == ".log" and path.stat().st_size > MOST_LOG:
                cut = folder / "cut"
                cut.write_bytes(b"[its beginning is left out]\n" + path.read_bytes()[-MOST_LOG:])
                archive.add(cut, path.name)
                cut.unlink()
            elif path.name != "cut":
                archive.add(path, path.name)
    partial.rename(out / "gpu_check.tar.gz")


if __name__ == "__main__":
    print(page(Path(sys.argv[1])), end="")
