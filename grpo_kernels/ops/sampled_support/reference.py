"""The specification of log-probs over a support: the logits whole, with -inf outside of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.ops.sampled_support.config import Entries
from grpo_kernels.ops.token_logprobs.config import IGNORED


def takes_part(entries: Entries) -> Tensor:
    """Rows [N] whose results depend on what they hold."""
    return (entries.bounds.diff() > 1) & (entries.places != IGNORED)


def masked(logits: Tensor, entries: Entries) -> Tensor:
    """Logits [N, V] with -inf outside of the support. Rows that take no part are not read, and get 0 inside of it."""
    place = torch.arange(len(entries.token_ids), device=logits.device)
    rows = torch.searchsorted(entries.bounds[1:].contiguous(), place, right=True).clamp(max=max(len(logits) - 1, 0))
    is_kept = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    is_kept = is_kept.index_put((rows, entries.token_ids), torch.ones_like(rows, dtype=torch.bool))
    return torch.where(is_kept, torch.where(takes_part(entries)[:, None], logits, 0), -math.inf)
