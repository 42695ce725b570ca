"""Registers group_advantages with torch. It has no gradient: rewards are data."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.groups import sort_rows
from grpo_kernels.ops.group_advantages import reference
from grpo_kernels.ops.group_advantages.reference import GroupInputs

_WIDE = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _WIDE, "cpu": _WIDE, "reference": _WIDE}
_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"


registry.define_compiled(
    "_group_advantages_cuda(Tensor rewards, Tensor? order, Tensor? starts, Tensor? parent, Tensor? parent_starts, "
    "int group_size, Tensor? subgroups, Tensor? valid, Tensor? lengths, Tensor? baselines, float[] weights, "
    f"int[] modes, float[] coefficients) -> {_RESULTS}"
)


def _fake(inputs: GroupInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row = inputs.rewards.new_empty(len(inputs.rewards))
    size, degenerate = (torch.empty_like(row, dtype=dtype) for dtype in (torch.int32, torch.bool))
    return row, torch.empty_like(row), torch.empty_like(row), size, degenerate


def _cuda(
    rewards: Tensor, groups: Tensor | None, group_size: int, subgroups: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Sorts the rows into groups with torch; the rest is one compiled op."""
    order = sort_rows(rewards.shape[0], groups, group_size, subgroups) or (None, None, None, None)
    results = registry.ops._group_advantages_cuda(rewards, *order, group_size, subgroups, *rest)
    return cast(tuple[Tensor, ...], results)


OP = registry.TorchOp(
    "group_advantages",
    GroupInputs,
    _RESULTS,
    SUPPORTS,
    _fake,
    cuda=_cuda,
    reference=reference.forward,
    opaque_reference=True,
    on_host=("cpu",),
)
