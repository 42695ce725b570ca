"""Times our ops and their peers: `pytest benchmarks -k policy_loss`.

A case is a group of rows: ours, and each provider. A provider's row fails if its results differ from ours, or if the
ratio of the two, measured alternately, misses a bar. `--save FILE` writes what benchmarks.tables and benchmarks.plot
read.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import tables
from benchmarks.case import Case, Sweep, with_variants
from benchmarks.cases import cases, sweeps
from benchmarks.conftest import SUITE, Suite
from tests.harness import device_error


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


def test_case(suite: Suite, case: Case, who: str, request: pytest.FixtureRequest) -> None:
    if reason := suite.passes_over(case, who):
        pytest.skip(reason)
    row = suite.measure(case, who)
    if "raised" in row and (error := device_error()):
        pytest.exit(f"{case.op}: {case.name}, {who} broke the GPU: {error}", returncode=1)
    if reason := row.get("missing") or row.get("raised"):
        pytest.skip(reason)
    assert "refused" not in row, row["refused"]
    assert_met(row, request.config.getoption("--report-limits"))


@pytest.mark.parametrize("sweep", sweeps(), ids=lambda sweep: f"{sweep.op}: {sweep.name}, scaling")
def test_scaling(suite: Suite, sweep: Sweep, request: pytest.FixtureRequest) -> None:
    if reason := suite.passes_over(sweep):
        pytest.skip(reason)
    assert_met(suite.scale(sweep), request.config.getoption("--report-limits"))


@pytest.mark.quick
def test_a_steady_ratio_is_near_the_baseline(suite: Suite, case: Case, who: str) -> None:
    ratio, least = suite.compare_with_baseline(case, who)
    assert ratio >= least, f"{who} takes {ratio:.2f} times our time; the baseline allows {least:.2f}"


def assert_met(result: dict[str, Any], is_reported: bool = False) -> None:
    missed = [text for bar in result["bars"] if (text := tables.missed(bar))]
    if missed and is_reported:
        pytest.xfail("; ".join(missed))
    assert not missed, missed
