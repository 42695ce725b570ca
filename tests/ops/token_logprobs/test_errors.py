"""Errors of token_logprobs: the exception type and the parts of its message."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.backends import runs_on
from tests.harness import assert_raises, device_of
from tests.ops.token_logprobs.rows import BACKENDS

NAN, INF = float("nan"), float("inf")


def refused(error: type[Exception], *parts: str, logits: Any = None, targets: Any = None, **options: Any) -> None:
    """Checks that the call raises exactly this type, with a message that contains the op and each part."""
    logits = torch.randn(2, 3, 7) if logits is None else logits
    targets = torch.zeros(2, 3, dtype=torch.int64) if targets is None else targets
    for backend in (None, *(name for name in BACKENDS if runs_on(name, "cpu"))):
        call = functools.partial(gk.token_logprobs, logits, targets, backend=backend, **options)
        assert_raises(error, "token_logprobs: ", parts, call)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_logits_of_another_dtype(dtype: torch.dtype) -> None:
    refused(TypeError, "logits", str(dtype), logits=torch.zeros(2, 3, 7).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_targets_of_another_dtype(dtype: torch.dtype) -> None:
    refused(TypeError, "targets", str(dtype), targets=torch.zeros(2, 3, dtype=dtype))


@pytest.mark.parametrize("name", ["logits", "targets"])
@pytest.mark.parametrize("value", [[1.0], 1.0], ids=str)
def test_something_that_is_no_tensor(name: str, value: Any) -> None:
    refused(TypeError, name, "tensor", type(value).__name__, **{name: value})


@pytest.mark.parametrize("shape", [(), (2, 3, 0)], ids=str)
def test_logits_without_a_vocabulary(shape: tuple[int, ...]) -> None:
    refused(ValueError, "logits", str(list(shape)), logits=torch.zeros(shape))


@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 2), (6,), (), (2, 4)], ids=str)
def test_targets_of_another_shape(shape: tuple[int, ...]) -> None:
    refused(ValueError, "targets", "[2, 3]", str(list(shape)), targets=torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("name", ["temperature", "softcap", "logit_scale"])
@pytest.mark.parametrize("value", [0, 0.0, -1.0, NAN, INF, -INF], ids=str)
def test_a_factor_that_is_not_positive_and_finite(name: str, value: float) -> None:
    refused(ValueError, name, "positive", str(value), **{name: value})


@pytest.mark.parametrize("name", ["temperature", "softcap", "logit_scale"])
@pytest.mark.parametrize("value", ["1", True, [1.0]], ids=str)
def test_a_factor_that_is_no_number(name: str, value: Any) -> None:
    refused(TypeError, name, type(value).__name__, **{name: value})


@pytest.mark.parametrize("shape", [(3,), (2, 4), (3, 2), (2, 3, 1), (), (6,)], ids=str)
def test_a_temperature_of_another_shape(shape: tuple[int, ...]) -> None:
    refused(ValueError, "temperature", "[2, 3]", str(list(shape)), temperature=torch.ones(shape))


def test_a_temperature_of_another_dtype() -> None:
    refused(TypeError, "temperature", "int64", temperature=torch.ones(2, 3, dtype=torch.int64))


def test_a_temperature_that_requires_grad() -> None:
    refused(ValueError, "temperature", "requires_grad", "detach", temperature=torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("name", ["targets", "temperature"])
def test_arguments_on_another_device(name: str) -> None:
    value = torch.zeros(2, 3, dtype=torch.int64) if name == "targets" else torch.ones(2, 3)
    refused(ValueError, name, "cpu", "meta", **{name: value.to("meta")})


@pytest.mark.parametrize("target", [-1, -99, -101, 7, 2**40])
@pytest.mark.parametrize("backend", [b for b in ("cpu", "reference") if b in BACKENDS])
def test_a_target_that_is_no_column_is_an_error_on_the_cpu(backend: str, target: int) -> None:
    targets = torch.zeros(2, 3, dtype=torch.int64)
    targets[1, 1] = target
    with pytest.raises(RuntimeError, match=rf"token_logprobs: targets must be in \[0, 7\) or -100, got {target}"):
        gk.token_logprobs(torch.randn(2, 3, 7), targets, backend=backend)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b not in ("cpu", "reference")])
def test_float64_on_a_gpu_backend(backend: str) -> None:
    logits = torch.zeros(1, 3, dtype=torch.float64, device=device_of(backend))
    targets = torch.zeros(1, dtype=torch.int64, device=logits.device)
    with pytest.raises(RuntimeError, match=f"token_logprobs: backend '{backend}' cannot run here.*float64"):
        gk.token_logprobs(logits, targets, backend=backend)


def test_inplace_backward_of_a_leaf() -> None:
    refused(ValueError, "inplace_backward", "leaf", logits=torch.zeros(2, 3, 7).requires_grad_(), inplace_backward=True)


def test_inplace_backward_of_logits_that_overlap() -> None:
    overlapping = torch.zeros(7).requires_grad_().expand(2, 3, 7)
    refused(ValueError, "logits", "overlap", "[0, 0, 1]", logits=overlapping, inplace_backward=True)


def test_inplace_backward_under_compile() -> None:
    torch.compiler.reset()
    targets = torch.tensor([0, 1])

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return gk.token_logprobs(logits * 2, targets, inplace_backward=True).logprobs.sum()

    with pytest.raises(Exception, match="inplace_backward must be False under"):
        torch.compile(loss, fullgraph=True, backend="eager")(torch.zeros(2, 5, requires_grad=True))


def test_inplace_backward_with_create_graph() -> None:
    for backend in BACKENDS:
        leaf = torch.zeros(2, 5, device=device_of(backend), requires_grad=True)
        targets = torch.arange(2, device=leaf.device)
        logprobs = gk.token_logprobs(leaf * 1, targets, inplace_backward=True, backend=backend).logprobs
        with pytest.raises(RuntimeError, match="create_graph must be False with inplace_backward"):
            torch.autograd.grad(logprobs.sum(), leaf, create_graph=True)


@pytest.mark.parametrize("name", ["return_entropy", "inplace_backward"])
@pytest.mark.parametrize("value", ["x", 1, None], ids=str)
def test_a_flag_that_is_no_bool(name: str, value: Any) -> None:
    refused(TypeError, f"{name} must be a bool", repr(value), **{name: value})
