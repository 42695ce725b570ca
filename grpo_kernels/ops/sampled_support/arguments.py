"""Checks of a support: top-p, top-k and min-p sampling renormalise over a few token ids."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.linear_head.arguments import is_banned
from grpo_kernels.ops.linear_head.head import Head, LMHead
from grpo_kernels.ops.token_logprobs.config import IGNORED


class Entries(NamedTuple):
    """Kept token ids of N rows, one after the other, as int64 tensors.

    A row takes part if its target is not ignored and it keeps more than one id: the only id of a row is certain.

    Attributes:
        token_ids: kept ids [E]
        rows: row of each entry [E]; -1 for entries of rows that take no part
        bounds: entries of row i are bounds[i] to bounds[i + 1] - 1 [N + 1]
        places: target of each row as a place among its entries [N]; IGNORED for ignored rows, -1 if it is not kept
        order: entries by ascending token id, then row; those of rows that take no part are last [E]
    """

    token_ids: Tensor
    rows: Tensor
    bounds: Tensor
    places: Tensor
    order: Tensor


def check_support(op: str, support: object, head: Head) -> Entries:
    """The entries of a support for the head's targets and columns.

    On the CPU, values are checked here, and the error has the row. On a GPU, an assertion fails when the stream reaches
    it, and nothing waits; what the result holds then stays within its tensors.
    """
    if not isinstance(support, (tuple, list)) or len(support) != 2:
        raise TypeError(f"{op}: support must be a pair (token_ids, offsets) of tensors, got {_in_words(support)}")
    token_ids = checks.tensor(op, "support.token_ids", support[0], checks.INTEGERS)
    offsets = checks.tensor(op, "support.offsets", support[1], checks.INTEGERS)
    targets = head.targets
    rows = targets.numel()
    if token_ids.dim() != 1:
        raise ValueError(f"{op}: support.token_ids must have shape [E], got {list(token_ids.shape)}")
    if offsets.shape != (rows + 1,):
        raise ValueError(
            f"{op}: support.offsets must have shape [{rows + 1}], one more than there are targets, "
            f"got {list(offsets.shape)}"
        )
    checks.same_device(op, "support.token_ids", token_ids, targets.device)
    checks.same_device(op, "support.offsets", offsets, targets.device)
    entries = _entries_of(op, token_ids.long(), offsets.long(), targets, len(head.weight))
    if head.banned is not None:
        is_wrong = is_banned(entries.token_ids, head.banned) & (entries.rows >= 0)
        checks.values(op, "support.token_ids", "not be banned by the head", is_wrong, entries.token_ids)
    return entries


def check_support_alone(op: str, lm_head: LMHead, **arguments: object) -> None:
    """Refuses with a support what divides the work of a head: only kept columns are computed, for all tokens."""
    arguments = {"head.lora": lm_head.lora, "head.vocab_start": lm_head.vocab_start} | arguments
    for name, value in arguments.items():
        if value is not None:
            got = type(value).__name__ if isinstance(value, tuple) else repr(value)  # not all elements of an adapter
            raise ValueError(f"{op}: {name} must be None with support, got {got}; only kept columns are computed")


def _in_words(value: object) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__


def _entries_of(op: str, token_ids: Tensor, offsets: Tensor, targets: Tensor, columns: int) -> Entries:
    bounds = offsets.clamp(0, len(token_ids)).cummax(0).values
    bounds[:1] = 0
    _require(
        op,
        f"support.offsets must ascend from 0 to the number of token ids, {len(token_ids)}",
        torch.cat(((bounds == offsets)[:-1], offsets[-1:] == len(token_ids))),
        offsets,
        "at",
    )
    place = torch.arange(len(token_ids), device=token_ids.device)
    # entries outside of all bounds, after a failed assertion, count as the last row's
    rows = torch.searchsorted(bounds[1:].contiguous(), place, right=True).clamp(max=max(len(targets) - 1, 0))
    is_column = (token_ids >= 0) & (token_ids < columns)
    _require(op, f"support.token_ids must be in [0, {columns})", is_column, token_ids, "in row", rows)
    if len(token_ids) == 0:
        places = torch.where(targets == IGNORED, IGNORED, -1)
        _require(op, "targets must be in the support of their row", places != -1, targets, "in row")
        return Entries(token_ids, rows, bounds, places, place)
    token_ids = token_ids.clamp(0, columns - 1)
    starts = bounds[:-1]
    # at most one entry of a row is its target, so a sum of places is the place
    found = torch.where(token_ids == targets[rows], place - starts[rows] + 1, 0).cumsum(0)
    found = torch.cat((found.new_zeros(1), found))
    places = torch.where(targets == IGNORED, IGNORED, found[bounds[1:]] - found[starts] - 1)
    _require(op, "targets must be in the support of their row", places != -1, targets, "in row")
    takes_part = (targets != IGNORED) & (bounds.diff() > 1)
    live = torch.where(takes_part[rows], rows, -1)
    key, order = torch.where(live >= 0, token_ids, columns).sort(stable=True)
    by_key = live[order]
    is_new = (key[1:] != key[:-1]) | (by_key[1:] != by_key[:-1]) | (by_key[1:] < 0)
    _require(op, "support.token_ids must differ within a row", is_new, key[1:], "twice in row", by_key[1:])
    return Entries(token_ids, live, bounds, places, order)


def _require(op: str, rule: str, holds: Tensor, values: Tensor, where: str, rows: Tensor | None = None) -> None:
    """Asserts a rule for every value. On the CPU, the error has the first value that breaks it, and its row."""
    if holds.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(holds.all(), f"{op}: {rule}")
    elif not bool(holds.all()):
        first = int((~holds).int().argmax())
        row = first if rows is None else int(rows[first])
        raise ValueError(f"{op}: {rule}, got {int(values[first])} {where} {row}")
