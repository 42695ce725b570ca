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


SHAPES: dict[str, tuple[int, ...]] = {"hidden": (2, 3, 4), "targets": (2, 3), "head": (7, 4), "advantages": (2,)}
SHAPES |= {"teacher.ids": (2, 3, 4), "teacher.logprobs": (2, 3, 4), "teacher.mask": (2, 3), "teacher.weights": (2, 3)}
SHAPES |= {"bias": (7,), "A of lora": (2, 4), "B of lora": (7, 2), "banned": (2,)}
SHAPES |= {
    "teacher.normalizer": (),
    "normalizer": (),
    "weight_grad": (7, 4),
    "support.token_ids": (8,),
    "support.offsets": (7,),
}
DTYPES = dict.fromkeys(("targets", "teacher.ids", "banned", "support.token_ids", "support.offsets"), torch.int64)
DTYPES |= {"teacher.mask": torch.bool}
Tensors = dict[str, torch.Tensor]


def of_head(t: Tensors) -> object:
    return gk.LMHead(t["head"], t["bias"], lora=(t["A of lora"], t["B of lora"], 1.0), banned=t["banned"])


def of_teacher(t: Tensors) -> object:
    fields = {name: t[f"teacher.{name}"] for name in ("ids", "logprobs", "mask", "weights", "normalizer")}
    return of_loss(t, teacher=gk.Teacher(**fields), backend="reference")


def of_sums(t: Tensors) -> object:
    divisor = {"rows": t["normalizer"]}
    return of_loss(t, normalizer=divisor, weight_grad=t["weight_grad"], backend="triton")


def of_support(t: Tensors) -> object:
    return of_loss(t, support=(t["support.token_ids"], t["support.offsets"]), backend="reference")


def of_loss(t: Tensors, **more: Any) -> object:
    head = t["head"].requires_grad_()
    return gk.linear_policy_loss(t["hidden"], head, t["targets"], None, t["advantages"], **more)


CALLS: dict[Callable[[Tensors], object], tuple[str, ...]] = {
    of_head: ("bias", "A of lora", "B of lora", "banned"),
    of_teacher: ("teacher.ids", "teacher.logprobs", "teacher.mask", "teacher.weights", "teacher.normalizer"),
    of_sums: ("normalizer", "weight_grad"),
    of_support: ("head", "support.token_ids", "support.offsets"),
}


@no_gpu
@pytest.mark.parametrize(("call", "name"), [(call, name) for call, names in CALLS.items() for name in names])
def test_a_tensor_on_another_device_is_refused(call: Callable[[Tensors], object], name: str) -> None:
    with FakeTensorMode():
        tensors = {
            key: torch.empty(shape, dtype=DTYPES.get(key), device="cuda:1" if key == name else "cuda:0")
            for key, shape in SHAPES.items()
        }
        with pytest.raises(ValueError, match=rf"^\w+: {name} must be on cuda:0 .*got cuda:1$"):
            call(tensors)


# Backend selection by architecture


@pytest.mark.parametrize(
    ("architectures", "runs", "refused"),
    [
        (BUILT, [(8, 0), (8, 7), (9, 0), (10, 3), (12, 1), (13, 0)], [(7, 0), (7, 5), (11, 0)]),
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


def chosen(index: int | None, requested: str | None = None) -> str:
    return backends.select("op", requested, "cuda", torch.float32, SUPPORTS, index)


@no_gpu
def test_the_choice_is_by_the_device_of_the_tensor(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for requested in (None, "kernel"):
        assert [chosen(index, requested) for index in range(3)] == ["cuda", "triton", "cuda"]
    assert chosen(None) == "triton", "of the current device"
    reason = "built for sm_80, sm_90, sm_100, not for sm_70 of cuda:1; rebuild with .*ARCHITECTURES=70"
    with pytest.raises(RuntimeError, match=f"op: backend 'cuda' cannot run here: .*{reason}; use backend='kernel'"):
        chosen(1, "cuda")
    assert "not for sm_70 of cuda:1" in gk.available_kernels()["cuda"]
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
