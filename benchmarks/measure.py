"""Times, ratios and memory of one case. A peer is timed only if its results match ours."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.case import Bar, Call, Case, Provider, Sweep
from benchmarks.memory import peak_memory
from benchmarks.paired import least, paired, repeats_for, seconds

Result = dict[str, Any]


def ceiling(device: torch.device, copied: int = 64 * 2**20, side: int = 0) -> dict[str, float]:
    """Bytes per second of a copy, both directions counted, and flops per second of a product; the best of seven."""
    large = torch.randn(copied, device=device)
    there = torch.empty_like(large)
    repeats = 1 if device.type == "cpu" else 20  # amortises a GPU's launches and synchronisation
    best = lambda call: min(seconds(call, repeats) for _ in range(7))  # noqa: E731
    result = {"copy": 2 * 4 * large.numel() / best(lambda: there.copy_(large))}
    side = side or (2048 if device.type == "cpu" else 8192)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        result[str(dtype).removeprefix("torch.")] = 2 * side**3 / best(lambda a=a, b=b: a @ b)
    return result


def measure(
    case: Case, device: torch.device, limits: dict[str, float], only: Iterable[str] | None = None, pairs: int = 0
) -> Result:
    """Measures a case, as plain numbers for JSON.

    Args:
        case: The case.
        device: Where it runs.
        limits: The measured ceiling.
        only: Names of the providers to time, without memory and bars; None for all.
        pairs: Pairs of times in place of the case's own number; 0 for that number.
    """
    torch.manual_seed(0)
    sets = [case.inputs(device, seed) for seed in range(gpu.SETS if device.type == "cuda" else 1)]
    inputs = sets[0]
    result: Result = {"op": case.op, "name": case.name, "shape": case.shape, "dtype": case.dtype}
    result["floor"] = {"bytes": case.floor.bytes, "flops": case.floor.flops}
    wanted = [provider for provider in case.providers if only is None or provider.name in only]
    # all results are compared before anything is timed, so that an error shows early
    judged = {provider.name: verdict(case, provider, device) for provider in wanted}
    result["ours"] = timing(in_turn(case.ours, sets), target_of(case, device), 10 if only is None else 3)
    floor = case.floor.seconds(limits, case.dtype) * 1e6 if limits else 0.0
    result["ours"] |= {"floor_us": floor, "of_ceiling": floor / result["ours"]["us"]}
    result["providers"] = {}
    for provider in wanted:
        name = provider.name
        result["providers"][name] = judged[name] or or_error(lambda p=provider: compared(case, p, sets, device, pairs))
    if device.type == "cuda":
        result["gpu"] = or_error(lambda: {"warm_us": gpu.event_time(lambda: case.ours(inputs), 20)})
    memory = {} if only is not None else memory_of(case, inputs, judged, device)
    result["memory"] = memory
    result["bars"] = [judge(bar, bar_value(bar, result, case, inputs)) for bar in case.bars if only is None]
    return result


def or_error(measurement: Callable[[], Result]) -> Result:
    """Result of a measurement, or its error, which must not cost the rest of the case."""
    try:
        return measurement()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def target_of(case: Case, device: torch.device) -> float:
    """Seconds per side of a pair; a single launch is too short to time on a GPU."""
    return case.target if device.type == "cpu" else max(case.target, 0.02)


def verdict(case: Case, provider: Provider, device: torch.device) -> Result:
    """Reason why a provider is not timed, or {}."""
    missing = provider.missing(device)
    if missing:
        return {"missing": missing}
    if not provider.agrees:
        return {}
    inputs = (case.checked or case.inputs)(device, 0)
    gold = (provider.ours or case.ours)(inputs)

    def compare() -> Result:
        got = provider.call(inputs)
        try:
            case.same(got, gold)
        except AssertionError as error:
            return {"refused": f"the results of {provider.name} differ from ours: {' '.join(str(error).split())}"}
        return {}

    return or_error(compare)


def timing(call: Callable[[], Any], target: float, samples: int = 10) -> Result:
    """Median, range and best of ten samples, or of three if a call takes half a second."""
    repeats = repeats_for(call, target)
    if repeats == 1 and seconds(call, 1) > 0.5:
        samples = 3
    times = sorted(seconds(call, repeats) * 1e6 for _ in range(samples))
    return {
        "us": statistics.median(times),
        "low": times[samples // 10],
        "high": times[-1 - samples // 10],
        "best": times[0],
    }


def in_turn(call: Call, sets: list[Any]) -> Callable[[], Any]:
    turns = itertools.cycle(sets)
    return lambda: call(next(turns))


def compared(case: Case, provider: Provider, sets: list[Any], device: torch.device, pairs: int) -> Result:
    ours = in_turn(provider.ours or case.ours, sets)
    theirs = in_turn(provider.call, sets if provider.few is None else [provider.few(device, 0)])
    if case.one_thread:
        ratio = least(ours, theirs, pairs or case.pairs)
    else:
        ratio = paired(ours, theirs, pairs=pairs or case.pairs, target=target_of(case, device))
    share = provider.share
    return {
        "us": ratio.theirs / share,
        "ours_us": ratio.ours,
        "ratio": ratio.ratio / share,
        "low": ratio.low / share,
        "high": ratio.high / share,
        "agrees": provider.agrees,
    }


def memory_of(case: Case, inputs: Any, judged: dict[str, Result], device: torch.device) -> Result:
    """Peak bytes beside inputs and results, of ours and of peers on the same inputs. All have run once before, so
    one-time allocations do not count."""
    calls = {"ours": case.ours}
    calls |= {p.name: p.call for p in case.providers if p.agrees and p.few is None and judged.get(p.name) == {}}
    result: Result = {}
    for name, call in calls.items():
        try:
            result[name] = peak_memory(lambda call=call: call(inputs), device) - case.returned(inputs)
        except NotImplementedError as error:
            return {"missing": str(error)}
    return result


def bar_value(bar: Bar, result: Result, case: Case, inputs: Any) -> float | None:
    """Value of a bar, or None if it could not be measured."""
    if bar.kind == "microseconds at most":
        by_events: float | None = result.get("gpu", {}).get("warm_us")
        return by_events if "gpu" in result else float(result["ours"]["best"])
    if bar.kind == "memory below":
        whole = case.arrays[bar.of](inputs) if bar.of in case.arrays else result["memory"].get(bar.of)
        own = result["memory"].get("ours")
        return None if whole is None or own is None else own / whole
    ratio = result["providers"][bar.of].get("ratio")
    if ratio is None:
        return None
    return 1 / ratio if bar.kind == "cost at most" else float(ratio)


def judge(bar: Bar, value: float | None) -> Result:
    held = None if value is None else bar.held(value)
    return {"kind": bar.kind, "of": bar.of, "limit": bar.limit, "value": value, "held": held, "text": str(bar)}


def scale(sweep: Sweep, device: torch.device, limits: dict[str, float]) -> Result:
    points = []
    for size in sweep.sizes:
        inputs = sweep.inputs(device, size)
        call = lambda inputs=inputs: sweep.ours(inputs)  # noqa: E731
        call()
        repeats = max(1, min(1000, sweep.batch // size))
        taken = min(seconds(call, repeats) for _ in range(5))
        floor = size * sweep.floor.seconds(limits, "float32")
        points.append({"size": size, "us": taken * 1e6, "floor_us": floor * 1e6})
    result: Result = {"op": sweep.op, "name": sweep.name, "unit": sweep.unit, "points": points}
    result["fit_from"] = sweep.fit_from
    result["exponent"] = exponent([(p["size"], p["us"]) for p in points if p["size"] >= sweep.fit_from])
    first, last = next(p for p in points if p["size"] >= sweep.fit_from), points[-1]
    values = {
        "exponent below": result["exponent"],
        "growth at most": (last["us"] / last["size"]) / (first["us"] / first["size"]),
    }
    result["bars"] = [judge(bar, values[bar.kind]) for bar in sweep.bars]
    return result


def exponent(points: list[tuple[float, float]]) -> float:
    """Slope of log time over log size, by least squares."""
    logs = [(math.log(size), math.log(time)) for size, time in points]
    x0, y0 = (statistics.mean(column) for column in zip(*logs, strict=True))
    return sum((x - x0) * (y - y0) for x, y in logs) / sum((x - x0) ** 2 for x, _ in logs)
