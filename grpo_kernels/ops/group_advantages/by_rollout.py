"""Rollouts of several rows, which count as one row in every statistic; plain torch on any device, without a wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels.groups import RowGroups
from grpo_kernels.ops.group_advantages.reference import GroupInputs, Results, participants

_OP = "group_advantages"


def by_rollout(compute: Callable[[GroupInputs], Results], inputs: GroupInputs) -> Results:
    """Lets one row of each rollout stand for it: the first that takes part. The others get what it gets."""
    if inputs.rollouts is None:
        return compute(inputs)
    rewards, count = inputs.rewards, len(inputs.rewards)
    siblings = RowGroups.of(_OP, inputs.rollouts, rewards)
    place = torch.arange(count, dtype=torch.float64, device=rewards.device)
    takes_part = participants(inputs)

    def over(values: Tensor, how: str, initial: float) -> Tensor:
        return siblings.reduce(values, how, initial)[siblings.group]

    leader = (over(torch.where(takes_part, place, place + count), "min", 2.0 * count) % max(count, 1)).long()
    groups = place.long() // inputs.group_size if inputs.groups is None else inputs.groups
    _check(inputs, "groups", groups, groups[leader], torch.ones_like(takes_part))
    columns = rewards if rewards.dim() == 2 else rewards[:, None]
    scored = takes_part[:, None] & ~columns.isnan()
    first = over(torch.where(scored, place[:, None], count), "min", count)
    stated = columns.gather(0, first.long().clamp(max=max(count - 1, 0)))
    _check(inputs, "rewards", columns, stated, scored)
    for name, values in (("subgroups", inputs.subgroups), ("baselines", inputs.baselines)):
        if values is not None:
            _check(inputs, name, values, values[leader], takes_part)
    lengths = inputs.lengths
    folded = dataclasses.replace(
        inputs,
        rollouts=None,
        rewards=torch.where(first < count, stated, torch.nan).view_as(rewards).contiguous(),
        valid=takes_part & (leader == place),
        lengths=None if lengths is None else over(torch.where(takes_part, lengths, 0), "sum", 0.0),
    )
    advantages, *statistics = compute(folded)
    mean, std, size, degenerate = (values[leader] for values in statistics)
    return torch.where(takes_part, advantages[leader], 0), mean, std, size, degenerate


def _check(inputs: GroupInputs, name: str, values: Tensor, expected: Tensor, of: Tensor) -> None:
    """Refuses rows that contradict the one that stands for their rollout; a GPU is not waited for."""
    differs = (values != expected) & ~(values.isnan() & expected.isnan()) & of
    rule = f"{_OP}: {name} must be equal in all rows of a rollout"
    if values.device.type != "cpu":
        torch._assert_async(~differs.any(), rule)
    elif differs.any():
        at = differs.nonzero()[0]
        row, rollouts = int(at[0]), inputs.rollouts
        assert rollouts is not None
        own, other = (of_rows[tuple(at)].item() for of_rows in (values, expected))
        raise RuntimeError(f"{rule}, got {own:g} in row {row} after {other:g} in rollout {int(rollouts[row])}")
