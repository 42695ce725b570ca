"""CPU kernels on copies of GPU tensors, where the CUDA library is missing. On the GPU of tests/simulated_gpu.py.

Faults that this is for: a copy for each tensor instead of one each way, results that share memory or lie on the host, a
capture that records nothing or breaks the process, and calls that fail where neither library is built.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import grpo_kernels as gk
from grpo_kernels import backends, registry
from tests.harness import needs_cpu_kernels
from tests.ops.all_cases import OPS
from tests.ops.promises import Op, Results, drawn, evaluated, tensors
from tests.simulated_gpu import Factories, Gpu

pytestmark = [
    needs_cpu_kernels,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/ops/test_graphs_gpu.py does this on a GPU"),
]
KERNELS = ("group_advantages", "endpoint_segments", "similarity_groups", "pairwise_cosine", "cluster_distances")
KERNELS += ("agglomerate", "silhouette")
COMPOSED = ("gigpo_advantages", "similarity_advantages")  # functions that call two ops
COPIED = [name for name in OPS if name.partition(" ")[0] in (*KERNELS, *COMPOSED)]
# cases whose references read values
READING = [name for name in COPIED if not name.startswith(("group_advantages", "gigpo_advantages"))]
NOT_BUILT = "not built; reinstall with GRPO_KERNELS_BUILD=cpu or cuda"
NO_CUDA = "this torch is not a CUDA build"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A simulated GPU without CUDA kernels and Triton."""
    gpu = Gpu()
    gpu.transfers = []
    monkeypatch.setitem(backends.DEVICES, "cuda", {"cuda"})
    monkeypatch.setattr(backends, "_emulated", set())
    monkeypatch.setattr(backends, "_TRITON_INSTALLED", False)
    monkeypatch.setattr(torch.cuda, "device", gpu.guard)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.steps is not None)
    with gpu, Factories():
        yield gpu


def assert_on_gpu(results: Results, expected: Results) -> None:
    for name, want in expected.items():
        result = results[name]
        assert result.device == torch.device("cuda:0") and result.dtype == want.dtype
        torch.testing.assert_close(result.host, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", [None, "kernel"])
@pytest.mark.parametrize("name", COPIED)
def test_one_copy_each_way_gives_the_results_of_the_host(gpu: Gpu, name: str, backend: str | None) -> None:
    op = OPS[name]
    expected = evaluated(op, drawn(op, 1), "cpu")
    assert gpu.transfers == []
    assert_on_gpu(evaluated(op, drawn(op, 1, gpu.put), backend), expected)
    calls_two = name.startswith(COMPOSED) or name == "similarity_groups"  # that case compares distances, too
    assert gpu.transfers == ["host", "GPU"] * (2 if calls_two else 1)


@pytest.mark.parametrize("name", READING)
def test_without_either_library_the_reference_runs_on_copies(
    gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "cpu_error", NOT_BUILT)
    op = OPS[name]
    expected = evaluated(op, drawn(op, 1), "reference")
    assert_on_gpu(evaluated(op, drawn(op, 1, gpu.put), None), expected)
    assert gpu.transfers[:2] == ["host", "GPU"]


def test_without_either_library_group_advantages_stay_on_the_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their reference reads no values, so that it can be captured."""
    monkeypatch.setattr(backends, "cpu_error", NOT_BUILT)
    weighted = Op(lambda: {"rewards": torch.randn(6, 2)}, weighted_advantages, {})
    for op in (*(OPS[name] for name in COPIED if name not in READING), weighted):
        expected, static = evaluated(op, drawn(op, 1), "reference"), drawn(op, 1, gpu.put)
        with gpu.capture(tensors(static)):
            results = evaluated(op, static, None)
        assert_on_gpu(results, expected)
    assert gpu.transfers == []


def weighted_advantages(inputs: dict[str, Tensor], backend: str | None) -> Results:
    config = gk.AdvantageConfig(reward_weights=(0.5, 2.0))
    return gk.group_advantages(inputs["rewards"], 3, config=config, backend=backend)._asdict()


@pytest.mark.parametrize("name", COPIED)
def test_a_capture_is_refused(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, static = OPS[name], drawn(OPS[name], 1, gpu.put)
    error = r"^\w+: the CPU kernel must not be captured, as it waits for the GPU; call it before the capture, or use "
    error += "the CUDA kernel"
    with gpu.capture(tensors(static)), pytest.raises(RuntimeError, match=f"{error}, which .*: {NO_CUDA}$"):
        op.call(static, None)
    assert gpu.transfers == []
    monkeypatch.setattr(backends, "_emulated", {"cuda"})
    with gpu.capture(tensors(static)), pytest.raises(RuntimeError, match=f"{error}$"):
        op.call(static, "cpu")


@pytest.mark.parametrize("name", READING)
def test_a_capture_without_either_library_is_refused(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "cpu_error", NOT_BUILT)
    static = drawn(OPS[name], 1, gpu.put)
    with gpu.capture(tensors(static)), pytest.raises(RuntimeError, match=r"the reference must not be captured"):
        OPS[name].call(static, None)


def test_results_have_memory_of_their_own(gpu: Gpu) -> None:
    results = gk.group_advantages(gpu.put(torch.rand(6)), 3)
    assert len({result.host.untyped_storage().data_ptr() for result in results}) == len(results)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows_of_a_wider_table(gpu: Gpu, rows: int) -> None:
    """A single row counts as contiguous, whatever its stride."""
    rewards = gpu.put(torch.full((1, 4), 3.0))[:rows, 1]
    assert rows == 0 or rewards.stride() == (4,)
    result = gk.group_advantages(rewards, gpu.put(torch.zeros(rows, dtype=torch.int64)))
    assert result.mean.host.tolist() == [3.0] * rows and result.degenerate.host.tolist() == [True] * rows


def test_the_copied_backends_are_those_tested_here() -> None:
    assert backends.through_host == set(KERNELS)
    for op in KERNELS:
        kernel = registry.overload(f"{op}_on_host")
        assert torch.Tag.cudagraph_unsafe in kernel.tags
        for key in ("CUDA", "XPU"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(kernel.name(), key)


@pytest.mark.parametrize("device", ["cuda:1", "xpu:0"])
def test_it_is_one_op_in_a_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_emulated", set())
    monkeypatch.setattr(backends, "_TRITON_INSTALLED", False)

    def call(rewards: Tensor, values: Tensor, embeddings: Tensor) -> list[Tensor]:
        advantages = gk.group_advantages(rewards.flatten(), 2).advantages
        segments = gk.endpoint_segments(rewards, values, values, values=values)
        return [advantages, *segments, *gk.similarity_groups(embeddings, 2)]

    with FakeTensorMode():
        arguments = [torch.empty(4, 3, device=device) for _ in range(3)]
        graph = make_fx(call)(*arguments)
        results = graph(*arguments)
    assert {result.device for result in results} == {torch.device(device)}
    ours = [str(node.target) for node in graph.graph.nodes if "grpo_kernels" in str(node.target)]
    assert ours == [f"grpo_kernels.{op}_on_host.default" for op in KERNELS[:3]]


def test_other_ops_do_not_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        logprobs = torch.empty(2, 3, device="cuda:0")
        with pytest.raises(RuntimeError, match=r"'kernel' cannot run here: .* cpu \(it does not run on cuda tensors\)"):
            gk.policy_loss(logprobs, logprobs, torch.empty(2, device="cuda:0"), backend="kernel")
