"""How the time of an op grows with its input: the fitted exponent, and its bars. No test here depends on speed."""

from __future__ import annotations

import pytest

from benchmarks import measure
from benchmarks.case import Bar, Floor, Sweep
from tests.test_benchmarks import CPU, LIMITS


def test_the_fit_recovers_a_planted_exponent() -> None:
    points = [(float(n), 3.0 * n**1.37 * (1 + 0.01 * (-1) ** i)) for i, n in enumerate((10, 100, 1000, 10_000))]
    assert measure.exponent(points) == pytest.approx(1.37, abs=0.01)


def test_a_quadratic_sweep_misses_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "seconds", lambda call, repeats: call() ** 2 * 1e-9)
    bars = (Bar("exponent below", 1.25), Bar("growth at most", 2))
    sweep = Sweep(
        "sum", "all", "numbers", (10, 100, 1000), lambda device, size: size, lambda n: n, Floor(bytes=4), bars
    )
    result = measure.scale(sweep, CPU, LIMITS)
    assert result["exponent"] == pytest.approx(2)
    assert [bar["held"] for bar in result["bars"]] == [False, False]
    assert result["bars"][1]["value"] == pytest.approx(100)
