"""Registers token_advantages with torch. It has no gradient: advantages are data."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.groups import packed_bounds
from grpo_kernels.ops.token_advantages import reference
from grpo_kernels.ops.token_advantages.config import WHITEN_TOKENS, Plan
from grpo_kernels.ops.token_advantages.reference import TokenRewards
from grpo_kernels.plans import read

_FLOATS = (torch.float32, torch.float64)
SUPPORTS = {"triton": _FLOATS, "cpu": _FLOATS, "reference": _FLOATS}


def _fake(inputs: TokenRewards) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inputs.rewards), torch.empty_like(inputs.rewards)


_kernel = registry.lazy("forward", __package__)


def _triton(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    turns: Tensor | None,
    settings: list[float],
) -> tuple[Tensor, Tensor]:
    """Checks the bounds of packed rows; the rest are the kernel's launches."""
    plan = read(Plan, settings)
    bounds = None if cu_seqlens is None else packed_bounds("token_advantages", cu_seqlens, rewards.numel())
    numbers = bool(plan.carry_rewards), plan.gamma, plan.lam, plan.whiten_eps
    results = _kernel(rewards, values, mask, bounds, turns, plan.whiten == WHITEN_TOKENS, *numbers)
    return cast(tuple[Tensor, Tensor], results)


OP = registry.TorchOp(
    "token_advantages",
    TokenRewards,
    "(Tensor, Tensor)",
    SUPPORTS,
    _fake,
    triton=_triton,
    reference=reference.forward,
    opaque_reference=True,
)
