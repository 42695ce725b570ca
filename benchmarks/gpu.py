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
AHEAD = 1_000_000  # cycles, about half a millisecond
FLUSH = 256 * 2**20  # bytes written between cold calls, several times any second-level cache


def describe(sets: list[Any], call: Callable[[Any], Any], rounds: int = 20) -> dict[str, Any]:
    """Of calls that have run before."""
    warm = lambda: call(sets[0])  # noqa: E731
    found: dict[str, Any] = {"warm_us": event_time(warm, rounds), "cold_us": cold_time(call, sets, rounds)}
    return found | counts(warm) | graph_time(warm, rounds)


def event_time(call: Callable[[], Any], rounds: int) -> float:
    """Microseconds, the median. The GPU is kept busy until all is in its queue: Python's time is not in it."""
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
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
        other.fill_(1)
        times.append(event_time(lambda inputs=inputs: call(inputs), 1))
    return statistics.median(times)


def graph_time(call: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Without the launches' cost. Where it is missing, the reason is kept."""
    graph, stream, mode = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    try:
        # one that waits for the device is found out before: a capture that breaks off leaves torch in disorder
        torch.cuda.set_sync_debug_mode("error")
        call()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        return {"graph_missing": " ".join(str(error).split())[:200]}
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.set_stream(stream)
    return {"graph_us": event_time(graph.replay, rounds)}


def counts(call: Callable[[], Any]) -> dict[str, Any]:
    """Kernels launched and waits of the host for a stream, an event or a copy in one call, as the profiler saw them."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
    names = [event.name for event in profile.events()]
    launches = sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)
    if launches == 0:
        return {"counts_missing": "the profiler saw no launch"}
    waits = sum(name.startswith(("cudaStreamSynchronize", "cudaEventSynchronize")) for name in names)
    waits += names.count("cudaMemcpy")
    return {"launches": launches, "synchronisations": waits}
