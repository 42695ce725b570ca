"""GPU timing: CUDA events with warm and cold caches, graph replay, and counts of launches and synchronisations."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

SETS = 4  # inputs in rotation, so that no call finds its own in the cache
FLUSH = 256 * 2**20  # bytes written between cold calls, several times any second-level cache
MOST_AHEAD = 0.2  # seconds, the longest sleep of the GPU while a call is queued
Call = Callable[[], Any]


def describe(call: Call, device: torch.device) -> dict[str, Any]:
    """Times and counts of a call that has run before; on a CPU a warm time only."""
    began = time.perf_counter()
    host_seconds(call)
    rounds = rounds_for(time.perf_counter() - began)
    if device.type != "cuda":
        return {"warm_us": statistics.median(host_seconds(call) * 1e6 for _ in range(rounds))}
    timer = Timer(call)
    result: dict[str, Any] = {"host_us": statistics.median(host_seconds(call) * 1e6 for _ in range(rounds))}
    result |= {"warm_us": timer.warm(rounds), "cold_us": timer.cold(rounds)}
    return result | {"is_gapless": timer.is_gapless} | counts(call) | graph_time(call, rounds)


def event_time(call: Call, rounds: int) -> float:
    """Median time of a call in microseconds, without the host's share."""
    return Timer(call).warm(rounds)


class Timer:
    """Times a call by CUDA events, with the GPU asleep until the whole call is in its queue.

    The sleep lasts as long as the host takes to queue the call, and is extended if the GPU wakes before the host is
    done: a linear head queues dozens of kernels, and the gaps between them would be timed. A call that synchronises
    cannot be queued ahead; `is_gapless` is then False.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.is_gapless = True
        call()
        torch.cuda.synchronize()
        self.ahead = min(2 * host_seconds(call) + 100e-6, MOST_AHEAD)

    def warm(self, rounds: int) -> float:
        return statistics.median(self.sample() for _ in range(rounds))

    def cold(self, rounds: int) -> float:
        flushed = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
        times = []
        for _ in range(rounds):
            flushed.fill_(1)
            times.append(self.sample())
        return statistics.median(times)

    def sample(self) -> float:
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(self.ahead * cycles_per_second()))
            begin.record()
            self.call()
            end.record()
            was_asleep = not begin.query()
            end.synchronize()
            if was_asleep or not self.is_gapless:
                return float(begin.elapsed_time(end)) * 1e3
            self.is_gapless = self.ahead < MOST_AHEAD
            self.ahead = min(2 * self.ahead, MOST_AHEAD)


@functools.cache
def cycles_per_second() -> float:
    """Cycles of torch.cuda._sleep in a second."""
    cycles = 10_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)  # the first call loads the kernel, and the clock rises
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (float(begin.elapsed_time(end)) * 1e-3)


def host_seconds(call: Call) -> float:
    """Seconds until the call returns, which on a GPU may be before it has ended; synchronises afterwards."""
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return seconds


def rounds_for(seconds: float) -> int:
    """Number of samples: twenty of a short call, fewer of a long one, whose times vary less."""
    return max(5, min(20, int(0.3 / max(seconds, 1e-9))))


def copy_time(size: float, device: torch.device, rounds: int = 20) -> float:
    """Microseconds of a copy that reads and writes `size` bytes in all, with cold caches on a GPU."""
    source = torch.ones(max(1, int(size) // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    call = lambda: target.copy_(source)  # noqa: E731
    call()
    if device.type == "cuda":
        return Timer(call).cold(rounds)
    return statistics.median(host_seconds(call) * 1e6 for _ in range(rounds))


def graph_time(call: Call, rounds: int) -> dict[str, Any]:
    """Time of a captured call, without the cost of its launches, or the reason why it cannot be captured."""
    graph, stream, mode = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
    try:
        # refuses a call that synchronises before the capture: one that aborts leaves torch in an undefined state
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


def counts(call: Call) -> dict[str, Any]:
    """Kernel launches, and host synchronisations with a stream, an event or a copy, counted by the profiler."""
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
