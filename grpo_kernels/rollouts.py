"""Rollouts of several rows: their tokens as one packed row, and what they add up to over the ranks that hold them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.groups import TokenRows, packed_bounds, sort_rows


class JoinedRows:
    """The rows of every rollout one after the other, in the order of the batch.

    Rollouts are in ascending order of their ids. Their number is known only on the device, so `cu_seqlens` has room for
    one a row; of the last ones, which are empty, `exists` is False.

    Args:
        op: function that errors name
        rollouts: integer ids [B]
        tokens: a tensor in the shape of the tokens, padded [B, T] or packed [M] with `cu_seqlens`
    """

    def __init__(self, op: str, rollouts: Tensor, tokens: Tensor, cu_seqlens: Tensor | None) -> None:
        self.shape = tokens.shape
        rows = tokens if cu_seqlens is None else cu_seqlens[1:]
        ids = checks.per_row(op, "rollouts", rollouts, checks.INTEGERS, rows).long()
        sorted_rows = sort_rows(len(ids), ids, 0, None)
        assert sorted_rows is not None
        self._order, starts = sorted_rows.order, sorted_rows.starts
        self.exists = starts[:-1] < len(ids)
        if cu_seqlens is None:
            self.cu_seqlens = starts * tokens.shape[1]
            return
        bounds = packed_bounds(op, cu_seqlens.long(), len(tokens))
        rank = torch.empty_like(self._order).index_put((self._order,), torch.arange(len(ids), device=ids.device))
        # tokens of no row stay behind all others
        of_token = TokenRows(op, tokens.shape, bounds, tokens.device).spread(rank - len(ids))
        self._order = of_token.sort(stable=True).indices
        ends = bounds.diff()[sorted_rows.order].cumsum(0)
        self.cu_seqlens = torch.cat([ends.new_zeros(1), ends])[starts]

    def join(self, values: Tensor) -> Tensor:
        """Values of the tokens [M], in the order of the rollouts."""
        return values[self._order].reshape(-1)

    def split(self, values: Tensor) -> Tensor:
        """The inverse: from the order of the rollouts to that of the batch, in its shape."""
        ordered = values.view(self.shape)
        return torch.empty_like(ordered).index_copy_(0, self._order, ordered)


class RankRows:
    """Rows of this rank among those of all ranks of a process group, in the order of ranks; without one, this rank's.

    The ranks may have different numbers of rows, of which the host is told once.
    """

    def __init__(self, rows: int, device: torch.device, process_group: Any) -> None:
        self._group, self._sizes, self._rank = process_group, [rows], 0
        if process_group is not None:
            sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(process_group.size())]
            torch.distributed.all_gather(sizes, torch.tensor([rows], device=device), process_group)
            self._sizes = torch.cat(sizes).tolist()
            self._rank = process_group.rank()

    def gather(self, values: Tensor) -> Tensor:
        """Values of all rows from those of this rank's; differentiable."""
        if self._group is None:
            return values
        padded = torch.cat([values, values.new_zeros(max(self._sizes) - len(values), *values.shape[1:])])
        by_rank: Tensor = _AllGather.apply(padded, self._group)  # type: ignore[no-untyped-call]
        return torch.cat([of_rank[:size] for of_rank, size in zip(by_rank, self._sizes, strict=True)])

    def own(self, values: Tensor) -> Tensor:
        """This rank's of the values of all rows."""
        return torch.split(values, self._sizes)[self._rank]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(values) for _ in range(group.size())]
        torch.distributed.all_gather(parts, values.contiguous(), group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, torch.distributed.ReduceOp.SUM, ctx.group)
        return total[ctx.group.rank()], None
