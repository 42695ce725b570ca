"""Checks of a support: top-p, top-k and min-p sampling renormalise over a few token ids."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.linear_head.arguments import ids_of, is_banned
from grpo_kernels.ops.linear_head.head import Head, LMHead
from grpo_kernels.ops.sampled_support.reference import Entries
from grpo_kernels.ops.token_logprobs.config import IGNORED

_IDS, _OFFSETS = "support.token_ids", "support.offsets"


def check_support(op: str, support: object, head: Head, lm_head: LMHead) -> Entries:
    """The entries of a support for the head's targets and columns, which are those of all ranks.

    On the CPU, values are checked here, and the error has the row. On a GPU, an assertion fails
    when the stream reaches it, and nothing waits; what the result holds then stays within its
    tensors.
    """
    if not isinstance(support, (tuple, list)) or len(support) != 2:
        size = f" of {len(support)}" if isinstance(support, (tuple, list)) else ""
        rule = "a pair (token_ids, offsets) of tensors"
        raise TypeError(f"{op}: support must be {rule}, got {type(support).__name__}{size}")
    targets, (columns, in_range) = head.targets, ids_of(lm_head)
    for name, value in zip((_IDS, _OFFSETS), support, strict=True):
        checks.tensor(op, name, value, checks.INTEGERS)
        checks.same_device(op, name, value, targets.device)
    token_ids, offsets = (value.long() for value in support)
    if token_ids.dim() != 1:
        raise ValueError(f"{op}: {_IDS} must have shape [E], got {list(token_ids.shape)}")
    count, shape = len(token_ids), [len(targets) + 1]
    if list(offsets.shape) != shape:
        rule = f"have shape {shape}, one more than there are targets"
        raise ValueError(f"{op}: {_OFFSETS} must {rule}, got {list(offsets.shape)}")

    bounds = offsets.clamp(0, count).cummax(0).values
    bounds[:1] = 0
    bounds[-1:] = count
    rule = f"{_OFFSETS} must ascend from 0 to the number of token ids, {count}"
    _require(op, rule, bounds == offsets, offsets, "at")
    rows = torch.repeat_interleave(bounds.diff(), output_size=count)
    is_column = (token_ids >= 0) & (token_ids < columns)
    _require(op, f"{_IDS} must {in_range}", is_column, token_ids, "in row", rows)
    token_ids = token_ids.clamp(0, columns - 1)

    place = torch.arange(count, device=rows.device) - bounds[rows]
    place = torch.where(token_ids == targets[rows], place, -1)
    places = torch.full_like(targets, -1).scatter_reduce(0, rows, place, "amax")
    places = torch.where(targets == IGNORED, IGNORED, places)
    _require(op, "targets must be in the support of their row", places != -1, targets, "in row")

    takes_part = (targets != IGNORED) & (bounds.diff() > 1)
    live = torch.where(takes_part[rows], rows, -1)
    ids, order = token_ids.sort(stable=True)
    by_id = live[order]
    is_new = (ids.diff() != 0) | (by_id.diff() != 0) | (by_id[1:] < 0)
    _require(op, f"{_IDS} must differ within a row", is_new, ids[1:], "twice in row", by_id[1:])
    if head.banned is not None:
        is_wrong = is_banned(token_ids, head.banned) & (live >= 0)
        checks.values(op, _IDS, "not be banned by the head", is_wrong, token_ids)
    return Entries(token_ids, live, bounds, order, places)


def check_support_alone(op: str, lm_head: LMHead, **arguments: object) -> None:
    """Refuses with a support what divides the work of a head: only kept columns are computed."""
    for name, value in {"head.lora": lm_head.lora, **arguments}.items():
        if value is not None:
            # not all elements of an adapter
            got = type(value).__name__ if isinstance(value, tuple) else repr(value)
            rule = "must be None with support"
            raise ValueError(f"{op}: {name} {rule}, got {got}; only kept columns are computed")


def _require(
    op: str,
    rule: str,
    holds: Tensor,
    values: Tensor,
    where: str,
    rows: Tensor | None = None,
) -> None:
    """Asserts a rule for every value. On the CPU, the error has the first that breaks it."""
    if not checks.is_readable(holds):
        torch._assert_async(holds.all(), f"{op}: {rule}")
    elif not holds.all():
        first = int(holds.int().argmin())
        row = first if rows is None else rows[first]
        raise ValueError(f"{op}: {rule}, got {values[first]} {where} {row}")
