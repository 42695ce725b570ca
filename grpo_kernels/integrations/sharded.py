"""Gathers the parameters of LM heads that FSDP2 or ZeRO-3 shards, for adapters that hold the model.

FSDP2 gathers a unit's parameters in the unit's own forward pass, which a fused head does not call: it multiplies by the
weight of the head in the forward pass of the model. The ranks have rows of their own, so that the gradient of the whole
parameter is the mean over the ranks, as FSDP2 averages the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate


def gathered(
    where: str, value: Any, units: Iterable[nn.Module], device: torch.device, dtype: torch.dtype | None = None
) -> Any:
    """Gathers a parameter that FSDP2 shards in one all-gather, and its gradient in one reduce-scatter.

    The gradient is reduced in the dtype of the parameter and has its placements.

    Args:
        where: what an error begins with
        value: a parameter of the head; tensors of this rank and None are returned as they are
        units: the head and the modules around it, of which FSDP2 shards at least one
        device: device of the result; FSDP2's CPUOffloadPolicy keeps the shards on the host
        dtype: dtype of the result, in which it is gathered if that takes fewer bytes; None keeps its own
    """
    if not isinstance(value, DTensor):
        return value
    placements, mesh = value.placements, value.device_mesh
    if not any(isinstance(unit, FSDPModule) for unit in units):
        raise ValueError(
            f"{where}: the LM head must be sharded by FSDP2, got placements {placements} outside of any known "
            "FSDPModule; call fully_shard() on the head or the model"
        )
    if sum(not placement.is_replicate() for placement in placements) > 1:
        raise ValueError(
            f"{where}: the LM head must be sharded by FSDP2 alone, got placements {placements}; unshard() its module, "
            "or leave the head out of the parallelize_plan"
        )
    ranks = mesh.size()
    shards: Any = value.view_as(value)  # a hook on the parameter itself would stay there
    if shards.requires_grad:
        shards.register_hook(lambda gradient: gradient / ranks)
    shards = shards.to(device)
    narrower = dtype if dtype is not None and dtype.itemsize < value.dtype.itemsize else None
    whole = shards.redistribute(placements=[Replicate()] * mesh.ndim, forward_dtype=narrower)
    result: Tensor = whole.to_local(grad_placements=[Partial()] * mesh.ndim)
    return result if dtype is None else result.to(dtype)


def kept(parameter: Tensor) -> Tensor:
    """A parameter that ZeRO-3 has gathered for the forward pass, for a backward that reads it, too.

    The memory is then taken from the parameter, but not from a view of it.
    """
    return parameter[:]


def dtype_of(hidden: Tensor) -> torch.dtype:
    """dtype that the ops multiply hidden states in."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
