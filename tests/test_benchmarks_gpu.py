"""The GPU part of the benchmarks, on a mocked GPU."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from benchmarks import gpu, measure
from benchmarks.case import Bar
from tests.test_benchmarks import small_case


def test_launches_and_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "aten::sum", "cudaStreamSynchronize", "cudaLaunchKernelExC"]

    class Profile:
        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> list[Any]:
            return [types.SimpleNamespace(name=name) for name in names]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile())
    assert gpu.counts(lambda: None) == {"launches": 3, "synchronisations": 1}
    names.append("cudaMemcpy")
    assert gpu.counts(lambda: None) == {"launches": 3, "synchronisations": 2}
    names.clear()
    assert gpu.counts(lambda: None) == {"counts_missing": "the profiler saw no launch"}


def test_what_waits_is_not_captured_and_a_broken_capture_is_cleared_away(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {"mode": 0, "stream": "first", "captures": 0}

    class Capture:
        def __init__(self, graph: object) -> None:
            pass

        def __enter__(self) -> None:
            state.update(stream="of the capture", captures=state["captures"] + 1)

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("capture broke\n  off")

    stubs: dict[str, Any] = {
        "CUDAGraph": object,
        "graph": Capture,
        "current_stream": lambda: state["stream"],
        "set_stream": lambda stream: state.update(stream=stream),
        "get_sync_debug_mode": lambda: state["mode"],
        "set_sync_debug_mode": lambda mode: state.update(mode=mode),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)

    def waits() -> None:
        assert state["mode"] == "error"
        raise RuntimeError("called a synchronizing CUDA operation")

    assert gpu.graph_time(waits, 3) == {"graph_missing": "called a synchronizing CUDA operation"}
    assert state == {"mode": 0, "stream": "first", "captures": 0}
    assert gpu.graph_time(lambda: None, 3) == {"graph_missing": "capture broke off"}
    assert state == {"mode": 0, "stream": "first", "captures": 1}


def test_a_gpu_is_judged_by_its_events() -> None:
    bar, case = Bar("microseconds at most", 25), small_case()
    timed = {"ours": {"best": 40.0}, "memory": {}, "providers": {}}
    assert measure.bar_value(bar, timed, case, None) == 40
    assert measure.bar_value(bar, timed | {"gpu": {"warm_us": 20.0}}, case, None) == 20
    assert measure.bar_value(bar, timed | {"gpu": {"failed": "no room"}}, case, None) is None


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
        patch.setattr(gpu, "cycles_per_second", lambda: 1e6)
        patch.setattr(gpu, "host_seconds", lambda call: 1e-3)


def test_events_give_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Gpu(monkeypatch, host=1e-3)
    assert gpu.event_time(lambda: None, 5) == 250
    assert played.sleeps == [2100] * 5  # a little more than twice the time the host takes to queue a call


def test_the_gpu_sleeps_longer_if_it_woke_before_the_call_was_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Gpu(monkeypatch, host=7e-3)
    timer = gpu.Timer(lambda: None)
    assert timer.warm(2) == 250 and timer.is_gapless
    assert played.sleeps == [2100, 4200, 8400, 8400]


def test_a_call_that_waits_for_the_gpu_is_timed_with_its_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Gpu(monkeypatch, host=9.0)
    timer = gpu.Timer(lambda: None)
    assert timer.warm(3) == 250 and not timer.is_gapless
    assert max(played.sleeps) == gpu.MOST_AHEAD * 1e6 and len(played.sleeps) < 15


def test_cycles_are_counted_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    count = gpu.cycles_per_second.__wrapped__
    played = Gpu(monkeypatch, host=0.0)
    assert count() == pytest.approx(played.sleeps[-1] / 0.25e-3)
