"""The weight of each token in the mean that an aggregation asks for, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows
from grpo_kernels.ops.policy_loss.config import (
    GEO_MEAN,
    LOCAL_TOKEN_MEAN,
    ROW_TOKEN_MEAN,
    ROW_TOKEN_NORM,
    TOKEN_MEAN,
    TOKEN_SUM,
    Plan,
)


class Shares:
    """The weight of every token in a sum that is the mean an aggregation asks for."""

    def __init__(
        self,
        rows: TokenRows,
        valid: Tensor,
        kept: Tensor,
        here: Tensor,
        normalizers: Tensor | None,
        counts: list[float],
        weights: Tensor | None,
        plan: Plan,
    ) -> None:
        self.rows, self.valid, self.kept, self.here, self.weights, self.plan = rows, valid, kept, here, weights, plan
        known = torch.tensor(counts, dtype=torch.float64, device=valid.device)
        if normalizers is not None:
            known = torch.where(normalizers[:-1].isnan(), known, normalizers[:-1])
        self.tokens, self.row_count, self.segments = known

    def of(self, aggregation: int, policy: bool = False) -> Tensor:
        if aggregation == LOCAL_TOKEN_MEAN:
            return self.kept / self.kept.sum().double().clamp(min=1)
        if self.weights is not None:
            return self.weights
        by_segment = policy and self.plan.by_segment
        members = self.here if policy else self.valid
        if aggregation == TOKEN_SUM:
            return members.double()
        if aggregation == TOKEN_MEAN:
            return members / _known(self.segments if by_segment else self.tokens, members.sum())
        per_row = self.rows.sum(members.double())
        counted = (self.rows.sum(self.valid.double()) > 0).sum()
        if self.plan.count_empty_rows or (policy and self.plan.loss == GEO_MEAN):
            counted = torch.full_like(counted, self.rows.count)
        share = 1 / _known(self.row_count, counted).expand(self.rows.count)
        if aggregation == ROW_TOKEN_MEAN:
            share = share / per_row.clamp(min=1)
        if aggregation == ROW_TOKEN_NORM:
            share = share / self.plan.max_length
        return self.rows.spread(share) * members


def _known(normalizer: Tensor, counted: Tensor) -> Tensor:
    return torch.where(normalizer.isnan(), counted.clamp(min=1), normalizer)
