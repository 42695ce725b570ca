"""A pytest plugin for gpu_check: runs the tests that need a GPU, in shares, and writes a line for each as it ends.

    python -m pytest -p tools.gpu_tests --shard 1/4 --results tests_1.jsonl tests/ops

Cases of the cpu and reference backends, and of verl, which GPU machines lack, are left out. CUDA's cases come first,
as Triton compiles many kernels for its own. A line names the ops and backends chosen for tensors on the GPU. After an
error the GPU reports one in every later call of the process, so the process ends; the same command then continues after
the results in the file.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_lines
from grpo_kernels import backends

_PATIENCE = 60  # seconds until a test counts as hung
_ran: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="I/N: the I-th of N disjoint shares of the tests")
    parser.addoption("--results", type=Path, help="a file that gets a line per test")


def pytest_configure(config: pytest.Config) -> None:
    backends.select = recording(backends.select)
    if config.getoption("--results"):
        lines = gpu_lines.Lines(config.getoption("--results"), _PATIENCE)
        config.pluginmanager.register(Recorder(lines), "gpu_lines")


def recording(select: Callable[..., str]) -> Callable[..., str]:
    def call(op: str, requested: str | None, where: Any, *rest: Any) -> str:
        chosen = select(op, requested, where, *rest)
        if str(getattr(where, "type", where)) == "cuda" and not torch.compiler.is_compiling():
            _ran.add(f"{op}:{chosen}")
        return chosen

    return call


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, shares = (int(number) for number in config.getoption("--shard").split("/"))
    on_gpu = [
        item
        for item in items
        if backend_of(item) not in ("cpu", "reference") and "verl" not in getattr(item, "originalname", "")
    ]
    recorder = config.pluginmanager.get_plugin("gpu_lines")
    done = recorder.lines.known if recorder else {}
    selected = [item for item in on_gpu if digest(item) % shares == share - 1 and item.nodeid not in done]
    # all ops from the start, as time may run out
    selected.sort(key=lambda item: (backend_of(item) == "triton", digest(item)))
    config.hook.pytest_deselected(items=list(set(items) - set(selected)))
    items[:] = selected


def backend_of(item: pytest.Item) -> str | None:
    call = getattr(item, "callspec", None)
    return None if call is None else call.params.get("backend")


def digest(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


class Recorder:
    """Writes a line per test, whose state is that of its worst phase."""

    def __init__(self, lines: gpu_lines.Lines) -> None:
        self.lines = lines
        self.reports: list[pytest.TestReport] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _ran.clear()
        self.reports.clear()
        with self.lines.begun(item.nodeid):
            result = yield
        self.finish(item.nodeid)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def finish(self, item: str) -> None:
        failed = next((report for report in self.reports if report.failed), None)
        why = "" if failed is None else first_failure(failed)
        error = gpu_lines.device_error()
        is_skipped = any(report.skipped for report in self.reports)
        state = "failed" if why or error else "skipped" if is_skipped else "passed"
        seconds = round(sum(report.duration for report in self.reports), 3)
        self.lines.write(item, state, seconds=seconds, ran_on=sorted(_ran), why=why or error)
        if error:
            print(
                f"\n{item}: {why or error}\nthe GPU reports an error in every further call of this process", flush=True
            )
            os._exit(gpu_lines.START_AGAIN)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Sets the exit status from all results, including those of earlier processes."""
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = int(any(line["state"] in gpu_lines.BAD for line in self.lines.known.values()))


def first_failure(report: pytest.TestReport) -> str:
    """Phase, message and place of a failure, from pytest's report."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return f"{report.when}: {str(report.longrepr).strip()[-400:]}"
    message = " | ".join(line.strip() for line in str(crash.message).splitlines()[:3])
    return f"{report.when}: {message[:400]} ({Path(crash.path).name}:{crash.lineno})"
