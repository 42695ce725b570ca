"""Losses of two terms: CHORD, LUFFY, cross-entropy of good examples, prime-rl, score centering.

Faults they are there for: a share of the wrong tokens, a term of tokens that it is not for, NaN
in what it does not read, a tail of the sampler's distribution that is lost.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.loop import SUPPORTS as SUPPORTS_OF_HIDDEN
from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

F64 = torch.float64
BACKENDS = runnable_backends(SUPPORTS, F64)
SHAPE = (4, 60)


def draw(backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs, advantages and a mask."""
    random = torch.Generator().manual_seed(0)
    old = -0.1 - 2 * torch.rand(SHAPE, generator=random, dtype=F64)
    now = old + 0.3 * torch.randn(SHAPE, generator=random, dtype=F64)
    advantages = torch.randn(SHAPE, generator=random, dtype=F64)
    mask = torch.rand(SHAPE, generator=random) < 0.8
    now, old, advantages, mask = (value.to(device_of(backend)) for value in (now, old, advantages, mask))
    return now.requires_grad_(), old, advantages, mask


def cross_entropy(lp: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """The weighted mean of -lp over a mask."""
    shares = gk.token_shares(mask)
    return -(torch.where(mask, lp, 0) * shares * (1 if weights is None else weights)).sum()


def assert_same(loss: Tensor, want: Tensor, leaf: Tensor) -> None:
    gradients = [torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in (loss, want)]
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
    assert gradients[0].any()


def clipped(lp: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = (lp - old).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_components_with_counts_of_their_own(backend: str) -> None:
    """prime-rl divides each component by its own number of tokens."""
    now, old, advantages, mask = draw(backend)
    is_imitated = (torch.arange(SHAPE[1], device=now.device) % 3 == 0).expand(SHAPE)
    policy, imitated = mask & ~is_imitated, mask & is_imitated
    want = -(advantages * (now - old).exp())[policy].mean() - now[imitated].mean()
    config = gk.LossConfig(clip_low=None, clip_high=None)
    loss = gk.policy_loss(now, old, advantages, mask=policy, config=config, backend=backend).loss
    assert_same(loss + cross_entropy(now, imitated), want, now)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chord(backend: str) -> None:
    """CHORD: (1 - mu) GRPO on the policy's rows and mu times the weighted cross-entropy of an expert's rows."""
    now, old, advantages, mask = draw(backend)
    mu, is_expert = 0.3, torch.tensor([[False], [True], [False], [True]], device=now.device)
    p = now.detach().exp()
    ours, experts = mask & ~is_expert, mask & is_expert
    want = (1 - mu) * clipped(now, old, advantages)[ours].mean() + mu * (-now * p * (1 - p))[experts].mean()
    old = torch.where(experts, torch.nan, old)
    policy = gk.policy_loss(now, old, advantages, mask=ours, config=gk.LossConfig(), backend=backend).loss
    assert_same((1 - mu) * policy + mu * cross_entropy(now, experts, p * (1 - p)), want, now)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_entropy_of_positive_examples(backend: str) -> None:
    """VAPO's auxiliary loss, as in NeMo RL and Cosmos-RL: its mean is over the tokens of rewarded rows alone."""
    now, old, advantages, mask = draw(backend)
    positive = mask & torch.tensor([[True], [False], [True], [False]], device=now.device)
    want = clipped(now, old, advantages)[mask].mean() - 0.1 * now[positive].mean()
    policy = gk.policy_loss(now, old, advantages, mask=mask, config=gk.LossConfig(), backend=backend).loss
    loss = policy + 0.1 * cross_entropy(now, positive)
    assert_same(loss, want, now)
    # with the counts of the whole batch, micro-batches add up
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        lp, own = now[rows], positive[rows]
        inputs = lp, old[rows], advantages[rows]
        options = {"mask": mask[rows], "normalizer": mask.sum(), "config": gk.LossConfig(), "backend": backend}
        part = gk.policy_loss(*inputs, **options).loss
        parts.append(part - 0.1 * (lp * gk.token_shares(own, count=positive.sum())).sum())
    assert_same(parts[0] + parts[1], want, now)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shaping_of_luffy(backend: str) -> None:
    """arXiv 2504.14945: tokens of a teacher have the term -A f(p) with f = p / (p + gamma), the others -A r."""
    now, old, advantages, mask = draw(backend)
    of_teacher = (torch.arange(SHAPE[0], device=now.device) % 3 == 0)[:, None].expand(SHAPE)
    gamma, shares = 0.1, gk.token_shares(mask)
    want = (-advantages * torch.where(of_teacher, now.exp() / (now.exp() + gamma), (now - old).exp()))[mask].mean()
    config = gk.LossConfig(clip_low=None, clip_high=None)
    policy = gk.policy_loss(
        now, old, advantages, mask=mask & ~of_teacher, weights=shares, config=config, backend=backend
    ).loss
    p = torch.where(mask & of_teacher, now, 0).exp()
    shaped = -(torch.where(of_teacher, shares * advantages, 0) * p / (p + gamma)).sum()
    assert_same(policy + shaped, want, now)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_policy_distillation(backend: str) -> None:
    """The reverse KL to a teacher as a reward of each token, with a policy gradient."""
    now, old, _, mask = draw(backend)
    teacher = old + 0.3 * torch.sin(torch.arange(SHAPE[1], device=now.device))
    want = (-(teacher - old) * now)[mask].mean()
    config = gk.LossConfig(loss="reinforce")
    assert_same(gk.policy_loss(now, old, teacher - old, mask=mask, config=config, backend=backend).loss, want, now)


COLUMNS, WIDTH = 37, 5


@pytest.mark.parametrize("backend", runnable_backends(SUPPORTS_OF_HIDDEN, F64))
@pytest.mark.parametrize("known", [6, COLUMNS])
def test_score_centering(backend: str, known: int) -> None:
    """arXiv 2609.20807: -A w (log pi(a) - E_mu log pi), with the tail of mu shared like that of pi.

    The loss differs by the entropy of mu, which has no gradient. That of a logit is -A w times 1 for the token that was
    sampled, minus mu.
    """
    random, device = torch.Generator().manual_seed(1), device_of(backend)
    hidden, weight = torch.randn(*SHAPE, WIDTH, generator=random), torch.randn(COLUMNS, WIDTH, generator=random)
    of_mu = 2 * torch.randn(*SHAPE, COLUMNS, generator=random)
    actions, advantages = torch.randint(COLUMNS, SHAPE, generator=random), torch.randn(SHAPE, generator=random)
    importance, mask = torch.rand(SHAPE, generator=random) * 2, torch.rand(SHAPE, generator=random) < 0.8
    hidden, weight, of_mu, advantages, importance = (
        value.to(device, F64) for value in (hidden, weight, of_mu, advantages, importance)
    )
    actions, mask = actions.to(device), mask.to(device)
    factor = torch.where(mask, -advantages * importance, 0) / mask.sum()
    mu, ids = of_mu.log_softmax(-1).topk(known)

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        shares = gk.token_shares(mask)
        centre = gk.Teacher(ids, mu, kind="forward_kl", tail="bucket", weights=-advantages * importance * shares)
        return gk.linear_policy_loss(
            hidden,
            weight,
            actions,
            None,
            advantages,
            mask=mask,
            is_weights=importance,
            weights=shares,
            teacher=centre,
            config=gk.LossConfig("reinforce"),
            backend=backend,
        ).loss

    def published(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs = (hidden @ weight.T).log_softmax(-1)
        is_tail = torch.ones_like(logprobs, dtype=torch.bool).scatter(-1, ids, False)
        p = logprobs.detach().exp()
        tail = torch.where(is_tail, p, 0)
        rest = 1 - mu.exp().sum(-1, keepdim=True)
        share = tail / tail.sum(-1, keepdim=True).clamp(min=1e-300)
        expected = (torch.where(is_tail, rest * share, of_mu.log_softmax(-1).exp()) * logprobs).sum(-1)
        return (factor * (logprobs.gather(-1, actions[..., None]).squeeze(-1) - expected)).sum()

    leaves = hidden.requires_grad_(), weight.requires_grad_()
    values, gradients = [], []
    for loss in (ours, published):
        value = loss(*leaves)
        values.append(value)
        gradients.append(torch.autograd.grad(value, leaves))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
    if known == COLUMNS:
        centred = torch.zeros_like(of_mu).scatter(-1, actions[..., None], 1.0) - of_mu.softmax(-1)
        of_hidden = (factor[..., None] * centred) @ weight
        torch.testing.assert_close(gradients[0][0], of_hidden.detach(), rtol=1e-12, atol=1e-15)
        entropy = -(of_mu.softmax(-1) * of_mu.log_softmax(-1)).sum(-1)
        torch.testing.assert_close(values[0] - values[1], -(factor * entropy).sum(), rtol=1e-12, atol=1e-14)
    assert gradients[0][0][mask].any(-1).all() and not gradients[0][0][~mask].any()
