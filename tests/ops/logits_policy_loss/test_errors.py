"""Errors of logits_policy_loss; their messages name the op, the argument, the rule and the value."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_raises
from tests.ops.logits_policy_loss.batches import BACKENDS, CONFIGS, batch, cast

NAMES = ("logits", "targets", "old_logprobs", "advantages", "mask")


def refused(error: type[Exception], *parts: str, **changes: Any) -> None:
    """Checks that the call raises exactly this type; the message begins with the first part and contains the others."""
    arguments = {name: value for name, value in cast(batch(), torch.float32).items() if name in NAMES} | changes
    for backend in (None, *BACKENDS):
        call = functools.partial(gk.logits_policy_loss, **arguments, backend=backend)
        assert_raises(error, f"logits_policy_loss: {parts[0]}", parts[1:], call)


@pytest.mark.parametrize("name", [*NAMES, "segments", "cu_seqlens", "is_weights", "weights"])
def test_something_that_is_no_tensor(name: str) -> None:
    logits = {"logits": torch.zeros(4, 31), "targets": torch.zeros(4).long()} if name == "cu_seqlens" else {}
    refused(TypeError, f"{name} must be a tensor", "list", **logits | {name: [1.0]})


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "sampling_logprobs", "advantages", "is_weights"])
def test_numbers_of_another_dtype_or_shape(name: str) -> None:
    refused(TypeError, f"{name} must be of dtype", "int64", **{name: torch.zeros(4, 7).long()})
    refused(ValueError, f"{name} must have", "[4, 7]", "[3]", **{name: torch.zeros(3)})


def test_logits_that_do_not_fit() -> None:
    refused(TypeError, "logits must be of dtype", "int64", logits=torch.zeros(4, 7, 31).long())
    refused(ValueError, "logits must have shape [..., V] with V > 0", "[4, 7, 0]", logits=torch.zeros(4, 7, 0))
    refused(ValueError, "targets must have shape [4, 7]", "[4, 8]", targets=torch.zeros(4, 8).long())
    refused(ValueError, "targets must be on cpu", "meta", targets=torch.zeros(4, 7, device="meta").long())
    refused(ValueError, "mask must have the shape of targets", "[4, 7]", "[7, 4]", mask=torch.ones(7, 4))
    refused(ValueError, "mask must have the shape of targets", "[4, 7]", "[4]", mask=torch.ones(4))


def test_logits_that_are_neither_padded_nor_packed() -> None:
    """The message must not name `logprobs`, which is not an argument of the caller."""
    rule = "logits must have shape [B, T, V], or [M, V] with cu_seqlens"
    refused(ValueError, rule, "[5, 31]", logits=torch.zeros(5, 31), targets=torch.zeros(5).long())
    refused(ValueError, rule, "[4, 7, 31]", cu_seqlens=torch.tensor([0, 28]))


@pytest.mark.parametrize("name", ["temperature", "softcap", "logit_scale"])
def test_a_factor_that_is_not_positive(name: str) -> None:
    refused(ValueError, f"{name} must be positive and finite", "-1.0", **{name: -1.0})
    refused(TypeError, f"{name} must be a number", "str", **{name: "1"})


def test_what_the_config_needs() -> None:
    refused(TypeError, "config must be a LossConfig", "dict", config={})
    refused(ValueError, "ref_logprobs must be given for kl_coef=0.05", config=CONFIGS["clip"])
    refused(ValueError, "segments must be given for ratio='segment'", config=CONFIGS["segment"])
    refused(ValueError, "sampling_logprobs must be given for correction", config=CONFIGS["corrected"])
    refused(ValueError, "normalizer must be a positive number", "0", normalizer=0)


@pytest.mark.parametrize("target", [-1, 31])
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("cpu", "reference")])
def test_a_target_that_is_no_column(backend: str, target: int) -> None:
    arguments = batch("grpo")
    arguments["targets"][1, 0] = target
    rule = rf"^logits_policy_loss: targets must be in \[0, 31\) or -100, got {target} in row 7"
    with pytest.raises(RuntimeError, match=rule):
        gk.logits_policy_loss(**arguments, backend=backend)
    # a token that takes no part is not read, whichever argument says so
    segments = torch.zeros(4, 7).int()
    segments[1, 0] = -1
    assert gk.logits_policy_loss(**arguments, segments=segments, backend=backend).loss.isfinite()
    arguments["mask"][1, 0] = False
    assert gk.logits_policy_loss(**arguments, backend=backend).loss.isfinite()


def test_logits_that_cannot_be_overwritten() -> None:
    leaf = torch.zeros(4, 7, 31).requires_grad_()
    refused(ValueError, "inplace must be False for logits that are a leaf, got True", logits=leaf, inplace=True)
    overlapping = (torch.zeros(31).requires_grad_() * 1).expand(4, 7, 31)
    rule = "logits must not overlap themselves in memory with inplace=True"
    refused(ValueError, rule, "[0, 0, 1]", logits=overlapping, inplace=True)


def test_in_place_under_compile() -> None:
    torch.compiler.reset()
    arguments = batch("grpo")
    logits = arguments.pop("logits").detach().requires_grad_()

    def loss(leaf: torch.Tensor) -> torch.Tensor:
        return gk.logits_policy_loss(leaf * 2, **arguments, inplace=True).loss

    with pytest.raises(Exception, match="logits_policy_loss: inplace must be False under"):
        torch.compile(loss, fullgraph=True, backend="eager")(logits)


@pytest.mark.parametrize("name", ["return_entropy", "inplace"])
def test_a_flag_that_is_no_bool(name: str) -> None:
    refused(TypeError, f"{name} must be a bool", "'x'", **{name: "x"})
