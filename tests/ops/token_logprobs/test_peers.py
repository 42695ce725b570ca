"""token_logprobs against the functions of the installed TRL, and with policy_loss against the loss of its trainer.

Faults that this is for: a temperature, shift or entropy that TRL takes otherwise; a gradient by the logits that is not
the trainer's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from tests import peers_trl
from tests.harness import assert_within_budget, device_of
from tests.ops.token_logprobs.cases import BACKENDS, FAST, rows_of

utils = pytest.importorskip("trl.trainer.utils")


def rows(backend: str) -> tuple[Tensor, Tensor]:
    batch, device = rows_of((2, 9, 4000) if backend in FAST else (2, 2, 700)), device_of(backend)
    return batch["logits"].float().to(device).requires_grad_(), batch["targets"].to(device)


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


ROWS, WIDTH, VOCABULARY, TEMPERATURE = 6, 11, 40, 0.9


def logits_for(logprobs: Tensor, targets: Tensor) -> Tensor:
    """Random logits with these log-probs at the targets."""
    logits = torch.randn(*logprobs.shape, VOCABULARY, dtype=torch.float64)
    is_target = torch.arange(VOCABULARY) == targets[..., None]
    others = logits.masked_fill(is_target, -torch.inf).logsumexp(-1)
    own = logprobs - torch.log(-torch.expm1(logprobs)) + others
    return torch.where(is_target, own[..., None], logits)


def batch() -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Logits whose ratios are on both sides of the clip bounds, targets, a mask, and TRL's inputs by its names."""
    shape = ROWS, WIDTH
    old = -3 * torch.rand(shape, dtype=torch.float64) - 0.7
    shift = torch.tensor([0.3, -0.35, 0.05, 0.35, -0.3, -0.05])[:, None]
    targets = torch.randint(VOCABULARY, shape)
    logits = logits_for((old + 0.25 * torch.randn(shape) + shift).clamp(max=-1e-3), targets) * TEMPERATURE
    mask = torch.arange(WIDTH) < torch.randint(4, WIDTH + 1, (ROWS, 1))
    inputs = {
        "old_per_token_logps": old,
        "ref_per_token_logps": old + 0.3 * torch.randn(shape),
        "advantages": torch.tensor([1.5, -0.7, -1.0, 0.0, -1.2, 0.6], dtype=torch.float64),
    }
    return logits, targets, mask, inputs


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
@pytest.mark.parametrize("backend", FAST)
def test_grpo_trainer_from_logits(backend: str, loss_type: str, level: str) -> None:
    logits, targets, mask, inputs = batch()
    fields: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1}
    fields |= {"entropy_coef": 0.01, "sapo_temperature_neg": 1.0625}  # TRL rounds it to float32
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = gk.token_logprobs(
        leaf, targets.where(mask, -100), temperature=TEMPERATURE, return_entropy=True, backend=backend
    )
    result = gk.policy_loss(
        logprobs,
        inputs["old_per_token_logps"],
        inputs["advantages"],
        mask=mask,
        ref_logprobs=inputs["ref_per_token_logps"],
        entropy=entropy,
        normalizer={"tokens": mask.sum()} if loss_type in ("dapo", "cispo", "vespo") else None,
        config=gk.LossConfig.trl(**fields),
        backend=backend,
    )
    theirs = logits.clone().requires_grad_()
    want, metrics = peers_trl.policy_loss(
        utils.selective_log_softmax(theirs, targets, temperature=TEMPERATURE),
        utils.entropy_from_logits(theirs / TEMPERATURE),
        mask,
        inputs,
        **fields,
    )
    gradients = [torch.autograd.grad(loss, logit)[0] for loss, logit in ((result.loss, leaf), (want, theirs))]
    torch.testing.assert_close(result.loss.detach(), want.detach(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10 * float(gradients[1].abs().max()))
    named = result.metrics.trl()
    assert set(named) == set(metrics)
    assert named["entropy"] == pytest.approx(metrics["entropy"], rel=1e-9)
