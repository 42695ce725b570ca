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
from tests.ops.policy_loss import peers as policy_peers
from tests.ops.token_logprobs.cases import BACKENDS, FAST, rows_of

utils = pytest.importorskip("trl.trainer.utils")


def rows(backend: str) -> tuple[Tensor, Tensor]:
    batch, device = rows_of((2, 9, 4000) if backend in FAST else (2, 2, 700)), device_of(backend)
    return batch["logits"].float().to(device).requires_grad_(), batch["targets"].to(device)


def of_trl(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = utils.selective_log_softmax(logits, targets, temperature=temperature)
    return logprobs, utils.entropy_from_logits(logits / temperature)


# Both functions, whose results and gradients ours may not be further from float64 than.
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_gradients(backend: str, temperature: float) -> None:
    logits, targets = rows(backend)
    ours = gk.token_logprobs(logits, targets, temperature=temperature, return_entropy=True, backend=backend)
    theirs = of_trl(logits, targets, temperature)
    wide = logits.detach().double().requires_grad_()
    gold = of_trl(wide, targets, temperature)
    for mine, peers, exact in zip(ours, theirs, gold, strict=True):
        assert_within_budget(mine, peers, exact)
        upstream = torch.randn(targets.shape, device=targets.device)
        gradients = [torch.autograd.grad(result, logits, upstream, retain_graph=True)[0] for result in (mine, peers)]
        (by_wide,) = torch.autograd.grad(exact, wide, upstream.double(), retain_graph=True)
        assert_within_budget(*gradients, by_wide)


# TRL's slicing between the model and the loss: the last position has no target.
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_shifted_by_one(backend: str) -> None:
    logits, targets = rows(backend)
    ours = gk.token_logprobs(logits[:, :-1], targets[:, 1:], backend=backend).logprobs
    theirs = utils.selective_log_softmax(logits[:, :-1], targets[:, 1:])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(r.sum(), logits)[0] for r in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def logits_of(logprobs: Tensor, targets: Tensor) -> Tensor:
    """Random logits of 40 tokens with these log-probs at the targets."""
    logits = torch.randn(*logprobs.shape, 40, dtype=torch.float64)
    is_target = torch.arange(40) == targets[..., None]
    others = logits.masked_fill(is_target, -torch.inf).logsumexp(-1)
    own = logprobs - torch.log(-torch.expm1(logprobs)) + others
    return torch.where(is_target, own[..., None], logits)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
@pytest.mark.parametrize("backend", FAST)
def test_grpo_trainer_from_logits(backend: str, loss_type: str, level: str) -> None:
    batch = policy_peers.make_batch(torch.float64)
    mask, temperature, targets = batch["mask"], 0.9, torch.randint(40, batch["mask"].shape)
    logits = logits_of(batch["logprobs"], targets) * temperature
    fields: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1}
    fields |= {"entropy_coef": 0.01, "sapo_temperature_neg": 1.0625}  # TRL rounds it to float32
    leaf, theirs = (logits.clone().requires_grad_() for _ in range(2))
    logprobs, entropy = gk.token_logprobs(
        leaf, targets.where(mask, -100), temperature=temperature, return_entropy=True, backend=backend
    )
    arguments = {name: batch[name] for name in ("old_logprobs", "advantages", "mask", "ref_logprobs")}
    normalizer = {"tokens": mask.sum()} if loss_type in ("dapo", "cispo", "vespo") else None
    config = gk.LossConfig.trl(**fields)
    result = gk.policy_loss(
        logprobs, entropy=entropy, normalizer=normalizer, config=config, backend=backend, **arguments
    )
    names = {"old_per_token_logps": "old_logprobs", "ref_per_token_logps": "ref_logprobs", "advantages": "advantages"}
    inputs = {name: batch[ours] for name, ours in names.items()}
    want, metrics = peers_trl.policy_loss(*of_trl(theirs, targets, temperature), mask, inputs, **fields)
    gradients = [torch.autograd.grad(loss, logit)[0] for loss, logit in ((result.loss, leaf), (want, theirs))]
    torch.testing.assert_close(result.loss.detach(), want.detach(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10 * float(gradients[1].abs().max()))
    named = result.metrics.trl()
    assert set(named) == set(metrics)
    assert named["entropy"] == pytest.approx(metrics["entropy"], rel=1e-9)
