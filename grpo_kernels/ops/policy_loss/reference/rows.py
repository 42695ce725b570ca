"""Tokens, their rows and the terms of the loss, as the specification of policy_loss sees them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.groups import packed_bounds


class Rows:
    """Maps tokens to rows (`count` for tokens of no row), sums over rows, and spreads rows over their tokens."""

    def __init__(self, shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device) -> None:
        if cu_seqlens is None:
            bounds = torch.arange(shape[0] + 1, device=device) * shape[1]
        else:
            bounds = packed_bounds("policy_loss", cu_seqlens, shape[0])
        self.count, self.starts = len(bounds) - 1, bounds[:-1]
        self.of = torch.searchsorted(bounds[1:], torch.arange(shape.numel(), device=device), right=True)

    def sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count + 1).index_add(0, self.of, values)[:-1]

    def spread(self, values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(1)])[self.of]

    def last(self, flagged: Tensor) -> Tensor:
        """Position of the last such token of each row, -1 where there is none."""
        position = torch.where(flagged, torch.arange(len(flagged), device=flagged.device), -1)
        return position.new_full((self.count + 1,), -1).scatter_reduce(0, self.of, position, "amax")[:-1]


class Tokens(NamedTuple):
    """One entry per token, 0 for tokens that take no part."""

    valid: Tensor
    kept: Tensor  # by their entropy
    lp: Tensor
    old: Tensor
    advantage: Tensor


class Terms(NamedTuple):
    """Terms of the policy loss: at every token, or at the last token of a segment or row."""

    here: Tensor  # bool, one per token
    score: Tensor  # log-prob of what the ratio is of
    ratio: Tensor
