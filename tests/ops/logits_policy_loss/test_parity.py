"""logits_policy_loss against TRL's log-softmax and the loss of its trainer, from logits to their gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.logits_policy_loss.registration import SUPPORTS
from grpo_kernels.ops.policy_loss.peers import TRL_LOSS_TYPES
from tests import peers_trl
from tests.harness import runnable_backends
from tests.ops.logits_policy_loss.batches import logits_for

utils = pytest.importorskip("trl.trainer.utils")

ROWS, WIDTH, VOCABULARY = 6, 11, 40
TEMPERATURE = 0.9


def batch() -> tuple[Tensor, dict[str, Tensor]]:
    """Logits whose ratios are on both sides of the clip bounds, and the other arguments by TRL's names."""
    shape = ROWS, WIDTH
    old = -3 * torch.rand(shape, dtype=torch.float64) - 0.7
    shift = torch.tensor([0.3, -0.35, 0.05, 0.35, -0.3, -0.05])[:, None]
    targets = torch.randint(VOCABULARY, shape)
    logits = logits_for((old + 0.25 * torch.randn(shape) + shift).clamp(max=-1e-3), targets, VOCABULARY) * TEMPERATURE
    return logits, {
        "targets": targets,
        "mask": torch.arange(WIDTH) < torch.randint(4, WIDTH + 1, (ROWS, 1)),
        "old_per_token_logps": old,
        "ref_per_token_logps": old + 0.3 * torch.randn(shape),
        "advantages": torch.tensor([1.5, -0.7, -1.0, 0.0, -1.2, 0.6], dtype=torch.float64),
    }


def theirs(logits: Tensor, inputs: dict[str, Tensor], **fields: Any) -> tuple[Tensor, dict[str, float]]:
    inputs = dict(inputs)
    targets, mask = inputs.pop("targets"), inputs.pop("mask")
    logprobs = utils.selective_log_softmax(logits, targets, temperature=TEMPERATURE)
    entropy = utils.entropy_from_logits(logits / TEMPERATURE)
    return peers_trl.policy_loss(logprobs, entropy, mask, inputs, **fields)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, torch.float64))
def test_grpo_trainer(backend: str, loss_type: str, level: str) -> None:
    logits, inputs = batch()
    fields = {"loss_type": loss_type, "importance_sampling_level": level, "beta": 0.1, "entropy_coef": 0.01}
    fields["sapo_temperature_neg"] = 1.0625  # TRL rounds it to float32
    mask, results = inputs["mask"], []
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    config = gk.LossConfig.trl(**fields)
    got = gk.logits_policy_loss(
        leaves[0],
        inputs["targets"],
        inputs["old_per_token_logps"],
        inputs["advantages"],
        temperature=TEMPERATURE,
        mask=mask,
        ref_logprobs=inputs["ref_per_token_logps"],
        normalizer=mask.sum() if loss_type in ("dapo", "cispo", "vespo") else None,
        config=config,
        backend=backend,
    )
    want, metrics = theirs(leaves[1], inputs, **fields)
    for loss, leaf in ((got.loss, leaves[0]), (want, leaves[1])):
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    for ours, trl in zip(*results, strict=True):
        torch.testing.assert_close(ours, trl, rtol=1e-9, atol=1e-10 * float(trl.abs().max()))
    named = got.metrics.trl()
    assert set(named) == set(metrics)
    assert named["entropy"] == pytest.approx(metrics["entropy"], rel=1e-9)
