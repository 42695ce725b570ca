"""CUDA graphs and streams, checked without a GPU: nothing waits for the host, and calls share no memory.

Each call runs on the GPU of tests/simulated_gpu.py, which captures and replays it. Compiled code is read as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import backends
from tests.ops.all_cases import OPS
from tests.ops.promises import Inputs, Op, Results, assert_same_bits, drawn, evaluated, tensors
from tests.ops.waiting import WAITING
from tests.simulated_gpu import Factories, Gpu, GpuTensor, Step, Waits, replay

# References that read values; without the CUDA library, the CPU kernels of these ops take copies. Those of ops with a
# kernel in Triton are not for GPUs.
READING = ("endpoint_segments", "similarity", "pairwise_cosine", "cluster_distances", "agglomerate", "silhouette")
CSRC = Path(__file__).parent.parent / "csrc"
EACH = [
    (name, backend)
    for name, op in OPS.items()
    for backend in ("cuda", "triton", "reference")
    if backend in op.supports and not (backend == "reference" and ("triton" in op.supports or name.startswith(READING)))
]
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available() or "cuda" not in backends._emulated,
    reason="for the kernels emulated on the host; tests/ops/test_graphs_gpu.py captures on a GPU",
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A simulated GPU on which everything in the test runs."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    gpu, launch = Gpu(), interpreter.GridExecutor.__call__
    monkeypatch.setitem(backends.DEVICES, "cuda", {"cuda"})
    monkeypatch.setattr(torch.cuda, "device", gpu.guard)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda kernel, *args, **kwargs: gpu.launch(launch, kernel, args, kwargs)
    )
    with gpu, Factories():
        yield gpu


def hosts(results: Results) -> Results:
    return {name: result.host.clone() for name, result in results.items()}


def captured(gpu: Gpu, op: Op, static: Inputs, backend: str) -> tuple[list[Step], Results]:
    with gpu.capture(tensors(static)) as graph:
        results = evaluated(op, static, backend)
    return graph, results


# One stream


@without_gpu
@pytest.mark.parametrize(("name", "backend"), EACH)
def test_a_replay_on_new_values_equals_a_call(gpu: Gpu, name: str, backend: str) -> None:
    """The reference, too, waits for nothing, copies nothing from the host, and adds in a fixed order."""
    op = OPS[name]
    # also the warm-up, after which anything kept between calls is memory from outside of the capture
    expected = [hosts(evaluated(op, drawn(op, seed, gpu.put), backend)) for seed in (1, 2)]
    assert any(not torch.equal(expected[0][key], expected[1][key]) for key in expected[0]), "the inputs change nothing"
    static = drawn(op, 1, gpu.put)
    graph, results = captured(gpu, op, static, backend)
    assert gpu.kernels > 0 or backend == "reference"
    assert_same_bits(hosts(results), expected[0])
    for seed in (2, 1):
        for memory, value in zip(tensors(static), tensors(drawn(op, seed)), strict=True):
            memory.host.copy_(value)
        replay(graph)
        assert_same_bits(hosts(results), expected[seed - 1])


@without_gpu
@pytest.mark.parametrize("name", WAITING)
def test_documented_settings_wait(gpu: Gpu, name: str) -> None:
    with pytest.raises(Waits):
        WAITING[name](gpu.put)


def test_every_op_is_captured() -> None:
    ops = {name for name in gk.__all__ if callable(getattr(gk, name)) and name[0].islower()}
    # these compute nothing on a GPU, or numbers for the host; LMHead is an argument
    ops -= {"available_kernels", "use_backend", "group_ids", "segment_metrics", "similarity_metrics"}
    assert ops | {"diversity", "variants"} == {name.partition(" ")[0] for name in OPS} - {"LMHead"}


# Two streams


@pytest.mark.full
@without_gpu
@pytest.mark.parametrize(
    ("name", "backend"),
    # the interpreter is slow, so of Triton one case of each op
    [(name, backend) for name, backend in EACH if backend == "cuda" or " " not in name],
)
def test_two_streams_that_take_turns_change_nothing(gpu: Gpu, name: str, backend: str) -> None:
    """After every kernel of one stream, the other runs its next one."""
    op = OPS[name]
    expected = [hosts(evaluated(op, drawn(op, seed, gpu.put), backend)) for seed in (1, 2)]
    streams = [captured(gpu, op, drawn(op, seed, gpu.put), backend) for seed in (1, 2)]
    for _, results in streams:
        for result in results.values():
            result.host.zero_()
    replay(*(graph for graph, _ in streams))
    for (_, results), want in zip(streams, expected, strict=True):
        assert_same_bits(hosts(results), want)


@pytest.mark.full
@without_gpu
@pytest.mark.parametrize("name", [name for name, backend in EACH if backend == "cuda"])
def test_two_threads_at_once_change_nothing(name: str) -> None:
    """Calls of CUDA kernels only, as the state of Triton's interpreter is global."""
    op = OPS[name]
    draws = [drawn(op, seed) for seed in (1, 2)]
    expected = [evaluated(op, inputs, "cuda") for inputs in draws]
    together = Barrier(2)

    def repeat(inputs: Inputs) -> list[Results]:
        together.wait()
        return [evaluated(op, inputs, "cuda") for _ in range(5)]

    with ThreadPoolExecutor(2) as threads:
        for runs, want in zip(threads.map(repeat, draws), expected, strict=True):
            for results in runs:
                assert_same_bits(results, want)


# The simulated GPU itself, on planted faults

VALUES, TARGETS = [1.0, 0.0, 2.0, 0.0], [3, 1, 0, 2]
FAULTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "item": lambda x, at: x.sum().item(),
    "tolist": lambda x, at: x.tolist(),
    "bool": lambda x, at: bool((x > 0).all()),
    "int": lambda x, at: int(at[0]),
    "range": lambda x, at: x[: at[0]],
    "nonzero": lambda x, at: x.nonzero(),
    "where of one argument": lambda x, at: torch.where(x > 0),
    "mask as an index": lambda x, at: x[x > 0],
    "mask as an index to write to": lambda x, at: x.index_put((x > 0,), x[:2]),
    "masked_select": lambda x, at: x.masked_select(x > 0),
    "unique": lambda x, at: x.unique(),
    "unique_consecutive": lambda x, at: x.unique_consecutive(),
    "bincount": lambda x, at: at.bincount(),
    "repeat_interleave": lambda x, at: x.repeat_interleave(at),
    "equal": lambda x, at: torch.equal(x, x + 1),
    "cpu": lambda x, at: x.cpu(),
    "to": lambda x, at: x.to("cpu"),
    "copy from the host": lambda x, at: x.copy_(torch.zeros(4)),
    "to the GPU": lambda x, at: torch.zeros(4).to(x.device),
    "tensor of a list": lambda x, at: torch.tensor(VALUES, device=x.device),
    "as_tensor of a list": lambda x, at: torch.as_tensor(VALUES, device=x.device),
    "new_tensor of a list": lambda x, at: x.new_tensor(VALUES),
    "operand on the host": lambda x, at: x + torch.zeros(4),
    "choice of a host tensor": lambda x, at: torch.where(x > 0, x, torch.zeros(())),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wait_is_reported(gpu: Gpu, name: str) -> None:
    x, at = gpu.put(torch.tensor(VALUES)), gpu.put(torch.tensor(TARGETS))
    with pytest.raises(Waits):
        FAULTS[name](x, at)


def test_what_does_not_wait_is_run(gpu: Gpu) -> None:
    x, at = gpu.put(torch.tensor(VALUES)), gpu.put(torch.tensor(TARGETS))
    y = torch.where(x > 0, x, -1.0) + torch.full((), 3.0, device=x.device) + torch.arange(4, device=x.device)
    y[at] = y.repeat_interleave(at, output_size=6)[:4] * 2
    assert isinstance(y, GpuTensor) and y.device == torch.device("cuda:0")
    assert y.host.tolist() == [8.0, 8.0, 6.0, 8.0]


def test_a_wait_in_a_backward_is_reported(gpu: Gpu) -> None:
    class Peeks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, upstream: Tensor) -> Tensor:
            return upstream * 2 if bool(upstream.any()) else upstream

    x = gpu.put(torch.ones(3)).requires_grad_()
    with pytest.raises(Waits):
        torch.autograd.grad(Peeks.apply(x).sum(), x)


def test_memory_kept_between_calls_is_reported(gpu: Gpu) -> None:
    x = gpu.put(torch.ones(3))
    kept = torch.zeros_like(x)
    with gpu.capture([x]):
        (x + 1) * torch.zeros_like(x)
        with pytest.raises(AssertionError, match=r"add.* uses memory from outside of the capture"):
            kept.add_(x)


def test_a_number_read_at_capture_is_seen_in_the_replay(gpu: Gpu) -> None:
    x = gpu.put(torch.ones(3))
    with gpu.capture([x]) as graph:
        result = x * float(x.host[0])
    x.host.fill_(3)
    replay(graph)
    assert result.host.tolist() == [3, 3, 3], "and not 9, as of a call"


def test_shared_memory_shows_between_streams(gpu: Gpu) -> None:
    shared, graphs, results = gpu.put(torch.zeros(3)), [], []
    for value in (1.0, 2.0):
        with gpu.capture([shared]) as graph:
            results.append(shared.fill_(value) + 0)
        graphs.append(graph)
    replay(*graphs)
    assert [result.host.tolist() for result in results] == [[2, 2, 2], [2, 2, 2]]


def test_tensors_of_two_gpus_are_refused(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="same device, got cuda:0, cuda:1"):
        gpu.put(torch.ones(3)) + gpu.put(torch.ones(3), index=1)


# Compiled code

# The runtime's functions that neither wait nor allocate nor queue; a capture allows them.
HARMLESS = {
    "cudaDeviceGetAttribute",
    "cudaDriverGetVersion",
    "cudaFuncGetAttributes",
    "cudaFuncSetAttribute",
    "cudaGetDevice",
    "cudaGetErrorString",
    "cudaGetLastError",
}
# Host state that is a fact of the device, not of a call: its shared memory. And the emulator's.
HOST_STATE = {"static std::atomic<int> limits[kCachedDevices];", "inline thread_local int emulated_device = kNoDevice;"}
LAUNCHER = "common/cuda/launch.h"
BINDINGS = sorted(CSRC.glob("*/cuda_op.cpp"))
DEVICE_CODE = [
    *BINDINGS,
    *sorted(CSRC.rglob("*.cu*")),
    *sorted(CSRC.glob("*/cuda.h")),
    *sorted(CSRC.glob("common/cuda/*")),
]


def faults(source: str, is_launcher: bool = False) -> set[str]:
    """Calls and declarations that keep CUDA sources from capture and from running on two streams."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"", "", source, flags=re.S)
    found = {f"calls {name}" for name in re.findall(r"\b(cu(?:da)?[A-Z]\w+)\s*\(", code) if name not in HARMLESS}
    found |= {f"allocates by {name}" for name in re.findall(r"\b(malloc|calloc|aligned_alloc|make_unique|new)\b", code)}
    found |= {f"includes {name}" for name in re.findall(r"#include <((?:thrust|cub)/\S+)>", code)}
    for line in map(str.strip, code.splitlines()):
        is_function = "(" in line and not line.endswith(");")
        is_static = re.search(r"\b(static|thread_local)\b", line) and not re.search(r"constexpr|const\b", line)
        is_global = re.match(r"(__device__|__managed__)[^(]*;", line)
        if is_global or (is_static and not is_function and line not in HOST_STATE):
            found.add(f"keeps state: {line}")
    if not is_launcher:
        found |= {"launches by chevrons"} if "<<<" in code else set()
        launches = re.findall(r"\blaunch\((.*?)\);", code, flags=re.S)
        found |= {f"launches on another stream: {call}" for call in launches if not re.search(r"\bstream,", call)}
    return found


def functions_of(source: str) -> dict[str, str]:
    """The registered functions of a cuda_op.cpp, with their parameters and bodies."""
    names = re.findall(r"TORCH_BOX\(&grpo_kernels::(\w+)\)", source)
    return {name: re.search(rf"\b{name}\((.*?)\n}}\n", source, flags=re.S)[0] for name in names}  # type: ignore[index]


def guard_fault(function: str) -> str | None:
    """Reason why the function's launches may miss the stream or the device of its tensors, or None."""
    guard = re.search(r"const DeviceGuard guard\((\w+)\.get_device_index\(\)\);", function)
    streams = set(re.findall(r"current_stream\(([\w.]*(?:\(\))?)\)", function))
    launch = re.search(r"\blaunch_\w+\(", function)
    if guard is None or launch is None or guard.start() > launch.start():
        return "no guard before the launch"
    parameters = function.replace("(GRPO_POLICY_PARAMETERS", "(Tensor logprobs")
    if f"Tensor {guard[1]}," not in parameters and f"Tensor {guard[1]})" not in parameters:
        return f"the guard is for {guard[1]}, which is not an argument"
    if streams != {f"{guard[1]}.get_device_index()"}:
        return f"the guard is for {guard[1]}, the streams for {sorted(streams)}"
    return None


@pytest.mark.parametrize("path", DEVICE_CODE, ids=lambda path: str(path.relative_to(CSRC)))
def test_compiled_code_can_be_captured(path: Path) -> None:
    assert not faults(path.read_text(), is_launcher=str(path).endswith(LAUNCHER))


@pytest.mark.parametrize("path", BINDINGS, ids=lambda path: path.parent.name)
def test_launches_are_guarded_for_the_device_of_their_stream(path: Path) -> None:
    functions = functions_of(path.read_text())
    assert functions
    assert {name: why for name, body in functions.items() if (why := guard_fault(body))} == {}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("cudaMalloc(&memory, bytes);", "calls cudaMalloc"),
        ("cudaStreamSynchronize(stream);", "calls cudaStreamSynchronize"),
        ("cudaMemcpyAsync(to, from, bytes, kind, stream);", "calls cudaMemcpyAsync"),
        ("cuMemAlloc(&memory, bytes);", "calls cuMemAlloc"),
        ("kernel<<<1, 32>>>(x);", "launches by chevrons"),
        ("launch(kernel, 1, 32, 0, nullptr, x);", "launches on another stream"),
        ("static float* scratch = nullptr;", "keeps state"),
        ("static thread_local Scratch<float> scratch;", "keeps state"),
        ("__device__ unsigned counter;", "keeps state"),
        ("#include <cub/cub.cuh>", "includes cub/cub.cuh"),
        ("float* x = new float[3];", "allocates by new"),
    ],
)
def test_faults_of_compiled_code_are_found(line: str, fault: str) -> None:
    assert [found for found in faults(f"void f() {{\n{line}\n}}\n") if found.startswith(fault)]
    assert not faults(f"// {line}\n")


def test_faults_of_guards_are_found() -> None:
    right = functions_of((CSRC / "policy_loss" / "cuda_op.cpp").read_text())["scale_gradient_cuda"]
    assert guard_fault(right) is None
    for old, new in (
        ("const DeviceGuard guard(gradient.get_device_index());", ""),
        ("guard(gradient.", "guard(result."),
        ("current_stream(gradient.", "current_stream(upstream."),
        ("current_stream(gradient.get_device_index())", "nullptr"),
    ):
        assert old in right and guard_fault(right.replace(old, new)), old
