"""Regression tests for mistakes found in other implementations of GROUP-PPO."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.endpoint_segments.batches import (
    F64,
    NORMS,
    RULES,
    Batch,
    assert_same,
    batch_of,
    config_of,
    lengths_of,
    on_backends,
    plan,
    width_for,
)


def with_outcome(batch: Batch, outcome: float) -> Batch:
    """The batch with a single reward per row, at its last token."""
    places = torch.arange(batch.mask.shape[1])
    last = (batch.mask * (places + 1)).amax(1) - 1
    return dataclasses.replace(batch, rewards=torch.where(places == last[:, None], outcome, 0.0).to(F64))


# An endpoint's advantage was the sum of rewards up to it minus its value, so a terminal reward reached only the last
# endpoint.


@pytest.mark.parametrize("discounts", [(1.0, 1.0), (0.99, 0.95)], ids=str)
@on_backends
def test_every_endpoint_learns_of_the_outcome(backend: str, discounts: tuple[float, float]) -> None:
    gamma, lam = discounts
    batch = batch_of(0, 4, width_for(backend, 50), gaps=0.05, empty=0.0)
    by_size = config_of(group_max_size=5, group_variance_threshold=1e9, gamma=gamma, lam=lam)
    lost, won = (with_outcome(batch, outcome).run(by_size, backend) for outcome in (0.0, 1.0))
    assert torch.equal(lost.segment_ids, won.segment_ids) and (won.num_segments > 2).all()
    for row in range(4):
        ends = won.endpoint_mask[row]
        starts = (won.segment_ids[row][batch.mask[row]].diff(prepend=won.segment_ids.new_tensor([-1])) > 0).nonzero()
        behind = (batch.mask[row].sum() - 1 - starts[:, 0].cpu()).double()
        segments = torch.arange(len(behind)).flip(0).double()
        gained = (won.advantages - lost.advantages)[row][ends].cpu()
        torch.testing.assert_close(gained, gamma**behind * lam**segments, rtol=1e-9, atol=1e-12)


@on_backends
def test_critic_learns_the_outcome_at_every_token(backend: str) -> None:
    """Elsewhere, the critic's target was 0 at every token but endpoints."""
    batch = with_outcome(batch_of(0, 4, width_for(backend, 50), gaps=0.05), 1.0)
    got = batch.run(config_of(norm="batch"), backend)
    torch.testing.assert_close(got.returns.cpu(), batch.mask.double(), rtol=0, atol=1e-12)


# The segments of all rows of a prompt were put into one list and every row read from its start: rows received the
# advantages of their siblings.


@pytest.mark.parametrize("credit", ["endpoint", "broadcast"])
@on_backends
def test_siblings_keep_their_own_advantages(backend: str, credit: str) -> None:
    rewards = torch.tensor([[0.0, 0, 0, 4], [0, 0, 0, -2], [0, 0, 0, 1]], dtype=F64)
    batch = dataclasses.replace(plan(torch.zeros(3, 4)), rewards=rewards)
    config = config_of(credit=credit, group_max_size=2, group_variance_threshold=1e9)
    got = batch.run(config, backend)
    wanted = [[worth if credit == "broadcast" or t % 2 else 0.0 for t in range(4)] for worth in (4.0, -2.0, 1.0)]
    assert got.advantages.tolist() == wanted


@pytest.mark.parametrize("rule", RULES)
@on_backends
def test_nothing_of_a_sibling_reaches_a_row(backend: str, rule: str) -> None:
    """Flips the signs of the siblings' rewards and values, to which the scale is blind."""
    batch = batch_of(3, 4, width_for(backend, 40), gaps=0.05, empty=0.0, prompts=1)
    assert batch.values is not None
    config = config_of(rule=rule)
    first = batch.run(config, backend)
    for row in range(4):
        sign = torch.where(torch.arange(4) == row, 1.0, -1.0).to(F64)[:, None]
        others = dataclasses.replace(batch, rewards=batch.rewards * sign, values=batch.values * sign)
        got = others.run(config, backend)
        for field in ("advantages", "returns", "endpoint_mask", "segment_ids", "num_segments"):
            assert torch.equal(getattr(got, field)[row], getattr(first, field)[row])
        assert not torch.equal(got.advantages, first.advantages)


# No key of the config was ever read: a threshold of 0.1 and a size of 2 gave the same result as 10 and 99.


@on_backends
def test_threshold_and_size_of_the_config_are_read(backend: str) -> None:
    batch = batch_of(1, 4, width_for(backend, 64), rewards="terminal", empty=0.0)
    tokens = int(batch.mask.sum())

    def share(**params: Any) -> float:
        config = dataclasses.replace(gk.SegmentConfig(**params), norm="none")
        return float(batch.run(config, backend).num_segments.sum()) / tokens

    small = {"group_variance_threshold": 0.1, "group_max_size": 2}
    large = {"group_variance_threshold": 10.0, "group_max_size": 99}
    assert share(**small) > 0.9 and share(**large) < 0.35
    assert share(**large | {"group_max_size": 2}) >= 0.5
    assert share(**large) < share(**large | {"group_variance_threshold": 1.0}) < 1.0
    assert share(**large | {"max_threshold": 20.0}) == share(**large)


@on_backends
def test_share_of_endpoints_is_that_of_the_size_at_least(backend: str) -> None:
    """Elsewhere, the 16-fold reduction was computed by a formula; here endpoints are counted."""
    batch = plan([[1.0] * 64] * 2)
    got = batch.run(config_of(group_variance_threshold=1e9), backend)
    assert got.num_segments.tolist() == [4, 4] and got.endpoint_mask.sum() == 8


# Tokens were weighted by the squared difference of two log-probs: where these agreed, every row was one segment.


@pytest.mark.parametrize("rule", RULES)
@on_backends
def test_equal_log_probs_are_cut_like_nearly_equal_ones(backend: str, rule: str) -> None:
    batch = batch_of(2, 4, width_for(backend, 128), on_policy=True, empty=0.0)
    noise = torch.randn(batch.mask.shape, dtype=F64)
    counts = {}
    for size in (0.0, 1e-6, 1e-4, 1e-3):
        noisy = dataclasses.replace(batch, old_logprobs=batch.logprobs + size * noise)
        counts[size] = int(noisy.run(config_of(rule=rule), backend).num_segments.sum())
    tokens = int(batch.mask.sum())
    assert 0.1 * tokens < counts[0.0] < 0.9 * tokens
    assert counts[1e-6] == counts[0.0] and all(abs(n - counts[0.0]) <= 0.05 * tokens for n in counts.values())


# The step counter and the running product were never reset, so earlier segments affected the cuts of later ones.


@on_backends
def test_later_segments_are_as_long_as_earlier_ones(backend: str) -> None:
    periods = width_for(backend, 180) // 6
    signs = torch.tensor([1.0, 1, 1, 1, -1, -1]).repeat(periods)
    weights = torch.tensor([0.2, 0.9, 0.4, 0.3, 0.5, 0.8]).repeat(periods)
    batch = plan(signs, weights=weights)
    got = batch.run(config_of(lam=0.0), backend)
    assert lengths_of(got.segment_ids[0]) == [4, 2] * periods
    uneven = plan(torch.tensor([1.0, 3, 3, 3, 3, 3]).repeat(periods))
    literal = config_of(rule="literal", lam=0.0, group_variance_threshold=0.4, group_max_size=6)
    lengths = lengths_of(uneven.run(literal, backend).segment_ids[0])
    assert lengths[:2] == [4, 3] and len(set(lengths)) < 4
    constant = plan([1.0] * (4 * periods))
    literal = dataclasses.replace(literal, group_variance_threshold=0.3)
    assert lengths_of(constant.run(literal, backend).segment_ids[0]) == [4] * periods


@on_backends
def test_a_row_begins_anew_after_every_segment(backend: str) -> None:
    """Tokens after the end of a segment are cut like a row of their own at the same scale."""
    for seed in range(4):
        for rule in RULES:
            batch = batch_of(seed, 1, width_for(backend, 60), gaps=0.0, empty=0.0)
            config = config_of(rule=rule, lam=0.0, gamma=0.0)
            ids = batch.run(config, backend).segment_ids[0].cpu()
            for start in (ids.diff() > 0).nonzero()[:, 0].tolist()[:4]:
                # the same tokens, but those before the cut are in a separate row
                where = torch.arange(len(ids)) > start
                split = batch.map(lambda x: x.expand(2, -1))
                split = dataclasses.replace(
                    split, mask=torch.stack((~where, where)) & split.mask, groups=torch.tensor([0, 0])
                )
                rest = split.run(config, backend).segment_ids[1].cpu()
                counted = rest >= 0
                assert torch.equal(rest[counted], ids[counted] - ids[counted][0])


# Sums of rewards included masked positions.


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "prompts"])
@on_backends
def test_reward_on_a_masked_token_is_ignored(backend: str, with_values: bool, norm: str) -> None:
    batch = batch_of(4, 5, width_for(backend, 40), values=with_values, gaps=0.3, rewards="terminal")
    zeroed = dataclasses.replace(batch, rewards=torch.where(batch.mask, batch.rewards, 0))
    loud = dataclasses.replace(batch, rewards=torch.where(batch.mask, batch.rewards, 1e3))
    assert not torch.equal(zeroed.rewards, loud.rewards)
    assert_same(loud.run(config_of(norm=norm), backend), zeroed.run(config_of(norm=norm), backend))


# Endpoints were recognised by nonzero advantages, and a row without any made the loss NaN.


@on_backends
def test_an_endpoint_without_advantage_is_one(backend: str) -> None:
    batch = plan([[0.0] * 5, [1.0] * 5])
    got = batch.run(config_of(group_max_size=5), backend)
    assert got.endpoint_mask.tolist() == [[False] * 4 + [True]] * 2 and got.advantages[0].tolist() == [0.0] * 5


@on_backends
def test_rows_without_tokens_leave_the_loss_finite(backend: str) -> None:
    batch = batch_of(5, 4, width_for(backend, 30), empty=0.0)
    mask = batch.mask.clone()
    mask[1] = False
    batch = dataclasses.replace(batch, mask=mask).with_garbage()
    got = batch.run(config_of(), backend)
    assert got.num_segments[1] == 0 and not got.endpoint_mask[1].any()
    for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        logprobs: Tensor = batch.logprobs.to(device_of(backend)).requires_grad_()
        old = batch.old_logprobs.to(logprobs.device)
        config = gk.LossConfig(aggregation=aggregation)
        loss = gk.policy_loss(logprobs, old, got.advantages, mask=got.endpoint_mask, config=config).loss
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert loss.isfinite() and gradient.isfinite().all()
        assert not gradient[~got.endpoint_mask].any() and gradient.any()


# The endpoint mask was not sliced with the batch: micro-batches had the mask of the first row, or none.


@on_backends
def test_results_are_split_like_the_batch(backend: str) -> None:
    batch = batch_of(6, 6, width_for(backend, 30), empty=0.0)
    got = batch.run(config_of(), backend)
    device = got.advantages.device
    config = gk.LossConfig(ratio="segment", aggregation="token-mean")
    now, old = batch.logprobs.to(device) + 0.1, batch.old_logprobs.to(device)
    options = {"config": config, "normalizer": int(got.num_segments.sum())}
    whole = gk.policy_loss(now, old, got.advantages, segments=got.segment_ids, **options).loss  # type: ignore[arg-type]
    parts = [
        gk.policy_loss(now[i], old[i], got.advantages[i], segments=got.segment_ids[i], **options).loss  # type: ignore[arg-type]
        for i in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-10, atol=1e-12)
    assert whole != 0
