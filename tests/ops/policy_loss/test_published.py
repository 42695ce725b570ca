"""Losses of systems whose packages tests do not install, against their formulas written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
ROWS, WIDTH = 12, 20


def batch(size: float = 0.4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs, one advantage a row, and a mask with holes and an empty row."""
    random = torch.Generator().manual_seed(0)
    old = -0.1 - torch.rand(ROWS, WIDTH, generator=random, dtype=F64)
    now = old + size * torch.randn(ROWS, WIDTH, generator=random, dtype=F64)
    advantages = torch.randn(ROWS, generator=random, dtype=F64)
    advantages[2] = 0
    mask = torch.rand(ROWS, WIDTH, generator=random) < 0.8
    mask[4] = False
    return now, old, advantages, mask


def check(
    backend: str, config: gk.LossConfig, terms: Tensor, leaf: Tensor, arguments: dict[str, Tensor]
) -> gk.PolicyLossMetrics:
    """Compares loss and gradient with those of the terms, whose mean over the mask is the loss."""
    want = (terms * arguments["mask"]).sum() / arguments["mask"].sum()
    (want_gradient,) = torch.autograd.grad(want, leaf)
    device = device_of(backend)
    moved: dict[str, Any] = {name: value.detach().to(device) for name, value in arguments.items()}
    moved["logprobs"] = moved["logprobs"].detach().requires_grad_()
    result = gk.policy_loss(**moved, config=config, backend=backend)
    (gradient,) = torch.autograd.grad(result.loss, moved["logprobs"])
    # a few roundings of terms below 10, in float64
    torch.testing.assert_close(result.loss.cpu(), want.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gradient.cpu(), want_gradient, rtol=1e-13, atol=1e-15)
    return result.metrics


@pytest.mark.parametrize("cap", [None, 1.3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_topr(backend: str, cap: float | None) -> None:
    """Trinity-RFT's form of arXiv 2503.14286: examples of positive advantage have weight 1, others a tapered ratio."""
    now, old, advantages, mask = batch()
    leaf = now.clone().requires_grad_()
    ratio = (leaf - old).exp().detach()
    is_positive = advantages[:, None] > 0
    limit = 1.0 if cap is None else cap
    weight = torch.where(is_positive, 1, ratio.clamp(0, limit))
    arguments = {"logprobs": now, "old_logprobs": old, "advantages": advantages, "mask": mask}
    config = gk.LossConfig(loss="topr", ratio_cap=cap)
    metrics = check(backend, config, -weight * advantages[:, None] * leaf, leaf, arguments)
    clipped = (ratio > limit) & ~is_positive & mask
    assert 0 < clipped.sum() < mask.sum()
    assert metrics["clipped"].item() == clipped.sum()


def mixed(level: str, leaf: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """OpenPipe ART's ratio levels, from the ratio of each token and the geometric mean of its row's."""
    d = leaf - old
    of_row = ((d * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
    if level == "average":
        return (d.exp() + of_row) / 2
    return d.exp().sqrt() * of_row.sqrt()


@pytest.mark.parametrize("level", ["average", "geometric_average"])
@pytest.mark.parametrize("loss", ["clip", "cispo"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ratio_levels_of_art(backend: str, loss: str, level: str) -> None:
    now, old, advantages, mask = batch()
    leaf = now.clone().requires_grad_()
    ratio, of_token = mixed(level, leaf, old, mask), advantages[:, None]
    if loss == "clip":
        terms = -torch.minimum(ratio * of_token, ratio.clamp(0.8, 1.3) * of_token)
        clipped = torch.where(of_token < 0, ratio < 0.8, (ratio > 1.3) & (of_token > 0)) & mask
    else:
        terms = -ratio.detach().clamp(0.8, 1.3) * of_token * leaf
        clipped = ((ratio < 0.8) | (ratio > 1.3)) & mask
    arguments = {"logprobs": now, "old_logprobs": old, "advantages": advantages, "mask": mask}
    config = gk.LossConfig(loss=loss, ratio=level, clip_high=0.3)
    metrics = check(backend, config, terms, leaf, arguments)
    assert 0 < clipped.sum() < mask.sum()
    assert metrics["clipped"].item() == clipped.sum()
    torch.testing.assert_close(metrics["ratio_sum"].item(), (ratio * mask).sum().item(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mean_of_ratios_far_apart_does_not_overflow(backend: str) -> None:
    """exp of a token's log ratio is infinite in float32, that of its row is not; and the other way around."""
    now = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    old = torch.tensor([[-120.0, 110.0], [120.0, -110.0]])
    device = device_of(backend)
    leaf = now.to(device).detach().requires_grad_()
    result = gk.policy_loss(
        leaf,
        old.to(device),
        torch.tensor([1.0, -1.0], device=device),
        config=gk.LossConfig(ratio="average"),
        backend=backend,
    )
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert result.loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_shaping_of_luffy(backend: str) -> None:
    """arXiv 2504.14945: tokens of a teacher have the term -A f(p) with f = p / (p + gamma), the others -A r.

    Its gradient is that of a cross-entropy with the weight A gamma p / (p + gamma)^2.
    """
    now, old, advantages, mask = batch()
    leaf = now.clone().requires_grad_()
    of_teacher = (torch.arange(ROWS) % 3 == 0)[:, None].expand_as(mask)
    gamma, of_token = 0.1, advantages[:, None]
    shaped = leaf.exp() / (leaf.exp() + gamma)
    terms = -of_token * torch.where(of_teacher, shaped, (leaf - old).exp())
    (want,) = torch.autograd.grad((terms * mask).sum() / mask.sum(), leaf)
    slope = gamma * now.exp() / (now.exp() + gamma).square()
    device = device_of(backend)
    moved = now.to(device).detach().requires_grad_()
    result = gk.policy_loss(
        moved,
        old.to(device),
        advantages.to(device),
        mask=mask.to(device),
        kinds=of_teacher.to(device, torch.int8),
        weights=(torch.where(of_teacher, of_token * slope, 1) / mask.sum()).to(device),
        config=gk.LossConfig(clip_low=None, clip_high=None),
        backend=backend,
    )
    (gradient,) = torch.autograd.grad(result.loss, moved)
    torch.testing.assert_close(gradient.cpu(), want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_policy_distillation(backend: str) -> None:
    """The reverse KL to a teacher as a reward of each token, with a policy gradient."""
    now, old, _, mask = batch()
    teacher = old + 0.3 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=F64)
    leaf = now.clone().requires_grad_()
    arguments = {"logprobs": now, "old_logprobs": old, "advantages": teacher - old, "mask": mask}
    check(backend, gk.LossConfig(loss="reinforce"), -(teacher - old) * leaf, leaf, arguments)
