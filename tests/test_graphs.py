"""CUDA graphs, checked without a GPU: nothing waits for the host, and calls share no memory.

Each call runs on the GPU of tests/simulated_gpu.py, which captures and replays it. Compiled code is read as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.ops.all_cases import OPS
from tests.ops.promises import Results, assert_same_bits, drawn, evaluated, tensors
from tests.ops.waiting import WAITING
from tests.simulated_gpu import Gpu, Waits, replay, running, without_gpu

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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with running(monkeypatch) as gpu:
        yield gpu


def hosts(results: Results) -> Results:
    return {name: result.host.clone() for name, result in results.items()}


@without_gpu
@pytest.mark.parametrize(("name", "backend"), EACH)
def test_a_replay_on_new_values_equals_a_call(gpu: Gpu, name: str, backend: str) -> None:
    """The reference, too, waits for nothing, copies nothing from the host, and adds in a fixed order."""
    op = OPS[name]
    # also the warm-up, after which anything kept between calls is memory from outside of the capture
    expected = [hosts(evaluated(op, drawn(op, seed, gpu.put), backend)) for seed in (1, 2)]
    assert any(not torch.equal(expected[0][key], expected[1][key]) for key in expected[0]), "the inputs change nothing"
    static = drawn(op, 1, gpu.put)
    with gpu.capture(tensors(static)) as graph:
        results = evaluated(op, static, backend)
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
    ops -= {"available_kernels", "use_backend", "group_ids", "segment_metrics", "similarity_metrics", "deal_by_length"}
    assert ops | {"diversity", "variants"} == {name.partition(" ")[0] for name in OPS} - {"LMHead"}


# The simulated GPU itself, on planted faults

FAULTS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "mask as an index": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: x.copy_(torch.zeros(4)),
    "tensor of a list": lambda x: torch.tensor([1.0], device=x.device),
    "operand on the host": lambda x: x + torch.zeros(4),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wait_is_reported(gpu: Gpu, name: str) -> None:
    with pytest.raises(Waits):
        FAULTS[name](gpu.put(torch.tensor([1.0, 0.0, 2.0, 0.0])))


def test_memory_kept_between_calls_is_reported(gpu: Gpu) -> None:
    x = gpu.put(torch.ones(3))
    kept = torch.zeros_like(x)
    with gpu.capture([x]):
        (x + 1) * torch.zeros_like(x)
        with pytest.raises(AssertionError, match=r"add.* uses memory from outside of the capture"):
            kept.add_(x)


# Compiled code, of which the emulator checks that launches are on the stream of a guarded device

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
DEVICE_CODE = [
    *sorted(CSRC.glob("*/cuda_op.cpp")),
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
    return found | ({"launches by chevrons"} if "<<<" in code and not is_launcher else set())


@pytest.mark.parametrize("path", DEVICE_CODE, ids=lambda path: str(path.relative_to(CSRC)))
def test_compiled_code_can_be_captured(path: Path) -> None:
    assert not faults(path.read_text(), is_launcher=str(path).endswith(LAUNCHER))


FAULTY = """
cudaMemcpyAsync(to, from, bytes, kind, stream);
kernel<<<1, 32>>>(x);
static float* scratch = nullptr;
__device__ unsigned counter;
#include <cub/cub.cuh>
float* x = new float[3];
"""


def test_faults_of_compiled_code_are_found() -> None:
    assert faults(FAULTY) == {
        "calls cudaMemcpyAsync",
        "launches by chevrons",
        "keeps state: static float* scratch = nullptr;",
        "keeps state: __device__ unsigned counter;",
        "includes cub/cub.cuh",
        "allocates by new",
    }
