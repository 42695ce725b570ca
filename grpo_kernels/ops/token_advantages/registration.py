"""Registers token_advantages with torch. It has no gradient: advantages are data."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.groups import packed_bounds

_FLOATS = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _FLOATS, "triton": _FLOATS, "cpu": _FLOATS, "reference": _FLOATS}

SCHEMA = (
    "(Tensor rewards, Tensor? values, Tensor mask, Tensor? cu_seqlens, Tensor? turns, int[] modes, "
    "float[] coefficients) -> (Tensor, Tensor)"
)
registry.define_compiled("_token_advantages_cuda" + SCHEMA.replace("cu_seqlens", "bounds"))


def _fake(rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rewards), torch.empty_like(rewards)


def _cuda(
    rewards: Tensor, values: Tensor | None, mask: Tensor, cu_seqlens: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    """Checks the bounds of packed rows with torch; the rest is one compiled op."""
    bounds = None if cu_seqlens is None else packed_bounds("token_advantages", cu_seqlens, rewards.numel())
    results = registry.ops._token_advantages_cuda(rewards, values, mask, bounds, *settings)
    if bounds is not None and len(bounds) == 1:  # tokens without a row
        for result in results:
            result.zero_()
    return cast(tuple[Tensor, Tensor], results)


FORWARD = registry.define("token_advantages", SCHEMA, SUPPORTS, _fake, folder=__package__, cuda=_cuda)
