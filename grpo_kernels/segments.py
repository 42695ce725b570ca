"""Which tokens and rows belong together, found on the device and without asking it anything."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Segment s holds rows order[starts[s]] .. order[starts[s + 1] - 1], ascending; all int64.

    How many segments there are is known only on the device, so every array has room for one per row; those past the
    last are empty. parent[s] is the number of the group that s is a part of, with its rows parent_starts[...] of the
    same order; both None without subgroups.
    """

    order: Tensor
    starts: Tensor
    parent: Tensor | None
    parent_starts: Tensor | None


def sort_rows(rows: int, groups: Tensor | None, group_size: int, subgroups: Tensor | None) -> Segments | None:
    """None where rows are in order as they are: uniform groups without subgroups."""
    if groups is None:
        if subgroups is None:
            return None
        groups = torch.arange(rows, device=subgroups.device) // group_size
    if subgroups is None:
        ids, order = groups.sort(stable=True)
        return Segments(order, _starts(_numbers(_changes(ids))), None, None)
    by_subgroup = subgroups.sort(stable=True).indices
    order = by_subgroup[groups[by_subgroup].sort(stable=True).indices]
    new_group = _changes(groups[order])
    parents = _numbers(new_group)
    starts = _starts(_numbers(new_group | _changes(subgroups[order])))
    # an empty segment starts past the last row; any parent will do for it
    parent = parents[starts[:-1].clamp(max=max(rows - 1, 0))]
    return Segments(order, starts, parent, _starts(parents))


def packed_bounds(op: str, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Asserts that `cu_seqlens` bounds packed rows; returns it clamped to [0, tokens] and made to ascend from 0.

    The assertion fails at once on the CPU. On a GPU it fails in its own place of the stream, without a wait: kernels
    that read the result stay within the tokens whatever `cu_seqlens` holds.
    """
    bounds = cu_seqlens.clamp(0, tokens).cummax(0).values
    bounds[:1] = 0
    rule = "cu_seqlens must ascend from 0 to at most the number of tokens"
    torch._assert_async((bounds == cu_seqlens).all(), f"{op}: {rule}")
    return bounds


def _changes(sorted_ids: Tensor) -> Tensor:
    """True at the first row of each run of equal ids."""
    changes = torch.ones_like(sorted_ids, dtype=torch.bool)
    changes[1:] = sorted_ids[1:] != sorted_ids[:-1]
    return changes


def _numbers(first_of_run: Tensor) -> Tensor:
    return first_of_run.cumsum(0) - 1


def _starts(numbers: Tensor) -> Tensor:
    wanted = torch.arange(len(numbers) + 1, device=numbers.device)
    return torch.searchsorted(numbers, wanted)
