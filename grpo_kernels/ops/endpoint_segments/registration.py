"""Registers endpoint_segments with torch. It has no gradient: advantages are data."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.groups import packed_bounds, sort_rows
from grpo_kernels.ops.endpoint_segments import reference
from grpo_kernels.ops.endpoint_segments.config import NORM_PROMPT, Plan
from grpo_kernels.ops.endpoint_segments.reference import SegmentInputs
from grpo_kernels.plans import read

_FLOATS = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _FLOATS, "cpu": _FLOATS, "reference": _FLOATS}

_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"

registry.define_compiled(
    "_endpoint_segments_cuda(Tensor rewards, Tensor logprobs, Tensor old_logprobs, Tensor mask, Tensor? values, "
    "Tensor? bounds, Tensor? order, Tensor? starts, Tensor threshold, float[] settings) "
    f"-> {_RESULTS}"
)


def _fake(inputs: SegmentInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rewards, cu_seqlens = inputs.rewards, inputs.cu_seqlens
    rows = rewards.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        torch.empty_like(rewards),
        torch.empty_like(rewards),
        torch.empty_like(rewards, dtype=torch.bool),
        torch.empty_like(rewards, dtype=torch.int32),
        rewards.new_empty(rows, dtype=torch.int32),
    )


def _cuda(
    rewards: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor | None,
    groups: Tensor | None,
    threshold: Tensor,
    settings: list[float],
) -> tuple[Tensor, ...]:
    """Checks the bounds of packed rows and sorts rows into prompts with torch; the rest is one compiled op."""
    bounds = None if cu_seqlens is None else packed_bounds("endpoint_segments", cu_seqlens, rewards.numel())
    order = starts = None
    if values is None or read(Plan, settings).norm == NORM_PROMPT:
        rows = rewards.shape[0] if bounds is None else bounds.shape[0] - 1
        sorted_rows = sort_rows(rows, groups, 0, None)
        assert sorted_rows is not None
        order, starts = sorted_rows.order, sorted_rows.starts
    results = registry.ops._endpoint_segments_cuda(
        rewards, logprobs, old_logprobs, mask, values, bounds, order, starts, threshold, settings
    )
    if len(results[-1]) == 0:  # tokens without a row
        for result, absent in zip(results, (0, 0, False, -1), strict=False):
            result.fill_(absent)
    return cast(tuple[Tensor, ...], results)


OP = registry.TorchOp(
    "endpoint_segments",
    SegmentInputs,
    _RESULTS,
    SUPPORTS,
    _fake,
    cuda=_cuda,
    reference=reference.forward,
    opaque_reference=True,
    on_host=("cpu", "reference"),
)
