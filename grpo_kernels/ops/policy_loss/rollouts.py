"""Ratios of rollouts that are several rows, or slices of rows on several ranks."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.groups import RowGroups, TokenRows
from grpo_kernels.ops.policy_loss.arguments import Layout
from grpo_kernels.rollouts import RankRows

_OP = "rollout_logprobs"


def rollout_logprobs(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollouts: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    process_group: Any = None,
) -> Tensor:
    """Computes log-probs for policy_loss whose ratios are those of rollouts, as ratio="sequence" has those of rows.

    The ratio of a rollout is the geometric mean of the ratios of its tokens, on whichever rows and ranks they are. With
    such log-probs a loss has no KL term; a second one over the log-probs themselves adds it. Rows of one rollout that
    are neighbours need none of this: `cu_seqlens` of policy_loss can bound them as one.

    Args:
        logprobs: log-probs of the policy, padded [B, T] or packed [M] with `cu_seqlens`; differentiable
        old_logprobs: log-probs of the policy that the ratio refers to, to be given to policy_loss, too
        rollouts: integer ids [B]
        mask, cu_seqlens: as in policy_loss
        process_group: a torch.distributed process group whose ranks hold parts of the batch: rows, or slices of rows.
            Ids are then those of the whole batch, and every rank has to call backward. Waits for the device once

    Returns:
        log-probs in the shape of logprobs, differentiable
    """
    layout = Layout.of(_OP, logprobs, cu_seqlens)
    bounds = None if cu_seqlens is None else cu_seqlens.long().contiguous()
    rows = TokenRows(_OP, logprobs.shape, bounds, logprobs.device)
    flags = layout.flags("mask", mask)
    everywhere = torch.ones(logprobs.numel(), dtype=torch.bool, device=logprobs.device)
    if bounds is not None:
        checks.no_token_left_out(_OP, bounds, len(logprobs), flags)
    valid = rows.within(everywhere if flags is None else flags.reshape(-1))
    own = rows.counts(valid)
    ids = checks.per_row(_OP, "rollouts", rollouts, checks.INTEGERS, own).long()
    lp = torch.where(valid, layout.number(logprobs).reshape(-1), 0)
    checks.tensor(_OP, "old_logprobs", old_logprobs, checks.FLOATS)
    old = torch.where(valid, cast(Tensor, layout.floats("old_logprobs", old_logprobs)).reshape(-1), 0)
    old = old.clamp(min=-math.sqrt(torch.finfo(lp.dtype).max))  # where the old policy could not sample: far, but finite
    ranks = RankRows(rows.count, logprobs.device, process_group)
    sums = ranks.gather(torch.stack([rows.sum((lp - old).double()), own], 1))
    siblings = RowGroups.of(_OP, ranks.gather(ids), sums)
    total, count = siblings.reduce(sums, "sum", 0.0).unbind(1)
    mean = ranks.own((total / count.clamp(min=1))[siblings.group])
    return (old + torch.where(valid, rows.spread(mean), 0).to(lp.dtype)).view(logprobs.shape)
