"""Setup for all tests: stand-ins for Triton and CUDA on machines without a GPU, poisoned memory, seeds."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator
from pathlib import Path

import torch

# Must be set before Triton is first imported. With a GPU, the compiled kernels run.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

from grpo_kernels import backends, registry
from tests import harness, interpreter, thinning
from tests.emulation import build

hypothesis.settings.register_profile("project", deadline=None, derandomize=True, max_examples=60)
# without --all
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("project"), max_examples=20)
# other examples each time, or those of --hypothesis-seed; under the sanitizers each takes three times as long
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=180)
hypothesis.settings.register_profile("nightly-sanitized", deadline=None, max_examples=60)
# for machines on which the first draw, which imports much, takes a minute
hypothesis.settings.register_profile(
    "slow", hypothesis.settings.get_profile("project"), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("project")
CHOICES = backends._choices
NIGHTLY = Path(__file__).parent / "nightly"


def pytest_configure(config: pytest.Config) -> None:
    if not (config.getoption("--all") or config.getoption("--hypothesis-profile", None)):
        hypothesis.settings.load_profile("quick")
    # xdist already uses every core
    torch.set_num_threads(2 if not hasattr(config, "workerinput") else 1)
    if backends.interpreting() and importlib.util.find_spec("triton") is not None:
        interpreter.quicken()
    if config.getoption("--results", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(config.getoption("--results")))
    backends.name_implementations()
    emulate = build.compiler() is not None and (build.ROOT / "csrc").exists()
    if not torch.cuda.is_available() and emulate:
        torch.ops.load_library(str(build.library(os.environ.get("EMULATION", "plain"))))
        registry.enable_emulated_cuda()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="a file that gets a line of JSON for each test as it ends")
    parser.addoption("--nightly", action="store_true", help="run the tests of tests/nightly")
    parser.addoption("--all", action="store_true", help="run all cases of parametrized tests, and tests marked full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests of the GPU's backends. Leaves out nightly tests, tests marked `full`, and of parametrized tests all
    cases but a cover for each backend."""
    for item in items:
        if getattr(getattr(item, "callspec", None), "params", {}).get("backend") in ("cuda", "triton"):
            item.add_marker("gpu")
    if not config.getoption("--nightly"):
        nightly = [item for item in items if item.path.is_relative_to(NIGHTLY)]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    if config.getoption("--all") or config.getoption("--nightly"):
        return
    left_out = {item.nodeid for item in items if item.get_closest_marker("full") is not None}
    grids: dict[tuple[str, Hashable, int], dict[str, thinning.Case]] = defaultdict(dict)
    for item in items:
        if item.nodeid not in left_out and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            case = thinning.values_of(item.callspec.params)
            strength = 2 if item.get_closest_marker("pairs") else 1
            grid, backend = item.nodeid.partition("[")[0], case.get("backend")
            grids[grid, backend, strength][item.nodeid] = case
    for (_, backend, strength), cases in grids.items():
        left_out |= cases.keys() - thinning.thinned(
            cases, strength, is_slow=backend == repr("triton") and strength == 1
        )
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends a worker whose GPU reports an error, as it would in every later test; xdist starts another one."""
    result = yield
    if hasattr(item.config, "workerinput") and (error := harness.device_error()):
        print(f"{item.nodeid}: {error}", file=sys.__stderr__, flush=True)
        os._exit(75)
    return result


class Results:
    """Appends a line of JSON for each test as it ends, so that a run that is stopped loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            message = getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or str(
                report.longrepr or ""
            )
            why = " | ".join(message.strip().splitlines()[:3])[:400]
            line = {"item": report.nodeid, "state": report.outcome, "seconds": round(report.duration, 3), "why": why}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def pytest_collection_finish() -> None:
    """Excludes imported modules and collected tests from garbage collection, which would walk through them often."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the names of implementations away, as for users."""
    monkeypatch.setattr(backends, "_choices", CHOICES)


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Fills uninitialized memory with NaN, in torch's allocations and in those of the compiled ops."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    for module in (backends.cpu_library, backends.cuda_library):
        if module is not None:
            module.poison_allocations(True)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
