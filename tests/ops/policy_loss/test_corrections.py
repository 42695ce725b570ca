"""Corrections from sampling_logprobs against importance weights that a few lines compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.config import CORRECTIONS
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
LOW, HIGH = 0.95, 1.05
SPREAD = {"token": 0.05, "sequence": 0.02, "geometric": 0.2}  # of the gaps, so that ratios lie inside and outside


def weights_of(correction: str, gap: Tensor, mask: Tensor) -> Tensor:
    """One weight a token, or one a row. A token that the sampler could not score has a gap of 0."""
    of, _, how = correction.partition("_")
    gap = torch.where(mask, gap.nan_to_num(), 0)
    if of != "token":
        gap = gap.sum(1)
    if of == "geometric":
        gap = gap / mask.sum(1).clamp(min=1)
    ratio = gap.exp()
    return ratio.clamp(LOW, HIGH) if how == "truncate" else ratio * ((ratio >= LOW) & (ratio <= HIGH))


@pytest.mark.parametrize("loss", ["clip", "cispo", "icepop"])
@pytest.mark.parametrize("correction", CORRECTIONS[1:])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_correction_is_its_importance_weights(backend: str, correction: str, loss: str) -> None:
    random, device = torch.Generator().manual_seed(0), device_of(backend)
    rows, width = 12, 20
    old = -torch.rand(rows, width, generator=random, dtype=F64)
    gap = SPREAD[correction.partition("_")[0]] * torch.randn(rows, width, generator=random, dtype=F64)
    gap[1, 3] = torch.nan
    mask = torch.rand(rows, width, generator=random) < 0.8
    mask[4] = False
    now = (old + 0.1 * torch.randn(rows, width, generator=random, dtype=F64)).to(device)
    advantages = torch.randn(rows, generator=random, dtype=F64).to(device)
    weights = weights_of(correction, gap, mask)
    assert weights[mask if weights.dim() == 2 else mask.any(1)].unique().numel() > 2
    results = []
    for fields, more in (
        ({"correction": correction, "correction_min": LOW, "correction_max": HIGH}, {"sampling_logprobs": old - gap}),
        ({}, {"is_weights": weights}),
    ):
        leaf = now.clone().requires_grad_()
        result = gk.policy_loss(
            leaf,
            old.to(device),
            advantages,
            mask=mask.to(device),
            config=gk.LossConfig(loss=loss, **fields),
            backend=backend,
            **{name: value.to(device) for name, value in more.items()},
        )
        results.append((result.loss, *torch.autograd.grad(result.loss, leaf)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)
