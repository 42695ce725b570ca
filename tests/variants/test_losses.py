"""IPO and IcePop against formulas of prime-rl, TOPR against that of Trinity-RFT: what a loss keeps, and its bounds.

Faults they are there for: a bound that is off by one token or counts as outside, a ratio that overflows where its token
is dropped, a NaN that a comparison hides.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
SHAPE = (6, 50)
IPO = gk.LossConfig(loss="ipo", clip_low=0.3, clip_high=0.2)
ICEPOP = gk.LossConfig(loss="icepop", clip_low=0.8, clip_high=4.0)


def draw(backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, those of the sampler, one advantage a row, and a mask with an empty row."""
    random = torch.Generator().manual_seed(0)
    sampled = -3 * torch.rand(SHAPE, generator=random, dtype=F64)
    now = (sampled + 1.5 * torch.randn(SHAPE, generator=random, dtype=F64)).clamp(max=0)
    advantages = torch.randn(SHAPE[0], generator=random, dtype=F64)
    advantages[2] = 0
    mask = torch.rand(SHAPE, generator=random) < 0.8
    mask[4] = False
    now, sampled, advantages, mask = (value.to(device_of(backend)) for value in (now, sampled, advantages, mask))
    return now.requires_grad_(), sampled, advantages, mask


def is_far(name: str, now: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
    """Tokens that IPO and IcePop drop, or whose ratio TOPR bounds."""
    if name == "ipo":
        change = now.exp() - sampled.exp()
        return (change < -0.3) | (change > 0.2)
    log_ratio = now - sampled
    if name == "icepop":
        return (log_ratio < math.log(0.2)) | (log_ratio > math.log(5.0))
    return (log_ratio > math.log(1.3 if name == "topr at 1.3" else 1)) & (advantages <= 0)


@pytest.mark.parametrize("name", ["ipo", "icepop", "topr", "topr at 1.3"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_gradient_and_clipped_tokens(backend: str, name: str) -> None:
    now, sampled, advantages, mask = draw(backend)
    far, ratio, a = is_far(name, now, sampled, advantages[:, None]), (now - sampled).exp(), advantages[:, None]
    config = {"ipo": IPO, "icepop": ICEPOP, "topr": gk.LossConfig(loss="topr")}.get(name)
    if name.startswith("topr"):
        weight = torch.where(a > 0, 1, ratio.detach().clamp(max=1.3 if config is None else 1))
        terms = -weight * a * now
    else:
        terms = -ratio * a * ~far
    want = terms[mask].mean()
    config = config or gk.LossConfig(loss="topr", ratio_cap=1.3)
    result = gk.policy_loss(now, sampled, advantages, mask=mask, config=config, backend=backend)
    gradients = [torch.autograd.grad(loss, now)[0] for loss in (result.loss, want)]
    torch.testing.assert_close(result.loss.detach(), want.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
    metrics = result.metrics.to_dict()
    assert 0 < (far & mask).sum() == metrics["clipped"] < mask.sum()
    if not name.startswith("topr"):
        assert metrics["clipped"] == metrics["low_clipped"] + metrics["high_clipped"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_are_inside(backend: str) -> None:
    """Probabilities that float64 holds exactly, and a ratio of exactly 2."""
    sampled = torch.tensor([[0.25, 0.5, 0.5]], dtype=F64, device=device_of(backend)).log()
    now = torch.tensor([[0.5, 0.25, 0.75]], dtype=F64, device=device_of(backend)).log().requires_grad_()
    advantages = torch.ones(1, dtype=F64, device=now.device)
    for config, kept in (
        (gk.LossConfig(loss="ipo", clip_low=0.25, clip_high=0.25), [True, True, True]),
        (gk.LossConfig(loss="ipo", clip_low=0.24, clip_high=0.25), [True, False, True]),
        (gk.LossConfig(loss="ipo", clip_low=0.25, clip_high=0.24), [False, True, False]),
        (gk.LossConfig(loss="icepop", clip_low=0.4, clip_high=1.0), [True, False, True]),
    ):
        loss = gk.policy_loss(now, sampled, advantages, config=config, backend=backend).loss
        (gradient,) = torch.autograd.grad(loss, now)
        assert (gradient[0] != 0).tolist() == kept


@pytest.mark.parametrize("config", [IPO, ICEPOP], ids=["ipo", "icepop"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_ratios_are_dropped_and_nan_is_not(backend: str, config: gk.LossConfig) -> None:
    """A token that the sampler hardly ever draws; prime-rl's first version gave NaN for it."""
    sampled = torch.tensor([[-1e4, -1.0, -1.0]], dtype=F64, device=device_of(backend))
    now = torch.tensor([[-0.1, -1e4, -1.0]], dtype=F64, device=device_of(backend)).requires_grad_()
    advantages = torch.ones(1, dtype=F64, device=now.device)
    loss = gk.policy_loss(now, sampled, advantages, config=config, backend=backend).loss
    (gradient,) = torch.autograd.grad(loss, now)
    assert loss.item() == pytest.approx(-1 / 3) and (gradient[0] != 0).tolist() == [False, False, True]
    wrong = torch.where(torch.tensor([[False, False, True]], device=now.device), torch.nan, now)
    assert gk.policy_loss(wrong, sampled, advantages, config=config, backend=backend).loss.isnan()


# Bounds that a batch of ordinary tokens does not reach: log ratio of a single token to the old policy and to the
# reference, its advantage, and the term.
FAR = [
    ({"ratio": "sequence", "log_ratio_clamp": (-math.inf, 10.0)}, (12.0, 0.0, -1.0), math.exp(10)),
    ({"log_ratio_clamp": (-10.0, 20.0)}, (25.0, 0.0, -1.0), math.exp(20)),
    ({"clip_low": None, "dual_clip": 3.0}, (25.0, 0.0, -1.0), 3.0),
    ({"kl": "k3", "kl_coef": 1.0, "kl_clamp": (20.0, 10.0)}, (0.0, -8.0, 0.0), 10.0),
    ({"kl": "k3", "kl_coef": 1.0, "kl_clamp": (700.0, 10.0)}, (0.0, 11.0, 0.0), 10.0),
    ({"kl": "k1", "kl_coef": 1.0, "kl_clamp": (20.0, 100.0)}, (0.0, 25.0, 0.0), 20.0),
    ({"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}, (math.log(4.5), 0.0, -1.0), -4.5 * 9),
    ({"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}, (math.log(6.0), 0.0, -1.0), -5.0 * 9),
]


@pytest.mark.parametrize(("fields", "token", "term"), FAR)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_of_a_far_token(
    backend: str, fields: dict[str, object], token: tuple[float, float, float], term: float
) -> None:
    to_old, to_reference, advantage = token
    config, device = gk.LossConfig(**fields), device_of(backend)  # type: ignore[arg-type]
    lp = torch.full((1, 1), -9.0, dtype=F64, device=device)
    result = gk.policy_loss(
        lp,
        lp - to_old,
        torch.tensor([advantage], dtype=F64, device=device),
        ref_logprobs=lp - to_reference if config.kl != "none" else None,
        config=config,
        backend=backend,
    )
    assert result.loss.item() == pytest.approx(term, rel=1e-12)
