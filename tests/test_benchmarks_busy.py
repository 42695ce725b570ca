"""Calls beside busy processes. No test here depends on speed."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import busy

SLOWER = {"torch.mul, 8,192": 1.0, "torch.sort, 8,192": 2.0, "torch.cumsum, 8,192": 40.0, busy.PRODUCTS: 20.0}


def result_of(name: str, slower: float) -> dict[str, Any]:
    return {"name": name, "alone_us": 10.0, "mean_us": 10 * slower, "p95_us": 1.0, "slower": slower}


def test_an_op_may_be_three_times_as_slow_as_torch() -> None:
    results = [result_of(*one) for one in SLOWER.items()]
    results += [result_of("policy_loss", 7.0), result_of("token_logprobs", 6.0), result_of(busy.OF_PRODUCTS, 60.0)]
    limits = {result["name"]: busy.limit_of(result["name"], results) for result in results}
    assert [limits[name] for name in ("policy_loss", busy.OF_PRODUCTS, busy.PRODUCTS)] == [6.0, 60.0, math.inf]
    lines = busy.table(results).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[6:]] == ["**not met**", "met", "met"]


def test_processes_end_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            started.append(self)

    monkeypatch.setattr(busy.subprocess, "Popen", Popen)
    with pytest.raises(RuntimeError), busy.busy_processes(2):
        assert [process.poll() for process in started] == [None, None]
        raise RuntimeError
    assert all(process.poll() is not None for process in started) and len(started) == 2


def test_every_call_is_timed(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    busy.main(["--seconds", "0.001", "--processes", "0", "--json", str(tmp_path / "busy.json")])
    results = json.loads((tmp_path / "busy.json").read_text())["busy"]
    assert [result["name"] for result in results] == [*busy.of_torch(), *busy.ours()]
    assert set(busy.ONE_THREAD) <= busy.of_torch().keys() and torch.get_num_threads() == threads
    assert all(result["mean_us"] > 0 for result in results)
