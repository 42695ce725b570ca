"""A pytest plugin for gpu_check: which tests a GPU is worth, a share of them, and which op ran on which backend there.

    python -m pytest -p tools.gpu_tests --shard 1/4 --junit-xml shard1.xml tests/ops

Left out are cases of the cpu and the reference backend, which need no GPU, and of the large grids nine cases in ten;
--whole-grid brings those back. Every testcase in the XML has a property `ran_on` for each op and backend that was
chosen for tensors on the GPU. Never run on a GPU.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from grpo_kernels import dispatch

_ran: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="I/N: of N shares of the tests the I-th; each case is in one")


def pytest_configure() -> None:
    dispatch.select = recording(dispatch.select)


def recording(select: Callable[..., str]) -> Callable[..., str]:
    def call(op: str, requested: str | None, device_type: str, *rest: Any) -> str:
        chosen = select(op, requested, device_type, *rest)
        if device_type == "cuda" and not torch.compiler.is_compiling():
            _ran.add(f"{op}:{chosen}")
        return chosen

    return call


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, shares = (int(number) for number in config.getoption("--shard").split("/"))
    wanted = [item for item in items if backend_of(item) not in ("cpu", "reference")]
    if not config.getoption("--whole-grid", default=False):
        wanted = thinned(wanted)
    kept = {item for item in wanted if digest(item) % shares == share - 1}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of each test of a large grid, on each backend, a tenth of the cases, and one at least."""
    cases: dict[tuple[str, str | None], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("grid") is not None:
            cases[item.nodeid.partition("[")[0], backend_of(item)].append(item)
    surplus = {item for some in cases.values() for item in sorted(some, key=digest)[(len(some) + 9) // 10 :]}
    return [item for item in items if item not in surplus]


def backend_of(item: pytest.Item) -> str | None:
    call = getattr(item, "callspec", None)
    return None if call is None else call.params.get("backend")


def digest(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _ran.clear()
    try:
        return (yield)
    finally:
        item.user_properties += [("ran_on", each) for each in sorted(_ran)]
