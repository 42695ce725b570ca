#!/usr/bin/env python3
"""Predict from machine code how close each GPU kernel comes to the speed of a copy. No GPU is needed.

    python tools/gpu_roofline.py [--target sm_90] [--op NAME] [--launches] [--json FILE] [--into docs/performance.md]
    python tools/gpu_roofline.py --source FILE.cu [--kernel REGEX] [--loops]   # one file, while writing a kernel

The calls are those of tools/roofline_cases.py. A prediction is not a measurement: tools/gpu_model.py states what it
assumes of each GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.gpu_model import (  # noqa: E402 - found through the line above
    ARCHITECTURES,
    GPUS,
    LAUNCH_SECONDS,
    Gpu,
    memory_of,
    occupancy,
)
from tools.roofline_cases import CASES  # noqa: E402
from tools.roofline_predict import (  # noqa: E402
    UNBOUNDED_THREADS,
    LoopReport,
    Prediction,
    compile_cases,
    compile_source,
    hot_loop,
    predict_case,
    report_loop,
)
from tools.sass import Kernel, Route, read_cubin  # noqa: E402

WIDTH = 100  # columns of the document

# --- one source


def widths(counts: dict[int, int]) -> str:
    """Accesses by width, such as ``2x128``."""
    return "+".join(f"{count}x{bits}" for bits, count in counts.items()) or "-"


def describe_kernel(kernel: Kernel, warps: int, threads: int) -> str:
    total = memory_of(kernel.instructions)
    return (
        f"{kernel.demangled}\n  {kernel.registers} registers, {kernel.shared_bytes} bytes of static shared memory, "
        f"{kernel.frame_bytes} of stack; {warps} of 64 warps resident with blocks of {threads}\n"
        f"  in all: {len(kernel.instructions)} instructions, {total.local} local, {total.generic} generic, "
        f"{total.shared} shared accesses"
    )


def describe_loop(report: LoopReport, element_bytes: float, verbose: bool) -> str:
    memory, flying, count = report.memory, report.latency, len(report.trace)
    elements = memory.bytes / element_bytes if element_bytes else 0
    each = f", {count / elements:.1f} an element" if elements else ""
    text = (
        f"    {'loop' if report.loop.latches else 'body'} at depth {report.loop.depth}, {report.lines}\n"
        f"      {count} instructions{each}, {report.issue.cycles:.0f} scheduler cycles by {report.issue.bound}; "
        f"alone {flying.cycles:.0f} cycles\n"
        f"      loads {widths(memory.loads)}, stores {widths(memory.stores)}; in flight {flying.loads_in_flight} "
        f"loads, {flying.bytes_in_flight} bytes a thread; {memory.shared} shared, {memory.local} local, "
        f"{memory.generic} generic, {memory.bulk_copies} bulk\n"
        f"      of a copy: issue {report.issue_share:.2f}, latency {report.latency_share:.2f}, "
        f"predicted {report.share:.2f}"
    )
    if not verbose:
        return text
    pipes = ", ".join(f"{p} {c:.0f}" for p, c in sorted(report.issue.by_pipe.items(), key=lambda item: -item[1]))
    opcodes = ", ".join(f"{n} {o}" for o, n in Counter(i.opcode for i in report.trace).most_common())
    return f"{text}\n      cycles: {pipes}\n      {opcodes}"


def show_source(options: argparse.Namespace, gpu: Gpu) -> str:
    """The report of one source's kernels: the hot loop of each or, with ``--loops``, all loops."""
    with tempfile.TemporaryDirectory(prefix="gpu_roofline_") as folder:
        cubin = Path(folder) / "source.cubin"
        compile_source(options.source, options.target, cubin)
        kernels = read_cubin(cubin, options.kernel)
    route = Route(not options.shortest, (("", options.trips),), options.through, options.avoid)
    parts = [f"{gpu.name}, predicted, relative to a copy at {gpu.copy / 1e12:.1f} TB/s"]
    for kernel in kernels:
        threads = options.threads or kernel.max_threads or UNBOUNDED_THREADS
        warps = occupancy(kernel, threads, gpu.architecture)
        parts.append(describe_kernel(kernel, warps, threads))
        hot = hot_loop(kernel, options.loop)
        for loop in [*kernel.loops, kernel.body] if options.loops else [hot]:
            report = report_loop(kernel, loop, gpu, warps, route)
            parts.append(("  * " if loop == hot else "    ") + describe_loop(report, options.bytes, options.loops)[4:])
    return "\n".join(parts)


# --- the table of all calls


def predict(
    target: str, backends: Sequence[str], op: str = "", folder: Path | None = None
) -> tuple[dict[str, list[Prediction]], list[str]]:
    """Predictions of the cases on every GPU of a target, by the GPU's name, and a line for each case that failed.

    Args:
        target: architecture to compile for.
        backends: ``cuda``, ``triton``, or both.
        op: only this op's cases.
        folder: keeps the compiled kernels, and reuses those it has.
    """
    cases = [case for case in CASES if op in ("", case.op)]
    gpus = [gpu for gpu in GPUS.values() if gpu.architecture == target]
    results: dict[str, list[Prediction]] = {gpu.name: [] for gpu in gpus}
    with tempfile.TemporaryDirectory(prefix="gpu_roofline_") as scratch:
        at = Path(scratch) if folder is None else folder
        at.mkdir(parents=True, exist_ok=True)
        failures = compile_cases(cases, backends, target, at)
        for case, backend in itertools.product(cases, backends):
            try:
                predictions = predict_case(case, backend, gpus, at) if getattr(case, backend) else []
            except (FileNotFoundError, ValueError) as error:  # a pattern that no kernel or line matches any more
                failures.append(f"{case.op}, {case.name}, {backend}: {error}")
                continue
            for prediction in predictions:
                results[prediction.gpu].append(prediction)
    return results, failures


HEADER = ("call", "backend", "time", "share of copy", "bound by", "instructions", "registers", "occupancy", "access")


def table_rows(results: dict[str, list[Prediction]]) -> list[tuple[str, ...]]:
    """One row per call and backend; the columns behind the shares are those of its longest launch."""
    rows: list[tuple[str, ...]] = []
    for several in zip(*results.values(), strict=True):
        first, main = several[0], several[0].main
        shares = " / ".join(f"{prediction.share:.1%}" for prediction in several)
        in_flight = f"{main.width} bits, {main.loads_in_flight} in flight"
        flaws = "".join(
            f", {count} {name}" for name, count in (("local", main.local), ("generic", main.generic)) if count
        )
        rows.append(
            (
                f"`{first.op}`, {first.name}",
                first.backend,
                f"{first.us:,.0f} us",
                shares,
                main.bound,
                f"{main.instructions:,.1f}" if main.registers else "",
                str(main.registers or ""),
                f"{main.occupancy:.0%}" if main.registers else "",
                in_flight + flaws if main.registers else "",
            )
        )
    return rows


def launch_rows(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """One row per launch, for one GPU."""
    return [
        (
            f"{prediction.op}, {prediction.name}, {prediction.backend}",
            launch.kernel,
            f"{launch.us:,.1f} us",
            launch.bound,
            f"{launch.instructions:,.1f}",
            str(launch.registers),
            f"{launch.occupancy:.0%}",
            launch.lines,
        )
        for prediction in predictions
        for launch in prediction.launches
    ]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    spread = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, spread)).rstrip() for line in lines)


def assumptions(gpus: Sequence[str]) -> str:
    known = {gpu.name: gpu for gpu in GPUS.values()}
    lines = [
        f"{gpu.name}: {gpu.sms} SMs at {gpu.clock / 1e9:.3f} GHz, a copy at {gpu.copy / 1e12:.1f} TB/s, a load in "
        f"{gpu.idle_latency * 1e9:.0f} ns of idle and {gpu.latency * 1e9:.0f} ns of busy memory"
        for gpu in (known[name] for name in gpus)
    ]
    return "; ".join(lines) + f". {LAUNCH_SECONDS * 1e6:.0f} us are added for each launch."


def document_text(results: dict[str, list[Prediction]]) -> str:
    names = list(results)
    text = (
        "Predicted from machine code, not measured. For each loop, the time is the largest of three: its bytes at the "
        "speed of a copy, the cycles of the schedulers or of the busiest pipe, and what the resident warps take that "
        f"wait for their own loads and arithmetic. Assumptions: {assumptions(names)} The time is that on {names[0]}, "
        f"the shares those on {' / '.join(names)}. The other columns are of the launch that takes longest: its bound, "
        "instructions per element, registers, share of 64 warps that are resident, narrowest global access, and loads "
        "in flight when a thread first waits."
    )
    wrapped = textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    rows = [HEADER, ("---",) * len(HEADER), *table_rows(results)]
    return wrapped + "\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def replaced(document: str, new: str, name: str = "predicted") -> str:
    """The document with new text between the marks of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if document.count(begin) != 1 or document.count(end) != 1:
        raise SystemExit(f"the document must have {begin} and {end} once each")
    head, _, rest = document.partition(begin)
    return f"{head}{begin}\n\n{new}\n\n{end}{rest.partition(end)[2]}"


def show_calls(options: argparse.Namespace) -> int:
    """Prints the table of calls and writes it where the options say; returns the exit status."""
    results, failures = predict(options.target, options.backend or ["cuda", "triton"], options.op, options.cubins)
    print(f"predicted, not measured. {assumptions(list(results))}")
    print(aligned([HEADER, *table_rows(results)]))
    if options.launches:
        print(aligned(launch_rows(next(iter(results.values())))))
    for failure in failures:
        print(f"FAIL {failure}", file=sys.stderr)
    if options.json is not None:
        report = {name: [prediction.to_json() for prediction in group] for name, group in results.items()}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.into is not None:
        options.into.write_text(replaced(options.into.read_text(), document_text(results)))
    return 1 if failures else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--target",
        choices=list(ARCHITECTURES),
        default="sm_90",
        help="architecture to compile for; default: %(default)s",
    )
    calls = parser.add_argument_group("all calls")
    calls.add_argument("--op", default="", help="only this op")
    calls.add_argument("--backend", action="append", choices=["cuda", "triton"], help="default: both")
    calls.add_argument("--launches", action="store_true", help="also print every launch")
    calls.add_argument("--json", type=Path, help="also write the predictions to this file")
    calls.add_argument("--into", type=Path, help="also write the table between the marks of this document")
    calls.add_argument("--cubins", type=Path, help="keep the compiled kernels in this folder, and reuse those it has")
    one = parser.add_argument_group("one source")
    one.add_argument("--source", type=Path, help="a CUDA source")
    one.add_argument("--gpu", choices=list(GPUS), help="default: the one that stands for the target")
    one.add_argument("--kernel", default="", help="regular expression over demangled names, with template arguments")
    one.add_argument("--loops", action="store_true", help="every loop, with cycles by pipe and a histogram")
    one.add_argument("--threads", type=int, default=0, help="block size; default: the kernel's launch bound")
    one.add_argument("--bytes", type=float, default=0, help="bytes that a loop moves per element, to count per element")
    one.add_argument("--loop", default="", help="source line of the loop to show, or body; default: most bytes")
    one.add_argument("--through", default="", help="source lines that the path through a loop visits")
    one.add_argument("--avoid", default="", help="source lines that the path through a loop avoids")
    one.add_argument("--trips", type=int, default=1, help="iterations of inner loops; default: %(default)s")
    one.add_argument("--shortest", action="store_true", help="take the shortest path through a loop, not the longest")
    options = parser.parse_args(argv)
    gpu = GPUS[options.gpu or ARCHITECTURES[options.target]]
    if gpu.architecture != options.target:
        parser.error(f"{options.gpu} is not of {options.target}")
    if options.source is not None:
        print(show_source(options, gpu))
        return 0
    return show_calls(options)


if __name__ == "__main__":
    sys.exit(main())
