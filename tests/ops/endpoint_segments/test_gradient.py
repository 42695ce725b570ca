"""The gradient that segment advantages give, in an environment whose policy gradient is known exactly.

Responses have LENGTH tokens from a vocabulary of two; the policy has one logit for every position and previous token.
Each of the 2^LENGTH responses has a reward of its own, at its last token. All are enumerated, so that nothing is drawn
and no error is noise. `pytest -s` prints the error of each form.

Faults: an advantage that does not reach a token of its segment, a ratio over other tokens than the segment's, and a
document that promises no bias where there is one.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import needs_cpu_kernels

LENGTH = 8
JOINT = gk.LossConfig(ratio="segment", aggregation="token-sum", clip_low=None, clip_high=None)
PER_TOKEN = gk.LossConfig(aggregation="token-sum", clip_low=None, clip_high=None)
SEGMENTS = gk.SegmentConfig(norm="none", group_max_size=4)
WHOLE = gk.SegmentConfig(norm="none", group_max_size=LENGTH, group_variance_threshold=1e12, adaptive_threshold=False)
SINGLE = gk.SegmentConfig(norm="none", group_max_size=1)


@dataclasses.dataclass
class Environment:
    """Rewards of all responses, and the policy's logits [position, previous token, token]."""

    rewards: Tensor
    logits: Tensor

    @classmethod
    def made(cls, seed: int) -> Environment:
        rng = torch.Generator().manual_seed(seed)
        rewards = torch.randn(2**LENGTH, generator=rng, dtype=torch.float64)
        return cls(rewards, torch.randn(LENGTH, 2, 2, generator=rng, dtype=torch.float64))

    @staticmethod
    def all_responses() -> Tensor:
        return (torch.arange(2**LENGTH)[:, None] >> torch.arange(LENGTH)) & 1

    @staticmethod
    def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
        before = torch.cat((torch.zeros_like(tokens[:, :1]), tokens[:, :-1]), 1)
        return logits.log_softmax(-1)[torch.arange(LENGTH), before, tokens]

    def reward(self, tokens: Tensor) -> Tensor:
        return self.rewards[(tokens << torch.arange(LENGTH)).sum(1)]

    def exact_gradient(self) -> Tensor:
        logits = self.logits.clone().requires_grad_()
        tokens = self.all_responses()
        (self.logprobs(logits, tokens).sum(1).exp() * self.reward(tokens)).sum().backward()
        assert logits.grad is not None
        return logits.grad

    def critic(self) -> Tensor:
        """Expected reward before each token of every response."""
        chance = self.logprobs(self.logits, self.all_responses()).sum(1).exp()
        columns = []
        for t in range(LENGTH):
            start = torch.arange(2**LENGTH) % 2**t  # responses with the same first t tokens share their t low bits
            mass, worth = (torch.zeros_like(chance).index_add(0, start, x) for x in (chance, chance * self.rewards))
            columns.append((worth / mass)[start])
        return torch.stack(columns, 1)


def error(form: str, config: gk.SegmentConfig, seed: int, critic: bool = False, is_off_policy: bool = False) -> float:
    """Distance of the expected gradient of a form of the loss from the exact one, as a share of its norm."""
    world, tokens = Environment.made(seed), Environment.all_responses()
    rng = torch.Generator().manual_seed(seed + 100)
    noise = 0.3 * torch.randn(world.logits.shape, generator=rng, dtype=torch.float64)
    old = world.logprobs(world.logits + noise if is_off_policy else world.logits, tokens)
    chance = old.sum(1).exp()[:, None]
    rewards = torch.zeros(old.shape, dtype=torch.float64)
    rewards[:, -1] = world.rewards
    values = world.critic() if critic else (world.logprobs(world.logits, tokens).sum(1).exp() @ world.rewards) + 0 * old
    logits = world.logits.clone().requires_grad_()
    now = world.logprobs(logits, tokens)
    result = gk.endpoint_segments(rewards, now, old, values=values, config=config)
    advantages = chance * result.advantages
    if form == "joint":
        loss = gk.policy_loss(now, old, advantages, segments=result.segment_ids, config=JOINT).loss
    else:
        mask = result.endpoint_mask if form == "sparse" else None
        loss = gk.policy_loss(now, old, advantages, mask=mask, config=PER_TOKEN).loss
    (gradient,) = torch.autograd.grad(-loss, logits)
    exact = world.exact_gradient()
    share = float((gradient - exact).norm() / exact.norm())
    print(f"\n{form}, {'off' if is_off_policy else 'on'}-policy, {critic=}, seed {seed}: {share:.1%} off")
    return share


@needs_cpu_kernels
@pytest.mark.parametrize("seed", range(3))
def test_which_forms_of_the_loss_give_the_policy_gradient(seed: int) -> None:
    broadcast = dataclasses.replace(SEGMENTS, credit="broadcast")
    for rule in ("bounded", "literal"):
        assert error("joint", dataclasses.replace(SEGMENTS, rule=rule), seed) < 1e-12
        assert error("sparse", dataclasses.replace(SEGMENTS, rule=rule), seed) > 0.5
    assert error("broadcast", broadcast, seed) < 1e-12
    assert error("joint", WHOLE, seed, is_off_policy=True) < 1e-12
    assert error("broadcast", dataclasses.replace(WHOLE, credit="broadcast"), seed, is_off_policy=True) > 0.2
    # a cut that saw the outcome leaves a bias with a critic, which single tokens do not have
    assert error("joint", SINGLE, seed, critic=True) < 1e-12
    cut = error("joint", SEGMENTS, seed, critic=True)
    assert cut > 0.02 and error("sparse", SEGMENTS, seed, critic=True) > 2 * cut
