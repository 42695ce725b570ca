"""torch registration of endpoint_segments. Not differentiable: advantages are data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.ops import registry

_FLOATS = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _FLOATS, "triton": _FLOATS, "cpu": _FLOATS, "reference": _FLOATS}

SCHEMA = (
    "(Tensor rewards, Tensor logprobs, Tensor old_logprobs, Tensor mask, Tensor? values, Tensor? cu_seqlens, "
    "Tensor? groups, Tensor threshold, int[] modes, float[] coefficients) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
registry.define_compiled(
    "_endpoint_segments_cuda"
    + SCHEMA.replace("Tensor? cu_seqlens, Tensor? groups", "Tensor? bounds, Tensor? order, Tensor? starts")
)


def _fake(rewards: Tensor, logprobs: Any, old: Any, mask: Tensor, values: Any, cu: Tensor | None, *_: Any) -> Any:
    rows = rewards.shape[0] if cu is None else cu.shape[0] - 1
    return (
        torch.empty_like(rewards),
        torch.empty_like(rewards),
        torch.empty_like(mask, dtype=torch.bool),
        torch.empty_like(mask, dtype=torch.int32),
        rewards.new_empty(rows, dtype=torch.int32),
    )


FORWARD = registry.define("endpoint_segments", SCHEMA, SUPPORTS, _fake)
