"""The bias of a softmax over the whole vocabulary after filtered sampling, where the policy gradient is known exactly.

The environments are those of tests/ops/endpoint_segments/test_gradient.py: eight binary tokens, and a reward for each
of the 256 responses. Sampling keeps the more probable token alone where its probability reaches top_p. All responses
are enumerated, so that nothing is drawn and no error is noise. `pytest -s` prints the table of the document.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import needs_cpu_kernels
from tests.ops.endpoint_segments.test_gradient import LENGTH, Environment

pytestmark = needs_cpu_kernels
CONFIG = gk.LossConfig(aggregation="token-sum", ratio="segment", clip_low=None, clip_high=None)
SEEDS = (0, 1, 2)


def before(tokens: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(tokens[:, :1]), tokens[:, :-1]), 1)


def logits_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logits [responses, LENGTH, 2] of the environment's policy."""
    return logits[torch.arange(LENGTH), before(tokens)]


class Filtered:
    """Responses that can be sampled, with their probability, under the policy that samples."""

    def __init__(self, env: Environment, top_p: float) -> None:
        tokens = env.all_responses()
        p = logits_of(env.logits, tokens).softmax(-1)
        # the most probable one, and others while those before have less mass
        kept = (p == p.amax(-1, keepdim=True)) | (p.amax(-1, keepdim=True) < top_p)
        is_possible = kept.gather(-1, tokens[..., None])[..., 0].all(1)
        self.env, self.tokens, self.kept = env, tokens[is_possible], kept[is_possible]
        self.sampler = self.logprobs_over_support(env.logits)
        self.rewards = env.reward(self.tokens)

    @property
    def support(self) -> tuple[Tensor, Tensor]:
        rows = self.kept.flatten(0, 1)
        return rows.nonzero()[:, 1], torch.cat((torch.zeros(1, dtype=torch.int64), rows.sum(1).cumsum(0)))

    def logprobs_over_support(self, logits: Tensor) -> Tensor:
        """The definition, without the library."""
        masked = logits_of(logits, self.tokens).masked_fill(~self.kept, -torch.inf)
        return masked.log_softmax(-1).gather(-1, self.tokens[..., None])[..., 0]

    def exact_gradient(self, logits: Tensor) -> Tensor:
        """Gradient of the expected reward of responses that this support lets the policy sample."""
        leaf = logits.clone().requires_grad_()
        reward = (self.logprobs_over_support(leaf).sum(1).exp() * self.rewards).sum()
        return torch.autograd.grad(reward, leaf)[0]

    def logprobs(self, logits: Tensor, over_support: bool) -> Tensor:
        """The head's hidden states are 1 at the position and the token before it, its weight the logits."""
        hidden = torch.eye(2 * LENGTH).double()[2 * torch.arange(LENGTH) + before(self.tokens)]
        support = self.support if over_support else None
        return gk.linear_logprobs(hidden, logits.reshape(-1, 2).T, self.tokens, support=support).logprobs

    def gradient(self, logits: Tensor, over_support: bool, old: Tensor | None = None) -> Tensor:
        """The expected gradient of the loss: every response weighted with its probability under the sampler."""
        leaf = logits.clone().requires_grad_()
        logprobs = self.logprobs(leaf, over_support)
        probability = self.sampler.sum(1).exp()
        advantages = self.rewards - (probability * self.rewards).sum()
        weights = probability[:, None].expand_as(logprobs)
        old = self.sampler if old is None else old
        # one segment: the product of all ratios, so that the estimate is unbiased off-policy, too
        whole = torch.zeros_like(self.tokens, dtype=torch.int32)
        config = {"config": CONFIG, "weights": weights, "segments": whole}
        return -torch.autograd.grad(gk.policy_loss(logprobs, old, advantages, **config).loss, leaf)[0]

    def error(self, logits: Tensor, over_support: bool, old: Tensor | None = None) -> float:
        exact = self.exact_gradient(logits)
        return float((self.gradient(logits, over_support, old) - exact).norm() / exact.norm())


@pytest.mark.parametrize("top_p", [0.9, 0.8, 0.7, 1.0])
def test_the_gradient_over_the_support_is_exact(top_p: float) -> None:
    """And that of the whole softmax where nothing is filtered; off-policy after an update of the logits."""
    errors: dict[str, list[float]] = {}
    for seed in SEEDS:
        env = Environment.made(seed)
        filtered = Filtered(env, top_p)
        step = torch.randn(env.logits.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        later = env.logits + 0.3 * step
        recomputed = filtered.logprobs(env.logits, over_support=False)
        for name, error in {
            "support": filtered.error(env.logits, True),
            "support, off-policy": filtered.error(later, True),
            "whole softmax, ratio to the sampler": filtered.error(env.logits, False),
            "whole softmax, ratio to itself": filtered.error(env.logits, False, recomputed),
            "whole softmax, ratio to itself, off-policy": filtered.error(later, False, recomputed),
        }.items():
            errors.setdefault(name, []).append(error)
    for name, values in errors.items():
        print(f"top_p {top_p}: {name}: {', '.join(f'{100 * value:.3g} %' for value in values)}")
    assert max(errors["support"] + errors["support, off-policy"]) < 1e-12  # sums of 256 terms in float64
    if top_p == 1.0:
        assert max(errors["whole softmax, ratio to the sampler"]) < 1e-12
    else:
        assert min(errors["whole softmax, ratio to the sampler"]) > 0.01
        assert min(errors["whole softmax, ratio to itself"]) > 0.004
