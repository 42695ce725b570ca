"""Makes pytest-benchmark describe the machine as our results do, without the name of the host."""

from __future__ import annotations

from typing import Any

from benchmarks import machine


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    machine_info.clear()
    machine_info.update(machine.describe())
