"""The weight of each token in the mean that an aggregation asks for, counted over a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.groups import RowGroups, TokenRows
from grpo_kernels.ops.policy_loss.config import AGGREGATIONS
from grpo_kernels.rollouts import RankRows

_OP = "token_shares"
_OF_GROUPS = "group-mean-token-mean"
_MEANS = (*(name for name in AGGREGATIONS if name != "local-token-mean"), _OF_GROUPS)


def token_shares(
    mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    rollouts: Tensor | None = None,
    groups: int | Tensor | None = None,
    aggregation: str = "token-mean",
    count: float | Tensor | None = None,
    max_length: int | None = None,
    process_group: Any = None,
) -> Tensor:
    """Computes the `weights` of policy_loss whose weighted sum is the mean that an aggregation asks for, in float64.

    Call it once for the whole batch: slices of the result are right in every micro-batch, as the losses of the parts
    then add up to that of the batch.

    Args:
        mask: tokens that take part, bools or 0 and 1, padded [B, T] or packed [M] with `cu_seqlens`
        cu_seqlens: int32 or int64 [B + 1], bounds of the rows of packed input
        rollouts: integer ids [B]; the rows of one id are one sequence in the means "seq-mean-...", which alone take
            them. None means that each row is one
        groups: an int (groups of that many consecutive rows) or integer ids [B]; for "group-mean-token-mean"
        aggregation: as in LossConfig, or "group-mean-token-mean", the mean over groups of the mean over their tokens
        count: what the mean divides by, the number of tokens, sequences or groups of the whole batch; None means to
            count the tokens, or the sequences or groups that have one
        max_length: constant divisor of "seq-mean-token-sum-norm"
        process_group: a torch.distributed process group whose ranks hold parts of the batch: rows, or slices of rows.
            Ids of rollouts and groups are then those of the whole batch; rows with one id are one rollout, on whichever
            ranks they are, so slices of rows need ids. Waits for the device once

    Returns:
        float64 weights in the shape of the mask, 0 outside it; a sequence without tokens counts in no mean unless
        `count` has it
    """
    checks.tensor(_OP, "mask", mask, (torch.bool, *checks.INTEGERS, *checks.FLOATS))
    if mask.dim() != (2 if cu_seqlens is None else 1):
        raise ValueError(f"{_OP}: mask must have shape [B, T], or [M] with cu_seqlens, got {list(mask.shape)}")
    _check_means(aggregation, max_length, groups, count)
    if cu_seqlens is not None:
        checks.tensor(_OP, "cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
        checks.same_device(_OP, "cu_seqlens", cu_seqlens, mask.device)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
            raise ValueError(f"{_OP}: cu_seqlens must have shape [B + 1], got {list(cu_seqlens.shape)}")
        cu_seqlens = cu_seqlens.long().contiguous()
    rows = TokenRows(_OP, mask.shape, cu_seqlens, mask.device)
    counted = checks.flags(_OP, "mask", mask).reshape(-1)
    if cu_seqlens is not None:
        checks.no_token_left_out(_OP, cu_seqlens, len(mask), counted)
    members = rows.within(counted).double()
    lengths = rows.sum(members)
    units = _units(aggregation, rollouts, groups, lengths)
    if aggregation == "token-sum":
        return members.view(mask.shape)
    ranks = RankRows(len(lengths), mask.device, process_group)
    everywhere = ranks.gather(lengths)
    of_row, counted = _sizes(ranks, everywhere, units)
    if aggregation == "token-mean":
        counted = everywhere.sum()
    share = (1 / _divisor(mask, count, counted)).expand(rows.count)
    if aggregation in ("seq-mean-token-mean", _OF_GROUPS):
        share = share / of_row.clamp(min=1)
    if max_length is not None:
        share = share / max_length
    return (rows.spread(share) * members).view(mask.shape)


def _check_means(
    aggregation: str, max_length: int | None, groups: int | Tensor | None, count: float | Tensor | None
) -> None:
    if aggregation not in _MEANS:
        raise checks.unknown(_OP, "aggregation", aggregation, _MEANS)
    if (aggregation == "seq-mean-token-sum-norm") != (max_length is not None):
        rule = "given with aggregation='seq-mean-token-sum-norm', and only then"
        raise ValueError(f"{_OP}: max_length must be {rule}, got {max_length!r}")
    if max_length is not None and checks.integer(_OP, "max_length", max_length) < 1:
        raise ValueError(f"{_OP}: max_length must be at least 1, got {max_length}")
    if aggregation == "token-sum" and count is not None:
        rule = "None with aggregation='token-sum', which divides by nothing"
        raise ValueError(f"{_OP}: count must be {rule}, got {count!r}")
    if (aggregation == _OF_GROUPS) != (groups is not None):
        got = "None" if groups is None else type(groups).__name__
        raise ValueError(f"{_OP}: groups must be given with aggregation={_OF_GROUPS!r}, and only then, got {got}")


def _units(aggregation: str, rollouts: Tensor | None, groups: int | Tensor | None, lengths: Tensor) -> int | Tensor:
    """The units that the mean is over: ids of the rows, or a number of consecutive rows."""
    if rollouts is not None:
        if not aggregation.startswith("seq-mean"):
            raise ValueError(
                f"{_OP}: rollouts must be left out with aggregation={aggregation!r}, which counts tokens alike however "
                "rollouts are split into rows, got a tensor; aggregation='seq-mean-token-mean' counts rollouts"
            )
        rollouts = checks.per_row(_OP, "rollouts", rollouts, checks.INTEGERS, lengths).long()
    if groups is None:
        return 1 if rollouts is None else rollouts
    if isinstance(groups, Tensor):
        return checks.per_row(_OP, "groups", groups, checks.INTEGERS, lengths).long()
    RowGroups.of(_OP, groups, lengths)  # refuses what does not divide this rank's rows
    return groups


def _sizes(ranks: RankRows, everywhere: Tensor, units: int | Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of the unit that each row is part of, and the number of units that have any; over all ranks."""
    if isinstance(units, int) and units == 1:
        return ranks.own(everywhere), (everywhere > 0).sum().double()
    members = RowGroups.of(_OP, ranks.gather(units) if isinstance(units, Tensor) else units, everywhere)
    totals = members.reduce(everywhere, "sum", 0.0)
    return ranks.own(totals[members.group]), (totals > 0).sum().double()


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
