"""Finds which rows form a group and which tokens form a packed sequence, on the device and without host waits.

Two forms are used: `SortedRows` for ops that return one value per row, and `GroupLayout` for ops that return one
value per group, with rows padded to [P, K].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks

# Padding has no kernel that limits the size of a group.
_ANY_SIZE = 2**31 - 1
_VALUES = (*checks.FLOATS, *checks.INTEGERS, torch.bool)


class SortedRows(NamedTuple):
    """Rows sorted by group, all int64: group g holds rows order[starts[g]] to order[starts[g + 1] - 1], ascending.

    The number of groups is known only on the device, so every array has room for one group per row; the last ones are
    empty. With subgroups, g counts subgroups, parent[g] is the group that subgroup g belongs to, and the rows of group
    p are order[parent_starts[p]] to order[parent_starts[p + 1] - 1]; otherwise both are None.
    """

    order: Tensor
    starts: Tensor
    parent: Tensor | None
    parent_starts: Tensor | None


def sort_rows(rows: int, groups: Tensor | None, group_size: int, subgroups: Tensor | None) -> SortedRows | None:
    """Sorts rows by group, then by subgroup; None for uniform groups without subgroups, whose rows are in order."""
    if groups is None:
        if subgroups is None:
            return None
        groups = torch.arange(rows, device=subgroups.device) // group_size
    if subgroups is None:
        ids, order = groups.sort(stable=True)
        return SortedRows(order, _starts(_numbers(_changes(ids))), None, None)
    by_subgroup = subgroups.sort(stable=True).indices
    order = by_subgroup[groups[by_subgroup].sort(stable=True).indices]
    new_group = _changes(groups[order])
    parents = _numbers(new_group)
    starts = _starts(_numbers(new_group | _changes(subgroups[order])))
    # an empty group starts past the last row; its parent is never read
    parent = parents[starts[:-1].clamp(max=max(rows - 1, 0))]
    return SortedRows(order, starts, parent, _starts(parents))


class RowGroups(NamedTuple):
    """Rows sorted by group, the first row of each group in that order with room for one group per row, and the group
    of each row, all int64: what sums over the rows of a group need, in a fixed order and without a host wait."""

    order: Tensor
    starts: Tensor
    group: Tensor

    @classmethod
    def of(cls, op: str, groups: int | Tensor, rows: Tensor) -> RowGroups:
        """Checks `groups`, an int (that many consecutive rows) or integer ids, and lays out the rows of a tensor."""
        count = rows.shape[0]
        if isinstance(groups, Tensor):
            ids = checks.per_row(op, "groups", groups, checks.INTEGERS, rows).long()
        else:
            checks.group_size(op, groups, count)
            places = torch.arange(count + 1, device=rows.device)
            order = places[:-1]
            return cls(order, (places * groups).clamp(max=count), order // groups)
        sorted_rows = sort_rows(count, ids, 0, None)
        assert sorted_rows is not None
        order, starts = sorted_rows.order, sorted_rows.starts
        place = torch.searchsorted(starts[1:].contiguous(), torch.arange(count, device=rows.device), right=True)
        return cls(order, starts, torch.empty_like(place).index_put((order,), place))

    def reduce(self, values: Tensor, how: str, initial: float) -> Tensor:
        """The sum, minimum or maximum of the rows [B, ...] of each group, by group; `initial` where there is none."""
        if values.numel() == 0:
            return values
        ordered = values[self.order].contiguous()
        return torch.segment_reduce(ordered, how, offsets=self.starts, axis=0, unsafe=True, initial=initial)


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


def packed_bounds(op: str, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Asserts that `cu_seqlens` bounds packed rows, and returns it clamped to [0, tokens] and non-decreasing from 0.

    On the CPU the assertion fails at once, on a GPU when the stream reaches it; nothing waits. Kernels that read the
    result stay within the tokens whatever `cu_seqlens` holds.
    """
    bounds = cu_seqlens.clamp(0, tokens).cummax(0).values
    bounds[:1] = 0
    rule = "cu_seqlens must ascend from 0 to at most the number of tokens"
    torch._assert_async((bounds == cu_seqlens).all(), f"{op}: {rule}")
    return bounds


class TokenRows:
    """Rows of tokens, padded [B, T] or packed [M]: reduces over the tokens of each row, and spreads over them.

    The order of every sum is fixed, also in the gradient, so that results repeat bit for bit on a GPU without torch's
    deterministic mode; nothing is copied from the host or waits.
    """

    def __init__(self, op: str, shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device) -> None:
        self._shape, self._device, self._bounds, self._row = shape, device, None, None
        self.count = shape[0]
        if cu_seqlens is not None:
            self._bounds = packed_bounds(op, cu_seqlens, shape[0])
            self._row = torch.searchsorted(self._bounds[1:], self._places(), right=True)
            self.count = len(self._bounds) - 1

    def _places(self) -> Tensor:
        return torch.arange(self._shape.numel(), device=self._device)

    def within(self, flags: Tensor) -> Tensor:
        """The flags of tokens of a row; False for those of no row."""
        return flags if self._row is None else flags & (self._row < self.count)

    def starts(self) -> Tensor:
        """The first place of each row."""
        if self._bounds is not None:
            return self._bounds[:-1]
        return torch.arange(self.count, device=self._device) * self._shape[1]

    def sum(self, values: Tensor) -> Tensor:
        """Sums [..., B] over the tokens [..., N] of each row, which are floats."""
        if self._bounds is not None:
            return reduce_runs(values, self._bounds, "sum", 0.0)
        return values.view(*values.shape[:-1], *self._shape).sum(-1)

    def counts(self, flags: Tensor) -> Tensor:
        """Number of the flags of each row, in float64."""
        return self.sum(flags.double()) if self._bounds is not None else flags.view(self._shape).sum(1).double()

    def extremes(self, values: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value of each row, infinite where it has none."""
        least, most = (torch.where(where, values, none) for none in (math.inf, -math.inf))
        if self._bounds is not None:
            smallest = reduce_runs(least, self._bounds, "min", math.inf)
            return smallest, reduce_runs(most, self._bounds, "max", -math.inf)
        if values.numel() == 0:
            return values.new_full((self.count,), math.inf), values.new_full((self.count,), -math.inf)
        return least.view(self._shape).amin(1), most.view(self._shape).amax(1)

    def last(self, flags: Tensor) -> Tensor:
        """Place of the last such token of each row, -1 where there is none."""
        last = self.extremes(self._places().double(), flags)[1]
        return torch.where(last.isinf(), -1, last).long()

    def spread(self, values: Tensor) -> Tensor:
        """One value for each token from one for each row; 0 for tokens of no row."""
        if self._row is None:
            return values[:, None].expand(self._shape).reshape(-1)
        return torch.cat([values, values.new_zeros(1)])[self._row]


def reduce_runs(values: Tensor, bounds: Tensor, how: str, initial: float) -> Tensor:
    """Reduces values [..., N] to one [..., B] for each run bounds[i] to bounds[i + 1] - 1, `initial` where it is empty.

    The sum, minimum or maximum, in a fixed order.
    """
    if values.numel() == 0:
        return (initial + values.sum(-1, keepdim=True)).expand(*values.shape[:-1], len(bounds) - 1)
    by_token = values.movedim(-1, 0).contiguous()
    reduced = torch.segment_reduce(by_token, how, offsets=bounds, axis=0, unsafe=True, initial=initial)
    return reduced.movedim(0, -1)


class GroupLayout(NamedTuple):
    """Rows of each group, for a padded layout [count, size].

    Group p holds rows order[offsets[p]] to order[offsets[p + 1] - 1]; if both are None, groups are consecutive rows.
    """

    order: Tensor | None
    offsets: Tensor | None
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed
    size: int  # of the largest group


def check_layout(
    op: str, groups: int | Tensor, rows: Tensor, num_groups: int | None, max_size: int | None, limit: int
) -> GroupLayout:
    """Lays out groups in ascending order of their ids.

    Their number and largest size are read from the device, once, unless both are given. No group may exceed `limit`.
    """
    for name, value in (("num_groups", num_groups), ("max_size", max_size)):
        if value is not None and not 0 <= checks.integer(op, name, value) < 2**31:
            raise ValueError(f"{op}: {name} must be from 0 to 2**31 - 1, got {value}")
    if max_size is not None and max_size > limit:
        raise ValueError(f"{op}: max_size must be at most {limit}, got {max_size}")
    count = rows.shape[0]
    if isinstance(groups, Tensor):
        ids = checks.per_row(op, "groups", groups, checks.INTEGERS, rows)
        return _layout_of_ids(op, ids, num_groups, max_size, limit)
    checks.group_size(op, groups, count)
    if groups > limit:
        raise ValueError(f"{op}: groups must have at most {limit} rows each, got {groups}")
    for name, value, actual in (("num_groups", num_groups, count // groups), ("max_size", max_size, groups)):
        if value is not None and value != actual:
            raise ValueError(f"{op}: {name} must be {actual} for {count} rows in groups of {groups}, got {value}")
    return GroupLayout(None, None, count // groups, groups)


def _layout_of_ids(op: str, ids: Tensor, num_groups: int | None, max_size: int | None, limit: int) -> GroupLayout:
    count = len(ids)
    if count == 0:
        offsets = ids.new_zeros((num_groups or 0) + 1, dtype=torch.int64)
        return GroupLayout(ids.long(), offsets, num_groups or 0, max_size or 0)
    rows = sort_rows(count, ids.long(), 0, None)
    assert rows is not None
    largest, in_use = rows.starts.diff().max(), (rows.starts < count).sum()
    is_read = ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if num_groups is None or max_size is None or is_read:
        groups, size = torch.stack((in_use, largest)).tolist()
        for name, value, least in (("num_groups", num_groups, groups), ("max_size", max_size, size)):
            if value is not None and value < least:
                raise ValueError(f"{op}: {name} must be at least {least} for these groups, got {value}")
        num_groups, max_size = groups if num_groups is None else num_groups, size if max_size is None else max_size
    else:
        torch._assert_async(
            (in_use <= num_groups) & (largest <= max_size), f"{op}: num_groups or max_size is too small"
        )
    if max_size > limit:
        raise ValueError(f"{op}: groups must have at most {limit} rows each, got one of {max_size}")
    wanted = torch.arange(num_groups + 1, device=ids.device).clamp(max=count)
    return GroupLayout(rows.order, rows.starts[wanted], num_groups, max_size)


def places(layout: GroupLayout, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and their positions in the flattened padded layout: row order[i] is at place[i]."""
    at = torch.arange(count, device=device)
    if layout.order is None or layout.offsets is None:
        return at, at
    group = torch.searchsorted(layout.offsets[1:].contiguous(), at, right=True)
    return layout.order, group * layout.size + at - layout.offsets[group]


def layout_within(op: str, groups: int | Tensor, rows: Tensor, count: int, size: int, rule: str) -> GroupLayout:
    """The layout of rows in a tensor of shape [count, size] that was built from the same groups."""
    if isinstance(groups, Tensor):
        # elsewhere the sizes are asserted without a wait, or a graph break
        is_read = groups.device.type == "cpu" and not torch.compiler.is_compiling()
        layout = check_layout(op, groups, rows, None if is_read else count, None if is_read else size, _ANY_SIZE)
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
    """Pads rows [N, ...] to [P, K, ...], the layout of pairwise_cosine: groups by ascending id, rows in order.

    Args:
        values: [N, ...]
        groups: an int (groups of that many consecutive rows) or integer ids [N]
        fill: the value of padding; None means NaN for floats, -1 for integers and False for bool
        num_groups, max_size: as in similarity_groups; finding them waits for a GPU once
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
    """Inverts pad_rows: [P, K, ...] to rows [N, ...], with the same groups. Nothing waits for a GPU."""
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
    unpadded = flat[place]
    return torch.empty_like(unpadded).index_put((order,), unpadded)
