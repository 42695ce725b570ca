"""group_advantages in Triton. Statistics are float64: rewards are few, and every digit matters."""

import math
from typing import Optional

import torch
import triton
from torch import Tensor

from grpo_kernels.aot import EXACT
from grpo_kernels.groups import sort_rows
from grpo_kernels.ops.group_advantages.config import SCALE_BATCH_STD, SINGLETON_PARENT, Plan
from grpo_kernels.ops.group_advantages.triton.batch import finish_kernel, moments_kernel
from grpo_kernels.ops.group_advantages.triton.groups import (
    ADD_COLUMN,
    WRITE_ALL,
    WRITE_STATISTICS,
    groups_kernel,
    parents_kernel,
)

# Rows of groups in one program: what fits in registers as float64, less where row numbers take some too.
_TILE = 512
_SORTED_TILE = 128
_ROWS_PER_PROGRAM = 1024
_MAX_PARTS = 1024


def forward(
    rewards: Tensor,
    groups: Optional[Tensor],
    group_size: int,
    subgroups: Optional[Tensor],
    valid: Optional[Tensor],
    lengths: Optional[Tensor],
    baselines: Optional[Tensor],
    weights: list[float],
    modes: list[int],
    coefficients: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    plan = Plan(*modes, *coefficients)
    rows = rewards.shape[0]
    combined, columns = _columns(rewards, weights, valid, subgroups, bool(plan.combine))
    sorted_rows = sort_rows(rows, groups, group_size, subgroups)
    order, starts, parent, parent_starts = (None, None, None, None) if sorted_rows is None else sorted_rows
    number = rows // group_size if starts is None else rows
    # a tile as wide as the groups are; where ids hide their size, 32
    block = min(max(triton.next_power_of_2(group_size), 2), _TILE) if starts is None else 32
    tile = {"GROUPS": (_TILE if starts is None else _SORTED_TILE) // block, "BLOCK": block, **EXACT}
    grid = (triton.cdiv(number, tile["GROUPS"]),)

    batch = plan.scale == SCALE_BATCH_STD or plan.whiten != 0 or plan.gain != 0
    mean, std = rewards.new_empty(rows), rewards.new_empty(rows)
    size = rewards.new_empty(rows, dtype=torch.int32)
    degenerate = rewards.new_empty(rows, dtype=torch.int8)
    advantages = rewards.new_empty(rows)
    if rows == 0:
        return advantages, mean, std, size, degenerate.bool()

    def run(values: Tensor, into: Tensor, write: int, weight: float) -> None:
        parents = None
        if parent is not None and (plan.shrinkage > 0 or plan.singleton == SINGLETON_PARENT):
            parents = values.new_empty(5, number, dtype=torch.float64)
            parents_kernel[grid](
                values, lengths, order, parent_starts, parents, number, plan.ddof, CENTER=plan.center, **tile
            )
        arrays = values, lengths, baselines, order, starts, parent, parents, into, mean, std, size, degenerate
        numbers = weight, plan.ddof, plan.eps, plan.std_floor, plan.shrinkage, math.inf if batch else plan.clip
        modes = {"CENTER": plan.center, "SCALE": plan.scale, "SINGLETON": plan.singleton, "WRITE": write}
        groups_kernel[grid](*arrays, number, group_size, *numbers, **modes, **tile)

    if columns is None:
        run(combined, advantages, WRITE_ALL.value, 1.0)
    else:
        run(combined, advantages, WRITE_STATISTICS.value, 1.0)
        degenerate.fill_(1)
        sums = torch.zeros(rows, dtype=torch.float64, device=rewards.device)
        for c, column in enumerate(columns):
            run(column, sums, ADD_COLUMN.value, weights[c] if weights else 1.0)
        advantages = sums if batch else sums.clamp(-plan.clip, plan.clip).to(rewards.dtype)
    if batch:
        parts = min(triton.cdiv(rows, _ROWS_PER_PROGRAM), _MAX_PARTS)
        rows_per_part = triton.cdiv(triton.cdiv(rows, parts), _ROWS_PER_PROGRAM) * _ROWS_PER_PROGRAM
        moments = rewards.new_empty(3, _MAX_PARTS, dtype=torch.float64)
        modes = {"SCALE": plan.scale, "WHITEN": plan.whiten, "GAIN": plan.gain}
        block = {"BLOCK": _ROWS_PER_PROGRAM, "MAX_PARTS": _MAX_PARTS, **EXACT}
        arrays = combined, lengths, advantages, size, degenerate, moments
        moments_kernel[(parts,)](*arrays, rows, rows_per_part, CENTER=plan.center, **modes, **block)
        result = rewards.new_empty(rows)
        arrays = combined, advantages, std, degenerate, moments, result
        numbers = plan.ddof, plan.eps, plan.std_floor, plan.whiten_eps, plan.clip
        finish_kernel[(triton.cdiv(rows, _ROWS_PER_PROGRAM),)](*arrays, rows, parts, *numbers, **modes, **block)
        advantages = result
    return advantages, mean, std, size, degenerate.bool()


def _columns(
    rewards: Tensor,
    weights: list[float],
    valid: Optional[Tensor],
    subgroups: Optional[Tensor],
    by_column: bool,
) -> tuple[Tensor, Optional[list[Tensor]]]:
    """The combined reward of every row, and for GDPO the columns; NaN where a row takes no part or is not scored."""
    if valid is not None or subgroups is not None:
        part = torch.ones_like(rewards[..., 0] if rewards.dim() == 2 else rewards, dtype=torch.bool)
        part = part if valid is None else part & valid
        part = part if subgroups is None else part & (subgroups >= 0)
        rewards = rewards.where(part[:, None] if rewards.dim() == 2 else part, math.nan)
    if rewards.dim() == 1 and not weights and not by_column:
        return rewards, None
    columns = list(rewards.unbind(1)) if rewards.dim() == 2 else [rewards]
    combined = torch.zeros_like(columns[0], dtype=torch.float64)
    scored = torch.zeros_like(columns[0], dtype=torch.bool)
    for c, column in enumerate(columns):
        here = ~column.isnan()
        combined = combined + torch.where(here, column.double() * (weights[c] if weights else 1.0), 0)
        scored = scored | here
    combined = combined.where(scored, math.nan)
    return combined, [column.contiguous() for column in columns] if by_column else None
