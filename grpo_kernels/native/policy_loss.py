"""The CUDA implementation: one compiled op, which reads the bounds of packed rows without checking them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import segments

_CU_SEQLENS = 4


def forward(logprobs: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = [logprobs, *args]
    if given[_CU_SEQLENS] is not None:
        given[_CU_SEQLENS] = segments.packed_bounds("policy_loss", given[_CU_SEQLENS], logprobs.numel())
    results = torch.ops.grpo_kernels._policy_loss_cuda(*given)
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], results)
