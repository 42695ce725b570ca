"""token_logprobs against the functions of the installed TRL: values and gradients in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import assert_within_budget, device_of
from tests.ops.token_logprobs.rows import BACKENDS, FAST, rows_of

utils = pytest.importorskip("trl.trainer.utils")


def rows(backend: str) -> tuple[Tensor, Tensor]:
    logits, targets = rows_of((2, 9, 4000) if backend in FAST else (2, 2, 700))
    device = device_of(backend)
    return logits.to(device).requires_grad_(), targets.to(device)


class Gold:
    """Both results in float64, with the logits they were computed from."""

    def __init__(self, logits: Tensor, temperature: float, targets: Tensor) -> None:
        self.logits = logits.detach().double().requires_grad_()
        log_p = (self.logits / temperature).log_softmax(-1)
        self.logprobs = log_p.gather(-1, targets[..., None])[..., 0]
        self.entropy = -(log_p.exp() * log_p).sum(-1)


def assert_agree(ours: Tensor, theirs: Tensor, logits: Tensor, exact: Tensor, exact_logits: Tensor) -> None:
    """Checks that our values and gradients are no further from float64 than theirs."""
    assert_within_budget(ours, theirs, exact)
    upstream = torch.randn(ours.shape, device=ours.device)
    gradients = [torch.autograd.grad(r, logits, upstream)[0] for r in (ours, theirs)]
    assert_within_budget(*gradients, torch.autograd.grad(exact, exact_logits, upstream.double())[0])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("backend", BACKENDS)
def test_selective_log_softmax(backend: str, temperature: float) -> None:
    logits, targets = rows(backend)
    ours = gk.token_logprobs(logits, targets, temperature=temperature, backend=backend).logprobs
    theirs = utils.selective_log_softmax(logits, targets, temperature=temperature)
    gold = Gold(logits, temperature, targets)
    assert_agree(ours, theirs, logits, gold.logprobs, gold.logits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_entropy_from_logits(backend: str) -> None:
    logits, targets = rows(backend)
    ours = gk.token_logprobs(logits, targets, return_entropy=True, backend=backend).entropy
    theirs = utils.entropy_from_logits(logits)
    gold = Gold(logits, 1.0, targets)
    assert ours is not None
    assert_agree(ours, theirs, logits, gold.entropy, gold.logits)


# TRL's slicing between the model and the loss: the last position has no target.
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_shifted_by_one(backend: str) -> None:
    logits, targets = rows(backend)
    ours = gk.token_logprobs(logits[:, :-1], targets[:, 1:], backend=backend).logprobs
    theirs = utils.selective_log_softmax(logits[:, :-1], targets[:, 1:])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(r.sum(), logits)[0] for r in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
