"""IPO and IcePop against the formulas of prime-rl (pull requests 2798, 3526, 3586), which publishes no package."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
CONFIGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "ipo": {"type": "ipo", "eps": 0.05},
    "ipo with a KL": {"type": "ipo", "eps": 0.05, "kl_tau": 1e-3},
    "icepop": {"type": "icepop"},
    "narrow icepop": {"type": "icepop", "ratio_low": 0.9, "ratio_high": 1.2},
}


def prime_rl(batch: dict[str, Tensor], eps: float = 0.3, kl_tau: float = 0.0, **ratios: float) -> tuple[Tensor, Tensor]:
    """The loss over the number of tokens, and which tokens it drops."""
    now, sampled, mask = batch["logprobs"], batch["sampled"], batch["mask"]
    log_ratio = now - sampled
    if "type" in ratios:
        low, high = ratios.get("ratio_low", 0.2), ratios.get("ratio_high", 5.0)
        drops = (log_ratio < math.log(low)) | (log_ratio > math.log(high))
    else:
        drops = (now.exp() - sampled.exp()).abs() > eps
    policy = -(log_ratio.exp() * batch["advantages"])[mask & ~drops].sum()
    return (policy + kl_tau * log_ratio[mask].square().sum()) / mask.sum(), drops & mask


def draw() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    sampled = -torch.rand(4, 50, generator=random, dtype=F64) * 3
    now = (sampled + 1.5 * torch.randn(4, 50, generator=random, dtype=F64)).clamp(max=0)
    advantages = torch.randn(4, 50, generator=random, dtype=F64)
    mask = torch.rand(4, 50, generator=random) < 0.8
    return {"logprobs": now, "sampled": sampled, "advantages": advantages, "mask": mask}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_and_gradient(backend: str, name: str) -> None:
    fields, batch = CONFIGS[name], draw()
    batch["logprobs"].requires_grad_()
    options = {key: value for key, value in fields.items() if key != "type" or value == "icepop"}
    expected, dropped = prime_rl(batch, **options)
    (gradient,) = torch.autograd.grad(expected, batch["logprobs"])
    assert 0 < dropped.sum() < batch["mask"].sum()
    moved = {key: value.detach().to(device_of(backend)) for key, value in batch.items()}
    leaf = moved["logprobs"] = moved["logprobs"].detach().requires_grad_()
    config = gk.LossConfig.prime_rl(**fields)
    result = gk.policy_loss(
        leaf,
        moved["sampled"],
        moved["advantages"],
        mask=moved["mask"],
        ref_logprobs=moved["sampled"] if config.kl != "none" else None,
        config=config,
        backend=backend,
    )
    (got,) = torch.autograd.grad(result.loss, leaf)
    torch.testing.assert_close(result.loss.detach().cpu(), expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got.cpu(), gradient, rtol=1e-12, atol=1e-14)
    metrics = result.metrics.to_dict()
    assert metrics["clipped"] == metrics["low_clipped"] + metrics["high_clipped"] == dropped.sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_are_inside(backend: str) -> None:
    """Probabilities that float64 holds exactly, and a ratio of exactly 2."""
    sampled = torch.tensor([[0.25, 0.5, 0.5]], dtype=F64, device=device_of(backend)).log()
    now = torch.tensor([[0.5, 0.25, 0.75]], dtype=F64, device=device_of(backend)).log().requires_grad_()
    advantages = torch.ones(1, dtype=F64, device=now.device)
    for config, kept in (
        (gk.LossConfig.prime_rl(eps=0.25), [True, True, True]),
        (gk.LossConfig.prime_rl(eps=0.24), [False, False, False]),
        (gk.LossConfig.prime_rl(type="icepop", ratio_low=0.6, ratio_high=2.0), [True, False, True]),
    ):
        loss = gk.policy_loss(now, sampled, advantages, config=config, backend=backend).loss
        (gradient,) = torch.autograd.grad(loss, now)
        assert (gradient[0] != 0).tolist() == kept


@pytest.mark.parametrize("config", ["ipo", "icepop"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_ratios_are_dropped_and_nan_is_not(backend: str, config: str) -> None:
    """A token that the sampler hardly ever draws; prime-rl's first version gave NaN for it."""
    sampled = torch.tensor([[-1e4, -1.0, -1.0]], dtype=F64, device=device_of(backend))
    now = torch.tensor([[-0.1, -1e4, -1.0]], dtype=F64, device=device_of(backend)).requires_grad_()
    advantages = torch.ones(1, dtype=F64, device=now.device)
    config = gk.LossConfig.prime_rl(type=config)
    loss = gk.policy_loss(now, sampled, advantages, config=config, backend=backend).loss
    (gradient,) = torch.autograd.grad(loss, now)
    assert loss.item() == pytest.approx(-1 / 3) and (gradient[0] != 0).tolist() == [False, False, True]
    wrong = torch.where(torch.tensor([[False, False, True]], device=now.device), torch.nan, now)
    assert gk.policy_loss(wrong, sampled, advantages, config=config, backend=backend).loss.isnan()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"LossConfig.prime_rl: type must be one of ipo, icepop, got 'dppo'"):
        gk.LossConfig.prime_rl(type="dppo")
    with pytest.raises(ValueError, match=r"LossConfig.prime_rl: adv_tau must be 1, got 0.5; multiply the advantages"):
        gk.LossConfig.prime_rl(adv_tau=0.5)
    with pytest.raises(ValueError, match=r"LossConfig.prime_rl: field must be one of eps, .* got 'ratio_low'"):
        gk.LossConfig.prime_rl(ratio_low=0.1)
