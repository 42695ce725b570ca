"""Several GPUs in one process: kernels launch on the input's GPU, and only if they were built for it."""

from __future__ import annotations

import contextlib
import inspect
import re
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


# Triton's launches


def rows() -> torch.Tensor:
    return torch.randn(2, 5)


def token_logprobs() -> None:
    logits = rows().requires_grad_()
    for inplace in (False, True):
        result = gk.token_logprobs(logits * 1, torch.tensor([0, 4]), inplace_backward=inplace, backend="triton")
        torch.autograd.grad(result.logprobs.sum(), logits)


def linear_logprobs() -> None:
    gk.linear_logprobs(rows(), rows(), torch.tensor([0, 1]), backend="triton")
    hidden, weight = rows().requires_grad_(), rows().requires_grad_()
    support = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 2, 4])
    result = gk.linear_logprobs(hidden, weight, torch.tensor([0, 1]), support=support, backend="triton")
    result.logprobs.sum().backward()


def linear_policy_loss() -> None:
    hidden, weight, targets = torch.randn(2, 3, 4).requires_grad_(), torch.randn(7, 4), torch.zeros(2, 3).long()
    gk.linear_policy_loss(hidden, weight, targets, None, torch.ones(2), backend="triton").loss.backward()


def linear_distillation_loss() -> None:
    hidden, weight, ids = torch.randn(3, 4).requires_grad_(), torch.randn(7, 4), torch.zeros(3, 1).long()
    gk.linear_distillation_loss(hidden, weight, ids, -torch.ones(3, 1), backend="triton").loss.backward()


CALLS: dict[str, Callable[[], object]] = {
    "token_logprobs": token_logprobs,
    "linear_logprobs": linear_logprobs,
    "linear_policy_loss": linear_policy_loss,
    "linear_distillation_loss": linear_distillation_loss,
    "token_advantages": lambda: gk.token_advantages(rows(), rows(), backend="triton"),
}


@no_gpu
@pytest.mark.parametrize("op", CALLS)
def test_triton_launches_under_a_guard_for_the_input(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    alive: list[torch.device] = []
    launched: list[list[torch.device]] = []

    @contextlib.contextmanager
    def guard(backend: str, args: tuple[Any, ...]) -> Iterator[None]:
        alive.extend(value.device for value in args if backend == "triton" and isinstance(value, torch.Tensor))
        yield
        alive.clear()

    launch = interpreter.GridExecutor.__call__

    def checked(self: Any, *args: Any, **more: Any) -> Any:
        launched.append(list(alive))
        return launch(self, *args, **more)

    monkeypatch.setattr(registry, "device_guard", guard)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", checked)
    CALLS[op]()
    assert launched and all(launched)


def test_every_op_with_triton_kernels_is_called_here() -> None:
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "grpo_kernels::" in name}
    of_triton = {name.removesuffix("_triton") for name in names if name.endswith("_triton")}
    of_backwards = {"token_logprobs_backward", "linear_logprobs_backward"}
    of_backwards |= {"token_logprobs_backward_inplace", "token_logprobs_backward_rounded"}
    of_heads = {f"sampled_support_{part}" for part in ("logits", "to_hidden", "add_weight", "backward")}
    of_heads |= {"sampled_support_logprobs", "sampled_support_logprobs_backward"}
    assert of_triton - of_heads == CALLS.keys() | of_backwards


@pytest.mark.parametrize("backend", ["triton", "cuda", "cpu", "reference"])
def test_the_guard_is_for_the_device_of_the_first_tensor(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []

    @contextlib.contextmanager
    def recorder(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", recorder)
    with FakeTensorMode():
        arguments = (None, torch.empty(2, device="cuda:1"), torch.empty(2), 3)
    with registry.device_guard(backend, arguments):
        assert entered == ([torch.device("cuda:1")] if backend == "triton" else [])


# Tensors of several devices


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def numbers(*shape: int) -> torch.Tensor:
    return on_gpu(*shape, dtype=torch.int64)


def flags(*shape: int) -> torch.Tensor:
    return on_gpu(*shape, dtype=torch.bool)


def policies(source: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments of a loss, with `weights`, which excludes `normalizer`, and packed."""
    arguments = source(2, 3) | policy(2, 3)
    weighted = arguments | {"weights": on_gpu(2, 3), "normalizer": None}
    return [arguments, weighted, source(6) | policy(6) | {"cu_seqlens": numbers(3)}]


def policy(*shape: int) -> dict[str, Any]:
    return {
        "old_logprobs": on_gpu(*shape),
        "advantages": on_gpu(2),
        "mask": flags(*shape),
        "policy_mask": flags(*shape),
        "segments": numbers(*shape),
        "ref_logprobs": on_gpu(*shape),
        "is_weights": on_gpu(2),
        "normalizer": on_gpu(),
        "config": gk.LossConfig(kl="k3", kl_coef=0.1),
    }


def head(*shape: int) -> dict[str, Any]:
    return {
        "hidden": on_gpu(*shape, 4),
        "weight": on_gpu(7, 4),
        "targets": numbers(*shape),
        "bias": on_gpu(7),
        "temperature": on_gpu(*shape),
        "positions": numbers(2),
    }


def adapter() -> tuple[torch.Tensor, torch.Tensor, float]:
    return on_gpu(2, 4), on_gpu(7, 2), 1.0


def distilled(**more: Any) -> dict[str, Any]:
    student = {name: value for name, value in head(2, 3).items() if name not in ("targets", "positions")}
    teacher = {"teacher_ids": numbers(2, 3, 4), "teacher_logprobs": on_gpu(2, 3, 4), "mask": flags(2, 3)}
    return student | teacher | {"weight_grad": on_gpu(7, 4)} | more


def clustered() -> dict[str, Any]:
    return {"embeddings": on_gpu(6, 4), "groups": numbers(6), "valid": flags(6), "num_groups": 2, "max_size": 3}


# Tensors of arguments that are tuples, by their names in messages
PARTS = {"support": ("support.token_ids", "support.offsets"), "lora": ("A of lora", "B of lora")}

# Arguments for each op, on one GPU. Together the calls of an op have all of its tensors.
ON_ONE_GPU: dict[Callable[..., Any], Callable[[], list[dict[str, Any]]]] = {
    gk.group_advantages: lambda: [
        {"rewards": on_gpu(6), "groups": numbers(6), "subgroups": numbers(6), "valid": flags(6)},
        {"rewards": on_gpu(6), "groups": numbers(6), "lengths": numbers(6), "config": "opo"},
        {"rewards": on_gpu(6), "groups": numbers(6), "baselines": on_gpu(6), "config": "remax"},
    ],
    gk.token_logprobs: lambda: [
        {"logits": on_gpu(2, 7), "targets": numbers(2), "temperature": on_gpu(2), "support": (numbers(5), numbers(3))}
    ],
    gk.linear_logprobs: lambda: [
        head(2, 3) | {"support": (numbers(5), numbers(7))},
        head(2, 3) | {"lora": adapter(), "positions": None, "term_index": numbers(4)},
    ],
    gk.linear_distillation_loss: lambda: [
        distilled(weights=on_gpu(2, 3)),
        distilled(normalizer=on_gpu(), lora=adapter()),
    ],
    gk.policy_loss: lambda: [
        *policies(lambda *shape: {"logprobs": on_gpu(*shape), "entropy": on_gpu(*shape)}),
        {"logprobs": on_gpu(5), "term_index": numbers(2, 3)} | policy(2, 3),
    ],
    gk.linear_policy_loss: lambda: [
        *policies(lambda *shape: head(*shape) | {"weight_grad": on_gpu(7, 4), "compact": False}),
        head(2, 3)
        | policy(2, 3)
        | {"ref_logprobs": None, "compact": False}
        | {"ref_hidden": on_gpu(2, 3, 5), "ref_weight": on_gpu(7, 5), "ref_bias": on_gpu(7)},
        head(2, 3) | policy(2, 3) | {"support": (numbers(5), numbers(7))},
        head(5) | policy(2, 3) | {"lora": adapter(), "positions": None, "term_index": numbers(2, 3)},
    ],
    gk.token_advantages: lambda: [
        {
            **{name: on_gpu(6) for name in ("rewards", "values")},
            "mask": flags(6),
            "turns": numbers(6),
            "cu_seqlens": numbers(3),
        }
    ],
    gk.sampling_correction: lambda: [
        {"old_logprobs": on_gpu(2, 3), "sampling_logprobs": on_gpu(2, 3), "mask": flags(2, 3)},
        {"old_logprobs": on_gpu(6), "sampling_logprobs": on_gpu(6), "cu_seqlens": numbers(3)},
    ],
    gk.endpoint_segments: lambda: [
        {
            **{name: on_gpu(6) for name in ("rewards", "logprobs", "old_logprobs", "values")},
            "mask": flags(6),
            "groups": numbers(2),
            "cu_seqlens": numbers(3),
            "config": {"norm": "prompt"},
        }
    ],
    gk.similarity_groups: lambda: [clustered()],
    gk.pairwise_cosine: lambda: [clustered()],
    gk.similarity_advantages: lambda: [
        {"rewards": on_gpu(6), **clustered()},
        {"rewards": on_gpu(6), "embeddings": on_gpu(6, 4), "groups": 3, "lengths": numbers(6), "config": "opo"},
        {"rewards": on_gpu(6), "embeddings": on_gpu(6, 4), "groups": 3, "baselines": on_gpu(6), "config": "remax"},
    ],
    gk.cluster_distances: lambda: [{"distances": on_gpu(2, 3, 3)}],
    gk.agglomerate: lambda: [{"distances": on_gpu(2, 3, 3)}],
    gk.silhouette: lambda: [{"distances": on_gpu(2, 3, 3), "labels": numbers(6), "groups": numbers(6)}],
}


# without a Triton kernel
OTHERS = {"policy_loss", "sampling_correction", "similarity_advantages", *backends.through_host}


def of_name(op: Callable[..., Any]) -> str:
    return op.__name__


def tensor_parameters(op: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(op).parameters.values()
    return [p.name for p in parameters if "Tensor" in str(p.annotation) or "Normalizer" in str(p.annotation)]


@no_gpu
@pytest.mark.parametrize("op", ON_ONE_GPU, ids=of_name)
@pytest.mark.parametrize("elsewhere", ["cuda:1", "cpu"])
def test_a_tensor_on_another_device_is_refused(op: Callable[..., Any], elsewhere: str) -> None:
    """Every tensor but the first, in turn; the message has function, argument, rule and device."""
    pytest.importorskip("triton")
    first, *others = tensor_parameters(op)
    backend = "triton" if of_name(op).startswith(("linear", "token")) else "reference"
    refused = set()
    with FakeTensorMode():
        for arguments in ON_ONE_GPU[op]():
            if "weight_grad" in arguments:
                arguments["weight"].requires_grad_()
            for name in others:
                if name in refused or not isinstance(arguments.get(name), (torch.Tensor, tuple)):
                    continue
                if name in PARTS:  # both of its tensors, the first below
                    first_part, second_part, *rest = arguments[name]
                    moved = arguments | {name: (first_part, torch.empty_like(second_part, device=elsewhere), *rest)}
                    with pytest.raises(ValueError, match=rf"{PARTS[name][1]} must be on cuda:0 .*got {elsewhere}"):
                        op(**moved, backend=backend)
                    moved = arguments | {name: (torch.empty_like(first_part, device=elsewhere), second_part, *rest)}
                else:
                    moved = arguments | {name: torch.empty_like(arguments[name], device=elsewhere)}
                if name == "weight" and "weight_grad" in arguments:
                    moved["weight"].requires_grad_()
                with pytest.raises(ValueError) as caught:
                    op(**moved, backend=backend)
                message = str(caught.value)
                rule = f"must be on cuda:0 like the first argument, got {elsewhere}"
                part = PARTS[name][0] if name in PARTS else name
                assert re.fullmatch(rf"\w+: {re.escape(part)} {rule}", message), message
                refused.add(name)
    assert refused == set(others), f"no call has {set(others) - refused}"
    assert first not in refused


@no_gpu
@pytest.mark.parametrize("field", ["ids", "logprobs", "mask", "weights", "normalizer"])
def test_a_teacher_on_another_device_is_refused(field: str) -> None:
    pytest.importorskip("triton")
    with FakeTensorMode():
        fields = {"ids": numbers(2, 3, 4), "logprobs": on_gpu(2, 3, 4), "mask": flags(2, 3), "weights": on_gpu(2, 3)}
        fields |= {"normalizer": on_gpu()}
        fields[field] = torch.empty_like(fields[field], device="cuda:1")
        with pytest.raises(ValueError, match=rf"^linear_policy_loss: teacher\.{field} must be on cuda:0 .*got cuda:1$"):
            gk.linear_policy_loss(**head(2, 3), **policy(2, 3), teacher=gk.Teacher(**fields), backend="triton")


def test_every_op_is_called_with_a_tensor_on_another_device() -> None:
    assert {of_name(op) for op in ON_ONE_GPU} == CALLS.keys() | OTHERS


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
