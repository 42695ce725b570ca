"""Times our ops and their peers: `pytest benchmarks -k policy_loss`.

A case is a group of rows: ours, and each provider. A provider's row fails if its results differ from ours, or if the
ratio of the two, measured alternately, misses a bar. `--save FILE` writes what benchmarks.tables and benchmarks.plot
read; pytest-benchmark's own options, such as --benchmark-compare, see the times of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import measure
from benchmarks.case import Case, Sweep
from benchmarks.cases import cases, sweeps
from benchmarks.conftest import Suite
from benchmarks.paired import repeats_for, seconds

ROWS = [
    pytest.param(case, who, id=f"{case.op}: {case.name}, {who}")
    for case in cases(device="cuda" if torch.cuda.is_available() else "cpu")
    for who in ("ours", *(provider.name for provider in case.providers))
]
ROUNDS, TARGET = 5, 0.02  # seconds of a round, but at least one call


@pytest.mark.parametrize(("case", "who"), ROWS)
def test_case(benchmark: Any, suite: Suite, case: Case, who: str, request: pytest.FixtureRequest) -> None:
    benchmark.group = f"{case.op}: {case.name}"
    row = suite.measure(case, who)
    if "missing" in row:
        pytest.skip(row["missing"])
    assert "refused" not in row, row["refused"]
    benchmark.extra_info.update({name: value for name, value in row.items() if name != "bars"})
    time(benchmark, suite, in_case(suite, case, who))
    assert_met(row, request.config.getoption("--report-limits"))


@pytest.mark.parametrize("sweep", sweeps(), ids=lambda sweep: f"{sweep.op}: {sweep.name}, scaling")
def test_scaling(benchmark: Any, suite: Suite, sweep: Sweep, request: pytest.FixtureRequest) -> None:
    """The time at the largest size; growth over all of them is judged by bars."""
    benchmark.group = f"{sweep.op}: {sweep.name}, scaling"
    result = suite.scale(sweep)
    benchmark.extra_info["exponent"] = result["exponent"]
    inputs = sweep.inputs(suite.device, sweep.sizes[-1])
    time(benchmark, suite, lambda: sweep.ours(inputs))
    assert_met(result, request.config.getoption("--report-limits"))


@pytest.mark.quick
@pytest.mark.parametrize(("case", "who"), [row for row in ROWS if row.values[1] in row.values[0].quick])
def test_a_steady_ratio_is_near_the_baseline(suite: Suite, case: Case, who: str) -> None:
    ratio, least = suite.compare_with_baseline(case, who)
    assert ratio >= least, f"{who} takes {ratio:.2f} times our time; the baseline allows {least:.2f}"


def in_case(suite: Suite, case: Case, who: str) -> Callable[[], Any]:
    """The call of a row; a provider that has smaller inputs is timed on these."""
    if who == "ours":
        return measure.in_turn(case.ours, suite.inputs(case))
    provider = case.provider(who)
    sets = suite.inputs(case) if provider.few is None else [provider.few(suite.device, 0)]
    return measure.in_turn(provider.call, sets)


def time(benchmark: Any, suite: Suite, call: Callable[[], Any]) -> None:
    """Rounds of calls for pytest-benchmark's table; on a GPU each call waits for the device."""
    wait = torch.cuda.synchronize if suite.device.type == "cuda" else (lambda: None)
    iterations, rounds = repeats_for(call, TARGET), max(1, min(ROUNDS, int(1 / seconds(call, 1))))
    benchmark.pedantic(lambda: (call(), wait()), rounds=rounds, iterations=iterations)


def assert_met(result: dict[str, Any], is_reported: bool = False) -> None:
    missed = [measure.verdict_of(bar) for bar in result["bars"] if bar["held"] is False]
    if missed and is_reported:
        pytest.xfail("; ".join(missed))
    assert not missed, missed
