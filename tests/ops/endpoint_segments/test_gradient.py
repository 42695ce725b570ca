"""The gradient that segment advantages give, in an environment whose policy gradient is known exactly.

Responses have LENGTH tokens from a vocabulary of two; the policy has one logit for every position and previous token.
Each of the 2^LENGTH responses has a reward of its own, at its last token. `pytest -s` prints the error of each form.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import needs_cpu_kernels

LENGTH, BATCH, BATCHES = 8, 2048, 64
JOINT = gk.LossConfig(ratio="segment", aggregation="token-sum", clip_low=None, clip_high=None)
PER_TOKEN = gk.LossConfig(aggregation="token-sum", clip_low=None, clip_high=None)
SEGMENTS = gk.SegmentConfig(norm="none", group_max_size=4)


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

    def expected_reward(self) -> float:
        tokens = self.all_responses()
        return float((self.logprobs(self.logits, tokens).sum(1).exp() * self.reward(tokens)).sum())

    def values(self, tokens: Tensor) -> Tensor:
        """Expected reward before each token, as a perfect critic predicts it."""
        every = self.all_responses()
        chance = self.logprobs(self.logits, every).sum(1).exp()
        weighted = chance * self.reward(every)
        code = (tokens << torch.arange(LENGTH)).sum(1)
        columns = []
        for t in range(LENGTH):
            # responses with the same first t tokens share their t low bits
            start = torch.arange(2**LENGTH) % 2**t
            mass, worth = (torch.zeros(2**t, dtype=torch.float64).index_add(0, start, x) for x in (chance, weighted))
            columns.append((worth / mass)[code % 2**t])
        return torch.stack(columns, 1)


class Estimate:
    """Mean and standard error of a gradient over batches, compared with the exact gradient."""

    def __init__(self, gradients: list[Tensor], exact: Tensor) -> None:
        result = torch.stack(gradients).flatten(1)
        self.mean = result.mean(0)
        self.error = result.std(0) / math.sqrt(len(result))
        self.exact = exact.flatten()

    def deviations(self) -> Tensor:
        """Deviations in standard errors. Half of the components are redundant, as two tokens share one softmax."""
        return ((self.mean - self.exact) / self.error.clamp(min=1e-12))[::2][1:]

    def off(self) -> float:
        return float((self.mean - self.exact).norm() / self.exact.norm())

    def noise(self) -> float:
        """Expected value of `off` for an unbiased estimate."""
        return float(self.error.norm() / self.exact.norm())


def estimate(
    world: Environment, form: str, config: gk.SegmentConfig, *, critic: bool = False, behaviour: Tensor | None = None
) -> Estimate:
    rng = torch.Generator().manual_seed(7)
    sampled_from = world.logits if behaviour is None else behaviour
    every = world.all_responses()
    chances = world.logprobs(sampled_from, every).sum(1).exp()
    expected = world.expected_reward()
    gradients = []
    for _ in range(BATCHES):
        tokens = every[torch.multinomial(chances, BATCH, replacement=True, generator=rng)]
        rewards = torch.zeros(BATCH, LENGTH, dtype=torch.float64)
        rewards[:, -1] = world.reward(tokens)
        values = world.values(tokens) if critic else torch.full_like(rewards, expected)
        logits = world.logits.clone().requires_grad_()
        now = world.logprobs(logits, tokens)
        old = world.logprobs(sampled_from, tokens)
        results = gk.endpoint_segments(rewards, now, old, values=values, config=config)
        if form == "sparse":
            loss = gk.policy_loss(now, old, results.advantages, mask=results.endpoint_mask, config=PER_TOKEN)
        elif form == "joint":
            loss = gk.policy_loss(now, old, results.advantages, segments=results.segment_ids, config=JOINT)
        else:
            loss = gk.policy_loss(now, old, results.advantages, config=PER_TOKEN)
        (-loss.loss / BATCH).backward()
        assert logits.grad is not None
        gradients.append(logits.grad)
    result = Estimate(gradients, world.exact_gradient())
    print(
        f"\n{form:9s} critic={critic!s:5s} {'on' if behaviour is None else 'off'}-policy: off by {result.off():6.1%} "
        f"of the gradient's norm, noise {result.noise():.1%}"
    )
    return result


def assert_unbiased(result: Estimate) -> None:
    z = result.deviations()
    assert len(z) == 2 * LENGTH - 1
    # 5 sigma for the worst of 15, and their sum of squares as chi-squared: 15 +- 5.5
    assert float(z.abs().max()) < 5
    assert float(z.square().sum()) < 15 + 5 * math.sqrt(2 * 15)


def assert_biased(result: Estimate) -> None:
    assert float(result.deviations().abs().max()) > 10
    assert result.off() > 10 * result.noise()


@needs_cpu_kernels
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", ["bounded", "literal"])
def test_joint_ratio_gives_the_policy_gradient(seed: int, rule: str) -> None:
    world = Environment.made(seed)
    config = dataclasses.replace(SEGMENTS, rule=rule)
    assert_unbiased(estimate(world, "joint", config))


@needs_cpu_kernels
@pytest.mark.parametrize("seed", range(3))
def test_broadcast_gives_the_policy_gradient(seed: int) -> None:
    assert_unbiased(estimate(Environment.made(seed), "broadcast", dataclasses.replace(SEGMENTS, credit="broadcast")))


@needs_cpu_kernels
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", ["bounded", "literal"])
def test_the_sparse_form_with_a_ratio_per_token_does_not(seed: int, rule: str) -> None:
    config = dataclasses.replace(SEGMENTS, rule=rule)
    assert_biased(estimate(Environment.made(seed), "sparse", config))


@needs_cpu_kernels
@pytest.mark.parametrize("seed", range(3))
def test_off_policy_a_joint_ratio_of_the_whole_response_is_exact_and_one_per_token_is_not(seed: int) -> None:
    world = Environment.made(seed)
    rng = torch.Generator().manual_seed(seed + 100)
    behaviour = world.logits + 0.3 * torch.randn(world.logits.shape, generator=rng, dtype=torch.float64)
    whole = dataclasses.replace(SEGMENTS, group_max_size=LENGTH, group_variance_threshold=1e12, max_threshold=1e12)
    assert_unbiased(estimate(world, "joint", whole, behaviour=behaviour))
    shared = dataclasses.replace(whole, credit="broadcast")
    assert_biased(estimate(world, "broadcast", shared, behaviour=behaviour))


@needs_cpu_kernels
def test_with_a_critic_cuts_that_saw_the_outcome_leave_a_bias_which_single_tokens_do_not_have() -> None:
    world = Environment.made(0)
    cut = estimate(world, "joint", SEGMENTS, critic=True)
    assert_unbiased(estimate(world, "joint", dataclasses.replace(SEGMENTS, group_max_size=1), critic=True))
    assert cut.off() > 5 * cut.noise()
    assert estimate(world, "sparse", SEGMENTS, critic=True).off() > 5 * cut.off()
