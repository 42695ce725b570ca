"""Which rows belong together, for ops that return something for each group, and rows in the layout [P, K]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks, segments

# Padding alone has no kernel that limits a group.
_ANY_SIZE = 2**31 - 1
_VALUES = (*checks.FLOATS, *checks.INTEGERS, torch.bool)


class GroupLayout(NamedTuple):
    """Group p has the rows order[offsets[p]] to order[offsets[p + 1] - 1]; both None: `size` neighbours each."""

    order: Tensor | None
    offsets: Tensor | None
    count: int  # type: ignore[assignment]  # tuple.count is of no use here
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
    if max_size is not None and max_size > most:
        raise ValueError(f"{op}: max_size must be at most {most}, got {max_size}")
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


def places(layout: GroupLayout, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row order[i] is at place[i] of the padded layout, p * size + (which one of group p it is)."""
    at = torch.arange(count, device=device)
    if layout.order is None or layout.offsets is None:
        return at, at
    group = torch.searchsorted(layout.offsets[1:].contiguous(), at, right=True)
    return layout.order, group * layout.size + at - layout.offsets[group]


def layout_within(op: str, groups: int | Tensor, rows: Tensor, count: int, size: int, rule: str) -> GroupLayout:
    """The layout of rows in something of shape [count, size] that was made with the same groups."""
    if isinstance(groups, Tensor):
        # elsewhere than on the CPU the sizes are asserted without waiting
        on_cpu = groups.device.type == "cpu"
        layout = check_layout(op, groups, rows, None if on_cpu else count, None if on_cpu else size, _ANY_SIZE)
        fits = layout.count <= count and layout.size <= size
    else:
        layout = check_layout(op, groups, rows, None, None, _ANY_SIZE)
        fits = (layout.count, layout.size) == (count, size)
    if not fits:
        raise ValueError(f"{op}: groups must be {rule}, got {layout.count} of at most {layout.size} rows")
    return layout._replace(size=size)


def pad_rows(
    values: Tensor,
    groups: int | Tensor,
    *,
    fill: float | None = None,
    num_groups: int | None = None,
    max_size: int | None = None,
) -> Tensor:
    """Rows [N, ...] to [P, K, ...], the layout of pairwise_cosine: groups by ascending id, their rows in order.

    fill  what stands where a group has no row; None: NaN for floats, -1 for integers, False for bool, which is what
          "absent" is written as everywhere here
    num_groups, max_size
          as in similarity_groups: finding them waits for a GPU once
    """
    name = "pad_rows"
    checks.tensor(name, "values", values, _VALUES)
    if values.dim() == 0:
        raise ValueError(f"{name}: values must have shape [N, ...], got []")
    if fill is None and values.dtype == torch.uint8:
        raise ValueError(f"{name}: fill must be given for uint8, which has no -1, got None")
    if fill is None:
        fill = float("nan") if values.is_floating_point() else 0 if values.dtype == torch.bool else -1
    layout = check_layout(name, groups, values, num_groups, max_size, _ANY_SIZE)
    order, place = places(layout, values.shape[0], values.device)
    padded = values.new_full((layout.count * layout.size, *values.shape[1:]), fill)
    return padded.index_put((place,), values[order]).view(layout.count, layout.size, *values.shape[1:])


def unpad_rows(values: Tensor, groups: int | Tensor) -> Tensor:
    """What pad_rows made [P, K, ...] of, as rows [N, ...] again; with the same groups. Nothing waits for a GPU."""
    name = "unpad_rows"
    checks.tensor(name, "values", values, _VALUES)
    if values.dim() < 2:
        raise ValueError(f"{name}: values must have shape [P, K, ...], got {list(values.shape)}")
    count, size = values.shape[:2]
    flat = values.flatten(0, 1)
    rows = flat
    if isinstance(groups, Tensor):
        if groups.dim() != 1:
            raise ValueError(f"{name}: groups must have shape [N], got {list(groups.shape)}")
        checks.same_device(name, "groups", groups, values.device)
        rows = groups
    rule = f"those of values, {count} of at most {size} rows"
    layout = layout_within(name, groups, rows, count, size, rule)
    order, place = places(layout, len(rows), values.device)
    found = flat[place]
    return torch.empty_like(found).index_put((order,), found)
