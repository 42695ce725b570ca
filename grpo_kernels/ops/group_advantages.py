"""torch registration of group_advantages. Not differentiable: rewards are data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.ops import registry

_WIDE = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _WIDE, "triton": _WIDE, "cpu": _WIDE, "reference": _WIDE}

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


FORWARD = registry.define("group_advantages", SCHEMA, SUPPORTS, _fake)
