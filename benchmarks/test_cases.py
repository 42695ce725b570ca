"""Every case and sweep of `benchmarks/cases`, and every bar: `make bench`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from benchmarks.case import Case, Sweep
from benchmarks.cases import cases, sweeps
from benchmarks.measure import ceiling, measure, scale
from benchmarks.run import default_device, show, verdict

DEVICE = torch.device(default_device())
limits = functools.cache(ceiling)


def name_of(one: Case | Sweep) -> str:
    return f"{one.op}: {one.name}"


@pytest.mark.parametrize("case", cases(device=DEVICE.type), ids=name_of)
def test_case(benchmark: Any, case: Case) -> None:
    found = benchmark.pedantic(lambda: measure(case, DEVICE, limits(DEVICE)), rounds=1)
    show(found)
    benchmark.extra_info.update(found)
    refused = [other["refused"] for other in found["providers"].values() if "refused" in other]
    assert not refused, refused
    assert_held(found)


@pytest.mark.parametrize("sweep", sweeps(), ids=name_of)
def test_sweep(benchmark: Any, sweep: Sweep) -> None:
    found = benchmark.pedantic(lambda: scale(sweep, DEVICE, limits(DEVICE)), rounds=1)
    print(f"\n{sweep.op}, {sweep.name}: exponent {found['exponent']:.3f}")
    benchmark.extra_info.update(found)
    assert_held(found)


def assert_held(found: dict[str, Any]) -> None:
    missed = [verdict(bar) for bar in found["bars"] if bar["held"] is False]
    assert not missed, missed
