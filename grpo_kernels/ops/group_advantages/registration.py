"""Registers group_advantages with torch. It has no gradient: rewards are data."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from grpo_kernels import registry
from grpo_kernels.groups import sort_rows
from grpo_kernels.ops.group_advantages.by_rollout import by_rollout
from grpo_kernels.ops.group_advantages.reference import GroupInputs, Results, forward

_WIDE = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _WIDE, "cpu": _WIDE, "reference": _WIDE}
_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"


registry.define_compiled(
    "_group_advantages_cuda(Tensor rewards, Tensor? order, Tensor? starts, Tensor? parent, Tensor? parent_starts, "
    "int group_size, Tensor? subgroups, Tensor? valid, Tensor? lengths, Tensor? baselines, float[] weights, "
    f"float[] settings) -> {_RESULTS}"
)


def _fake(inputs: GroupInputs) -> Results:
    row = inputs.rewards.new_empty(len(inputs.rewards))
    size, degenerate = (torch.empty_like(row, dtype=dtype) for dtype in (torch.int32, torch.bool))
    return row, torch.empty_like(row), torch.empty_like(row), size, degenerate


def _cuda(*values: Any) -> Results:
    return by_rollout(_cuda_of_rows, GroupInputs(*values))


def _cuda_of_rows(inputs: GroupInputs) -> Results:
    """Sorts the rows into groups with torch; the rest is one compiled op."""
    order = sort_rows(len(inputs.rewards), inputs.groups, inputs.group_size, inputs.subgroups)
    results = registry.ops._group_advantages_cuda(
        inputs.rewards,
        *(order or (None, None, None, None)),
        inputs.group_size,
        inputs.subgroups,
        inputs.valid,
        inputs.lengths,
        inputs.baselines,
        inputs.weights,
        inputs.settings,
    )
    return cast(Results, results)


OP = registry.TorchOp(
    "group_advantages",
    GroupInputs,
    _RESULTS,
    SUPPORTS,
    _fake,
    cuda=_cuda,
    reference=functools.partial(by_rollout, forward),
    opaque_reference=True,
    on_host=("cpu",),
)
