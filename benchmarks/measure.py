"""Times, ratios and memory of one case: nobody is timed who computes something else."""

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
from benchmarks.paired import paired, repeats_for, seconds

Found = dict[str, Any]


def ceiling(device: torch.device, copied: int = 64 * 2**20, side: int = 0) -> dict[str, float]:
    """Bytes a second of a copy, both directions counted, and flops a second of bare products; the best of seven."""
    large = torch.randn(copied, device=device)
    there = torch.empty_like(large)
    repeats = 1 if device.type == "cpu" else 20  # so that a GPU's launches and the wait for it do not count
    best = lambda call: min(seconds(call, repeats) for _ in range(7))  # noqa: E731
    found = {"copy": 2 * 4 * large.numel() / best(lambda: there.copy_(large))}
    side = side or (2048 if device.type == "cpu" else 8192)
    for dtype in (torch.float32,) if device.type == "cpu" else (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        found[str(dtype).removeprefix("torch.")] = 2 * side**3 / best(lambda a=a, b=b: a @ b)
    return found


def measure(
    case: Case, device: torch.device, limits: dict[str, float], only: Iterable[str] | None = None, pairs: int = 0
) -> Found:
    """Everything about a case as plain numbers; `only` some providers, and then no memory, for a quick look."""
    torch.manual_seed(0)
    sets = [case.inputs(device, seed) for seed in range(gpu.SETS if device.type == "cuda" else 1)]
    inputs = sets[0]
    found: Found = {"op": case.op, "name": case.name, "shape": case.shape, "dtype": case.dtype}
    found["floor"] = {"bytes": case.floor.bytes, "flops": case.floor.flops}
    wanted = [provider for provider in case.providers if only is None or provider.name in only]
    # first all agree, then all are timed: an error should not wait for the slow ones
    judged = {provider.name: verdict(case, provider, device) for provider in wanted}
    found["ours"] = timing(in_turn(case.ours, sets), target_of(case, device), 10 if only is None else 3)
    floor = case.floor.seconds(limits, case.dtype) * 1e6 if limits else 0.0
    found["ours"] |= {"floor_us": floor, "of_ceiling": floor / found["ours"]["us"]}
    found["providers"] = {}
    for provider in wanted:
        name = provider.name
        found["providers"][name] = judged[name] or kept(lambda p=provider: compared(case, p, sets, device, pairs))
    if device.type == "cuda":
        found["gpu"] = kept(lambda: {"warm_us": gpu.event_time(lambda: case.ours(inputs), 20)})
    memory = {} if only is not None else memory_of(case, inputs, judged, device)
    found["memory"] = memory
    found["bars"] = [judge(bar, bar_value(bar, found, case, inputs)) for bar in case.bars if only is None]
    return found


def kept(what: Callable[[], Found]) -> Found:
    """What else is known of a case is not lost with a peer that breaks, or a tool."""
    try:
        return what()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def target_of(case: Case, device: torch.device) -> float:
    """One launch and one wait are too little to time a GPU by."""
    return case.target if device.type == "cpu" else max(case.target, 0.02)


def verdict(case: Case, provider: Provider, device: torch.device) -> Found:
    """Why a provider is not timed, or nothing."""
    missing = provider.missing(device)
    if missing:
        return {"missing": missing}
    if not provider.agrees:
        return {}
    inputs = (case.checked or case.inputs)(device, 0)
    gold = (provider.ours or case.ours)(inputs)

    def compare() -> Found:
        got = provider.call(inputs)
        try:
            case.same(got, gold)
        except AssertionError as error:
            return {"refused": f"{provider.name} computes something else: {' '.join(str(error).split())}"}
        return {}

    return kept(compare)


def timing(call: Callable[[], Any], target: float, samples: int = 10) -> Found:
    """Of ten samples; of three where a call takes half a second."""
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


def compared(case: Case, provider: Provider, sets: list[Any], device: torch.device, pairs: int) -> Found:
    ours = in_turn(provider.ours or case.ours, sets)
    theirs = in_turn(provider.call, sets if provider.few is None else [provider.few(device, 0)])
    ratio = paired(ours, theirs, pairs=pairs or case.pairs, target=target_of(case, device))
    share = provider.share
    return {
        "us": ratio.theirs / share, "ours_us": ratio.ours, "ratio": ratio.ratio / share, "low": ratio.low / share,
        "high": ratio.high / share, "agrees": provider.agrees,
    }  # fmt: skip


def memory_of(case: Case, inputs: Any, judged: dict[str, Found], device: torch.device) -> Found:
    """Peak bytes beside the inputs and what is returned, of ours and of peers on the same inputs. All have run once:
    what is loaded at the first call is there."""
    calls = {"ours": case.ours}
    calls |= {p.name: p.call for p in case.providers if p.agrees and p.few is None and judged.get(p.name) == {}}
    found: Found = {}
    for name, call in calls.items():
        try:
            found[name] = peak_memory(lambda call=call: call(inputs), device) - case.returned(inputs)
        except NotImplementedError as error:
            return {"missing": str(error)}
    return found


def bar_value(bar: Bar, found: Found, case: Case, inputs: Any) -> float | None:
    """None where it could not be measured."""
    if bar.kind == "microseconds at most":
        by_events: float | None = found.get("gpu", {}).get("warm_us")
        return by_events if "gpu" in found else float(found["ours"]["best"])
    if bar.kind == "memory below":
        whole = case.arrays[bar.of](inputs) if bar.of in case.arrays else found["memory"].get(bar.of)
        own = found["memory"].get("ours")
        return None if whole is None or own is None else own / whole
    ratio = found["providers"][bar.of].get("ratio")
    if ratio is None:
        return None
    return 1 / ratio if bar.kind == "cost at most" else float(ratio)


def judge(bar: Bar, value: float | None) -> Found:
    held = None if value is None else bar.held(value)
    return {"kind": bar.kind, "of": bar.of, "limit": bar.limit, "value": value, "held": held, "text": str(bar)}


def scale(sweep: Sweep, device: torch.device, limits: dict[str, float]) -> Found:
    points = []
    for size in sweep.sizes:
        inputs = sweep.inputs(device, size)
        call = lambda inputs=inputs: sweep.ours(inputs)  # noqa: E731
        call()
        repeats = max(1, min(1000, sweep.batch // size))
        taken = min(seconds(call, repeats) for _ in range(5))
        floor = size * sweep.floor.seconds(limits, "float32")
        points.append({"size": size, "us": taken * 1e6, "floor_us": floor * 1e6})
    found: Found = {"op": sweep.op, "name": sweep.name, "unit": sweep.unit, "points": points}
    found["fit_from"] = sweep.fit_from
    found["exponent"] = exponent([(p["size"], p["us"]) for p in points if p["size"] >= sweep.fit_from])
    first, last = next(p for p in points if p["size"] >= sweep.fit_from), points[-1]
    values = {
        "exponent below": found["exponent"],
        "growth at most": (last["us"] / last["size"]) / (first["us"] / first["size"]),
    }
    found["bars"] = [judge(bar, values[bar.kind]) for bar in sweep.bars]
    return found


def exponent(points: list[tuple[float, float]]) -> float:
    """The slope of log time over log size, by least squares."""
    logs = [(math.log(size), math.log(time)) for size, time in points]
    x0, y0 = (statistics.mean(column) for column in zip(*logs, strict=True))
    return sum((x - x0) * (y - y0) for x, y in logs) / sum((x - x0) ** 2 for x, _ in logs)
