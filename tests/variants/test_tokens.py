"""Masks, weights, log-probs and terms of tokens: OPSM, top entropies, Clip-Cov, KL-Cov, FIPO, ART's ratio levels.

Faults they are there for: a masked token that is chosen or summed, a choice that depends on padding or on a generator,
a threshold that is off by one token, an order that is turned around, an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import variants
from tests.harness import assert_close_to_rounding

F64 = torch.float64
SHAPE = (4, 60)
CLIP_COV: dict[str, Any] = {"ratio": 0.05, "bounds": (-0.1, 0.4), "clip_low": 0.1, "clip_high": 0.4}
KL_COV: dict[str, Any] = {"ratio": 0.05, "coef": 0.5}
Batch = dict[str, Tensor]


def draw(seed: int = 0, spread: float = 0.3) -> Batch:
    random = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(SHAPE, generator=random, dtype=F64)
    mask = torch.rand(SHAPE, generator=random) < 0.8
    mask[3] = False
    return {
        "logprobs": old + spread * torch.randn(SHAPE, generator=random, dtype=F64),
        "old_logprobs": old,
        "advantages": torch.randn(SHAPE, generator=random, dtype=F64),
        "mask": mask,
        "entropy": torch.rand(SHAPE, generator=random, dtype=F64),
    }


def inputs(batch: Batch) -> tuple[Tensor, ...]:
    return batch["logprobs"], batch["old_logprobs"], batch["advantages"]


def penalty(batch: Batch, lp: Tensor, **more: Any) -> Tensor:
    shares = gk.token_shares(batch["mask"], cu_seqlens=more.get("cu_seqlens"))
    return variants.kl_cov_penalty(lp, *inputs(batch)[1:], shares, mask=batch["mask"], **KL_COV | more)


def penalty_gradient(batch: Batch, **more: Any) -> Tensor:
    leaf = batch["logprobs"].clone().requires_grad_()
    return torch.autograd.grad(penalty(batch, leaf, **more), leaf)[0]


# What each function makes of a batch, with a value for each token
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "off_policy_mask": lambda b, **more: variants.off_policy_mask(*inputs(b), threshold=0.02, mask=b["mask"], **more),
    "high_entropy_mask": lambda b, **more: variants.high_entropy_mask(b["entropy"], b["mask"], 0.3, **more),
    "clip_cov_weights": lambda b, **more: variants.clip_cov_weights(*inputs(b), mask=b["mask"], **CLIP_COV, **more),
    "future_kl_weights": lambda b, **more: variants.future_kl_weights(*inputs(b), mask=b["mask"], **more),
    "average_logprobs": lambda b, **more: variants.average_logprobs(*inputs(b)[:2], mask=b["mask"], **more),
    "geometric_average_logprobs": lambda b, **more: variants.geometric_average_logprobs(
        *inputs(b)[:2], mask=b["mask"], **more
    ),
    "kl_cov_penalty": penalty_gradient,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_is_close_to_float64(name: str) -> None:
    """Whatever the state of a generator."""
    batch = {key: value.float() if value.dtype == F64 else value for key, value in draw().items()}
    wide = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    mask, gold = batch["mask"], FUNCTIONS[name](wide)[batch["mask"]]
    torch.manual_seed(7)
    got = FUNCTIONS[name](batch)[mask]
    assert_close_to_rounding(got, gold, lambda: FUNCTIONS[name](wide)[mask], F64)
    assert len(gold.unique()) > 1


@pytest.mark.parametrize("name", ["clip_cov_weights", "kl_cov_penalty", "high_entropy_mask"])
def test_a_choice_does_not_depend_on_padding(name: str) -> None:
    batch, mask = draw(), draw()["mask"]
    packed = {key: value[mask] for key, value in batch.items()}
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)])
    got, want = FUNCTIONS[name](packed, cu_seqlens=bounds), FUNCTIONS[name](batch)[mask]
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", ["off_policy_mask", "clip_cov_weights", "kl_cov_penalty", "future_kl_weights"])
def test_advantages_may_be_a_column_where_packed_rows_have_a_token_each(name: str) -> None:
    batch = {key: value[:3].flatten()[:120:40].clone() for key, value in draw().items()} | {
        "mask": torch.ones(3).bool()
    }
    bounds = torch.arange(4)
    got = FUNCTIONS[name](batch | {"advantages": batch["advantages"][:, None]}, cu_seqlens=bounds)
    assert torch.equal(got, FUNCTIONS[name](batch, cu_seqlens=bounds))


# Masks


def test_off_policy_rows_of_negative_advantage_are_dropped() -> None:
    batch = draw()
    batch["old_logprobs"][0, 3] = math.nan  # a token that the sampler could not score
    mask, threshold = batch["mask"], 0.02
    gap = torch.where(mask, (batch["old_logprobs"] - batch["logprobs"]).nan_to_num(), 0)
    is_far = gap.sum(1) / mask.sum(1).clamp(min=1) > threshold
    assert is_far.any() and not is_far[:3].all()
    kept = variants.off_policy_mask(*inputs(batch), threshold=threshold, mask=mask)
    assert torch.equal(kept | ~mask, ~(is_far[:, None] & (batch["advantages"] < 0)) | ~mask)
    by_row = variants.off_policy_mask(*inputs(batch)[:2], torch.tensor([-1.0, 1, -1, -1]), threshold=0.02, mask=mask)
    assert torch.equal(by_row | ~mask, ~(is_far & torch.tensor([True, False, True, True]))[:, None] | ~mask)


@pytest.mark.parametrize("quantile", [1.0, 0.5, 0.3, 0.01, 0.0])
def test_high_entropies_are_those_of_a_quantile(quantile: float) -> None:
    batch = draw()
    values = batch["entropy"][batch["mask"]]
    floor = values.quantile(1 - quantile)
    kept = variants.high_entropy_mask(batch["entropy"], batch["mask"], quantile)
    assert torch.equal(kept, batch["mask"] & (batch["entropy"] >= floor))
    elsewhere = variants.high_entropy_mask(batch["entropy"], batch["mask"], quantile, floor=floor[None] * 0 + 0.75)
    assert torch.equal(elsewhere, batch["mask"] & (batch["entropy"] >= 0.75))


# Covariances


def covariance(batch: Batch) -> Tensor:
    mask = batch["mask"]
    factors = [batch[name] - batch[name][mask].mean() for name in ("advantages", "logprobs")]
    return factors[0] * factors[1]


def test_kl_cov_takes_the_highest_covariances() -> None:
    batch = draw()
    mask = batch["mask"]
    count = int(mask.sum() * 0.05)
    assert count > 1
    chosen = mask & (covariance(batch) >= covariance(batch)[mask].topk(count).values[-1])
    d = batch["logprobs"] - batch["old_logprobs"]
    leaf = batch["logprobs"].clone().requires_grad_()
    term = penalty(batch, leaf)
    (gradient,) = torch.autograd.grad(term, leaf)
    torch.testing.assert_close(term.detach(), 0.5 * d.abs()[chosen].sum() / mask.sum())
    torch.testing.assert_close(gradient, torch.where(chosen, 0.5 * d.sign(), 0) / mask.sum())
    weights = torch.rand(SHAPE[0], dtype=F64)
    scaled = penalty(batch, leaf, is_weights=weights)
    torch.testing.assert_close(scaled.detach(), 0.5 * (d.abs() * weights[:, None])[chosen].sum() / mask.sum())


def test_kl_cov_takes_the_first_of_equal_covariances() -> None:
    batch = draw()
    batch["advantages"][:] = 1.0  # no token's differs from the mean: the covariances are all 0
    mask = batch["mask"]
    chosen = penalty_gradient(batch) != 0
    count = int(mask.sum() * 0.05)
    assert count > 1 and torch.equal(chosen, mask & (mask.flatten().cumsum(0).view(SHAPE) <= count))


def test_clip_cov_drops_tokens_within_the_bounds() -> None:
    batch = draw()
    low, high = CLIP_COV["bounds"]
    mask, cov, advantages = batch["mask"], covariance(batch), batch["advantages"]
    ratio = (batch["logprobs"] - batch["old_logprobs"]).exp()
    is_clipped = -advantages * ratio.clamp(0.9, 1.4) > -advantages * ratio
    eligible = mask & ~is_clipped & (cov > low) & (cov < high)
    drawn = FUNCTIONS["clip_cov_weights"](batch) == 0
    count = int(mask.sum() * 0.05)
    assert 1 < count < eligible.sum() and drawn.sum() == count and not (drawn & ~eligible).any()
    every = variants.clip_cov_weights(*inputs(batch), mask=mask, **CLIP_COV | {"ratio": 1.0})
    assert torch.equal(every == 0, eligible)


def test_clip_cov_drops_every_token_with_the_same_probability() -> None:
    """Over many batches, the number of times that a place is chosen is binomial: within five standard deviations."""
    tries, width = 400, 50
    counts = torch.zeros(width)
    random = torch.Generator().manual_seed(0)
    for _ in range(tries):
        logprobs = -torch.rand(1, width, generator=random)
        counts += variants.clip_cov_weights(logprobs, None, torch.ones(1), ratio=0.2, bounds=(-9.0, 9.0))[0] == 0
    assert counts.sum() == 10 * tries
    assert (counts - 0.2 * tries).abs().max() < 5 * (tries * 0.2 * 0.8) ** 0.5


def test_at_least_one_token() -> None:
    batch = draw()
    weights = variants.clip_cov_weights(*inputs(batch), ratio=1e-6, bounds=(-9.0, 9.0), mask=batch["mask"])
    assert (weights == 0).sum() == 1
    leaf = batch["logprobs"].clone().requires_grad_()
    assert (torch.autograd.grad(penalty(batch, leaf, ratio=1e-6), leaf)[0] != 0).sum() == 1


def test_advantages_of_rows() -> None:
    batch = draw()
    rows, mask = batch["advantages"][:, 0], batch["mask"]
    wide = rows[:, None].expand(SHAPE)
    for name in ("clip_cov_weights", "kl_cov_penalty", "future_kl_weights"):
        assert torch.equal(*(FUNCTIONS[name](batch | {"advantages": a})[mask] for a in (rows, wide)))


# FIPO

FUTURES: dict[str, dict[str, Any]] = {
    "published": {"half_life": 32.0},
    "both sides": {"half_life": 4.0, "clip": (0.8, 1.2), "safety": 1.05},
    "capped": {"half_life": 8.0, "cap": 1.1, "safety": 1.05},
    "unbounded": {"half_life": 0.5, "clip": None, "safety": None},
}


def weight_of(
    moved: list[float],
    t: int,
    is_negative: bool,
    half_life: float,
    clip: tuple[float, float] | None = (1.0, 1.2),
    cap: float | None = None,
    safety: float | None = 4.0,
) -> float:
    """ms-swift's form of arXiv 2603.19835, from the log ratios of a row, 0 at masked tokens."""
    total = sum(
        0.5 ** ((k - t) / half_life) * moved[k]
        for k in range(t, len(moved))
        if cap is None or math.exp(moved[k]) <= cap
    )
    weight = math.exp(total)
    weight = weight if clip is None else min(max(weight, clip[0]), clip[1])
    is_risky = safety is not None and math.exp(moved[t]) > safety and is_negative
    return min(max(weight, 0.8), 1.0) if is_risky else weight


@pytest.mark.parametrize("name", FUTURES)
def test_future_kl_weights_are_the_published_ones(name: str) -> None:
    batch, settings = draw(spread=0.08), FUTURES[name]
    weights = variants.future_kl_weights(*inputs(batch), mask=batch["mask"], **settings)
    moved = torch.where(batch["mask"], batch["logprobs"] - batch["old_logprobs"], 0)
    negative = batch["advantages"] < 0
    want = [
        [weight_of(row, t, bool(negative[i, t]), **settings) for t in range(60)] for i, row in enumerate(moved.tolist())
    ]
    torch.testing.assert_close(weights[batch["mask"]], torch.tensor(want, dtype=F64)[batch["mask"]])
    assert len(weights[batch["mask"]].unique()) > 9  # not clipped everywhere
    on_policy = variants.future_kl_weights(batch["logprobs"], None, batch["advantages"], **settings)
    assert torch.equal(on_policy, torch.ones_like(on_policy))


# ART's ratio levels


@pytest.mark.parametrize("level", ["average", "geometric_average"])
@pytest.mark.parametrize("loss", ["clip", "cispo"])
def test_ratio_levels_of_art(loss: str, level: str) -> None:
    batch = draw(spread=0.4)
    old, advantages, mask = batch["old_logprobs"], batch["advantages"], batch["mask"]
    leaf = batch["logprobs"].clone().requires_grad_()
    d = leaf - old
    of_row = ((d * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
    ratio = (d.exp() + of_row) / 2 if level == "average" else d.exp().sqrt() * of_row.sqrt()
    if loss == "clip":
        terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
        clipped = torch.where(advantages < 0, ratio < 0.8, (ratio > 1.3) & (advantages > 0)) & mask
    else:  # a score function, whose log-prob is the token's own
        terms = -ratio.detach().clamp(0.8, 1.3) * advantages * leaf
        clipped = ((ratio < 0.8) | (ratio > 1.3)) & mask
    want = terms[mask].mean()
    (wanted,) = torch.autograd.grad(want, leaf)
    mixed = getattr(variants, f"{level}_logprobs")(leaf, old, mask=mask)
    if loss == "clip":
        result = gk.policy_loss(mixed, old, advantages, mask=mask, config=gk.LossConfig(clip_high=0.3))
        assert result.metrics["clipped"] == clipped.sum()
    else:
        weights = (mixed.detach() - old).exp().clamp(0.8, 1.3)
        config = gk.LossConfig(loss="reinforce")
        result = gk.policy_loss(leaf, old, advantages, mask=mask, is_weights=weights, config=config)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    torch.testing.assert_close(result.loss.detach(), want.detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
    assert 0 < clipped.sum() < mask.sum()


def test_mean_of_ratios_far_apart_does_not_overflow() -> None:
    """exp of a token's log ratio is infinite in float32, that of its row is not; and the other way around."""
    now = torch.zeros(2, 2, requires_grad=True)
    old = torch.tensor([[-120.0, 110.0], [120.0, -110.0]])
    mixed = variants.average_logprobs(now, old)
    loss = gk.policy_loss(mixed, old, torch.tensor([1.0, -1.0])).loss
    assert loss.isfinite() and torch.autograd.grad(loss, now)[0].isfinite().all()
