"""Positions that serve several terms: samples with a common prefix share its log-probs."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import checks

ABSENT = -1  # index of a term without a position


def check_term_index(op: str, term_index: Tensor, positions: int, device: torch.device) -> Tensor:
    """The flattened position of every term, int64."""
    checks.tensor(op, "term_index", term_index, checks.INTEGERS)
    checks.same_device(op, "term_index", term_index, device)
    index = term_index.long().contiguous()
    is_wrong = (index < ABSENT) | (index >= positions)
    rule = f"{op}: term_index must be in [0, {positions}), or {ABSENT} for no position"
    if device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(~is_wrong.any(), rule)
    elif bool(is_wrong.any()):
        raise ValueError(f"{rule}, got {int(index[is_wrong][0])}")
    return index


def gather(values: Tensor, index: Tensor, absent: float = 0) -> Tensor:
    """The value of each term's position, in the shape of `index`; `absent` for a term without one.

    The gradient of a position is the sum over its terms, in their order.
    """
    return cast(Tensor, _Gather.apply(values.reshape(-1), index, absent))  # type: ignore[no-untyped-call]


def add_up(by_term: Tensor, index: Tensor, positions: int) -> Tensor:
    """The sum over the terms of each position, in a fixed order on every device."""
    is_there = index != ABSENT
    by_term = torch.where(is_there, by_term.view(index.shape), 0).reshape(-1)
    index = torch.where(is_there, index, 0).reshape(-1)
    total = by_term.new_zeros(positions)
    if by_term.device.type == "cpu":
        return total.index_add_(0, index, by_term)
    return total.index_put_((index,), by_term, accumulate=True)  # sorts, whereas index_add_ uses atomics


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, absent: float) -> Tensor:
        ctx.save_for_backward(index)
        ctx.positions = len(values)
        if len(values) == 0:
            return values.new_full(index.shape, absent)
        return torch.where(index == ABSENT, absent, values[index.clamp(min=0)])

    @staticmethod
    def backward(ctx: Any, by_term: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return add_up(by_term, index, ctx.positions), None, None
