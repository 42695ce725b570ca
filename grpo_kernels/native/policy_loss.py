"""The CUDA implementation: one compiled op; where rows are packed, their tasks are numbered on the device first."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

_TOKENS_PER_TASK = 1024  # as in csrc/cuda/policy_loss.h
_CU_SEQLENS, _NORMALIZERS = 4, 12


def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cu_seqlens = args[_CU_SEQLENS]
    task_starts = None
    if cu_seqlens is not None:
        tasks = ((cu_seqlens.diff() + (_TOKENS_PER_TASK - 1)) // _TOKENS_PER_TASK).clamp(min=1)
        task_starts = torch.cat([tasks.new_zeros(1), tasks.cumsum(0)])
    before, after = args[: _NORMALIZERS + 1], args[_NORMALIZERS + 1 :]
    results = torch.ops.grpo_kernels._policy_loss_cuda(*before, task_starts, *after)
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], results)
