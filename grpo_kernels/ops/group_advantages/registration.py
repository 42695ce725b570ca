"""Registers group_advantages with torch. It has no gradient: rewards are data."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.groups import sort_rows

_WIDE = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _WIDE, "cpu": _WIDE, "reference": _WIDE}

SCHEMA = (
    "(Tensor rewards, Tensor? groups, int group_size, Tensor? subgroups, Tensor? valid, Tensor? lengths, "
    "Tensor? baselines, float[] weights, int[] modes, float[] coefficients) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

registry.define_compiled(
    "_group_advantages_cuda(Tensor rewards, Tensor? order, Tensor? starts, Tensor? parent, Tensor? parent_starts, "
    "int group_size, Tensor? subgroups, Tensor? valid, Tensor? lengths, Tensor? baselines, float[] weights, "
    "int[] modes, float[] coefficients) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _fake(rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row = rewards.new_empty(rewards.shape[0])
    size = rewards.new_empty(rewards.shape[0], dtype=torch.int32)
    degenerate = rewards.new_empty(rewards.shape[0], dtype=torch.bool)
    return row, torch.empty_like(row), torch.empty_like(row), size, degenerate


def _cuda(
    rewards: Tensor, groups: Tensor | None, group_size: int, subgroups: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Sorts the rows into groups with torch; the rest is one compiled op."""
    order = sort_rows(rewards.shape[0], groups, group_size, subgroups) or (None, None, None, None)
    results = registry.ops._group_advantages_cuda(rewards, *order, group_size, subgroups, *rest)
    return cast(tuple[Tensor, ...], results)


FORWARD = registry.define("group_advantages", SCHEMA, SUPPORTS, _fake, folder=__package__, cuda=_cuda, on_host=("cpu",))
