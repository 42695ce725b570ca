"""Errors of linear_policy_loss; their messages name the op, the argument, the rule and the value."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.backends import runs_on
from tests.harness import assert_raises, device_of
from tests.ops.linear_head.test_policy_loss_edges import (
    BACKENDS,
    CONFIGS,
    HIDDEN,
    KERNELS,
    ROWS,
    VOCABULARY,
    WIDTH,
    batch,
    leaves_of,
)


def refused(error: type[Exception], *parts: str, **changes: Any) -> None:
    """Checks that the call raises exactly this type; the message begins with the first part and contains the others."""
    arguments = {k: v.float() if v.is_floating_point() else v for k, v in batch().items()}
    for backend in (None, *(name for name in BACKENDS if runs_on(name, "cpu"))):
        call = functools.partial(gk.linear_policy_loss, **arguments | leaves_of(arguments) | changes, backend=backend)
        assert_raises(error, f"linear_policy_loss: {parts[0]}", parts[1:], call)


TENSORS = ("hidden", "weight", "targets", "bias", "mask", "policy_mask", "positions", "segments", "advantages")


@pytest.mark.parametrize("name", TENSORS)
def test_something_that_is_no_tensor(name: str) -> None:
    refused(TypeError, f"{name} must be a tensor", "list", **{name: [1.0]})


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "advantages", "is_weights"])
def test_numbers_of_another_dtype_or_shape(name: str) -> None:
    refused(TypeError, f"{name} must be of dtype", "int64", **{name: torch.zeros(ROWS, WIDTH).long()})
    refused(ValueError, f"{name} must have", f"[{ROWS}, {WIDTH}]", "[3]", **{name: torch.zeros(3)})


def test_a_head_that_does_not_fit() -> None:
    refused(ValueError, "weight must have shape [V, 5]", "[31, 6]", weight=torch.zeros(31, 6))
    refused(
        TypeError, "weight must be of dtype torch.float32 like hidden", "bfloat16", weight=torch.zeros(31, 5).bfloat16()
    )
    refused(ValueError, "bias must have shape [31]", "[30]", bias=torch.zeros(30))
    refused(ValueError, "targets must have the shape of hidden", "[4, 7]", "[4, 8]", targets=torch.zeros(4, 8).long())
    refused(ValueError, "mask must have the shape of targets", "[4, 7]", "[7, 4]", mask=torch.ones(7, 4))
    refused(ValueError, "temperature must be positive", "-1.0", temperature=-1.0)


def test_hidden_states_that_are_neither_padded_nor_packed() -> None:
    """The message must not name `logprobs`, which is not an argument of the caller."""
    hidden, targets = torch.zeros(5, HIDDEN), torch.zeros(5).long()
    with pytest.raises(ValueError, match=r"linear_policy_loss: (hidden|targets|cu_seqlens) must .*\[5") as caught:
        gk.linear_policy_loss(hidden, torch.zeros(VOCABULARY, HIDDEN), targets, None, torch.zeros(1))
    assert caught.type is ValueError


@pytest.mark.parametrize("value", ["slow", None, True], ids=str)
def test_a_memory_that_there_is_not(value: Any) -> None:
    refused(ValueError, "memory must be 'fast' or 'low'", repr(value), memory=value)


def test_a_compact_that_there_is_not() -> None:
    for value in ("host", "device"):
        refused(ValueError, "compact must be True, False or None", repr(value), compact=value)


def test_a_chunk_size_that_is_no_number_of_rows() -> None:
    refused(TypeError, "chunk_size must be a number of rows", "2.0", chunk_size=2.0)
    refused(ValueError, "chunk_size must be at least 1", "0", chunk_size=0)


def test_positions_that_are_no_places() -> None:
    refused(ValueError, "positions must be different places in [0, 28)", "28", positions=torch.tensor([3, 28]))
    refused(ValueError, "positions must, as a mask, have the shape", "[7]", positions=torch.ones(WIDTH).bool())


def test_what_the_config_needs() -> None:
    refused(ValueError, "ref_logprobs must be given for kl_coef=0.05", config=CONFIGS["dapo"])
    refused(ValueError, "segments must be given for ratio='segment'", config=CONFIGS["segment"])
    refused(ValueError, "normalizer must be a positive number", "0", normalizer=0)


@pytest.mark.parametrize("target", [-1, VOCABULARY])
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_a_target_that_is_no_column(memory: str, target: int) -> None:
    arguments = batch()
    arguments["targets"][1, 0], arguments["mask"][1, 0] = target, True
    with pytest.raises(
        RuntimeError, match=rf"^linear_policy_loss: targets must be in \[0, {VOCABULARY}\).*got {target}"
    ):
        gk.linear_policy_loss(**arguments, memory=memory)


def test_a_config_of_another_type() -> None:
    refused(TypeError, "config must be a LossConfig", "dict", config={})


@pytest.mark.parametrize("backend", [None, *KERNELS])
def test_a_weight_gradient_that_does_not_fit(backend: str | None) -> None:
    arguments = {k: v.float() if v.is_floating_point() else v for k, v in batch().items()}

    def refuses(error: type[Exception], rule: str, into: Any, frozen: str = "", **options: Any) -> None:
        device = device_of(backend or "cpu")
        moved = {k: v.to(device) for k, v in (arguments | leaves_of(arguments)).items()}
        moved["weight"] = moved["weight"].detach().requires_grad_(frozen != "weight")
        with pytest.raises(error, match="linear_policy_loss: weight_grad must " + rule):
            gk.linear_policy_loss(**moved, weight_grad=into, backend=backend, **options)

    fits = torch.zeros(VOCABULARY, HIDDEN, device=device_of(backend or "cpu"))
    refuses(TypeError, "be a tensor, got list", [1.0])
    refuses(TypeError, "be of dtype float32.*float64", fits.double())
    refuses(ValueError, r"have the shape of weight, \[31, 5\], got \[5, 31\]", fits.T)
    refuses(ValueError, "be on .* got meta", fits.to("meta"))
    refuses(ValueError, "be a plain tensor", fits.clone().requires_grad_())
    refuses(ValueError, "be a plain tensor", fits, frozen="weight")
    refuses(ValueError, "be None where memory='low' runs", fits, memory="low")
    refuses(ValueError, "be None where memory='low' runs", fits, config=CONFIGS["sequence token"], chunk_size=3)
    assert not fits.any()


def test_a_flag_that_is_no_bool() -> None:
    refused(TypeError, "return_entropy must be a bool", "'x'", return_entropy="x")
