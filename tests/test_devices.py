"""Several GPUs in one process: kernels launch on the input's GPU, and only if they were built for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import grpo_kernels as gk
from grpo_kernels import backends, registry
from tests.harness import needs_cpu_kernels

SUPPORTS = dict.fromkeys(backends.IMPLEMENTATIONS, (torch.float32,))
BUILT = "80-real;86-real;89-real;90-real;100-real;120"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for GPUs where there is none")


# Launches


def test_the_guard_is_for_the_device_of_the_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []

    @contextlib.contextmanager
    def recorder(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", recorder)
    with FakeTensorMode():
        arguments = (None, torch.empty(2, device="cuda:1"), torch.empty(2), 3)
    with registry.device_guard(arguments):
        assert entered == [torch.device("cuda:1")]
    with registry.device_guard((torch.empty(2),)):
        assert len(entered) == 1


# Tensors of several devices


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def numbers(*shape: int) -> torch.Tensor:
    return on_gpu(*shape, dtype=torch.int64)


@no_gpu
@pytest.mark.parametrize("field", ["ids", "logprobs", "mask", "weights", "normalizer"])
def test_a_teacher_on_another_device_is_refused(field: str) -> None:
    with FakeTensorMode():
        fields = {"ids": numbers(2, 3, 4), "logprobs": on_gpu(2, 3, 4), "mask": on_gpu(2, 3, dtype=torch.bool)}
        fields |= {"weights": on_gpu(2, 3), "normalizer": on_gpu()}
        fields[field] = torch.empty_like(fields[field], device="cuda:1")
        rows = {"hidden": on_gpu(2, 3, 4), "head": on_gpu(7, 4).requires_grad_(), "targets": numbers(2, 3)}
        with pytest.raises(ValueError, match=rf"^linear_policy_loss: teacher\.{field} must be on cuda:0 .*got cuda:1$"):
            gk.linear_policy_loss(
                **rows, old_logprobs=None, advantages=on_gpu(2), teacher=gk.Teacher(**fields), backend="reference"
            )


@no_gpu
@pytest.mark.parametrize("name", ["bias", "A of lora", "B of lora", "banned"])
def test_a_tensor_of_a_head_on_another_device_is_refused(name: str) -> None:
    with FakeTensorMode():
        tensors = {"bias": on_gpu(7), "A of lora": on_gpu(2, 4), "B of lora": on_gpu(7, 2), "banned": numbers(2)}
        tensors[name] = torch.empty_like(tensors[name], device="cuda:1")
        bias, a, b, banned = tensors.values()
        with pytest.raises(ValueError, match=f"^LMHead: {name} must be on cuda:0 like the first argument, got cuda:1$"):
            gk.LMHead(on_gpu(7, 4), bias, lora=(a, b, 1.0), banned=banned)


@no_gpu
@pytest.mark.parametrize("name", ["normalizer", "weight_grad"])
def test_a_number_or_a_sum_on_another_device_is_refused(name: str) -> None:
    with FakeTensorMode():
        tensors = {"normalizer": on_gpu(), "weight_grad": on_gpu(7, 4)}
        tensors[name] = torch.empty_like(tensors[name], device="cuda:1")
        rows = {"hidden": on_gpu(2, 3, 4), "head": on_gpu(7, 4).requires_grad_(), "targets": numbers(2, 3)}
        with pytest.raises(ValueError, match=rf"^linear_policy_loss: {name} must be on cuda:0 .*got cuda:1$"):
            gk.linear_policy_loss(**rows, old_logprobs=None, advantages=on_gpu(2), **tensors, backend="triton")


@no_gpu
@pytest.mark.parametrize("part", ["head", "support.token_ids", "support.offsets"])
@pytest.mark.parametrize("op", [gk.linear_logprobs, gk.linear_policy_loss])
def test_a_head_or_support_on_another_device_is_refused(op: Callable[..., Any], part: str) -> None:
    with FakeTensorMode():
        tensors = {"head": on_gpu(7, 4), "support.token_ids": numbers(8), "support.offsets": numbers(7)}
        tensors[part] = torch.empty_like(tensors[part], device="cuda:1")
        head, *support = tensors.values()
        more = {"old_logprobs": None, "advantages": on_gpu(2)} if op is gk.linear_policy_loss else {}
        with pytest.raises(ValueError, match=rf"^\w+: {part} must be on cuda:0 .*got cuda:1$"):
            op(on_gpu(2, 3, 4), head, numbers(2, 3), support=tuple(support), backend="reference", **more)


# Backend selection by architecture


@pytest.mark.parametrize(
    ("architectures", "runs", "refused"),
    [
        (
            BUILT,
            [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)],
            [(7, 0), (7, 5), (11, 0)],
        ),
        ("80-real;90-real;100", [(8, 0), (8, 9), (9, 0), (10, 3), (11, 0), (12, 0)], [(7, 5)]),
        ("90-real", [(9, 0)], [(8, 9), (10, 0), (12, 0)]),
        ("86-real", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("75-virtual", [(7, 5), (8, 0), (12, 0)], [(7, 0), (6, 1)]),
        ("90a-real", [(9, 0)], [(9, 1), (10, 0)]),
        ("90a", [(9, 0)], [(10, 0)]),
        ("100f-real", [(10, 0), (10, 3)], [(11, 0), (12, 0), (9, 0)]),
        ("native", [(7, 0), (9, 0)], []),
    ],
)
def test_architectures(architectures: str, runs: list[tuple[int, int]], refused: list[tuple[int, int]]) -> None:
    assert all(backends.runs_machine_code(architectures, *device) for device in runs)
    assert not any(backends.runs_machine_code(architectures, *device) for device in refused)


def cuda_library_of(facts: dict[str, str]) -> Any:
    return SimpleNamespace(build_facts=lambda: facts, driver_version=lambda: 13020)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulates an H100, a V100 and an A10, with CUDA kernels and Triton available."""
    capabilities = [SimpleNamespace(major=x // 10, minor=x % 10) for x in (90, 70, 86)]
    facts = {"cuda": "13.0.88", "cuda_architectures": "80-real;90-real;100"}
    monkeypatch.setattr(backends, "DEVICES", backends.DEVICES | {"cuda": {"cuda"}})
    monkeypatch.setattr(backends, "_emulated", set())
    monkeypatch.setattr(backends, "cuda_error", None)
    monkeypatch.setattr(backends, "cuda_library", cuda_library_of(facts))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    # get_device_capability is not patched, as torch.compile handles it itself
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: capabilities[index])
    backends._cuda_refusal.cache_clear()
    yield
    backends._cuda_refusal.cache_clear()


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def chosen(index: int | None, requested: str | None = None) -> str:
    return backends.select("op", requested, "cuda", torch.float32, SUPPORTS, index)


@no_gpu
def test_the_choice_is_by_the_device_of_the_tensor(gpus: None, available: None) -> None:
    pytest.importorskip("triton")
    assert [chosen(index) for index in range(3)] == ["cuda", "triton", "cuda"]
    assert [chosen(index, "kernel") for index in range(3)] == ["cuda", "triton", "cuda"]
    assert chosen(None) == "triton", "of the current device"


@no_gpu
def test_an_explicit_choice_is_refused_with_the_reason(gpus: None) -> None:
    pytest.importorskip("triton")
    reason = "built for sm_80, sm_90, sm_100, not for sm_70 of cuda:1; rebuild with .*ARCHITECTURES=70"
    with pytest.raises(RuntimeError, match=f"op: backend 'cuda' cannot run here: .*{reason}; use backend='kernel'"):
        chosen(1, "cuda")
    assert chosen(0, "cuda") == chosen(2, "cuda") == "cuda"


@no_gpu
def test_the_reason_is_shown_for_the_current_device(
    gpus: None, available: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not for sm_70 of cuda:1" in gk.available_kernels()["cuda"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert gk.available_kernels()["cuda"] == "ok"
    assert [gk.available_kernels(index)["cuda"] == "ok" for index in range(3)] == [True, False, True]


@no_gpu
def test_a_driver_older_than_the_build_is_the_reason(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(backends.cuda_library, "driver_version", lambda: 12080)
    assert chosen(0) == "triton"
    with pytest.raises(RuntimeError, match=r"built with CUDA 13.0.88, the driver runs CUDA 12.8 and older"):
        chosen(0, "cuda")


@no_gpu
@needs_cpu_kernels
def test_torch_compile_traces_the_choice(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    torch.compiler.reset()
    # torch.compile cannot trace into a compiled module
    assert backends.cpu_library is not None and backends.cuda_library is not None
    compiled_facts, facts = backends.cpu_library.build_facts, backends.cuda_library.build_facts()
    monkeypatch.setattr(backends.cuda_library, "build_facts", lambda: compiled_facts() | facts)
    numbers = {"cuda": 1, "triton": 2}

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x + 10 * numbers[chosen(0)] + numbers[chosen(1, "kernel")]

    assert compiled(torch.zeros(1)).item() == 12
    torch.compiler.reset()
