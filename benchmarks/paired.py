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
    ratios = sorted(b / a for a, b in times)
    ours_time, theirs_time = (statistics.median(side) * 1e6 for side in zip(*times, strict=True))
    tenth = len(ratios) // 10
    return Ratio(ours_time, theirs_time, statistics.median(ratios), ratios[tenth], ratios[-1 - tenth])


def least(ours: Call, theirs: Call, pairs: int) -> Ratio:
    """The shortest processor times of both sides, called alternately on one thread, and their ratio.

    Other processes lengthen single calls, so that the shortest of many is the steadiest figure of a busy machine. The
    range is that of the pairs, without the outer tenths.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours(), theirs()
        times = [tuple(seconds(call, 1, time.process_time) for call in (ours, theirs)) for _ in range(pairs)]
    finally:
        torch.set_num_threads(threads)
    ratios = sorted(b / a for a, b in times)
    ours_time, theirs_time = (min(side) * 1e6 for side in zip(*times, strict=True))
    tenth = len(ratios) // 10
    return Ratio(ours_time, theirs_time, theirs_time / ours_time, ratios[tenth], ratios[-1 - tenth])
