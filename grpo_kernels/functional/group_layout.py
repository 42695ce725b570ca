"""Which rows belong together, for ops that return something for each group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks, segments


class GroupLayout(NamedTuple):
    """Group p has the rows order[offsets[p]] to order[offsets[p + 1] - 1]; both None: `size` neighbours each."""

    order: Tensor | None
    offsets: Tensor | None
    count: int
    size: int  # of the largest


def check_layout(
    op: str, groups: int | Tensor, rows: Tensor, num_groups: int | None, max_size: int | None, most: int
) -> GroupLayout:  # fmt: skip
    """Groups in ascending order of their ids. How many, and of what size, waits for a GPU once unless it is given."""
    for name, value in (("num_groups", num_groups), ("max_size", max_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__} {value!r}")
        if value is not None and value < 0:
            raise ValueError(f"{op}: {name} must not be negative, got {value}")
    count = rows.shape[0]
    if isinstance(groups, Tensor):
        return _of_ids(op, checks.per_row(op, "groups", groups, checks.INTEGERS, rows), num_groups, max_size, most)
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"{op}: groups must be an int or an integer tensor, got {type(groups).__name__} {groups!r}")
    if groups < 1 or groups > most:
        raise ValueError(f"{op}: groups must have 1 to {most} rows each, got {groups}")
    if count % groups != 0:
        raise ValueError(
            f"{op}: groups must divide the number of rows, {count}, got {groups}; "
            "pass a tensor of ids for groups of unequal size"
        )
    for name, value, found in (("num_groups", num_groups, count // groups), ("max_size", max_size, groups)):
        if value is not None and value != found:
            raise ValueError(f"{op}: {name} must be {found} for {count} rows in groups of {groups}, got {value}")
    return GroupLayout(None, None, count // groups, groups)


def _of_ids(op: str, ids: Tensor, num_groups: int | None, max_size: int | None, most: int) -> GroupLayout:
    count = len(ids)
    if count == 0:
        offsets = ids.new_zeros((num_groups or 0) + 1, dtype=torch.int64)
        return GroupLayout(ids.long(), offsets, num_groups or 0, max_size or 0)
    found = segments.sort_rows(count, ids.long(), 0, None)
    assert found is not None
    largest, in_use = found.starts.diff().max(), (found.starts < count).sum()
    if num_groups is None or max_size is None or ids.device.type == "cpu":
        groups, size = torch.stack((in_use, largest)).tolist()
        for name, value, least in (("num_groups", num_groups, groups), ("max_size", max_size, size)):
            if value is not None and value < least:
                raise ValueError(f"{op}: {name} must be at least {least} for these groups, got {value}")
        num_groups, max_size = groups if num_groups is None else num_groups, size if max_size is None else max_size
    else:
        torch._assert_async(
            (in_use <= num_groups) & (largest <= max_size), f"{op}: num_groups or max_size is too small"
        )
    if max_size > most:
        raise ValueError(f"{op}: groups must have at most {most} rows each, got one of {max_size}")
    wanted = torch.arange(num_groups + 1, device=ids.device).clamp(max=count)
    return GroupLayout(found.order, found.starts[wanted], num_groups, max_size)
