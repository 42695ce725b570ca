"""GiGPO: advantages of an agent's steps, from its episodes and from steps taken in the same state."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.group_advantages import group_advantages
from grpo_kernels.ops.group_advantages.config import AdvantageConfig

_OP = "gigpo_advantages"


def gigpo_advantages(
    episode_rewards: Tensor,
    step_returns: Tensor,
    groups: int | Tensor,
    states: Tensor,
    *,
    rollouts: Tensor | None = None,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    config: AdvantageConfig | str = "grpo",
    backend: str | None = None,
) -> Tensor:
    """Adds the advantage of a step's episode within its prompt and that of the step among steps in the same state.

    Args:
        episode_rewards: [N], of the episode that each step is part of
        step_returns: discounted rewards from each step on [N], such as the returns of token_advantages with
            config="reinforce" on [episodes, steps]
        groups: prompt of each step, as in group_advantages
        states: integers [N], equal where steps of a prompt start from the same state; a negative one leaves the step
            out of the second comparison
        rollouts: episode of each step as integers [N], which then counts once in the statistics of its prompt; None
            counts every step, as published, so that long episodes weigh more
        episode_weight, step_weight: factors of the two advantages
        config: how each is normalised, as in group_advantages, without lengths and baselines
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        advantages [N], one per step; a step alone in its state has none of its own
    """
    for name, weight in (("episode_weight", episode_weight), ("step_weight", step_weight)):
        checks.finite(_OP, name, weight)
    checks.tensor(_OP, "episode_rewards", episode_rewards, checks.FLOATS)
    if episode_rewards.dim() != 1:
        raise ValueError(f"{_OP}: episode_rewards must have shape [N], got {list(episode_rewards.shape)}")
    checks.per_row(_OP, "step_returns", step_returns, checks.FLOATS, episode_rewards)
    checks.constant(_OP, "episode_rewards", episode_rewards)
    checks.constant(_OP, "step_returns", step_returns)
    checks.per_row(_OP, "states", states, checks.INTEGERS, episode_rewards)
    settings = AdvantageConfig.of(config, _OP)
    if settings.needs_lengths or settings.needs_baselines:
        wanted = "lengths" if settings.needs_lengths else "baselines"
        raise ValueError(f"{_OP}: config must need no {wanted}, which steps do not have, got {settings.estimator!r}")
    episodes = group_advantages(episode_rewards, groups, rollouts=rollouts, config=settings, backend=backend).advantages
    alone = dataclasses.replace(settings, singleton="zero")
    steps = group_advantages(step_returns, groups, subgroups=states, config=alone, backend=backend).advantages
    return episode_weight * episodes + step_weight * steps
