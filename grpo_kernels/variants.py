"""Published variants of the policy loss, as masks, weights, log-probs and terms to use with policy_loss.

Plain torch on any device. Tokens are padded [B, T], or packed [M] with `cu_seqlens`, as in policy_loss, and so are the
results; masked slots may hold NaN. `old_logprobs=None` means on-policy, the detached log-probs. Nothing waits for the
device. docs/variants.md shows each one in a loss, with the test that compares it with its source.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.groups import RowGroups, TokenRows
from grpo_kernels.ops.policy_loss.arguments import Layout
from grpo_kernels.ops.token_advantages import token_advantages
from grpo_kernels.ops.token_advantages.config import TokenAdvantageConfig

__all__ = [
    "average_logprobs",
    "clip_cov_weights",
    "flowrl_loss",
    "future_kl_weights",
    "geometric_average_logprobs",
    "gvpo_loss",
    "high_entropy_mask",
    "kl_cov_penalty",
    "off_policy_mask",
    "real_loss",
]


class _Batch:
    """Checked tokens, flat, and the rows that they form."""

    def __init__(
        self, function: str, like: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, name: str = "logprobs"
    ) -> None:
        self.op = f"variants.{function}"
        self.layout = Layout.of(self.op, like, cu_seqlens, name)
        bounds = None if cu_seqlens is None else cu_seqlens.long().contiguous()
        self.rows = TokenRows(self.op, like.shape, bounds, like.device)
        flags = self.layout.flags("mask", mask)
        everywhere = torch.ones(like.numel(), dtype=torch.bool, device=like.device)
        if bounds is not None:
            checks.no_token_left_out(self.op, bounds, like.numel(), flags)
        self.valid = self.rows.within(everywhere if flags is None else flags.reshape(-1))
        self.tokens = self.rows.sum(self.valid.double())  # of each row

    def leaf(self, name: str, values: Tensor) -> Tensor:
        """Log-probs that keep their gradient, 0 where masked."""
        checked = self.layout.floats(name, checks.tensor(self.op, name, values, checks.FLOATS), detach=False)
        result = torch.where(self.valid, cast(Tensor, checked).reshape(-1), 0)
        if name.endswith("logprobs"):
            checks.log_probs(self.op, name, result, self.valid)
        return result

    def of_tokens(self, name: str, values: Tensor) -> Tensor:
        """Numbers without a gradient, 0 where masked."""
        return self.leaf(name, values).detach()

    def old(self, name: str, values: Tensor | None, lp: Tensor) -> Tensor:
        """Old log-probs, or `lp`; those of tokens that the old policy could not sample far below, but finite."""
        values = lp.detach() if values is None else self.of_tokens(name, values)
        return values.clamp(min=-math.sqrt(torch.finfo(lp.dtype).max))

    def of_rows_or_tokens(self, name: str, values: Tensor) -> Tensor:
        checked = self.layout.per_row_or_token(name, values)
        spread = checked.reshape(-1) if checked.shape == self.layout.shape else self.rows.spread(checked.reshape(-1))
        return torch.where(self.valid, spread, 0)

    def of_rows(self, name: str, values: Tensor, detach: bool = True) -> Tensor:
        """One number for each row, in float64; 0 for rows without tokens."""
        checks.tensor(self.op, name, values, checks.FLOATS)
        checks.same_device(self.op, name, values, self.layout.device)
        count = self.rows.count
        if tuple(values.shape) not in ((count,), (count, 1)):
            raise ValueError(f"{self.op}: {name} must have shape {[count]}, got {list(values.shape)}")
        values = values.detach() if detach else values
        return torch.where(self.tokens > 0, values.reshape(-1).double(), 0)

    def total(self, values: Tensor) -> Tensor:
        """The sum over the tokens of each row, in float64."""
        return self.rows.sum(torch.where(self.valid, values.double(), 0))

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.tokens.clamp(min=1)

    def shaped(self, values: Tensor) -> Tensor:
        return values.view(self.layout.shape)

    def count(self, given: float | Tensor | None, counted: Tensor) -> float | Tensor:
        """The divisor of a mean."""
        if given is None:
            return counted.sum().double().clamp(min=1)
        if isinstance(given, Tensor):
            if given.numel() != 1:
                raise ValueError(f"{self.op}: count must have one element, got shape {list(given.shape)}")
            checks.same_device(self.op, "count", given, self.layout.device)
            given = given.detach().double().reshape(())
            return torch.where(given > 0, given, 1.0)
        checks.finite(self.op, "count", given, 0.0, open_end=True)
        return given

    def pair(self, name: str, values: tuple[float, float], minimum: float) -> tuple[float, float]:
        """Two numbers in ascending order, of which the second may be infinite."""
        are_two = isinstance(values, tuple | list) and len(values) == 2
        if not (are_two and all(type(n) in (int, float) for n in values) and minimum <= values[0] <= values[1]):
            raise ValueError(f"{self.op}: {name} must be (low, high) with {minimum:g} <= low <= high, got {values!r}")
        return values

    def clip(self, clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
        """Bounds of a ratio, as LossConfig has them."""
        for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
            if value is not None:
                checks.finite(self.op, name, value, 0.0)
        low, high = (math.inf if value is None else value for value in (clip_low, clip_high))
        return 1 - low, 1 + high


# Which tokens have a policy term


def off_policy_mask(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    advantages: Tensor,
    *,
    threshold: float,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes the `policy_mask` that drops rows of negative advantage far from their sampler (DeepSeek-V3.2, OPSM).

    Args:
        logprobs: log-probs of the policy
        sampling_logprobs: log-probs of the sampler, or the old ones; NaN where the sampler could not score the token
        advantages: one per row, [B] or [B, 1], or one per token; only tokens of negative advantage are dropped
        threshold: a row is dropped if its mean of sampling_logprobs - logprobs exceeds it
        mask, cu_seqlens: as in policy_loss
    """
    batch = _Batch("off_policy_mask", logprobs, mask, cu_seqlens)
    checks.finite(batch.op, "threshold", threshold, 0.0)
    lp = batch.leaf("logprobs", logprobs).detach()
    gap = batch.of_tokens("sampling_logprobs", sampling_logprobs) - lp
    distance = batch.mean(torch.where(gap.isnan(), 0, gap))
    negative = batch.of_rows_or_tokens("advantages", advantages) < 0
    return batch.shaped(~(negative & batch.rows.spread(~(distance <= threshold))))


def high_entropy_mask(
    entropy: Tensor,
    mask: Tensor | None,
    quantile: float,
    *,
    floor: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes the `policy_mask` of the tokens of highest entropy (arXiv 2506.01939).

    Args:
        entropy: entropy of each token
        mask, cu_seqlens: as in policy_loss
        quantile: share of the tokens to keep; 0 keeps those of the highest entropy
        floor: scalar, the least entropy to keep, for example found over all ranks; None means to find it here, as
            torch.quantile does
    """
    batch = _Batch("high_entropy_mask", entropy, mask, cu_seqlens, "entropy")
    checks.finite(batch.op, "quantile", quantile, 0.0)
    if quantile > 1:
        raise ValueError(f"{batch.op}: quantile must be at most 1, got {quantile!r}")
    values = batch.leaf("entropy", entropy).detach()
    least = batch.layout.scalar("floor", floor)
    if least is None:
        least = _quantile(values, batch.valid, 1 - quantile)
    return batch.shaped(batch.valid & (values >= least))


def _quantile(values: Tensor, valid: Tensor, share: float) -> Tensor:
    """torch.quantile over the valid values, for any number of them."""
    ordered = torch.where(valid, values, math.inf).sort().values
    if ordered.numel() == 0:
        return values.new_zeros(())
    # the rank in float64, then interpolation between its two neighbours
    rank = (valid.sum() - 1).clamp(min=0) * torch.full((), share, dtype=torch.float64, device=values.device)
    # an index of no dimensions would be a number that torch.compile cannot know
    below, above = ordered.index_select(0, torch.stack((rank.floor(), rank.ceil())).long()).unbind()
    return torch.lerp(below, above, (rank - rank.floor()).to(values.dtype))


# The tokens of highest covariance of advantage and log-prob (arXiv 2505.22617)


def clip_cov_weights(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    ratio: float = 0.0002,
    bounds: tuple[float, float] = (1.0, 5.0),
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes Clip-Cov's `is_weights`: 0 for tokens drawn among those of large covariance, 1 for the others.

    The draw is by a hash of a token's place and log-prob, so that a repetition draws the same tokens.

    Args:
        logprobs, old_logprobs, advantages, mask, cu_seqlens: as in policy_loss
        ratio: share of the tokens to draw; at least one
        bounds: covariances among which tokens are drawn
        clip_low, clip_high: those of the loss; tokens that it clips are not drawn
    """
    batch = _Batch("clip_cov_weights", logprobs, mask, cu_seqlens)
    least, most = batch.pair("bounds", bounds, -math.inf)
    lp = batch.leaf("logprobs", logprobs).detach()
    advantage = batch.of_rows_or_tokens("advantages", advantages)
    covariance = _covariance(batch, lp, advantage)
    moved = (lp - batch.old("old_logprobs", old_logprobs, lp)).exp()
    is_clipped = -advantage * moved.clamp(*batch.clip(clip_low, clip_high)) > -advantage * moved
    eligible = batch.valid & (covariance > least) & (covariance < most) & ~is_clipped
    keys = torch.where(eligible, _hash(lp, batch.valid), 2**32)
    drawn = _first(batch, keys, ratio) & eligible
    return batch.shaped(torch.where(drawn, 0, torch.ones_like(lp)))


def kl_cov_penalty(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    shares: Tensor,
    *,
    ratio: float = 0.0002,
    coef: float = 1.0,
    is_weights: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes KL-Cov's term: the absolute log ratios of the tokens of highest covariance, to add to the loss.

    The loss itself is unclipped: LossConfig(clip_low=None, clip_high=None).

    Args:
        logprobs, old_logprobs, advantages, is_weights, mask, cu_seqlens: as in policy_loss; logprobs differentiable
        shares: the weight of each token in the mean of the loss, as token_shares gives it
        ratio: share of the tokens to penalise; at least one
        coef: factor of the term
    """
    batch = _Batch("kl_cov_penalty", logprobs, mask, cu_seqlens)
    lp = batch.leaf("logprobs", logprobs)
    covariance = _covariance(batch, lp.detach(), batch.of_rows_or_tokens("advantages", advantages))
    chosen = _first(batch, torch.where(batch.valid, -covariance, math.inf), ratio) & batch.valid
    checks.finite(batch.op, "coef", coef)
    factor = coef * batch.of_tokens("shares", shares)
    if is_weights is not None:
        factor = factor * batch.of_rows_or_tokens("is_weights", is_weights)
    moved = (lp - batch.old("old_logprobs", old_logprobs, lp)).abs()
    return (torch.where(chosen, factor, 0) * moved).sum()


def _covariance(batch: _Batch, lp: Tensor, advantage: Tensor) -> Tensor:
    """Each token's part of the covariance, in float64, so that the order of the sums matters to no choice."""

    def centered(values: Tensor) -> Tensor:
        values = torch.where(batch.valid, values.double(), 0)
        return values - values.sum() / batch.valid.sum().clamp(min=1)

    return centered(advantage) * centered(lp)


def _first(batch: _Batch, keys: Tensor, ratio: float) -> Tensor:
    """The tokens of smallest key: `ratio` of the valid ones, and at least one."""
    checks.finite(batch.op, "ratio", ratio, 0.0, open_end=True)
    if ratio > 1:
        raise ValueError(f"{batch.op}: ratio must be at most 1, got {ratio!r}")
    count = (batch.valid.sum().double() * ratio).long().clamp(min=1)
    most = min(len(keys), max(math.ceil(len(keys) * ratio), 1))  # no host knows `count`
    if most == 0:
        return batch.valid
    last = keys.topk(most, largest=False).values.gather(0, (count - 1).clamp(max=most - 1)[None])
    below, tied = keys < last, keys == last
    return below | (tied & (tied.cumsum(0) <= count - below.sum()))


def _hash(lp: Tensor, valid: Tensor) -> Tensor:
    """32 bits of each token's place among the valid ones and its log-prob, by a multiplicative hash in two rounds."""
    bits = lp.float().contiguous().view(torch.int32).long()
    value = (bits ^ (valid.cumsum(0) * 0x9E3779B1)) & 0xFFFFFFFF
    for factor in (0x45D9F3B, 0x119DE1F3):  # below 2^31, so that no product overflows 63 bits
        value = ((value ^ (value >> 16)) * factor) & 0xFFFFFFFF
    return value ^ (value >> 16)


# Weights by what follows a token


def future_kl_weights(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    *,
    half_life: float = 32.0,
    clip: tuple[float, float] | None = (1.0, 1.2),
    cap: float | None = None,
    safety: float | None = 4.0,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes FIPO's `is_weights` (arXiv 2603.19835): exp of the discounted sum of the log ratios from a token on.

    Tokens that take no part add nothing to the sum, but count as steps of the discount.

    Args:
        logprobs, old_logprobs, advantages, mask, cu_seqlens: as in policy_loss
        half_life: number of tokens after which half of a log ratio is left
        clip: bounds of the weight; None means none
        cap: tokens with a larger ratio are left out of the sum; None means none
        safety: tokens of negative advantage with a larger ratio have a weight in [0.8, 1]; None means none
    """
    batch = _Batch("future_kl_weights", logprobs, mask, cu_seqlens)
    for name, value in (("half_life", half_life), ("cap", cap), ("safety", safety)):
        if value is not None or name == "half_life":
            checks.finite(batch.op, name, value, 0.0, open_end=True)
    lp = batch.leaf("logprobs", logprobs).detach()
    moved = lp - batch.old("old_logprobs", old_logprobs, lp)
    summed = moved if cap is None else torch.where(moved > math.log(cap), 0, moved)
    discounted = TokenAdvantageConfig("reinforce", gamma=2 ** (-1 / half_life))
    everywhere = batch.shaped(batch.rows.within(torch.ones_like(lp, dtype=torch.bool)))
    future = token_advantages(batch.shaped(summed), mask=everywhere, cu_seqlens=cu_seqlens, config=discounted).returns
    weights = future.reshape(-1).exp()
    if clip is not None:
        weights = weights.clamp(*batch.pair("clip", clip, 0.0))
    if safety is not None:
        is_risky = (moved > math.log(safety)) & (batch.of_rows_or_tokens("advantages", advantages) < 0)
        weights = torch.where(is_risky, weights.clamp(0.8, 1.0), weights)
    return batch.shaped(weights)


# Ratios between those of a token and of its row (OpenPipe ART)


def average_logprobs(
    logprobs: Tensor, old_logprobs: Tensor, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Computes log-probs whose ratios are the mean of each token's and its row's; for a loss without a KL."""
    batch = _Batch("average_logprobs", logprobs, mask, cu_seqlens)
    old, moved, of_row = _log_ratios(batch, logprobs, old_logprobs)
    return batch.shaped(old + torch.logaddexp(moved, of_row) - math.log(2))


def geometric_average_logprobs(
    logprobs: Tensor, old_logprobs: Tensor, *, mask: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Computes log-probs whose ratios are the geometric mean of each token's and its row's; likewise."""
    batch = _Batch("geometric_average_logprobs", logprobs, mask, cu_seqlens)
    old, moved, of_row = _log_ratios(batch, logprobs, old_logprobs)
    return batch.shaped(old + (moved + of_row) / 2)


def _log_ratios(batch: _Batch, logprobs: Tensor, old_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Old log-probs, the log ratio of each token, and the mean of its row's."""
    lp = batch.leaf("logprobs", logprobs)
    old = batch.old("old_logprobs", old_logprobs, lp)
    moved = lp - old
    return old, moved, batch.rows.spread(batch.mean(moved).to(lp.dtype))


# Losses of whole rows


def gvpo_loss(
    logprobs: Tensor,
    base_logprobs: Tensor | None,
    advantages: Tensor,
    groups: int | Tensor,
    *,
    beta: float = 0.1,
    count: float | Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes GVPO (arXiv 2504.19599): half the variance, in a group, of reward minus beta times the row's log ratio.

    Args:
        logprobs: log-probs of the policy; differentiable
        base_logprobs: log-probs of the reference or the old policy
        advantages: rewards or advantages of the rows, [B]
        groups: an int (groups of that many consecutive rows) or integer ids [B]; a group must be in one call
        beta: weight of the log ratio
        count: number of groups that the mean is over; None means those with a token here
        mask, cu_seqlens: as in policy_loss
    """
    batch = _Batch("gvpo_loss", logprobs, mask, cu_seqlens)
    lp = batch.leaf("logprobs", logprobs)
    checks.finite(batch.op, "beta", beta)
    score = batch.total(lp - batch.old("base_logprobs", base_logprobs, lp))
    active = batch.tokens > 0
    excess = torch.where(active, batch.of_rows("advantages", advantages) - beta * score, 0)
    by_group = RowGroups.of(batch.op, groups, excess)
    size, total = by_group.reduce(torch.stack([active.double(), excess], 1), "sum", 0.0).unbind(1)
    mean = (total / size.clamp(min=1))[by_group.group]
    centered = torch.where(active, excess - mean, 0)
    shares = 0.5 / (size - 1).clamp(min=1)[by_group.group] / batch.count(count, size > 0)
    return (centered.square() * shares).sum().to(lp.dtype)


def real_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    groups: int | Tensor,
    *,
    tau: float = 0.5,
    count: float | Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes REAL (arXiv 2602.05630): log(1 + sum of e^s) over a group's rows that are not better than its mean, plus
    log(1 + sum of e^-s) over those that are, where s is a row's mean log ratio over tau; 0 for groups without both.

    Args:
        logprobs, old_logprobs: as in policy_loss
        advantages: [B]; rows of positive advantage are the better ones
        groups, count, mask, cu_seqlens: as in gvpo_loss
        tau: temperature of the log ratios
    """
    batch = _Batch("real_loss", logprobs, mask, cu_seqlens)
    lp = batch.leaf("logprobs", logprobs)
    checks.finite(batch.op, "tau", tau, 0.0, open_end=True)
    score = batch.mean(lp - batch.old("old_logprobs", old_logprobs, lp)) / tau
    active, better = batch.tokens > 0, batch.of_rows("advantages", advantages) > 0
    by_group = RowGroups.of(batch.op, groups, score)
    sides = torch.stack([active & better, active & ~better], 1)
    exponents = torch.where(sides, torch.stack([-score, score], 1), -math.inf)
    top = by_group.reduce(exponents.detach(), "max", 0.0).clamp(min=0)
    powers = torch.where(sides, (exponents - top[by_group.group]).exp(), 0)
    totals = by_group.reduce(torch.cat([powers, sides.double()], 1), "sum", 0.0)
    logs = top + (totals[:, :2] + (-top).exp()).log()
    members = totals[:, 2:]
    value = torch.where((members > 0).all(1), logs.sum(1), 0).sum()
    return (value / batch.count(count, members.sum(1) > 0)).to(lp.dtype)


def flowrl_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor,
    advantages: Tensor,
    log_z: Tensor,
    *,
    beta: float = 15.0,
    clip: str = "product",
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    ratio_cap: float | None = None,
    is_weights: Tensor | None = None,
    count: float | Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes FlowRL (arXiv 2509.15207): weight * (log_z + mean log ratio to the reference - beta * reward)^2.

    Args:
        logprobs, old_logprobs, ref_logprobs, mask, cu_seqlens: as in policy_loss
        advantages: rewards or advantages of the rows, [B]
        log_z: [B], the log of the partition function of each row's prompt; differentiable
        beta: weight of the reward
        clip: "product" and "geometric" clip the row's weight, the product of its ratios or their geometric mean, to
            [1 - clip_low, 1 + clip_high]; "logprob" clips the row's mean log ratio to the logs of these
        ratio_cap: upper bound of the weight; None means none
        is_weights: importance weights of the rows, [B]
        count: number of rows that the mean is over; None means those with a token here
    """
    batch = _Batch("flowrl_loss", logprobs, mask, cu_seqlens)
    if clip not in ("product", "geometric", "logprob"):
        raise checks.unknown(batch.op, "clip", clip, ("product", "geometric", "logprob"))
    checks.finite(batch.op, "beta", beta)
    if ratio_cap is not None:
        checks.finite(batch.op, "ratio_cap", ratio_cap, 0.0, open_end=True)
    low, high = batch.clip(clip_low, clip_high)
    lp = batch.leaf("logprobs", logprobs)
    old, reference = batch.old("old_logprobs", old_logprobs, lp), batch.of_tokens("ref_logprobs", ref_logprobs)
    moved = batch.mean(lp - old)
    weight = (moved.detach() * (1 if clip == "geometric" else batch.tokens)).exp()
    kept = moved
    if clip == "logprob":
        kept = moved.clamp(math.log(low) if low > 0 else -math.inf, math.log(high))
    else:
        weight = weight.clamp(low, high)
    weight = weight if ratio_cap is None else weight.clamp(max=ratio_cap)
    if is_weights is not None:
        weight = weight * batch.of_rows("is_weights", is_weights)
    reward = batch.of_rows("advantages", advantages)
    partition = batch.of_rows("log_z", log_z, detach=False)
    residual = partition + batch.mean(old - reference) + kept - beta * reward
    active = batch.tokens > 0
    value = torch.where(active, weight * residual.square(), 0).sum() / batch.count(count, active)
    return value.to(lp.dtype)
