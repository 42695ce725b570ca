"""Times our ops and their peers: `pytest benchmarks -k policy_loss`.

A case is a group of rows: ours, and each provider. A provider's row fails if its results differ from ours, or if the
ratio of the two, measured alternately, misses a bar. `--save FILE` writes what benchmarks.tables and benchmarks.plot
read; pytest-benchmark's own options, such as --benchmark-compare, see the times of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import measure, tables
from benchmarks.case import Case, Sweep, with_variants
from benchmarks.cases import cases, sweeps
from benchmarks.conftest import SUITE, Suite
from benchmarks.paired import repeats_for, seconds
from tests.harness import device_error

ROUNDS, TARGET = 5, 0.02  # seconds of a round, but at least one call


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Rows of ours and of each provider, as the options ask for."""
    if "case" not in metafunc.fixturenames:
        return
    kind, variants = metafunc.config.stash[SUITE].kind, metafunc.config.getoption("--variants")
    chosen = cases(device=kind)
    if variants:
        chosen = [with_variants(case, variants) for case in chosen]
    is_quick = metafunc.function is test_a_steady_ratio_is_near_the_baseline
    rows = [
        pytest.param(case, who, id=f"{case.op}: {case.name}, {who}")
        for case in chosen
        for who in (case.quick if is_quick else ("ours", *(provider.name for provider in case.providers)))
    ]
    metafunc.parametrize(("case", "who"), rows)


def test_case(benchmark: Any, suite: Suite, case: Case, who: str, request: pytest.FixtureRequest) -> None:
    if reason := suite.passes_over(case, who):
        pytest.skip(reason)
    row = suite.measure(case, who)
    if "raised" in row and (error := device_error()):
        pytest.exit(f"{case.op}: {case.name}, {who} broke the GPU: {error}", returncode=1)
    if reason := row.get("missing") or row.get("raised"):
        pytest.skip(reason)
    assert "refused" not in row, row["refused"]
    benchmark.extra_info.update({name: value for name, value in row.items() if name != "bars"})
    call, sets = case.ours, suite.inputs(case)
    if who != "ours":
        provider = case.provider(who)
        call, sets = provider.call, sets if provider.few is None else [provider.few(suite.device, 0)]
    time(benchmark, suite, f"{case.op}: {case.name}", measure.in_turn(call, sets))
    assert_met(row, request.config.getoption("--report-limits"))


@pytest.mark.parametrize("sweep", sweeps(), ids=lambda sweep: f"{sweep.op}: {sweep.name}, scaling")
def test_scaling(benchmark: Any, suite: Suite, sweep: Sweep, request: pytest.FixtureRequest) -> None:
    """The time at the largest size; growth over all of them is judged by bars."""
    if reason := suite.passes_over(sweep):
        pytest.skip(reason)
    result = suite.scale(sweep)
    benchmark.extra_info["exponent"] = result["exponent"]
    inputs = sweep.inputs(suite.device, sweep.sizes[-1])
    time(benchmark, suite, f"{sweep.op}: {sweep.name}, scaling", lambda: sweep.ours(inputs))
    assert_met(result, request.config.getoption("--report-limits"))


@pytest.mark.quick
def test_a_steady_ratio_is_near_the_baseline(suite: Suite, case: Case, who: str) -> None:
    ratio, least = suite.compare_with_baseline(case, who)
    assert ratio >= least, f"{who} takes {ratio:.2f} times our time; the baseline allows {least:.2f}"


def time(benchmark: Any, suite: Suite, group: str, call: Callable[[], Any]) -> None:
    """Rounds of calls for pytest-benchmark's table; on a GPU each call waits for the device."""
    benchmark.group = group
    wait = measure.cuda.synchronize if suite.kind == "cuda" else (lambda: None)
    iterations, rounds = repeats_for(call, TARGET), max(1, min(ROUNDS, int(1 / seconds(call, 1))))
    benchmark.pedantic(lambda: (call(), wait()), rounds=rounds, iterations=iterations)


def assert_met(result: dict[str, Any], is_reported: bool = False) -> None:
    missed = [text for bar in result["bars"] if (text := tables.missed(bar))]
    if missed and is_reported:
        pytest.xfail("; ".join(missed))
    assert not missed, missed
