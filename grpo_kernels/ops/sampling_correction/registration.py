"""Registers sampling_correction with torch. Nothing has a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.groups import packed_bounds
from grpo_kernels.ops.sampling_correction.config import PASSES, table_widths

_WIDE = (torch.float32, torch.float64)
SUPPORTS = {"cuda": _WIDE, "triton": _WIDE, "cpu": _WIDE, "reference": _WIDE}

SCHEMA = (
    "(Tensor old_logprobs, Tensor sampling_logprobs, Tensor? mask, Tensor? cu_seqlens, Tensor? m2_ceiling, "
    "int[] statistics, float[] bounds, int[] modes, float[] coefficients) -> (Tensor, Tensor, Tensor)"
)
registry.define_compiled("_sampling_correction_cuda" + SCHEMA)


class Batch(NamedTuple):
    """The tensors of a call in the order of the schema: contiguous, without gradients, of one dtype.

    `m2_ceiling`: a float32 scalar, the largest squared log ratio that is kept.
    """

    old_logprobs: Tensor
    sampling_logprobs: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    m2_ceiling: Tensor | None


def _fake(
    old_logprobs: Tensor, _: Tensor, __: Tensor | None, cu_seqlens: Tensor | None, ___: Tensor | None, *plan: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows = old_logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    table = old_logprobs.new_empty(rows, sum(table_widths(len(plan[0]))), dtype=torch.float64)
    return torch.empty_like(old_logprobs), torch.empty_like(old_logprobs, dtype=torch.bool), table


def _cuda(old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """Checks the bounds of packed rows; the rest is one compiled op."""
    cu_seqlens, *rest = args
    if cu_seqlens is not None:
        cu_seqlens = packed_bounds("sampling_correction", cu_seqlens, old_logprobs.numel())
    op = registry.ops._sampling_correction_cuda
    return tuple(op(old_logprobs, sampling_logprobs, mask, cu_seqlens, *rest))


FORWARD = registry.define("sampling_correction", SCHEMA, SUPPORTS, _fake, folder=__package__, cuda=_cuda)
# The CPU has a kernel; GPUs have torch's scatter, whose sums of integers do not depend on the order.
HISTOGRAM = registry.define(
    "bits_histogram",
    "(Tensor bits, Tensor prefix, int level) -> Tensor",
    {"cpu": (torch.int32,)},
    lambda bits, prefix, level: bits.new_empty((2, 1 << PASSES[level][1]), dtype=torch.int64),
)
