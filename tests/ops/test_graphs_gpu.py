"""CUDA graphs, streams and several devices on a GPU. tests/test_graphs.py checks what can be checked without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends
from tests.ops.all_cases import OPS
from tests.ops.promises import Results, assert_same_bits, drawn, evaluated, tensors
from tests.ops.waiting import WAITING

PAGE = Path(__file__).parents[2] / "docs" / "cuda_graphs.md"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


EACH = [(name, backend) for name, op in OPS.items() for backend in ("cuda", "triton") if backend in op.supports]
COPIED = [name for name in OPS if name.partition(" ")[0] in backends.through_host]


@pytest.fixture(autouse=True)
def is_installed(request: pytest.FixtureRequest) -> None:
    backend = getattr(request.node, "callspec", SimpleNamespace(params={})).params.get("backend")
    if backend is not None and (reason := backends.missing(backend)):
        pytest.skip(reason)


@pytest.fixture
def refuse_waits() -> Iterator[None]:
    """Lets torch raise an error where the host would wait for the GPU. A capture that meets one breaks the process."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


def put(value: Tensor) -> Tensor:
    return value.cuda()


def hosts(results: Results) -> Results:
    return {name: result.cpu() for name, result in results.items()}


@pytest.mark.skipif(not PAGE.exists(), reason="tests are run from outside the checkout")
def test_the_example_of_the_page() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    new = names["new_logprobs"].requires_grad_()
    loss = names["gk"].policy_loss(new, names["old"], names["advantages"]).loss
    torch.testing.assert_close(names["result"].loss, loss, rtol=0, atol=0)
    torch.testing.assert_close(names["gradient"], torch.autograd.grad(loss, new)[0], rtol=0, atol=0)


@pytest.mark.parametrize(("name", "backend"), EACH)
def test_a_replay_on_new_values_equals_a_call(name: str, backend: str, request: pytest.FixtureRequest) -> None:
    op = OPS[name]
    static, second, other = (drawn(op, seed, put) for seed in (1, 2, 3))
    first = drawn(op, 1, put)
    expected = [hosts(evaluated(op, inputs, backend)) for inputs in (first, second)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    request.getfixturevalue("refuse_waits")
    with torch.cuda.stream(side):  # the warm-up that torch.cuda.graph asks for
        evaluated(op, static, backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = evaluated(op, static, backend)
    torch.cuda.set_sync_debug_mode("default")
    for inputs, want in ((second, expected[1]), (first, expected[0])):
        for memory, value in zip(tensors(static), tensors(inputs), strict=True):
            memory.copy_(value)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            evaluated(op, other, backend)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(hosts(results), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAITING)
def test_documented_settings_wait(name: str, request: pytest.FixtureRequest) -> None:
    def put_once(value: Tensor) -> Tensor:
        torch.cuda.set_sync_debug_mode("default")  # for the copy
        try:
            return value.cuda()
        finally:
            torch.cuda.set_sync_debug_mode("error")

    request.getfixturevalue("refuse_waits")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        WAITING[name](put_once)


@pytest.mark.parametrize(("name", "backend"), EACH)
def test_two_streams_at_once_change_nothing(name: str, backend: str) -> None:
    op = OPS[name]
    draws = [drawn(op, seed, put) for seed in (1, 2)]
    expected = [hosts(evaluated(op, inputs, backend)) for inputs in draws]
    streams = [torch.cuda.Stream() for _ in draws]
    torch.cuda.synchronize()
    runs: list[list[Results]] = [[], []]
    for _ in range(10):
        for inputs, stream, results in zip(draws, streams, runs, strict=True):
            with torch.cuda.stream(stream):
                results.append(evaluated(op, inputs, backend))
    torch.cuda.synchronize()
    for of_stream, want in zip(runs, expected, strict=True):
        for results in of_stream:
            assert_same_bits(hosts(results), want)


@pytest.mark.parametrize("name", COPIED)
def test_cpu_kernels_take_copies_and_refuse_a_capture(name: str) -> None:
    if reason := backends.missing("cpu"):
        pytest.skip(reason)
    op, inputs = OPS[name], drawn(OPS[name], 1, put)
    results = evaluated(op, inputs, "cpu")
    assert {result.device.type for result in results.values()} == {"cuda"}
    assert_same_bits(hosts(results), evaluated(op, drawn(op, 1), "cpu"))
    torch.cuda.synchronize()
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(RuntimeError, match="CPU kernel must not be captured"),
    ):
        evaluated(op, inputs, "cpu")


@pytest.mark.full
def test_a_graph_of_torch_compile_leaves_copies_out() -> None:
    if reason := backends.missing("cpu"):
        pytest.skip(reason)
    rewards = torch.rand(8, device="cuda")

    @torch.compile(mode="reduce-overhead")
    def twice(rewards: Tensor) -> Tensor:
        return 2 * gk.group_advantages(rewards.square(), 4, backend="cpu").advantages

    want = 2 * gk.group_advantages(rewards.square(), 4, backend="cpu").advantages
    for _ in range(3):  # a warm-up, the capture, a replay
        torch.testing.assert_close(twice(rewards), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("name", "backend"), EACH)
def test_the_second_gpu_computes_the_same(name: str, backend: str) -> None:
    """The first one stays the current device."""
    if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("needs two equal GPUs")
    op = OPS[name]
    want, results = (evaluated(op, drawn(op, 1, partial(Tensor.to, device=n)), backend) for n in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    assert {result.device for result in results.values()} == {torch.device("cuda:1")}
    assert_same_bits(hosts(results), hosts(want))
