"""token_advantages against the installed verl's functions, and against the formulas of other systems, line by line."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests import peers
from tests.ops.token_advantages.batches import BACKENDS, F64, Batch, batch_of, steps_of

on_backends = pytest.mark.parametrize("backend", BACKENDS)
discounts = pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])


def assert_close(got: Tensor, wanted: Tensor, mask: Tensor) -> None:
    """Equality where tokens count, and zeros elsewhere."""
    got = got.cpu()
    torch.testing.assert_close(got[mask], wanted[mask].to(got.dtype), rtol=1e-9, atol=1e-9)
    assert not got[~mask].any()


@discounts
@on_backends
def test_verl_gae(backend: str, gamma: float, lam: float) -> None:
    batch = batch_of(11, 6, 40)
    assert batch.mask is not None
    wanted = peers.verl("gae")(batch.rewards, batch.values, batch.mask.double(), gamma, lam)
    got = batch.run(gk.TokenAdvantageConfig(gamma=gamma, lam=lam, carry_rewards=False), backend)
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs, batch.mask)


@pytest.mark.parametrize("gamma", [1.0, 0.97])
@on_backends
def test_verl_reinforce_plus_plus(backend: str, gamma: float) -> None:
    from verl.trainer.config import AlgoConfig

    batch = batch_of(12, 6, 40, values=False)
    assert batch.mask is not None
    wanted = peers.verl("reinforce_plus_plus")(batch.rewards, batch.mask.double(), config=AlgoConfig(gamma=gamma))
    got = batch.run(gk.TokenAdvantageConfig("reinforce_plus_plus", gamma=gamma, carry_rewards=False), backend)
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs, batch.mask)


@on_backends
def test_rows_without_gaps_as_skyrl_and_roll(backend: str) -> None:
    """Their recursions read the values behind a gap and behind the row, so they agree where all tokens count."""
    batch = batch_of(13, 5, 30)
    batch = dataclasses.replace(batch, mask=torch.ones_like(batch.rewards, dtype=torch.bool))
    gamma, lam = 0.98, 0.9
    assert batch.values is not None and batch.mask is not None
    following = torch.cat([batch.values[:, 1:], torch.zeros(5, 1, dtype=F64)], 1)
    difference = batch.rewards + gamma * following - batch.values
    powers = (torch.arange(30)[None] - torch.arange(30)[:, None]).clamp(min=0)
    weights = torch.tril(torch.ones(30, 30, dtype=F64)).T * (gamma * lam) ** powers.double()
    advantages = difference @ weights.T
    got = batch.run(gk.TokenAdvantageConfig(gamma=gamma, lam=lam, whiten="none"), backend)
    assert_close(got.advantages, advantages, batch.mask)
    assert_close(got.returns, advantages + batch.values, batch.mask)
    whitened = (advantages - advantages.mean()) / (advantages.var() + 1e-8).sqrt()
    assert_close(batch.run(gk.TokenAdvantageConfig(gamma=gamma, lam=lam), backend).advantages, whitened, batch.mask)


@on_backends
def test_turns_as_roll_agentic_reinforce(backend: str) -> None:
    """A turn is a run of tokens that count, rewarded at its last token; its return is discounted once per turn."""
    batch = batch_of(14, 5, 60, values=False, gaps=0.15)
    assert batch.mask is not None
    runs = (~batch.mask).cumsum(1)
    batch = dataclasses.replace(batch, turns=torch.where(batch.mask, runs, -1))
    rewards, wanted, gamma = torch.zeros_like(batch.rewards), torch.zeros_like(batch.rewards), 0.9
    for row in range(5):
        running = 0.0
        for step in reversed(steps_of(batch, (row * 60, row * 60 + 60))):
            rewards.view(-1)[step[-1]] = batch.rewards.view(-1)[step[-1]]
            running = float(batch.rewards.view(-1)[step[-1]]) + gamma * running
            wanted.view(-1)[step] = running
    batch = dataclasses.replace(batch, rewards=rewards)
    config = gk.TokenAdvantageConfig("reinforce", gamma=gamma)
    got = batch.run(config, backend)
    assert_close(got.advantages, wanted, batch.mask)
    assert_close(got.returns, wanted, batch.mask)


@on_backends
def test_step_rewards_as_roll_step_reinforce(backend: str) -> None:
    """Rows are trajectories and tokens their steps."""
    scores = torch.tensor([[1.0, 0.0, 2.0], [0.5, -1.0, 0.0]], dtype=F64)
    steps = torch.tensor([[True, True, True], [True, True, False]])
    got = Batch(scores, None, steps).run(gk.TokenAdvantageConfig("reinforce", gamma=0.5), backend)
    wanted = torch.tensor([[1.5, 1.0, 2.0], [0.0, -1.0, 0.0]], dtype=F64)
    assert_close(got.returns, wanted, steps)


@discounts
@on_backends
def test_turns_of_one_token_are_tokens(backend: str, gamma: float, lam: float) -> None:
    batch = batch_of(15, 6, 40)
    numbers = torch.arange(40).expand(6, 40)
    config = gk.TokenAdvantageConfig(gamma=gamma, lam=lam)
    tokens, turns = batch.run(config, backend), dataclasses.replace(batch, turns=numbers).run(config, backend)
    for a, b in zip(tokens, turns, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
