"""Registers token_advantages with torch. It has no gradient: advantages are data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels import registry

_FLOATS = (torch.float32, torch.float64)
SUPPORTS = {"triton": _FLOATS, "cpu": _FLOATS, "reference": _FLOATS}

SCHEMA = (
    "(Tensor rewards, Tensor? values, Tensor mask, Tensor? cu_seqlens, Tensor? turns, int[] modes, "
    "float[] coefficients) -> (Tensor, Tensor)"
)


def _fake(rewards: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rewards), torch.empty_like(rewards)


FORWARD = registry.define("token_advantages", SCHEMA, SUPPORTS, _fake, folder=__package__)
