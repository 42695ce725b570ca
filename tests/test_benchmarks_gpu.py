"""What benchmarks do with a GPU, on one that is made up."""

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
        "CUDAGraph": object, "graph": Capture, "current_stream": lambda: state["stream"],
        "set_stream": lambda stream: state.update(stream=stream), "get_sync_debug_mode": lambda: state["mode"],
        "set_sync_debug_mode": lambda mode: state.update(mode=mode),
    }  # fmt: skip
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


def test_events_give_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return 0.25  # milliseconds

    ahead: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", ahead.append, raising=False)
    assert gpu.event_time(lambda: None, 5) == 250
    assert len(ahead) == 5  # the GPU is busy while the call is made
