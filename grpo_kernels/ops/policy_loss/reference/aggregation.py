"""The weight of each token in the mean that an aggregation asks for, in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.groups import TokenRows
from grpo_kernels.ops.policy_loss.config import (
    LOCAL_TOKEN_MEAN,
    ROW_TOKEN_MEAN,
    ROW_TOKEN_NORM,
    TOKEN_MEAN,
    TOKEN_SUM,
)
from grpo_kernels.ops.policy_loss.losses import Plan

# Places of the units in a normalizer.
TOKENS, ROWS, SEGMENTS = range(3)


class Shares:
    """The weight of every token in a sum that is the mean an aggregation asks for."""

    def __init__(
        self,
        rows: TokenRows,
        valid: Tensor,
        here: Tensor,
        normalizers: Tensor | None,
        counts: list[float],
        weights: Tensor | None,
        plan: Plan,
    ) -> None:
        self.rows, self.valid, self.here, self.weights, self.plan = rows, valid, here, weights, plan
        self.normalizers, self.counts = normalizers, counts

    def of(self, aggregation: int, policy: bool = False) -> Tensor:
        if aggregation == LOCAL_TOKEN_MEAN:
            return self.valid.double() / self.valid.sum().clamp(min=1)
        if self.weights is not None:
            return self.weights
        members = (self.here if policy else self.valid).double()
        if aggregation == TOKEN_SUM:
            return members
        if aggregation == TOKEN_MEAN:
            return members / self._divisor(SEGMENTS if policy and self.plan.by_segment else TOKENS, members.sum())
        if self.plan.count_empty_rows or (policy and self.plan.row.is_of_rows):
            counted = members.new_full((), self.rows.count)
        else:
            counted = (self.rows.sum(self.valid.double()) > 0).sum().double()
        share = (1 / self._divisor(ROWS, counted)).expand(self.rows.count)
        if aggregation == ROW_TOKEN_MEAN:
            share = share / self.rows.sum(members).clamp(min=1)
        if aggregation == ROW_TOKEN_NORM:
            share = share / self.plan.max_length
        return self.rows.spread(share) * members

    def _divisor(self, unit: int, counted: Tensor) -> Tensor:
        """The number of units in the normalizer, or counted here."""
        number = self.counts[unit]
        if math.isnan(number):
            return counted.clamp(min=1)
        if self.normalizers is None or number != math.inf:
            return counted.new_full((), number)
        known = self.normalizers[self.counts[:unit].count(math.inf)]
        return torch.where(known > 0, known, 1.0)  # a count from elsewhere can be 0, which counts as 1, as in TRL
