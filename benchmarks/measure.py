"""Times, ratios, memory and bars of cases, and the machine that they are measured on.

A peer is timed only if its results match ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import grpo_kernels as gk
from benchmarks.case import Bar, Call, Case, Provider, Sweep
from benchmarks.paired import least, paired, repeats_for, seconds

Result = dict[str, Any]
SETS = 4  # inputs in rotation on a GPU, so that no call finds its own in the cache
FLUSHED = 256 * 2**20  # bytes written between cold calls, several times any second-level cache
MOST_AHEAD = 0.2  # seconds, the longest sleep of the GPU while a call is queued
PACKAGES = (
    "torch",
    "triton",
    "trl",
    "verl",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "scikit-learn",
    "fastcluster",
)


class HostClock:
    """Stands in for torch.cuda in a rehearsal without a GPU, so that the same code runs on times of the host."""

    class Event:
        def __init__(self, **_: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = time.perf_counter()

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: HostClock.Event) -> float:
            return (end.at - self.at) * 1e3

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


cuda: Any = torch.cuda


def rehearse() -> None:
    """Takes the paths of a GPU on a CPU from now on, with one sample of each time."""
    global cuda
    cuda = HostClock()


def is_rehearsal() -> bool:
    return cuda is not torch.cuda


def has_events(device: torch.device) -> bool:
    """Whether times are taken as on a GPU."""
    return device.type == "cuda" or is_rehearsal()


# The machine


def usable_device() -> torch.device:
    """The GPU if there is one. Raises where no kernel runs, as the reference would be timed as ours."""
    name = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = gk.available_kernels()
    wanted = ("cuda", "triton") if name == "cuda" else ("cpu",)
    if all(kernels[kernel] != "ok" for kernel in wanted):
        reasons = "; ".join(f"{kernel}: {kernels[kernel]}" for kernel in wanted)
        build = "pip install --no-build-isolation -e ."
        raise RuntimeError(f"benchmarks: kernels must run on {name}, got {reasons}; build them in place: {build}")
    return torch.device(name)


def machine() -> Result:
    """Facts about the machine, without names of hosts or users."""
    facts: Result = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "grpo_kernels": gk.__version__,
        "kernels": gk.available_kernels(),
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
    }
    if torch.cuda.is_available():
        facts |= {"gpu": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
        facts["cuda"] = torch.version.cuda
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return facts


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _output(*command: str) -> str | None:
    """Output of a command, or None if there is no such program, it fails or it prints nothing."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip() or None
    return None


def write(path: Path, result: Result) -> None:
    """Renames the file once it is complete, so that a run that is killed loses what it measures at the time."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def ceiling(device: torch.device, copied: int = 64 * 2**20, side: int = 0) -> dict[str, float]:
    """Bytes per second of a copy, both directions counted, and flops per second of a product; the best of seven."""
    if is_rehearsal():
        copied, side = 2**16, 256
    large = torch.randn(copied, device=device)
    there = torch.empty_like(large)
    repeats = 1 if device.type == "cpu" else 20  # amortises a GPU's launches and synchronisation
    best = lambda call: min(seconds(call, repeats) for _ in range(7))  # noqa: E731
    result = {"copy": 2 * 4 * large.numel() / best(lambda: there.copy_(large))}
    side = side or (2048 if device.type == "cpu" else 8192)
    # a GPU's products of float32 would take three seconds, and its cases have bfloat16's
    for dtype in (torch.bfloat16,) if has_events(device) else (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        result[str(dtype).removeprefix("torch.")] = 2 * side**3 / best(lambda a=a, b=b: a @ b)
    return result


# Cases


def sets_of(case: Case, device: torch.device) -> list[Any]:
    torch.manual_seed(0)
    return [case.inputs(device, seed) for seed in range(SETS if device.type == "cuda" else 1)]


def in_turn(call: Call, sets: list[Any]) -> Callable[[], Any]:
    turns = itertools.cycle(sets)
    return lambda: call(next(turns))


def measure_ours(case: Case, sets: list[Any], device: torch.device, limits: dict[str, float]) -> Result:
    """Times of our call, the floor at the ceiling of the machine, and the peak memory in bytes."""
    result = timing(in_turn(case.ours, sets), _target())
    result |= gpu_numbers(lambda: case.ours(sets[0]), device, result["us"])
    floor = case.floor.seconds(limits, case.dtype) * 1e6
    result |= {"floor_us": floor, "of_ceiling": floor / result.get("cold_us", result["us"])}
    return result | memory_of(case, case.ours, sets[0], device)


def measure_provider(case: Case, provider: Provider, sets: list[Any], device: torch.device) -> Result:
    """Alternating times of ours and a provider, or the reason why there are none.

    Args:
        case: the case.
        provider: one of its providers.
        sets: inputs of the case, in rotation.
        device: where it runs.
    """
    try:
        return verdict(case, provider, device) or _measured(case, provider, sets, device)
    except Exception as error:  # a peer that fails costs its row alone
        return {"raised": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def _measured(case: Case, provider: Provider, sets: list[Any], device: torch.device) -> Result:
    sets_of_theirs = sets if provider.few is None else [provider.few(device, 0)]
    ours, theirs = in_turn(provider.ours or case.ours, sets), in_turn(provider.call, sets_of_theirs)
    if case.one_thread:
        ratio = least(ours, theirs, case.pairs)
    else:
        most = 1 if is_rehearsal() else 5 if has_events(device) else case.pairs  # times of a GPU vary little
        ratio = paired(ours, theirs, min(most, case.pairs), _target())
    share = provider.share
    result: Result = {"us": ratio.theirs / share, "ours_us": ratio.ours, "ratio": ratio.ratio / share}
    result |= {"low": ratio.low / share, "high": ratio.high / share, "agrees": provider.agrees}
    if provider.few is None:
        result |= gpu_numbers(lambda: provider.call(sets[0]), device, result["us"])
        result |= memory_of(case, provider.call, sets[0], device) if provider.agrees else {}
    return result


def verdict(case: Case, provider: Provider, device: torch.device) -> Result:
    """Reason why a provider is not timed, or {}."""
    if missing := provider.missing("cuda" if has_events(device) else device.type):
        return {"missing": missing}
    if not provider.agrees:
        return {}
    inputs = (case.checked or case.inputs)(device, 0)
    gold = (provider.ours or case.ours)(inputs)
    got = provider.call(inputs)
    try:
        case.same(got, gold)
    except AssertionError as error:
        return {"refused": f"the results of {provider.name} differ from ours: {' '.join(str(error).split())}"}
    return {}


def judged(bar: Bar, case: Case, entry: Result, inputs: Any) -> Result:
    """The value of a bar, None if it could not be measured, and whether it is met.

    Args:
        bar: a bar of the case.
        case: the case.
        entry: what was measured: "ours", and "providers" by name.
        inputs: of the case, for arrays that memory is compared with.
    """
    ours, provider = entry["ours"], entry["providers"].get(bar.of, {})
    value: float | None
    if bar.kind == "microseconds at most":
        value = ours.get("warm_us", ours["best"])
    elif bar.kind == "memory below":
        whole = case.arrays[bar.of](inputs) if bar.of in case.arrays else provider.get("memory")
        value = ours["memory"] / whole if whole and "memory" in ours else None
    else:
        value = provider.get("ratio")
        value = 1 / value if value is not None and bar.kind == "cost at most" else value
    return _judged(bar, value)


def _judged(bar: Bar, value: float | None) -> Result:
    held = None if value is None else bar.held(value)
    return {"kind": bar.kind, "of": bar.of, "limit": bar.limit, "value": value, "held": held}


def short(number: float) -> str:
    """Four digits, so that a near miss does not look like the limit."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _target() -> float:
    """Seconds per side of a pair, but at least one call; a single launch is too short to time on a GPU."""
    return 0.0 if is_rehearsal() else 0.02


def timing(call: Callable[[], Any], target: float, samples: int = 10) -> Result:
    """Median, range and best of ten samples, or of three if a call takes half a second."""
    repeats = repeats_for(call, target)
    if repeats == 1 and seconds(call, 1) > 0.5:
        samples = 3
    times = sorted(seconds(call, repeats) * 1e6 for _ in range(samples))
    low, high = times[samples // 10], times[-1 - samples // 10]
    return {"us": statistics.median(times), "low": low, "high": high, "best": times[0]}


# A GPU's events


def gpu_numbers(call: Callable[[], Any], device: torch.device, us: float) -> Result:
    """Times of a call by events and of the host alone, kernels launched, and the clock; {} on a CPU.

    Args:
        call: has run before.
        device: where it runs.
        us: about the microseconds that it takes.
    """
    if not has_events(device):
        return {}
    rounds = 1 if is_rehearsal() else max(3, min(20, int(3e5 / us)))
    timer = EventTimer(call, device)
    result: Result = {"host_us": statistics.median(_host_seconds(call) * 1e6 for _ in range(rounds))}
    result |= {"warm_us": timer.warm(rounds), "cold_us": timer.cold(rounds), "is_gapless": timer.is_gapless}
    with contextlib.suppress(Exception):  # a machine without pynvml, or whose driver refuses, costs no row
        result["sm_mhz"] = cuda.clock_rate()
    if us < 1e5:  # the profiler takes seconds for the thousands of launches of a loop over tokens
        with contextlib.suppress(Exception):
            result["launches"] = launches(call)
    return result


def launches(call: Callable[[], Any]) -> int:
    """Kernels that a call launches, as the profiler counts them."""
    with torch.profiler.profile() as profile:
        call()
        cuda.synchronize()
    return sum(event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for event in profile.events())


class EventTimer:
    """Times a call by CUDA events, with the GPU asleep until the whole call is in its queue.

    The sleep lasts as long as the host takes to queue the call, and is extended if the GPU wakes before the host is
    done: a linear head queues dozens of kernels, and the gaps between them would be timed. A call that synchronises
    cannot be queued ahead; `is_gapless` is then False.
    """

    def __init__(self, call: Callable[[], Any], device: torch.device) -> None:
        self.call, self.device, self.is_gapless = call, device, True
        self.ahead = min(2 * _host_seconds(call) + 100e-6, MOST_AHEAD)

    def warm(self, rounds: int) -> float:
        """Median in microseconds, with the caches as the call before left them."""
        return statistics.median(self._sample() for _ in range(rounds))

    def cold(self, rounds: int) -> float:
        """Median in microseconds, after other memory was written."""
        flushed = torch.empty(FLUSHED if self.device.type == "cuda" else 1, dtype=torch.uint8, device=self.device)
        times = []
        for _ in range(rounds):
            flushed.fill_(1)
            times.append(self._sample())
        return statistics.median(times)

    def _sample(self) -> float:
        while True:
            begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda._sleep(int(self.ahead * _cycles_per_second()))
            begin.record()
            self.call()
            end.record()
            was_asleep = not begin.query()
            end.synchronize()
            if was_asleep or not self.is_gapless:
                return float(begin.elapsed_time(end)) * 1e3
            self.is_gapless = self.ahead < MOST_AHEAD
            self.ahead = min(2 * self.ahead, MOST_AHEAD)


def _host_seconds(call: Callable[[], Any]) -> float:
    """Seconds until the call returns, which may be before the GPU has ended."""
    cuda.synchronize()
    began = time.perf_counter()
    call()
    taken = time.perf_counter() - began
    cuda.synchronize()
    return taken


@functools.cache
def _cycles_per_second() -> float:
    """Cycles of torch.cuda._sleep in a second."""
    cycles = 10_000_000
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(cycles)  # the first call loads the kernel, and the clock rises
    begin.record()
    cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (float(begin.elapsed_time(end)) * 1e-3)


# Memory


def memory_of(case: Case, call: Call, inputs: Any, device: torch.device) -> Result:
    """Peak bytes of a call beside its inputs and results; nothing where it cannot be measured.

    The call has run before, so that one-time allocations do not count.
    """
    peak = peak_memory(lambda: call(inputs), device)
    return {} if peak is None else {"memory": max(0, peak - case.returned(inputs))}


def peak_memory(call: Callable[[], Any], device: torch.device) -> int | None:
    """Peak beyond the memory in use before: as torch counts it on a GPU, else of the process, on Linux alone."""
    if has_events(device):
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        call()
        return int(cuda.max_memory_allocated() - before)
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None

    def kilobytes(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])

    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # free memory of the allocator would hide that of the call
    reset.write_text("5")
    before = kilobytes("VmRSS:")
    call()
    return (kilobytes("VmHWM:") - before) * 1024


# Scaling


def measure_sweep(sweep: Sweep, device: torch.device, limits: dict[str, float]) -> Result:
    """Times over the sizes, the power of the size that they grow with, and the bars."""
    points: list[Result] = []
    for size in sweep.sizes:
        inputs = sweep.inputs(device, size)
        call = functools.partial(sweep.ours, inputs)
        repeats = repeats_for(call, _target())
        taken = min(seconds(call, repeats) for _ in range(5))
        floor = size * sweep.floor.seconds(limits, "float32")
        points.append({"size": size, "us": taken * 1e6, "floor_us": floor * 1e6})
    result: Result = {"op": sweep.op, "name": sweep.name, "unit": sweep.unit, "points": points}
    fitted = [point for point in points if point["size"] >= sweep.fit_from]
    growth = (points[-1]["us"] / points[-1]["size"]) / (fitted[0]["us"] / fitted[0]["size"])
    result["exponent"] = exponent([(point["size"], point["us"]) for point in fitted])
    values = {"exponent below": result["exponent"], "growth at most": growth}
    return result | {"fit_from": sweep.fit_from, "bars": [_judged(bar, values[bar.kind]) for bar in sweep.bars]}


def exponent(points: list[tuple[float, float]]) -> float:
    """Slope of log time over log size, by least squares."""
    sizes, times = zip(*points, strict=True)
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, times)]).slope
