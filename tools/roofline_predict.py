"""Compiles the kernels of the cases and predicts their times; see tools/gpu_roofline.py."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_model import (
    LANES,
    LAUNCH_SECONDS,
    MAX_WARPS,
    SCHEDULERS,
    Gpu,
    Issue,
    Latency,
    Memory,
    issue_cycles,
    loop_latency,
    memory_of,
    occupancy,
)
from tools.roofline_cases import CASES, Case, Launch, Torch
from tools.sass import DEFAULT_ROUTE, Instruction, Kernel, Loop, Route, read_cubin

ROOT = Path(__file__).resolve().parent.parent
UNBOUNDED_THREADS = 256  # block size assumed for a kernel without launch bounds
WORKERS = 2  # compilers at a time
ROUNDS = 3  # latency depends on the bandwidth in use, and that on latency


# --- compilation


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin")


def rounds_as_written(source: Path) -> bool:
    """Whether CMakeLists.txt compiles a source without fused multiply-add."""
    listed = re.findall(r"set_source_files_properties\(([^)]*)-fmad=false", (ROOT / "CMakeLists.txt").read_text())
    return any(str(source).endswith(name) for name in re.findall(r"\S+\.cu", " ".join(listed)))


def compile_source(source: Path, architecture: str, output: Path) -> None:
    """Compiles a CUDA source with the project's flags to a cubin."""
    command = [find_nvcc() or "nvcc", "-std=c++20", "-O3", f"-arch={architecture}", "-lineinfo", "-cubin"]
    command += ["-fmad=false"] if rounds_as_written(source) else []
    command += [f"-I{ROOT / 'csrc'}", str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc: {source} does not compile\n{done.stderr}")


def compile_triton(op: str, name: str, architecture: str, output: Path) -> None:
    """Compiles the AotCase ``kernel[label]`` of an op to a cubin."""
    from tools import aot_compile

    aot_compile.prepare_environment()
    _, cases = aot_compile.collect(op)
    by_name = {aot_compile.case_name(case): case for case in cases}
    if name not in by_name:
        raise ValueError(f"{op} declares no Triton case {name!r}, but {', '.join(by_name)}")
    output.write_bytes(
        aot_compile.compile_cubin(by_name[name], architecture, str(output.parent / f"{output.stem}.cache"))
    )


def _compile(job: tuple[str, str, str, Path]) -> str:
    """Compiles one job; returns what went wrong, if anything."""
    op, kernel, architecture, output = job
    try:
        if kernel:
            compile_triton(op, kernel, architecture, output)
        else:
            compile_source(ROOT / "csrc" / op, architecture, output)
    except Exception as error:  # whatever the compilers raise must not hide the other kernels
        return f"{op} {kernel}: {type(error).__name__}: {error}"
    return ""


def compile_cases(cases: Iterable[Case], backends: Sequence[str], architecture: str, folder: Path) -> list[str]:
    """Compiles what the cases launch, a few at a time, unless the folder has it; returns what went wrong."""
    jobs = {}
    for case in cases:
        for backend in backends:
            for launch in getattr(case, backend):
                if isinstance(launch, Launch):
                    path = _cubin(case, backend, launch, folder)
                    jobs[path] = (case.source(launch), "") if backend == "cuda" else (case.op, launch.kernel)
    todo = [(op, kernel, architecture, path) for path, (op, kernel) in jobs.items() if not path.exists()]
    # the longest first: sources of CUDA
    todo.sort(key=lambda job: bool(job[1]))
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("fork")) as pool:
        return [failure for failure in pool.map(_compile, todo) if failure]


def _cubin(case: Case, backend: str, launch: Launch, folder: Path) -> Path:
    name = case.source(launch) if backend == "cuda" else f"{case.op} {launch.kernel}"
    return folder / (re.sub(r"\W+", "_", name) + ".cubin")


# --- one loop


@dataclass(frozen=True)
class LoopReport:
    """Cost and traffic of one iteration of a loop on one GPU; shares are of the speed of a copy.

    Attributes:
        warps: warps resident on an SM.
        issue_share: bandwidth at which the schedulers, or the busiest pipe, can ask for the loop's bytes.
        latency_share: bandwidth that the resident warps sustain, each waiting for its own loads and arithmetic.
    """

    loop: Loop
    trace: list[Instruction]
    issue: Issue
    memory: Memory
    latency: Latency
    warps: float
    issue_share: float
    latency_share: float

    @property
    def share(self) -> float:
        return min(self.issue_share, self.latency_share, 1.0)

    @property
    def lines(self) -> str:
        """The range of source lines, in the file with most instructions."""
        places = Counter(i.where.partition(" ")[0] for i in self.trace if i.line)
        files = Counter(place.rpartition(":")[0] for place in places.elements())
        if not files:
            return ""
        file = files.most_common(1)[0][0]
        numbers = sorted(int(place.rpartition(":")[2]) for place in places if place.rpartition(":")[0] == file)
        return f"{file}:{numbers[0]}-{numbers[-1]}"


def report_loop(kernel: Kernel, loop: Loop, gpu: Gpu, warps: float, route: Route = DEFAULT_ROUTE) -> LoopReport:
    trace = kernel.trace(loop, route)
    issue, memory = issue_cycles(trace, gpu.architecture), memory_of(trace)
    moved = memory.bytes * LANES * gpu.sms * gpu.clock / gpu.copy
    issue_share = moved * min(SCHEDULERS, warps) / issue.cycles
    share = 1.0
    for _ in range(ROUNDS):
        latency = loop_latency(trace, gpu, is_loop=bool(loop.latches), share=share)
        share = min(1.0, issue_share, moved * warps / latency.cycles)
    return LoopReport(loop, trace, issue, memory, latency, warps, issue_share, moved * warps / latency.cycles)


def hot_loop(kernel: Kernel, where: str = "") -> Loop:
    """The loop to look at.

    Args:
        where: empty for the innermost loop that moves most global bytes an iteration, or the whole kernel if none
            moves any; ``body`` for the whole kernel; else a regular expression over source lines, as
            ``folder/file:number text | opcode``, for the innermost loop with such a line and, of several, that with
            most bytes.
    """
    if where == "body":
        return kernel.body
    if where:
        lines = {a: [i.tag for n in a.blocks for i in kernel.blocks[n].instructions] for a in kernel.loops}
        matching = [a for a in kernel.loops if any(re.search(where, line) for line in lines[a])]
        if not matching:
            raise ValueError(f"{kernel.demangled}: no loop has a source line that matches {where!r}")
        inner = [a for a in matching if not any(b.blocks < a.blocks for b in matching)]
        return max(inner, key=lambda a: _moved(kernel, a))
    inner = [a for a in kernel.loops if not any(b.blocks < a.blocks and _moved(kernel, b) for b in kernel.loops)]
    best = max(inner, key=lambda a: _moved(kernel, a), default=None)
    return best if best is not None and _moved(kernel, best) > 0 else kernel.body


def _moved(kernel: Kernel, loop: Loop) -> int:
    memory = memory_of(kernel.trace(loop))
    return memory.bytes + memory.bulk_copies


# --- calls


@dataclass
class LaunchPrediction:
    """Prediction for one launch; all counts are of the machine code.

    Attributes:
        bound: ``memory``, ``latency``, or the pipe that the schedulers wait for.
        instructions: per element, in the hot loop.
        width: bits of the narrowest global access that carries at least an eighth of the hot loop's bytes.
        local: accesses of the whole kernel to local memory; generic likewise.
        occupancy: share of the SM's 64 warps that registers, shared memory and the grid allow.
    """

    kernel: str
    us: float
    bound: str
    registers: int = 0
    occupancy: float = 0.0
    instructions: float = 0.0
    cycles: float = 0.0
    width: int = 0
    loads_in_flight: int = 0
    bytes_in_flight: int = 0
    local: int = 0
    generic: int = 0
    frame_bytes: int = 0
    lines: str = ""


@dataclass
class Prediction:
    """The predicted time of a call on one GPU, and its floor's share of that."""

    op: str
    name: str
    backend: str
    gpu: str
    us: float
    share: float
    launches: list[LaunchPrediction] = field(default_factory=list)

    @property
    def main(self) -> LaunchPrediction:
        """The launch that takes longest."""
        return max(self.launches, key=lambda launch: launch.us)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def predict_launch(kernel: Kernel, launch: Launch, gpu: Gpu) -> LaunchPrediction:
    threads = launch.threads or kernel.max_threads or UNBOUNDED_THREADS
    per_block = -(-threads // LANES)
    resident = min(
        occupancy(kernel, threads, gpu.architecture, launch.shared), -(-launch.blocks // gpu.sms) * per_block
    )
    route = Route(launch.is_longest, launch.trips, launch.through, launch.avoid)
    report = report_loop(kernel, hot_loop(kernel, launch.loop), gpu, resident, route)
    per_thread = launch.per_thread or report.memory.bytes / launch.bytes
    around: list[Instruction] = []
    if report.loop.latches and launch.is_launch:
        around = kernel.trace(kernel.body, route, without=report.loop)
    times = _times(report, around, launch, gpu, per_thread, per_block)
    bound = max(times, key=lambda name: times[name])
    total = memory_of(kernel.instructions)
    return LaunchPrediction(
        kernel=re.sub(r"^void |[(](?!WalkKind).*", "", kernel.demangled),
        us=round(1e6 * times[bound], 3),
        bound=bound,
        registers=kernel.registers,
        occupancy=round(resident / MAX_WARPS, 3),
        instructions=round(len(report.trace) / per_thread, 2),
        cycles=round(report.issue.cycles / per_thread, 2),
        width=_width(report.memory),
        loads_in_flight=report.latency.loads_in_flight,
        bytes_in_flight=report.latency.bytes_in_flight,
        local=total.local,
        generic=total.generic,
        frame_bytes=kernel.frame_bytes,
        lines=report.lines,
    )


def _times(
    report: LoopReport, around: list[Instruction], launch: Launch, gpu: Gpu, per_thread: float, per_block: int
) -> dict[str, float]:
    """Seconds that each limit alone would take: memory, latency, and the busiest pipe."""
    threads = launch.threads or LANES * per_block
    sms, resident = min(gpu.sms, launch.blocks), report.warps
    # iterations of all warps, and the code around the loop once a warp
    iterations, warps = launch.elements / (per_thread * min(LANES, threads)), launch.blocks * per_block
    outside = issue_cycles(around, gpu.architecture).cycles if around else 0.0
    issue = (iterations * report.issue.cycles + warps * outside) / (min(SCHEDULERS, resident) * sms) / gpu.clock
    memory = launch.elements * launch.bytes / gpu.copy
    waves = max(1.0, warps / (resident * sms))
    latency = 0.0
    for _ in range(ROUNDS):
        share = min(1.0, memory / max(latency, issue, memory))
        options: dict[str, Any] = {"share": share, "has_rereads": launch.has_rereads}
        once = loop_latency(report.trace, gpu, is_loop=bool(report.loop.latches), **options).cycles
        alone = loop_latency(around, gpu, is_loop=False, **options).cycles if around else 0.0
        latency = (iterations / warps * once + alone) * waves / gpu.clock
    return {"memory": memory, "latency": latency, report.issue.bound: issue}


def _width(memory: Memory) -> int:
    counts = Counter(memory.loads) + Counter(memory.stores)
    carrying = [bits for bits, count in counts.items() if bits * count >= memory.bytes]  # an eighth, in bytes
    return min(carrying, default=0)


def predict_case(case: Case, backend: str, gpus: Sequence[Gpu], folder: Path) -> list[Prediction]:
    """The prediction of one call by one backend for GPUs of one architecture."""
    launches: tuple[Launch | Torch, ...] = getattr(case, backend)
    kernels = [_kernel_of(case, backend, launch, folder) for launch in launches]
    results = []
    for gpu in gpus:
        made = []
        for launch, kernel in zip(launches, kernels, strict=True):
            if isinstance(launch, Torch):
                made.append(
                    LaunchPrediction(f"torch: {launch.what}", round(1e6 * launch.bytes / gpu.copy, 3), "memory")
                )
            elif kernel is not None:
                made.append(predict_launch(kernel, launch, gpu))
        starts = sum(a.launches if isinstance(a, Torch) else a.is_launch for a in launches)
        us = sum(launch.us for launch in made) + 1e6 * LAUNCH_SECONDS * starts
        share = 1e6 * case.floor / gpu.copy / us
        results.append(Prediction(case.op, case.name, backend, gpu.name, round(us, 2), round(share, 4), made))
    return results


@functools.cache
def _read(path: Path, pattern: str) -> list[Kernel]:
    return read_cubin(path, pattern)


def _kernel_of(case: Case, backend: str, launch: Launch | Torch, folder: Path) -> Kernel | None:
    if isinstance(launch, Torch):
        return None
    cubin = _cubin(case, backend, launch, folder)
    if backend == "triton":
        kernel = _read(cubin, "")[0]
        kernel.demangled = launch.kernel
        return kernel
    # one disassembly of what any case wants of the source
    others = {a.kernel for c in CASES for a in c.cuda if isinstance(a, Launch) and c.source(a) == case.source(launch)}
    kernels = _read(cubin, "|".join(sorted(others | {launch.kernel})))
    matching = [kernel for kernel in kernels if re.search(launch.kernel, kernel.demangled)]
    if len(matching) != 1:
        names = ", ".join(kernel.demangled.partition("(")[0] for kernel in matching) or "none"
        raise ValueError(f"{case.op}, {case.name}: {launch.kernel!r} must match one kernel, got {names}")
    return matching[0]
