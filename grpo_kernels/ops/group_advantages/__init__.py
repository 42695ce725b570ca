"""Rewards to advantages within groups."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.group_advantages import registration as op
from grpo_kernels.ops.group_advantages.config import AdvantageConfig
from grpo_kernels.ops.group_advantages.reference import GroupInputs

_OP = "group_advantages"
_BOOL = (torch.bool,)
_NUMBERS = checks.INTEGERS + checks.FLOATS


class GroupAdvantages(NamedTuple):
    """Result of group_advantages, one entry per reward row; the rows of a rollout share theirs.

    Attributes:
        advantages: float32, or float64 for float64 rewards
        mean, std: statistics of the scored rewards of the row's group (of the weighted sum if there are several
            rewards) as used: after borrowing or shrinkage, before std_floor and eps. With scale="batch_std", std is
            that of the batch
        size: int32, number of scored rows, or rollouts, of the group
        degenerate: bool, the group carries no learning signal; its rows have advantage exactly 0
    """

    advantages: Tensor
    mean: Tensor
    std: Tensor
    size: Tensor
    degenerate: Tensor


def group_advantages(
    rewards: Tensor,
    groups: int | Tensor,
    *,
    rollouts: Tensor | None = None,
    subgroups: Tensor | None = None,
    valid: Tensor | None = None,
    lengths: Tensor | None = None,
    baselines: Tensor | None = None,
    config: AdvantageConfig | str = "grpo",
    backend: str | None = None,
) -> GroupAdvantages:
    """Normalises the rewards of each group: (reward - mean) / (std + eps) and its variants.

    A group whose rewards are all equal gives exactly 0 and is flagged in `degenerate`. Statistics are two-pass and
    deterministic. Nothing waits for a GPU that has the CUDA kernels; without them the CPU kernel takes copies, for
    which it waits. There is no gradient: rewards that require grad are refused.

    Args:
        rewards: [N] or, for several rewards, [N, R]; NaN means not scored: left out of the statistics, advantage 0
        groups: an int, the size of each group (not their number; its rows are neighbours), or integer ids [N], in any
            order, sparse or negative
        rollouts: integer ids [N]; rows of one id are parts of one rollout of the policy, which counts once everywhere.
            Rewards that its rows state must be equal, NaN states none; so must be groups, subgroups and baselines
        subgroups: integer labels [N] that split each group; rows with a negative label are left out
        valid: bool [N]; False means not scored
        lengths: tokens of each row [N], of which the CPU refuses negative ones; required by center="length" and
            whiten="tokens", otherwise refused
        baselines: [N]; required by center="baseline", otherwise refused
        config: an AdvantageConfig or the name of an estimator (AdvantageConfig.names())
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        GroupAdvantages: advantages [N], and the mean, std, size and degeneracy of each row's group
    """
    settings = AdvantageConfig.of(config)
    rewards = _rewards(rewards, settings)
    group_ids, group_size = _groups(groups, rewards)
    if rollouts is not None:
        rollouts = checks.per_row(_OP, "rollouts", rollouts, checks.INTEGERS, rewards).long().contiguous()
    subgroups = _subgroups(subgroups, rewards, settings)
    if valid is not None:
        valid = checks.per_row(_OP, "valid", valid, _BOOL, rewards).contiguous()
    if _wanted("lengths", lengths, settings.needs_lengths, settings):
        lengths = checks.per_row(_OP, "lengths", lengths, _NUMBERS, rewards).double().contiguous()
    if _wanted("baselines", baselines, settings.needs_baselines, settings):
        baselines = checks.per_row(_OP, "baselines", baselines, checks.FLOATS, rewards)
        baselines = baselines.detach().to(rewards.dtype).contiguous()

    device = rewards.device
    chosen = backends.select(_OP, backend, device.type, rewards.dtype, op.SUPPORTS, device.index)
    inputs = GroupInputs(
        rewards,
        group_ids,
        group_size,
        rollouts,
        subgroups,
        valid,
        lengths,
        baselines,
        settings.weight_list,
        settings.settings,
    )
    return GroupAdvantages(*op.OP(chosen, inputs))


def group_ids(keys: Iterable[Hashable] | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """Numbers hashable keys (uids, prompts) by first appearance: int64 ids for the argument `groups`.

    Keys are compared by equality and hash, never by their text: "1_10" and "11_0" stay different. A tensor gives its
    elements, on the host; one of integers can be `groups` itself.

    Returns:
        int64 ids [N]
    """
    numbers: dict[Hashable, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in checks.keys("group_ids", keys)]
    return torch.tensor(ids, dtype=torch.int64, device=device)


def _rewards(rewards: Tensor, settings: AdvantageConfig) -> Tensor:
    checks.tensor(_OP, "rewards", rewards, checks.FLOATS)
    if rewards.dim() not in (1, 2) or (rewards.dim() == 2 and rewards.shape[1] == 0):
        raise ValueError(f"{_OP}: rewards must have shape [N] or [N, R] with R > 0, got {list(rewards.shape)}")
    checks.constant(_OP, "rewards", rewards)
    columns = 1 if rewards.dim() == 1 else rewards.shape[1]
    weights = settings.reward_weights
    if weights is not None and len(weights) != columns:
        raise ValueError(
            f"{_OP}: config.reward_weights must have {columns} numbers, one for each reward column, got {weights}"
        )
    # half-precision rewards get statistics and results in float32
    if rewards.dtype in (torch.float16, torch.bfloat16):
        rewards = rewards.float()
    return rewards.contiguous()


def _groups(groups: int | Tensor, rewards: Tensor) -> tuple[Tensor | None, int]:
    if isinstance(groups, Tensor):
        return checks.per_row(_OP, "groups", groups, checks.INTEGERS, rewards).long().contiguous(), 0
    way_out = None
    if rewards.dim() == 2 and rewards.shape[1] == groups:
        way_out = "rewards [P, K] of P prompts are flattened to [P * K], as columns are reward functions"
    return None, checks.group_size(_OP, groups, rewards.shape[0], way_out)


def _subgroups(subgroups: Tensor | None, rewards: Tensor, settings: AdvantageConfig) -> Tensor | None:
    if subgroups is not None:
        return checks.per_row(_OP, "subgroups", subgroups, checks.INTEGERS, rewards).long().contiguous()
    if settings.needs_parent:
        field = "shrinkage" if settings.shrinkage > 0 else "singleton"
        raise ValueError(
            f"{_OP}: subgroups must be given, as config.{field}={getattr(settings, field)!r} "
            "uses the group that a subgroup is part of, got None"
        )
    return None


def _wanted(name: str, value: object, wanted: bool, settings: AdvantageConfig) -> bool:
    """Whether the argument is used. An argument that is missing or would be ignored is refused."""
    if wanted and value is None:
        raise ValueError(f"{_OP}: {name} must be given for estimator {settings.estimator!r}, got None")
    if not wanted and value is not None:
        raise ValueError(
            f"{_OP}: {name} must be left out, as estimator {settings.estimator!r} with center={settings.center!r}, "
            f"whiten={settings.whiten!r} does not use it, got {type(value).__name__}"
        )
    return wanted
