"""Errors of linear_logprobs; their messages name the op, the argument, the rule and the value."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.backends import runs_on
from tests.harness import assert_raises, device_of
from tests.ops.linear_head.test_logprobs_edges import BACKENDS, F64, HIDDEN, SHARED, batch


def refused(error: type[Exception], *parts: str, **changes: Any) -> None:
    """Checks that the call raises exactly this type, with a message that contains the op and each part."""
    arguments = batch(2, 3, dtype=torch.float32) | changes
    for backend in (None, *(name for name in BACKENDS if runs_on(name, "cpu"))):
        assert_raises(
            error, "linear_logprobs: ", parts, functools.partial(gk.linear_logprobs, **arguments, backend=backend)
        )


@pytest.mark.parametrize("name", ["hidden", "weight", "targets", "bias", "positions"])
@pytest.mark.parametrize("value", [[1.0], 1.0], ids=str)
def test_something_that_is_no_tensor(name: str, value: Any) -> None:
    refused(TypeError, f"{name} must be a tensor", type(value).__name__, **{name: value})


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_numbers_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    value = batch(2, 3, dtype=torch.float32)[name].to(dtype)
    refused(TypeError, f"{name} must be of dtype float32 or", str(dtype), **{name: value})


@pytest.mark.parametrize("name", ["targets", "positions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_places_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    refused(TypeError, f"{name} must be of dtype", "int64", str(dtype), **{name: torch.zeros(2, 3, dtype=dtype)})


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, F64], ids=str)
def test_a_head_in_another_dtype_than_the_hidden_states(name: str, dtype: torch.dtype) -> None:
    value = batch(2, 3)[name].to(dtype)
    refused(TypeError, f"{name} must be of dtype torch.float32 like hidden", str(dtype), **{name: value})


@pytest.mark.parametrize("shape", [(6,), (3, 2), (2, 3, 1), (), (2, 4)], ids=str)
def test_targets_of_another_shape(shape: tuple[int, ...]) -> None:
    targets = torch.zeros(shape, dtype=torch.int64)
    refused(ValueError, "targets must have the shape of hidden", "[2, 3]", str(list(shape)), targets=targets)


@pytest.mark.parametrize("shape", [(HIDDEN,), (31, 5), (0, HIDDEN), (1, 31, HIDDEN), (HIDDEN, 31)], ids=str)
def test_a_weight_of_another_shape(shape: tuple[int, ...]) -> None:
    refused(ValueError, "weight must have shape [V, 6]", "V > 0", str(list(shape)), weight=torch.zeros(shape))


@pytest.mark.parametrize("shape", [(30,), (31, 1), ()], ids=str)
def test_a_bias_of_another_shape(shape: tuple[int, ...]) -> None:
    refused(ValueError, "bias must have shape [31]", str(list(shape)), bias=torch.zeros(shape))


@pytest.mark.parametrize("name", ["weight", "bias", "targets", "positions", "temperature"])
def test_arguments_on_another_device(name: str) -> None:
    value = {"positions": torch.tensor([0]), "temperature": torch.ones(2, 3)} | batch(2, 3, dtype=torch.float32)
    refused(ValueError, f"{name} must be on cpu", "meta", **{name: value[name].to("meta")})


@pytest.mark.parametrize("name", ["temperature", "softcap", "logit_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")], ids=str)
def test_a_factor_that_is_not_positive_and_finite(name: str, value: float) -> None:
    refused(ValueError, f"{name} must be positive and finite", str(value), **{name: value})


def test_a_temperature_of_another_shape_or_with_a_gradient() -> None:
    refused(ValueError, "temperature must have", "[2, 3]", "[3]", temperature=torch.ones(3))
    refused(ValueError, "temperature must not require grad", temperature=torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("value", [2.0, True, "7"], ids=repr)
def test_a_chunk_size_that_is_no_number_of_rows(value: Any) -> None:
    refused(TypeError, "chunk_size must be a number of rows", type(value).__name__, repr(value), chunk_size=value)


@pytest.mark.parametrize("value", [0, -3])
def test_a_chunk_size_below_one(value: int) -> None:
    refused(ValueError, "chunk_size must be at least 1", str(value), chunk_size=value)


@pytest.mark.parametrize("shape", [(6,), (3, 2), (2, 3, 1)], ids=str)
def test_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    positions = torch.ones(shape, dtype=torch.bool)
    refused(
        ValueError,
        "positions must, as a mask, have the shape of targets",
        "[2, 3]",
        str(list(shape)),
        positions=positions,
    )


def test_positions_of_another_shape() -> None:
    refused(ValueError, "positions must be a mask or have shape [P]", "[1, 2]", positions=torch.tensor([[0, 1]]))


@pytest.mark.parametrize(("values", "part"), [([0, 6], "from 0 to 6"), ([-1, 2], "from -1 to 2"), ([4, 1, 4], "1 of")])
def test_positions_that_are_no_places(values: list[int], part: str) -> None:
    refused(ValueError, "positions must be different places in [0, 6)", part, positions=torch.tensor(values))


def test_a_process_group_without_a_vocab_start() -> None:
    refused(ValueError, "vocab_start must be given with process_group", "None", process_group=object())
    refused(ValueError, "vocab_start must be None unless torch.distributed is initialised", "got 3", vocab_start=3)


def test_a_split_vocabulary_under_compile() -> None:
    torch.compiler.reset()
    arguments = batch(3, dtype=torch.float32)
    compiled = torch.compile(lambda **of: gk.linear_logprobs(**of, vocab_start=7), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"vocab_start must be None under torch\.compile"):
        compiled(**arguments)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in SHARED])
def test_float64_on_a_gpu_backend(backend: str) -> None:
    arguments = {name: value.to(device_of(backend)) for name, value in batch(2).items()}
    with pytest.raises(RuntimeError, match=f"linear_logprobs: backend '{backend}' cannot run here.*float64"):
        gk.linear_logprobs(**arguments, backend=backend)


def test_a_flag_that_is_no_bool() -> None:
    refused(TypeError, "return_entropy must be a bool", "'x'", return_entropy="x")
