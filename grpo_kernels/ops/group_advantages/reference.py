"""The specification of group_advantages in plain torch. In float64 it is the reference for every other backend."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.group_advantages.config import (
    CENTER_BASELINE,
    CENTER_LEAVE_ONE_OUT,
    CENTER_LENGTH,
    CENTER_MEAN,
    CENTER_NONE,
    CENTER_RUNNER_UP,
    GAIN_NONZERO,
    NORMALIZE_THEN_SUM,
    SCALE_BATCH_STD,
    SCALE_LEAVE_ONE_OUT_STD,
    SCALE_MEAN,
    SCALE_STD,
    SINGLETON_PARENT,
    SINGLETON_RAW,
    WHITEN_NONE,
    WHITEN_TOKENS,
    Plan,
)
from grpo_kernels.plans import read


@op_inputs
class GroupInputs:
    """Checked arguments of group_advantages: rewards [N] or [N, R], what belongs to a row [N], all contiguous.

    Without `groups`, every `group_size` consecutive rows are a group. `settings` are an AdvantageConfig's.
    """

    rewards: Tensor
    groups: Tensor | None
    group_size: int
    rollouts: Tensor | None
    subgroups: Tensor | None
    valid: Tensor | None
    lengths: Tensor | None
    baselines: Tensor | None
    weights: list[float]
    settings: list[float]


Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # the fields of GroupAdvantages


def participants(inputs: GroupInputs) -> Tensor:
    """Rows that are neither masked nor left out by their subgroup."""
    rewards, valid, subgroups = inputs.rewards, inputs.valid, inputs.subgroups
    takes_part = torch.ones(len(rewards), dtype=torch.bool, device=rewards.device) if valid is None else valid
    return takes_part if subgroups is None else takes_part & (subgroups >= 0)


def forward(inputs: GroupInputs) -> Results:
    """The op of rows that are a rollout each."""
    plan = read(Plan, inputs.settings)
    rewards, subgroups, lengths, baselines = inputs.rewards, inputs.subgroups, inputs.lengths, inputs.baselines
    dtype = rewards.dtype
    if plan.scale == SCALE_LEAVE_ONE_OUT_STD:  # in float32 a difference of squares hides that the others are equal
        rewards = rewards.double()
    columns = rewards if rewards.dim() == 2 else rewards[:, None]
    factors = inputs.weights or [1.0] * columns.shape[1]
    weight = torch.cat([columns.new_full((1,), factor) for factor in factors])  # without a copy to a GPU
    takes_part = participants(inputs)
    check_lengths(lengths, takes_part)
    scored_columns = ~columns.isnan() & takes_part[:, None]
    scored = scored_columns.any(1)
    combined = torch.where(scored_columns, columns * weight, 0).sum(1)

    groups = inputs.groups
    if groups is None:
        groups = torch.arange(len(rewards), device=rewards.device) // inputs.group_size
    whole = _Groups(groups, torch.zeros_like(groups))
    innermost = whole if subgroups is None else _Groups(groups, subgroups)
    rest = (innermost, whole, lengths, baselines, plan)
    advantages, live, stats = _normalize(combined, scored, *rest)
    if plan.combine == NORMALIZE_THEN_SUM:
        parts = [_normalize(columns[:, c], scored_columns[:, c], *rest) for c in range(columns.shape[1])]
        advantages = sum(weight[c] * part[0] for c, part in enumerate(parts))
        live = torch.stack([part[1] for part in parts]).any(0)

    std = stats.std
    if plan.scale == SCALE_BATCH_STD:
        _, var = _batch_moments(combined, scored.to(combined.dtype), plan)
        std = var.sqrt().expand_as(combined).clone()
        divisor = std.clamp(min=plan.std_floor) + plan.eps
        advantages = torch.where(std != 0, advantages / divisor, 0)
    if plan.whiten != WHITEN_NONE:
        counts = lengths if plan.whiten == WHITEN_TOKENS else torch.ones_like(combined)
        counted = scored
        if plan.center == CENTER_LEAVE_ONE_OUT:  # undefined for a single row, except that a raw reward counts
            counted = scored & (live | (stats.count != 1))
        mean, var = _batch_moments(advantages, torch.where(counted, counts, 0).to(combined.dtype), plan)
        in_root = plan.whiten == WHITEN_TOKENS
        divisor = (var + plan.whiten_eps).sqrt() if in_root else var.sqrt() + plan.whiten_eps
        advantages = torch.where(var != 0, (advantages - mean) / divisor, 0)
    if plan.gain == GAIN_NONZERO:
        advantages = advantages * scored.sum() / (scored & (combined != 0)).sum().clamp(min=1)
    advantages = torch.where(live & scored, advantages, 0)
    if plan.clip < math.inf:
        advantages = advantages.clamp(-plan.clip, plan.clip)
    return advantages.to(dtype), stats.mean.to(dtype), std.to(dtype), stats.count.to(torch.int32), ~live


def _normalize(
    reward: Tensor,
    counted: Tensor,
    groups: _Groups,
    whole: _Groups,
    lengths: Tensor | None,
    baselines: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Tensor, _Stats]:
    """Normalises one column within its groups: advantages, mask of rows with a signal, and the statistics used."""
    own = _Stats(groups, reward, counted, lengths, plan.ddof)
    parent = own if groups is whole else _Stats(whole, reward, counted, lengths, plan.ddof)

    # a row alone in its subgroup may take the statistics of a group of more than one row
    alone = own.count == 1
    borrows = alone & (parent.count > 1) & (plan.singleton == SINGLETON_PARENT) & (groups is not whole)

    def pick(field: str) -> Tensor:
        return torch.where(borrows, getattr(parent, field), getattr(own, field))

    count, mean, std, flat = pick("count"), pick("mean"), pick("std"), pick("flat")
    if plan.shrinkage > 0 and groups is not whole:
        keep = own.count / (own.count + plan.shrinkage)
        mean = torch.where(alone, mean, keep * mean + (1 - keep) * parent.mean)
        std = torch.where(alone, std, keep * std + (1 - keep) * parent.std)
        flat = torch.where(alone, flat, parent.flat)

    center = {
        CENTER_NONE: lambda: torch.zeros_like(mean),
        CENTER_MEAN: lambda: mean,
        CENTER_LEAVE_ONE_OUT: lambda: mean,
        CENTER_LENGTH: lambda: pick("length_mean"),
        CENTER_BASELINE: lambda: baselines,
        CENTER_RUNNER_UP: lambda: pick("second"),
    }[plan.center]()
    of_group = plan.center not in (CENTER_NONE, CENTER_BASELINE)
    live = ~flat if of_group or plan.scale == SCALE_STD else torch.ones_like(flat)
    divisor = torch.ones_like(mean)
    if plan.scale == SCALE_STD:
        divisor = std.clamp(min=plan.std_floor) + plan.eps
    if plan.scale == SCALE_MEAN:
        divisor = mean + plan.eps
        live = live & (mean > 0)
    live = live & (divisor != 0)
    value = (reward - center) / divisor
    if plan.scale == SCALE_LEAVE_ONE_OUT_STD:
        # the other rows' squares, up to the rounding of a difference; equal others divide by nothing
        squares = own.squares - value**2 * count / (count - 1)
        differ = (squares > 1e-12 * own.squares) & (count - 1 > plan.ddof)
        others_std = (squares / (count - 1 - plan.ddof)).sqrt()
        value = torch.where(differ, value / (others_std.clamp(min=plan.std_floor) + plan.eps), value)
    if plan.center == CENTER_LEAVE_ONE_OUT:
        value = value * count / (count - 1)
    if plan.center == CENTER_RUNNER_UP:
        value = value.clamp(min=0)  # only the best row exceeds the runner-up

    raw = reward - center if plan.center == CENTER_BASELINE else reward
    raw = raw / (1 + plan.eps) if plan.scale == SCALE_STD else raw
    lonely = alone & ~borrows
    value = torch.where(lonely, raw, value)
    live = torch.where(lonely, plan.singleton == SINGLETON_RAW, live) & (own.count > 0)
    own.mean = torch.where(own.count > 0, mean, 0)
    own.std = torch.where(lonely | (own.count == 0), 0, std)
    return torch.where(live & counted, value, 0), live, own


def _batch_moments(values: Tensor, counts: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Mean and variance over the batch, each row counted `counts` times."""
    if len(values) == 0:
        return values.new_zeros(()), values.new_zeros(())
    total = counts.sum()
    # differences from one value, so that the mean of equal values is exact
    base = torch.where(counts > 0, values, -torch.inf).amax()
    mean = torch.where(total > 0, base + (counts * torch.where(counts > 0, values - base, 0)).sum() / total, 0)
    squares = (counts * torch.where(counts > 0, values - mean, 0) ** 2).sum()
    return mean, torch.where((total > plan.ddof) & (squares != 0), squares / (total - plan.ddof), 0)


def check_lengths(lengths: Tensor | None, takes_part: Tensor) -> None:
    """Raises for lengths that are none, of rows that take part and on the CPU; a GPU is not waited for."""
    if lengths is None or lengths.device.type != "cpu":
        return
    is_wrong = takes_part & ~((lengths >= 0) & lengths.isfinite())
    if is_wrong.any():
        row = int(is_wrong.nonzero()[0])
        raise RuntimeError(
            f"group_advantages: lengths must be finite and not negative, got {lengths[row]:g} in row {row}"
        )


class _Groups:
    """Rows with equal (group, subgroup): reductions over them, one result per row."""

    def __init__(self, groups: Tensor, subgroups: Tensor) -> None:
        order = subgroups.sort(stable=True).indices
        self.order = order[groups[order].sort(stable=True).indices]
        first = torch.ones_like(self.order, dtype=torch.bool)
        for ids in (groups[self.order], subgroups[self.order]):
            first[1:] &= ids[1:] == ids[:-1]
        starts = ~first
        starts[:1] = True
        number = starts.cumsum(0) - 1
        self.number = torch.empty_like(number)
        self.number[self.order] = number
        # one entry per row, so that the host need not know the number of groups
        self.lengths = torch.zeros_like(number).scatter_add(0, number, torch.ones_like(number))

    def reduce(self, values: Tensor, how: str, initial: float) -> Tensor:
        if len(values) == 0:
            return values.clone()
        per_group = torch.segment_reduce(values[self.order], how, lengths=self.lengths, initial=initial, unsafe=True)
        return per_group[self.number]


class _Stats:
    """Statistics of each row's group over its counted rows, in two passes."""

    def __init__(self, groups: _Groups, reward: Tensor, counted: Tensor, lengths: Tensor | None, ddof: float) -> None:
        def total(values: Tensor) -> Tensor:
            return groups.reduce(torch.where(counted, values, 0), "sum", 0)

        self.count = total(torch.ones_like(reward))
        self.low = groups.reduce(torch.where(counted, reward, math.inf), "min", math.inf)
        self.high = groups.reduce(torch.where(counted, reward, -math.inf), "max", -math.inf)
        # by comparison, because the rounded mean of equal values may differ from them
        self.flat = self.low >= self.high
        self.mean = torch.where(self.flat, self.low, total(reward) / self.count)
        self.mean = torch.where(self.count > 0, self.mean, 0)
        self.squares = squares = total((reward - self.mean) ** 2)
        enough = ~self.flat & (self.count > ddof)
        self.std = torch.where(enough, (squares / (self.count - ddof)).sqrt(), 0)
        below = torch.where(counted & (reward < self.high), reward, -math.inf)
        tied = total((reward == self.high).to(reward.dtype)) > 1
        self.second = torch.where(tied, self.high, groups.reduce(below, "max", -math.inf))
        tokens = torch.ones_like(reward) if lengths is None else lengths.to(reward.dtype)
        weighted = total(tokens * reward) / total(tokens)
        self.length_mean = torch.where(total(tokens) > 0, weighted, self.mean)
