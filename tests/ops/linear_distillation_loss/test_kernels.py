"""linear_distillation_loss on every backend in its own precision, and with other parts of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import registry
from grpo_kernels.ops.linear_distillation_loss import registration as op
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import INDUCTOR, assert_within_budget, device_of, needs_cpu_kernels, runnable_backends
from tests.ops.linear_distillation_loss.batch import F64, KINDS, LEAVES, ROWS, TAILS, batch, oracle, run, to

F32, BF16 = torch.float32, torch.bfloat16
KERNELS = [backend for backend in runnable_backends(SUPPORTS, F32) if backend != "reference"]


def by_definition(arguments: dict[str, Any], dtype: torch.dtype, kind: str, tail: str) -> dict[str, Tensor]:
    """Loss and gradients, of a student rounded to `dtype`, computed in float64 or that dtype."""
    loss, divergence, _, gradients = oracle(to(arguments, dtype), kind, tail)
    return {"loss": loss, "divergence": divergence} | gradients


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", KERNELS)
def test_float32(backend: str, kind: str, tail: str) -> None:
    arguments = to(batch(), F32)
    gold = by_definition(to(arguments, F64), F64, kind, tail)
    working = by_definition(arguments, F32, kind, tail)
    options: dict[str, Any] = {"kind": kind, "tail": tail, "chunk_size": 4, "backend": backend}
    result, gradients = run(to(arguments, F32, device_of(backend)), **options)
    got = {"loss": result.loss, "divergence": result.divergence} | gradients
    for name, value in got.items():
        assert_within_budget(value, working[name], gold[name], name)


@pytest.mark.parametrize("backend", KERNELS)
def test_halves(backend: str) -> None:
    """Gradients by the logits are rounded to bfloat16 once, and what the products give another time."""
    arguments = to(to(batch(), BF16), F64)
    gold = by_definition(arguments, F64, "jsd", "bucket")
    result, gradients = run(to(arguments, BF16, device_of(backend)), kind="jsd", chunk_size=4, backend=backend)
    torch.testing.assert_close(result.loss.cpu().double(), gold["loss"], rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        # two roundings, of terms whose largest is that of the result; Triton's interpreter truncates
        allowed = 4 * torch.finfo(BF16).eps * float(gold[name].abs().max())
        assert float((gradient.cpu().double() - gold[name]).abs().max()) <= allowed, name


@pytest.mark.parametrize("backend", KERNELS)
def test_chunks_and_shapes_change_nothing(backend: str) -> None:
    arguments = to(batch(rows=12), F32, device_of(backend))
    whole, gradients = run(arguments, backend=backend)
    shaped = {k: v.view(3, 4, -1) if k not in ("weight", "bias") else v for k, v in arguments.items()}
    other, others = run(shaped, backend=backend, chunk_size=5)
    assert other.divergence.shape == other.mass.shape == (3, 4)
    torch.testing.assert_close(other.divergence.view(-1), whole.divergence, rtol=1e-6, atol=1e-6)
    for name in LEAVES:
        torch.testing.assert_close(others[name].view_as(gradients[name]), gradients[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", KERNELS)
def test_weight_grad_is_added_to(backend: str) -> None:
    arguments = to(batch(), F32, device_of(backend))
    _, gradients = run(arguments, backend=backend)
    into = torch.ones_like(arguments["weight"])
    _, others = run(arguments, backend=backend, weight_grad=into)
    assert "weight" not in others
    torch.testing.assert_close(into - 1, gradients["weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", KERNELS)
def test_backward_runs_once(backend: str) -> None:
    arguments = to(batch(), F32, device_of(backend))
    leaf = arguments["hidden"].requires_grad_()
    loss = gk.linear_distillation_loss(**arguments, backend=backend).loss
    loss.backward(retain_graph=True)
    assert leaf.grad is not None
    with pytest.raises(RuntimeError, match="linear_distillation_loss: backward must run once, got a second call"):
        loss.backward()


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("backend", KERNELS)
def test_few_rows(backend: str, rows: int) -> None:
    arguments = {k: v[:rows] if k not in ("weight", "bias") else v for k, v in to(batch(), F32).items()}
    result, gradients = run(to(arguments, F32, device_of(backend)), backend=backend)
    assert result.divergence.shape == (rows,)
    assert bool(gradients["weight"].any()) == bool(rows) and result.loss.isfinite()


@pytest.mark.parametrize("backend", [None, pytest.param("cpu", marks=needs_cpu_kernels)])
def test_compiles_into_one_graph(backend: str | None) -> None:
    torch.compiler.reset()
    arguments = to(batch(), F32, device_of(backend or "cpu"))

    def loss(hidden: Tensor, **others: Any) -> Tensor:
        return gk.linear_distillation_loss(hidden * 2, **others, backend=backend).loss * 3

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=INDUCTOR)):
        leaves = {name: arguments[name].clone().requires_grad_() for name in LEAVES}
        value = function(**arguments | leaves)
        value.backward()
        results.append((value.detach(), *(leaf.grad for leaf in leaves.values())))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_where_all_rows_are_computed_masked_ones_hold_anything() -> None:
    """As on a GPU: a graph does not choose its rows by their values."""
    torch.compiler.reset()
    arguments = to(batch(), F32) | {"mask": torch.arange(ROWS) % 3 != 1}
    _, want = run(arguments)
    arguments["hidden"][~arguments["mask"]] = torch.nan
    leaves = {name: arguments[name].clone().requires_grad_() for name in LEAVES}
    loss = torch.compile(lambda **inputs: gk.linear_distillation_loss(**inputs).loss, backend=INDUCTOR)
    loss(**arguments | leaves).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", [name for name in KERNELS if name == "cpu" or torch.cuda.is_available()])
def test_opcheck(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    arguments = to(batch(), F32, device_of(backend))
    calls: list[tuple[Any, ...]] = []
    once = op.apply
    monkeypatch.setattr(op, "apply", lambda *args: calls.append(args) or once(*args))
    run(arguments, backend=backend)
    _, head, teacher, chunking, _ = calls[0]
    torch.library.opcheck(
        registry.overload("linear_distillation_loss", backend), (*head, *teacher, *chunking, head.needs_grad)
    )


def test_no_gradient_is_computed_without_need() -> None:
    arguments = to(batch(), F32)
    result = gk.linear_distillation_loss(**arguments)
    assert not result.loss.requires_grad and result.divergence.shape == (ROWS,)
    frozen = arguments | {"hidden": arguments["hidden"].requires_grad_()}
    gk.linear_distillation_loss(**frozen).loss.backward()
    assert frozen["weight"].grad is None and frozen["hidden"].grad.any()
