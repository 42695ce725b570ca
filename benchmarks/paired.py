"""Ratios that hold on a machine whose speed drifts: the two sides are measured alternately in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]


class Ratio(NamedTuple):
    """Times in microseconds per call, and the median over the pairs of theirs divided by ours, with its range."""

    ours: float
    theirs: float
    ratio: float
    low: float
    high: float


def seconds(call: Call, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    start = clock()
    for _ in range(repeats):
        call()
    wait()
    return (clock() - start) / repeats


def repeats_for(call: Call, target: float) -> int:
    """Number of calls, at least one, that take about `target` seconds, without the first, which loads and compiles."""
    call()
    first = seconds(call, 1)
    return max(1, int(target / max(seconds(call, 3) if first < target else first, 1e-9)))


def paired(ours: Call, theirs: Call, pairs: int = 15, target: float = 0.02) -> Ratio:
    """Times both sides alternately, for about `target` seconds per side of a pair, but at least once."""
    repeats = [repeats_for(call, target) for call in (ours, theirs)]
    times = [(seconds(ours, repeats[0]), seconds(theirs, repeats[1])) for _ in range(pairs)]
    ours_time, theirs_time = (statistics.median(side) for side in zip(*times, strict=True))
    return ratio_of(times, ours_time, theirs_time, statistics.median(b / a for a, b in times))


def ratio_of(times: list[tuple[float, float]], ours: float, theirs: float, ratio: float) -> Ratio:
    """Microseconds of both sides, and the ratio with the range of the pairs', without the outer tenths."""
    ratios, tenth = sorted(b / a for a, b in times), len(times) // 10
    return Ratio(ours * 1e6, theirs * 1e6, ratio, ratios[tenth], ratios[-1 - tenth])


def least(ours: Call, theirs: Call, pairs: int) -> Ratio:
    """The shortest processor times of both sides, called alternately on one thread, and their ratio.

    Other processes lengthen single calls, so that the shortest of many is the steadiest figure of a busy machine. The
    range is that of the pairs, without the outer tenths.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours(), theirs()
        clock = time.process_time
        times = [(seconds(ours, 1, clock), seconds(theirs, 1, clock)) for _ in range(pairs)]
    finally:
        torch.set_num_threads(threads)
    ours_time, theirs_time = (min(side) for side in zip(*times, strict=True))
    return ratio_of(times, ours_time, theirs_time, theirs_time / ours_time)
