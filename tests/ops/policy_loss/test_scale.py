"""The gradient of the forward pass times the upstream gradient of the loss, in its own memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SCALE, SUPPORTS
from tests import emulation
from tests.emulation import launches
from tests.harness import device_of, runnable_backends

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
KERNELS = [backend for backend in runnable_backends(SUPPORTS) if backend != "reference"]
BACKENDS = [backend for backend in KERNELS if backend in SCALE]


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1024, 5003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values(backend: str, dtype: torch.dtype, count: int, offset: int) -> None:
    """Every number is multiplied once, in the wide dtype, and none beside them."""
    memory = torch.randn(count + 8, dtype=torch.float64).to(device_of(backend), dtype)
    before = memory.clone()
    wide = torch.promote_types(dtype, torch.float32)
    for factor in (1.0, -0.3, 0.0, float("nan")):
        memory.copy_(before)
        SCALE[backend](memory[offset : offset + count], torch.tensor(factor, dtype=wide, device=memory.device))
        expected = before.clone()
        expected[offset : offset + count] = (expected[offset : offset + count].to(wide) * factor).to(dtype)
        torch.testing.assert_close(memory, expected, rtol=0, atol=0, equal_nan=True)


def loss_of(backend: str, leaf: Tensor, **options: Any) -> Tensor:
    old, advantages = leaf.detach() - 0.1, torch.arange(3.0, device=leaf.device) - 1.5
    return gk.policy_loss(leaf, old, advantages, backend=backend, **options).loss


@emulation.only
def test_a_backward_takes_one_launch() -> None:
    leaf = (-torch.rand(3, 5)).requires_grad_()
    loss = loss_of("cuda", leaf)
    assert launches(loss.backward) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_backward_needs_no_memory(backend: str) -> None:
    leaf = (-torch.rand(3, 5, device=device_of(backend))).requires_grad_()
    loss = loss_of(backend, leaf)
    (kept,) = loss.grad_fn.saved_tensors[:1]
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (last,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, last) and last.data_ptr() == kept.data_ptr() != first.data_ptr()


@pytest.mark.parametrize("value", [1.0, 2.0])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_second_derivative_by_the_upstream_gradient_is_kept(backend: str, value: float) -> None:
    leaf = (-torch.rand(3, 5, device=device_of(backend))).requires_grad_()
    factor = torch.tensor(value, device=leaf.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss_of(backend, leaf) * factor, leaf, create_graph=True)
    (by_factor,) = torch.autograd.grad(gradient.sum(), factor)
    torch.testing.assert_close(by_factor * value, gradient.sum().detach())
