"""What only a GPU has: times by CUDA events with cold and warm caches, graph replay, launches, synchronisations.

This file has not run on a GPU yet.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch

SETS = 4  # inputs in turn, so that no call finds its own in the cache
FLUSH = 256 * 2**20  # bytes written between cold calls, several times any second-level cache


def describe(sets: list[Any], call: Callable[[Any], Any], rounds: int = 20) -> dict[str, Any]:
    """Of calls that have run before."""
    found: dict[str, Any] = {
        "warm_us": event_time(lambda: call(sets[0]), rounds),
        "cold_us": cold_time(call, sets, rounds),
    }
    return found | graph_time(lambda: call(sets[0]), rounds) | counts(lambda: call(sets[0]))


def event_time(call: Callable[[], Any], rounds: int) -> float:
    """Microseconds, the median."""
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def cold_time(call: Callable[[Any], Any], sets: list[Any], rounds: int) -> float:
    other = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    times = []
    for inputs in itertools.islice(itertools.cycle(sets), rounds):
        other.random_()
        times.append(event_time(lambda inputs=inputs: call(inputs), 1))
    return statistics.median(times)


def graph_time(call: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Without the launches' cost; a call that waits for the device cannot be captured, and the reason is kept."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        return {"graph_missing": " ".join(str(error).split())[:200]}
    return {"graph_us": event_time(graph.replay, rounds)}


def counts(call: Callable[[], Any]) -> dict[str, int]:
    """Kernels launched and waits of the host in one call, as the profiler saw them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
    names = [event.name for event in profile.events()]
    launches = sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)
    waits = sum(name.startswith(("cudaStreamSynchronize", "cudaEventSynchronize")) for name in names)
    return {"launches": launches, "synchronisations": waits}
