"""CUDA graphs, streams and several devices on a GPU. tests/test_graphs.py checks what can be checked without one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends
from tests.graph_cases import CASES, COPIED, WAITING
from tests.graph_inputs import GPU_BACKENDS, Inputs, runs_on

PAGE = Path(__file__).parents[2] / "docs" / "cuda_graphs.md"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=GPU_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if reason := backends.missing(request.param):
        pytest.skip(reason)
    name = request.node.callspec.params["name"]
    if not runs_on(name, request.param):
        pytest.skip(f"{name.partition(' ')[0]} has no such kernel")
    return str(request.param)


@pytest.fixture
def refuse_waits() -> Iterator[None]:
    """Lets torch raise an error where the host would wait for the GPU. A capture that meets one breaks the process."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


def drawn(name: str, seed: int, device: str = "cuda") -> Inputs:
    torch.manual_seed(seed)
    inputs = (CASES | WAITING)[name].draw()
    return {key: value.detach().to(device).requires_grad_(value.requires_grad) for key, value in inputs.items()}


def assert_same_bits(results: list[Tensor], expected: list[Tensor]) -> None:
    for number, (result, want) in enumerate(zip(results, expected, strict=True)):
        torch.testing.assert_close(
            result.cpu(),
            want.cpu(),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda text, of=number: f"result {of}: {text}",
        )


@pytest.mark.skipif(not PAGE.exists(), reason="tests are run from outside the checkout")
def test_the_example_of_the_page() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    new = names["new_logprobs"].requires_grad_()
    loss = names["gk"].policy_loss(new, names["old"], names["advantages"]).loss
    assert_same_bits([names["result"].loss, names["gradient"]], [loss, *torch.autograd.grad(loss, new)])


@pytest.mark.parametrize("name", CASES)
def test_a_replay_on_new_values_equals_a_call(name: str, backend: str, request: pytest.FixtureRequest) -> None:
    call = CASES[name].call
    static, second, other = (drawn(name, seed) for seed in (1, 2, 3))
    first = {key: value.detach().clone() for key, value in static.items()}
    expected = [call(static, backend), call(second, backend)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    request.getfixturevalue("refuse_waits")
    with torch.cuda.stream(side):  # the warm-up that torch.cuda.graph asks for
        call(static, backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(static, backend)
    torch.cuda.set_sync_debug_mode("default")
    for inputs, want in ((second, expected[1]), (first, expected[0])):
        for key, value in inputs.items():
            static[key].detach().copy_(value.detach())
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            call(other, backend)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, want)


@pytest.mark.parametrize("name", WAITING)
def test_documented_settings_wait(name: str, backend: str, request: pytest.FixtureRequest) -> None:
    inputs = drawn(name, 1)
    request.getfixturevalue("refuse_waits")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        WAITING[name].call(inputs, backend)


@pytest.mark.parametrize("name", CASES)
def test_two_streams_at_once_change_nothing(name: str, backend: str) -> None:
    call = CASES[name].call
    draws = [drawn(name, seed) for seed in (1, 2)]
    expected = [call(inputs, backend) for inputs in draws]
    streams = [torch.cuda.Stream() for _ in draws]
    torch.cuda.synchronize()
    runs: list[list[list[Tensor]]] = [[], []]
    for _ in range(10):
        for inputs, stream, results in zip(draws, streams, runs, strict=True):
            with torch.cuda.stream(stream):
                results.append(call(inputs, backend))
    torch.cuda.synchronize()
    for results, want in zip(runs, expected, strict=True):
        for result in results:
            assert_same_bits(result, want)


@pytest.mark.parametrize("name", COPIED)
def test_cpu_kernels_take_copies_and_refuse_a_capture(name: str) -> None:
    if reason := backends.missing("cpu"):
        pytest.skip(reason)
    inputs, call = drawn(name, 1), CASES[name].call
    results = call(inputs, "cpu")
    assert {result.device.type for result in results} == {"cuda"}
    assert_same_bits(results, call(drawn(name, 1, "cpu"), "cpu"))
    torch.cuda.synchronize()
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(RuntimeError, match="CPU kernel must not be captured"),
    ):
        call(inputs, "cpu")


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
@pytest.mark.parametrize("name", CASES)
def test_the_second_gpu_computes_the_same(name: str, backend: str) -> None:
    """The first one stays the current device."""
    if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("needs two equal GPUs")
    want, results = (CASES[name].call(drawn(name, 1, device), backend) for device in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    assert {result.device for result in results} == {torch.device("cuda:1")}
    assert_same_bits(results, want)
