"""The CUDA implementation: rows are sorted into groups with torch, the rest is one compiled op."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from grpo_kernels import segments

_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_NORM, _PROMPT = 3, 2  # position in the modes, and the one that needs groups


def forward(
    rewards: Tensor, logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, values: Tensor | None,
    cu_seqlens: Tensor | None, groups: Tensor | None, threshold: Tensor, modes: list[int], coefficients: list[float],
) -> _Results:  # fmt: skip
    bounds = None if cu_seqlens is None else segments.packed_bounds("endpoint_segments", cu_seqlens, rewards.numel())
    order = starts = None
    if values is None or modes[_NORM] == _PROMPT:
        rows = rewards.shape[0] if bounds is None else bounds.shape[0] - 1
        found = segments.sort_rows(rows, groups, 0, None)
        assert found is not None
        order, starts = found.order, found.starts
    results = cast(
        _Results,
        torch.ops.grpo_kernels._endpoint_segments_cuda(
            rewards, logprobs, old_logprobs, mask, values, bounds, order, starts, threshold, modes, coefficients
        ),
    )
    if len(results[-1]) == 0:  # tokens that are of no row
        for result, nothing in zip(results, (0, 0, False, -1), strict=False):
            result.fill_(nothing)
    return results
