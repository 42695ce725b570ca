"""Every case and sweep of `benchmarks/cases`, and every bar: `make bench`.

pytest-benchmark's own table is of our calls alone, of a sweep's at its largest size; what was measured beside them
stands in its JSON as extra_info, and with -s on the screen.
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


def name_of(one: Case | Sweep) -> str:
    return f"{one.op}: {one.name}"


@pytest.mark.parametrize("case", cases(device=DEVICE.type), ids=name_of)
def test_case(benchmark: Any, case: Case) -> None:
    found = measure(case, DEVICE, limits(DEVICE))
    show(found)
    benchmark.extra_info.update(found)
    benchmark.pedantic(case.ours, (case.inputs(DEVICE, 0),), rounds=5, warmup_rounds=1)
    assert not broken(found), broken(found)
    assert_held(found)


@pytest.mark.parametrize("sweep", sweeps(), ids=name_of)
def test_sweep(benchmark: Any, sweep: Sweep) -> None:
    found = scale(sweep, DEVICE, limits(DEVICE))
    scaling.show(found)
    benchmark.extra_info.update(found)
    benchmark.pedantic(sweep.ours, (sweep.inputs(DEVICE, sweep.sizes[-1]),), rounds=5, warmup_rounds=1)
    assert_held(found)


def assert_held(found: dict[str, Any]) -> None:
    missed = [verdict(bar) for bar in found["bars"] if bar["held"] is False]
    assert not missed, missed
