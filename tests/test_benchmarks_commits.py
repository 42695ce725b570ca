"""Comparison of two commits: a steady slowdown is found, noise and drift are not. No test here depends on speed."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import commit_cases, commits


def timers(head: dict[str, list[float]]) -> tuple[commits.Start, list[str]]:
    """Fake processes: a second per call of base, and of head the times of each start in turn; also the log of turns."""
    log: list[str] = []
    starts = itertools.count()

    def start() -> tuple[commits.Timer, commits.Timer]:
        number = next(starts)

        def base(name: str) -> float:
            log.append("base")
            return 1.0

        def later(name: str) -> float | str:
            log.append("head")
            return head[name][min(number, len(head[name]) - 1)]

        return base, later

    return start, log


def test_the_sides_take_turns() -> None:
    start, log = timers({"sum": [1.0]})
    base, head = start()
    commits.compare("sum", base, head, rounds=2)
    assert log == ["base", "head", "head", "base"] * 2


def test_a_drift_of_the_machine_cancels() -> None:
    clock = itertools.count(1)
    result = commits.compare("sum", lambda _: float(next(clock)), lambda _: float(next(clock)), rounds=9)
    assert (result.ratio, result.low, result.high) == (1, 1, 1)


def test_the_interval_is_that_of_the_median() -> None:
    times = iter([float(100 + n) for n in range(15) for _ in range(2)])
    result = commits.compare("sum", lambda _: 100.0, lambda _: next(times), rounds=15)
    # the sign test: 3 of 15 are below the interval with a probability of 1.8 %
    assert (result.ratio, result.low, result.high) == pytest.approx((1.07, 1.03, 1.11))


def test_a_slower_case_is_measured_again_and_counts_if_it_stays_slower() -> None:
    start, log = timers({"same": [1.0], "once": [1.2, 1.0], "slower": [1.2, 1.3, 1.1], "faster": [0.5]})
    results = commits.compare_all(("same", "once", "slower", "faster"), start, rounds=1, threshold=0.05, tries=3)
    assert {name: result.ratio for name, result in results.items()} == {
        "same": 1.0,
        "once": 1.0,
        "slower": 1.1,
        "faster": 0.5,
    }
    assert [name for name, result in results.items() if result.is_slower(0.05)] == ["slower"]
    assert len(log) == 4 * (4 + 2 + 1)
    assert commits.table(results, 0.05).count("**slower**") == 1


def test_a_call_that_a_commit_lacks_is_noted() -> None:
    result = commits.compare("sum", lambda _: 1.0, lambda _: "AttributeError: no sum", rounds=3)
    assert result.note == "not in head: AttributeError: no sum" and not result.is_slower(0.0)
    assert "not in head" in commits.table({"sum": result}, 0.05)


def test_the_first_call_that_works_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer() -> commit_cases.Call:
        raise AttributeError("no LMHead")

    monkeypatch.setitem(commit_cases.CASES, "sum", (newer, lambda: lambda: 1))
    monkeypatch.setitem(commit_cases.CASES, "lost", (newer,))
    call = commit_cases.call_of("sum")
    assert not isinstance(call, str) and call() == 1
    assert commit_cases.call_of("lost") == "AttributeError: no LMHead"


def test_the_fastest_call_of_a_turn_counts() -> None:
    clock = iter([0.0, 0.0, 3.0, 3.0, 4.0, 4.0, 9.0])
    assert commit_cases.fastest(lambda: None, 5.0, lambda: next(clock)) == 1.0


def test_every_case_runs_here() -> None:
    for name in commit_cases.CASES:
        assert not isinstance(commit_cases.call_of(name), str), commit_cases.call_of(name)
