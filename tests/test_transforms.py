"""Derivatives that the ops do not have are refused, as torch would take them for 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import grpo_kernels as gk

torch.manual_seed(0)
OLD, ADVANTAGES, TARGETS, WEIGHT = torch.randn(2, 3), torch.randn(2), torch.randint(7, (2, 3)), torch.randn(7, 4)
LOGPROBS, LOGITS, HIDDEN = torch.randn(2, 3), torch.randn(2, 3, 7), torch.randn(2, 3, 4)
TEACHER = gk.Teacher(torch.tensor([0, 3]).expand(2, 3, 2), -torch.ones(2, 3, 2))
# the name of the argument, the argument, and what is differentiated by it
OPS: dict[str, tuple[str, Tensor, Callable[[Tensor], Any]]] = {
    "policy_loss": ("logprobs", LOGPROBS, lambda x: gk.policy_loss(x, OLD, ADVANTAGES).loss),
    "token_logprobs": ("logits", LOGITS, lambda x: gk.token_logprobs(x, TARGETS).logprobs.sum()),
    "linear_logprobs": ("hidden", HIDDEN, lambda x: gk.linear_logprobs(x, WEIGHT, TARGETS).logprobs.sum()),
    "linear_policy_loss": (
        "hidden",
        HIDDEN,
        lambda x: gk.linear_policy_loss(x, WEIGHT, TARGETS, OLD, ADVANTAGES).loss,
    ),
    "linear_distillation_loss": (
        "weight",
        WEIGHT,
        lambda x: gk.linear_distillation_loss(HIDDEN, x, TEACHER).loss,
    ),
}


def forward_mode(function: Callable[[Tensor], Any], value: Tensor) -> Any:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(value, torch.ones_like(value)))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Any], Tensor], Any]] = {
    "forward mode": forward_mode,
    "grad": lambda function, value: torch.func.grad(function)(value),
    "vjp": torch.func.vjp,
    "jvp": lambda function, value: torch.func.jvp(function, (value,), (torch.ones_like(value),)),
    "jvp of vmap": lambda function, value: torch.func.jvp(
        torch.func.vmap(function), (value[None],), (torch.ones_like(value[None]),)
    ),
    "vmap of grad": lambda function, value: torch.func.vmap(torch.func.grad(function))(value[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", OPS)
def test_derivatives_other_than_the_first_of_backward_are_refused(op: str, transform: str) -> None:
    _, value, function = OPS[op]
    refused = "must not be differentiated in forward mode|must override the setup_context|jvp|Batching rule not"
    with pytest.raises(RuntimeError, match=refused):
        TRANSFORMS[transform](function, value)


def test_a_tensor_outside_of_forward_mode_is_taken() -> None:
    _, value, function = OPS["policy_loss"]
    with forward_ad.dual_level():
        assert torch.equal(function(value), function(value))
