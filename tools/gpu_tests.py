"""A pytest plugin for gpu_check: which tests a GPU is worth, a share of them, and which op ran on which backend there.

    python -m pytest -p tools.gpu_tests --shard 1/4 --junit-xml shard1.xml tests/ops

Left out are cases of the cpu and the reference backend, which need no GPU, and of the large grids nine cases in ten, by
name, as Triton's interpreter has it without a GPU. --whole-grid brings those back. Every testcase in the XML has a
property `ran_on` for each op and backend that was chosen for tensors on the GPU. Never run on a GPU.
"""

from __future__ import annotations

import zlib
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
    kept = [
        item
        for item in items
        if zlib.crc32(item.nodeid.encode()) % shares == share - 1
        and is_for_a_gpu(item)
        and (config.getoption("--whole-grid", default=False) or not is_surplus(item))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def is_for_a_gpu(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    return call is None or call.params.get("backend") not in ("cpu", "reference")


def is_surplus(item: pytest.Item) -> bool:
    # not the digits that shards are made of
    return item.get_closest_marker("grid") is not None and zlib.crc32(item.nodeid.encode()[::-1]) % 10 != 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _ran.clear()
    try:
        return (yield)
    finally:
        item.user_properties += [("ran_on", each) for each in sorted(_ran)]
