"""Runs every case and sweep of `benchmarks/cases` and checks every bar: `make bench`.

The table of pytest-benchmark holds only our calls, for a sweep at its largest size. The other measurements are in its
JSON as extra_info, and on the screen with -s.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from benchmarks import scaling
from benchmarks.case import Case, Sweep
from benchmarks.cases import cases, sweeps
from benchmarks.measure import ceiling, measure, scale
from benchmarks.run import broken, default_device, show, verdict

DEVICE = torch.device(default_device())
limits = functools.cache(ceiling)


def name_of(case: Case | Sweep) -> str:
    return f"{case.op}: {case.name}"


@pytest.mark.parametrize("case", cases(device=DEVICE.type), ids=name_of)
def test_case(benchmark: Any, case: Case) -> None:
    result = measure(case, DEVICE, limits(DEVICE))
    show(result)
    benchmark.extra_info.update(result)
    benchmark.pedantic(case.ours, (case.inputs(DEVICE, 0),), rounds=5, warmup_rounds=1)
    assert not broken(result), broken(result)
    assert_held(result)


@pytest.mark.parametrize("sweep", sweeps(), ids=name_of)
def test_sweep(benchmark: Any, sweep: Sweep) -> None:
    result = scale(sweep, DEVICE, limits(DEVICE))
    scaling.show(result)
    benchmark.extra_info.update(result)
    benchmark.pedantic(sweep.ours, (sweep.inputs(DEVICE, sweep.sizes[-1]),), rounds=5, warmup_rounds=1)
    assert_held(result)


def assert_held(result: dict[str, Any]) -> None:
    missed = [verdict(bar) for bar in result["bars"] if bar["held"] is False]
    assert not missed, missed
