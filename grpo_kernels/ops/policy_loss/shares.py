"""The weight of each token in the mean that an aggregation asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.groups import TokenRows
from grpo_kernels.ops.policy_loss.config import AGGREGATIONS

_OP = "token_shares"
_MEANS = tuple(name for name in AGGREGATIONS if name != "local-token-mean")


def token_shares(
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    aggregation: str = "token-mean",
    count: float | Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Computes the `weights` of policy_loss whose weighted sum is the mean that an aggregation asks for, in float64.

    Args:
        mask: tokens that take part, padded [B, T] or packed [M] with `cu_seqlens`; 0 is False
        cu_seqlens: int32 or int64 [B + 1], bounds of the rows of packed input
        aggregation: as in LossConfig
        count: what the mean divides by, the number of tokens or of rows of the whole batch; None means to count the
            tokens, or the rows that have one, here
        max_length: constant divisor of "seq-mean-token-sum-norm"
    """
    checks.tensor(_OP, "mask", mask, (torch.bool, *checks.INTEGERS, *checks.FLOATS))
    if mask.dim() != (2 if cu_seqlens is None else 1):
        raise ValueError(f"{_OP}: mask must have shape [B, T], or [M] with cu_seqlens, got {list(mask.shape)}")
    if aggregation not in _MEANS:
        raise checks.unknown(_OP, "aggregation", aggregation, _MEANS)
    if (aggregation == "seq-mean-token-sum-norm") != (max_length is not None):
        rule = "given with aggregation='seq-mean-token-sum-norm', and only then"
        raise ValueError(f"{_OP}: max_length must be {rule}, got {max_length!r}")
    if max_length is not None and checks.integer(_OP, "max_length", max_length) < 1:
        raise ValueError(f"{_OP}: max_length must be at least 1, got {max_length}")
    if cu_seqlens is not None:
        checks.tensor(_OP, "cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
        checks.same_device(_OP, "cu_seqlens", cu_seqlens, mask.device)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
            raise ValueError(f"{_OP}: cu_seqlens must have shape [B + 1], got {list(cu_seqlens.shape)}")
        cu_seqlens = cu_seqlens.long().contiguous()
    rows = TokenRows(_OP, mask.shape, cu_seqlens, mask.device)
    members = rows.within(mask.reshape(-1) != 0).double()
    lengths = rows.sum(members)
    if aggregation == "token-sum":
        return members.view(mask.shape)
    if aggregation == "token-mean":
        return (members / _divisor(mask, count, members.sum())).view(mask.shape)
    share = 1 / _divisor(mask, count, (lengths > 0).sum().double())
    of_row = share.expand(rows.count)
    if aggregation == "seq-mean-token-mean":
        of_row = of_row / lengths.clamp(min=1)
    if max_length is not None:
        of_row = of_row / max_length
    return (rows.spread(of_row) * members).view(mask.shape)


def _divisor(mask: Tensor, count: float | Tensor | None, counted: Tensor) -> Tensor:
    if isinstance(count, Tensor):
        checks.tensor(_OP, "count", count, (*checks.INTEGERS, *checks.FLOATS))
        if count.numel() != 1:
            raise ValueError(f"{_OP}: count must have one element, got shape {list(count.shape)}")
        checks.same_device(_OP, "count", count, mask.device)
        count = count.detach().double().reshape(())
        return torch.where(count > 0, count, 1.0)
    if count is not None:
        checks.finite(_OP, "count", count, 0.0, open_end=True)
        return counted.new_full((), count)
    return counted.clamp(min=1)
