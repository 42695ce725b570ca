"""The CUDA implementation: rows are sorted into segments with torch, the rest is one compiled op."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from grpo_kernels import segments

_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def forward(
    rewards: Tensor,
    groups: Tensor | None,
    group_size: int,
    subgroups: Tensor | None,
    valid: Tensor | None,
    lengths: Tensor | None,
    baselines: Tensor | None,
    weights: list[float],
    modes: list[int],
    coefficients: list[float],
) -> _Results:
    rows = rewards.shape[0]
    found = segments.sort_rows(rows, groups, group_size, subgroups)
    order, starts, parent, parent_starts = (None, None, None, None) if found is None else found
    results = torch.ops.grpo_kernels._group_advantages_cuda(
        rewards,
        order,
        starts,
        parent,
        parent_starts,
        group_size,
        subgroups,
        valid,
        lengths,
        baselines,
        weights,
        modes,
        coefficients,
    )
    return cast(_Results, results)
