"""Measurements are written as soon as they end, so a later failure loses none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import grpo_kernels as gk
from benchmarks import gpu_lines, run, timings
from benchmarks.case import Floor
from benchmarks.items import Items
from tests.emulation import build
from tests.test_benchmarks import LIMITS, small_case


def run_items(measurements: Items, **items: Any) -> list[Any]:
    return list(measurements.run(items))


def fails() -> Any:
    raise MemoryError("no room")


def test_a_second_process_measures_the_remaining_items(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert run_items(Items(path, 1e9), a=lambda: {"us": 1}) == [{"us": 1}]
    after = Items(path, 1e9)
    assert run_items(after, a=fails, b=lambda: {"us": 2}) == [{"us": 2}]
    assert after.results == [{"us": 1}, {"us": 2}] and after.end() == 0


def test_failures_and_omissions_are_named(tmp_path: Path) -> None:
    measurements = Items(tmp_path / "lines", 1e9)
    assert run_items(measurements, a=fails, b=lambda: {"us": 2}) == [{"us": 2}]
    assert measurements.lost() == {"failed": ["a: MemoryError: no room"]} and measurements.end() == 1
    late = Items(None, -1)
    assert run_items(late, a=fails) == [] and late.lost() == {"left_out": ["a"]} and late.end() == 0


def test_an_item_that_killed_its_process_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    gpu_lines.Lines(path, 60).write("a", "begun")
    with path.open("a") as file:
        file.write('{"item": "b", "sta')  # truncated while being written
    measurements = Items(path, 1e9)
    assert run_items(measurements, a=fails, b=lambda: {"us": 2}) == [{"us": 2}]
    assert measurements.lost() == {"failed": ["a: the process ended while it ran"]}
    assert gpu_lines.results(gpu_lines.read(path))["a"]["state"] == "crashed"


def test_a_gpu_with_a_sticky_error_ends_the_process_for_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lines, "device_error", lambda: "an illegal memory access")
    measurements = Items(tmp_path / "lines", 1e9)
    assert run_items(measurements, a=fails, b=lambda: {"us": 2}) == []
    assert measurements.end() == gpu_lines.START_AGAIN
    monkeypatch.setattr(run, "ceiling", lambda device: LIMITS)
    monkeypatch.setattr(run, "cases", lambda op, name, device: [small_case(ours=lambda x: fails())])
    with pytest.raises(SystemExit) as ended:
        run.main(["--device", "cpu"])
    assert ended.value.code == gpu_lines.START_AGAIN


HANGS = """
import pathlib, sys, time
from benchmarks.gpu_lines import Lines
with Lines(pathlib.Path(sys.argv[1]), patience=0.2).begun("x"):
    time.sleep(60)
"""


def test_a_hanging_item_ends_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGS, str(tmp_path / "lines")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(build.ROOT)})
    assert done.returncode == gpu_lines.START_AGAIN
    assert gpu_lines.results(gpu_lines.read(tmp_path / "lines"))["x"]["state"] == "hung"


def test_timings_beside_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [small_case(), small_case(name="products", floor=Floor(flops=20))]
    monkeypatch.setattr(timings, "ceiling", lambda device: LIMITS)
    monkeypatch.setattr(timings, "cases", lambda op, name, device: table)
    monkeypatch.setattr(timings, "round_robin", list)
    out = tmp_path / "a.json"
    with pytest.raises(SystemExit) as ended:
        timings.main(["--device", "cpu", "--backend", "cpu", "--json", str(out)])
    assert ended.value.code == 0
    by_copy, by_product = json.loads(out.read_text())["timings"]
    assert by_copy["copy_us"] > 0 and by_copy["warm_us"] > 0 and "copy_us" not in by_product
    assert timings.share(by_copy) == pytest.approx(by_copy["copy_us"] / by_copy["warm_us"])
    assert timings.share(by_product) == pytest.approx(by_product["floor_us"] / by_product["warm_us"])


def test_a_backend_that_cannot_run_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "ceiling", lambda device: LIMITS)
    out = tmp_path / "a.json"
    with pytest.raises(SystemExit) as ended:
        where = ["--device", "cpu", "--backend", "cuda", "--json", str(out)]
        timings.main(["--op", "group_advantages", "--case", "one small", *where])
    timing = json.loads(out.read_text())["timings"][0]
    if "missing" in timing:  # absent if the kernels are emulated
        assert "cannot run here" in timing["missing"]
    assert ended.value.code == 0 and timing["backend"] == "cuda"


def test_without_kernels_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.usable("cpu").type == "cpu"
    known = {"cpu": "not built", "triton": "ok", "cuda": "no CUDA device"}
    monkeypatch.setattr(gk, "available_kernels", lambda: known)
    with pytest.raises(SystemExit, match=r"no kernels run on cpu here, .* cpu: not built; in a checkout, build them"):
        run.main(["--op", "group_advantages", "--quick"])
