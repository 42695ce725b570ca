"""Times of a GPU's events, on a mocked GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import measure
from benchmarks.case import Bar
from tests.test_benchmarks import small_case


class Gpu:
    """Stand-in for torch.cuda with a fixed time per call and a given queueing time; records requested sleeps."""

    def __init__(self, patch: pytest.MonkeyPatch, host: float) -> None:
        self.sleeps: list[int] = []
        gpu_made_up = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                pass

            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                pass

            def query(self) -> bool:
                """Whether the GPU is awake: the host took longer than the last sleep, whose cycles are microseconds."""
                return host * 1e6 > gpu_made_up.sleeps[-1]

            def elapsed_time(self, end: Event) -> float:
                return 0.25  # milliseconds

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "_sleep", self.sleeps.append, raising=False)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(measure, "_cycles_per_second", lambda: 1e6)
        patch.setattr(measure, "_host_seconds", lambda call: 1e-3)


@pytest.mark.parametrize(("host", "sleeps"), [(1e-3, [2100] * 3), (7e-3, [2100, 4200, 8400, 8400, 8400])])
def test_the_gpu_sleeps_until_the_call_is_queued(
    monkeypatch: pytest.MonkeyPatch, host: float, sleeps: list[int]
) -> None:
    played = Gpu(monkeypatch, host)
    timer = measure.EventTimer(lambda: None, torch.device("cuda"))
    assert timer.warm(3) == 250 and timer.is_gapless and played.sleeps == sleeps


def test_a_call_that_waits_for_the_gpu_is_timed_with_its_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Gpu(monkeypatch, host=9.0)
    timer = measure.EventTimer(lambda: None, torch.device("cuda"))
    assert timer.warm(3) == 250 and not timer.is_gapless
    assert max(played.sleeps) == measure.MOST_AHEAD * 1e6 and len(played.sleeps) < 15


def test_a_bar_in_microseconds_is_judged_by_events_on_a_gpu() -> None:
    bar, timed = Bar("microseconds at most", 25), {"ours": {"best": 40.0}, "providers": {}}
    assert measure.judged(bar, small_case(), timed, None)["value"] == 40
    timed["ours"]["warm_us"] = 20.0
    assert measure.judged(bar, small_case(), timed, None)["value"] == 20
