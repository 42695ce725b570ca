"""Weights and hidden states given as DTensors: turned into tensors of this rank before anything is computed.

A placement tells where the elements of a weight are, but not whose rows the ranks compute, on which the gradient
depends. Three cases are known: hidden states that are replicated on the weight's mesh, or a process group, mean that
all ranks compute the same rows (tensor parallelism). A sharded parameter of FSDP2 means that every rank has rows of its
own. A weight without a gradient is the same in both. Everything else is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
_OPTIONAL = ("bias", "ref_hidden", "ref_weight", "ref_bias", "weight_grad")
_SAME_ROWS = "if all ranks compute the same rows, pass DTensor.from_local(hidden, weight.device_mesh, [Replicate()])"
_OWN_ROWS = (
    "if every rank has rows of its own, pass weight.full_tensor(grad_placements=[Partial()]), whose gradient is the "
    "sum over the ranks, or the weight of an FSDP2 module after its unshard()"
)


class Split(NamedTuple):
    """A vocabulary whose columns are split over one dimension of a mesh."""

    mesh: Any
    placements: tuple[Any, ...]
    group: Any
    start: int


def takes_dtensors(op: str, can_split: bool = True) -> Callable[[Function], Function]:
    """Lets an op take hidden states, weights and biases that are DTensors.

    Args:
        op: name of the op
        can_split: the op has vocab_start and process_group, so that a split vocabulary stays split, but not with a
            support or a teacher
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def localized(hidden: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> Any:
            tensors = (hidden, weight, *map(options.get, _OPTIONAL), *_factors(options.get("lora")))
            if torch.compiler.is_compiling() or not any(map(is_dtensor, tensors)):
                return function(hidden, weight, *arguments, **options)
            splits = can_split and options.get("support") is None and options.get("teacher") is None
            local = _localize(op, {"hidden": hidden, "weight": weight} | options, splits)
            return function(local.pop("hidden"), local.pop("weight"), *arguments, **local)

        return cast(Function, localized)

    return decorate


def is_dtensor(value: object) -> bool:
    return type(value).__name__ == "DTensor"  # compared by name because importing the class takes a second


def _factors(lora: Any) -> tuple[Any, ...]:
    """A and B of an adapter; anything else than a tuple is refused later."""
    return tuple(lora[:2]) if isinstance(lora, (tuple, list)) else ()


def _localize(op: str, arguments: dict[str, Any], can_split: bool) -> dict[str, Any]:
    """The same arguments with tensors of this rank, and with its columns where the vocabulary stays split."""
    local = dict(arguments)
    hidden, weight = arguments["hidden"], arguments["weight"]
    for name in ("hidden", "ref_hidden"):
        local[name] = _replicated(op, name, arguments.get(name))
    split = None
    if is_dtensor(weight):
        _check_weight(op, arguments)
        dtype = _dtype(local["hidden"])
        manager = _fsdp_group(op, weight)
        lora = arguments.get("lora")
        if manager is not None:
            if arguments.get("process_group") is not None:
                raise ValueError(
                    f"{op}: process_group must be None for a sharded parameter of FSDP2, whose ranks have rows of "
                    "their own, got a group; where FSDP2 shards a split vocabulary, unshard() its module"
                )
            local |= {name: _gather_for_own_rows(op, name, arguments.get(name), dtype) for name in ("weight", "bias")}
            factors = [_gather_for_own_rows(op, "lora", value, None) for value in _factors(lora)]
        else:
            adapter = [value for value in _factors(lora) if is_dtensor(value)]
            _check_same_rows(op, hidden, weight, arguments.get("bias"), adapter, arguments.get("process_group"))
            split = _split(weight) if can_split else None
            local |= {name: _local_part(arguments.get(name), split, dtype) for name in ("weight", "bias")}
            factors = [
                _local_part(value, part, None) for value, part in zip(_factors(lora), (None, split), strict=False)
            ]
        if factors:
            local["lora"] = (*factors, *arguments["lora"][2:])
        is_whole = split is None and any(not placement.is_replicate() for placement in _effective(weight))
        is_gathered = manager is not None or is_whole
        local["weight_grad"] = _local_gradient(op, arguments.get("weight_grad"), weight, is_gathered)
        local["process_group"] = None
    if split is not None:
        local |= {"vocab_start": split.start, "process_group": split.group}
    for name in ("ref_weight", "ref_bias"):
        local[name] = _reference_part(op, name, arguments.get(name), split, local["hidden"])
    return {name: value for name, value in local.items() if name in arguments or value is not None}


def _check_weight(op: str, arguments: dict[str, Any]) -> None:
    """Refuses what would have no meaning beside a weight that is a DTensor."""
    weight, bias, hidden = (arguments.get(name) for name in ("weight", "bias", "hidden"))
    if arguments.get("vocab_start") is not None:
        raise ValueError(
            f"{op}: vocab_start must be None with a DTensor as weight, whose placements tell it, got "
            f"{arguments['vocab_start']}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is None:
            continue
        if not is_dtensor(value):
            raise TypeError(f"{op}: {name} must be a DTensor like weight, got {type(value).__name__}")
        if any(placement.is_partial() for placement in value.placements):
            raise ValueError(f"{op}: {name} must not be Partial on its mesh, got {value.placements}; redistribute() it")
        if value.device_mesh.get_coordinate() is None:
            raise ValueError(f"{op}: {name} must be on a mesh with this rank, got {value.device_mesh}")
        if isinstance(hidden, Tensor) and value.device != hidden.device:
            raise ValueError(
                f"{op}: {name} must be on {hidden.device} like hidden, got {value.device}; unshard() the module of a "
                "parameter that FSDP2 offloads"
            )


def _replicated(op: str, name: str, value: Any) -> Any:
    """Hidden states of this rank. Their gradient is complete on every rank."""
    if not is_dtensor(value):
        return value
    if any(not placement.is_replicate() for placement in _effective(value)):
        raise ValueError(
            f"{op}: {name} must be replicated on its mesh, got placements {value.placements}; "
            f"{name}.redistribute(placements=[Replicate()]) has all ranks compute all rows, {name}.to_local() each its "
            "own, with the full weight"
        )
    return value.to_local()


def _effective(value: Any) -> list[Any]:
    """Placements on the dimensions of the mesh that have several ranks."""
    return [placement for size, placement in zip(value.device_mesh.shape, value.placements, strict=True) if size > 1]


def _check_same_rows(op: str, hidden: Any, weight: Any, bias: Any, adapter: list[Any], group: Any) -> None:
    """Requires all ranks of the weight's mesh to compute the same rows, unless that makes no difference."""
    mesh = weight.device_mesh
    others = adapter if bias is None else [bias, *adapter]
    for value in others:
        if value.device_mesh != mesh:
            name = "bias" if value is bias else "lora"
            raise ValueError(f"{op}: {name} must be on the mesh of weight, {mesh}, got {value.device_mesh}")
    if group is not None:
        ranks = [mesh.get_group(dim) for dim, size in enumerate(mesh.shape) if size > 1]
        of_mesh = [dist.get_process_group_ranks(one) for one in ranks]
        if of_mesh not in ([], [dist.get_process_group_ranks(group)]):
            raise ValueError(
                f"{op}: process_group must have the ranks of the mesh of weight, {of_mesh}, got "
                f"{dist.get_process_group_ranks(group)}"
            )
        return
    needs_grad = torch.is_grad_enabled() and any(value.requires_grad for value in (weight, *others))
    if is_dtensor(hidden) and hidden.device_mesh != mesh:
        raise ValueError(f"{op}: hidden must be on the mesh of weight, {mesh}, got {hidden.device_mesh}")
    if not is_dtensor(hidden) and needs_grad and mesh.size() > 1:
        raise ValueError(
            f"{op}: hidden must be a DTensor for a weight with placements {weight.placements} that needs a gradient, "
            f"got a plain tensor; {_SAME_ROWS}; {_OWN_ROWS}"
        )


# Weights of which all ranks compute the same rows


def _split(weight: Any) -> Split | None:
    """The part of the columns that this rank has, or None if not exactly one dimension of the mesh splits them."""
    from torch.distributed.tensor import Shard

    mesh = weight.device_mesh
    dims = [dim for dim, size in enumerate(mesh.shape) if size > 1 and not weight.placements[dim].is_replicate()]
    if len(dims) != 1 or type(weight.placements[dims[0]]) is not Shard or weight.placements[dims[0]].dim % 2 != 0:
        return None
    ranks, rank = mesh.size(dims[0]), mesh.get_local_rank(dims[0])
    largest = -(-len(weight) // ranks)  # as torch.chunk
    if largest * (ranks - 1) >= len(weight):
        return None  # the last ranks have no columns
    return Split(mesh, weight.placements, mesh.get_group(dims[0]), rank * largest)


def _local_part(value: Any, split: Split | None, dtype: torch.dtype | None) -> Any:
    """Whole on every rank, or this rank's columns. The gradient of what was gathered is equal on all ranks."""
    from torch.distributed.tensor import Replicate

    if not is_dtensor(value):
        return value
    if split is not None and value.placements != split.placements:
        value = value.redistribute(placements=split.placements)
    if split is not None or all(placement.is_replicate() for placement in _effective(value)):
        return value.to_local()
    whole = [Replicate()] * value.device_mesh.ndim
    return _cast(value.redistribute(placements=whole, forward_dtype=_narrower(value, dtype)).to_local(), dtype)


def _reference_part(op: str, name: str, value: Any, split: Split | None, like: Tensor) -> Any:
    """The reference model's, which has no gradient, so that it is gathered whatever the rows of the ranks."""
    if value is None or (split is None and not is_dtensor(value)):
        return value
    if split is None:
        with torch.no_grad():
            return _local_part(value, None, _dtype(like))
    if not is_dtensor(value) or value.device_mesh != split.mesh:
        got = value.device_mesh if is_dtensor(value) else type(value).__name__
        raise ValueError(f"{op}: {name} must be a DTensor on the mesh of weight, {split.mesh}, got {got}")
    with torch.no_grad():
        return _local_part(value, split, None)


def _local_gradient(op: str, gradient: Any, weight: Any, is_gathered: bool) -> Any:
    """This rank's part of the tensor that the gradient of the weight is added to."""
    if gradient is None:
        return None
    if is_gathered:
        raise ValueError(
            f"{op}: weight_grad must be None for a weight that is gathered, with placements {weight.placements}, got a "
            "tensor"
        )
    if not is_dtensor(gradient):
        return gradient
    if gradient.device_mesh != weight.device_mesh or gradient.placements != weight.placements:
        raise ValueError(
            f"{op}: weight_grad must have the placements of weight, {weight.placements}, got {gradient.placements}"
        )
    with torch.no_grad():  # the tensor itself, to be added to
        return gradient.to_local()


# Weights of FSDP2, of which every rank computes rows of its own


def _fsdp_group(op: str, parameter: Any) -> Any:
    """FSDP2's group of parameters that this is a sharded one of, or None.

    Found in the register of modules, as a parameter itself does not know.
    """
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        return None
    for reference in list(_module_state_mapping.values()):
        for group in getattr(reference(), "_fsdp_param_groups", ()):
            for managed in group.fsdp_params:
                if managed.sharded_param is not parameter:
                    continue
                if managed.is_dtensor:
                    raise ValueError(
                        f"{op}: weight must be unsharded where FSDP2 shards a DTensor, got placements "
                        f"{parameter.placements}; unshard() its module"
                    )
                return group
    return None


def _gather_for_own_rows(op: str, name: str, value: Any, dtype: torch.dtype | None) -> Any:
    """The whole parameter. Its gradient is summed over the ranks and divided as FSDP2 divides it."""
    from torch.distributed.tensor import Partial, Replicate

    if not is_dtensor(value):
        return value
    manager = _fsdp_group(op, value)
    if manager is None:
        raise ValueError(f"{op}: {name} must be sharded by FSDP2 like weight, got a DTensor that is not")
    ranks = value.device_mesh.size()
    divisor = ranks if manager.gradient_divide_factor is None else manager.gradient_divide_factor
    shards = value.view_as(value)
    if shards.requires_grad and divisor != 1:
        shards.register_hook(lambda gradient: gradient / divisor)
    dims = value.device_mesh.ndim
    whole = shards.redistribute(placements=[Replicate()] * dims, forward_dtype=_narrower(value, dtype))
    return _cast(whole.to_local(grad_placements=[Partial()] * dims), dtype)


def _dtype(hidden: Any) -> torch.dtype | None:
    """dtype that the head is computed in, which is that of gathered weights."""
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        return None  # refused later
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def _narrower(value: Any, dtype: torch.dtype | None) -> torch.dtype | None:
    """dtype to gather in, if that takes fewer bytes."""
    return dtype if dtype is not None and dtype.itemsize < value.dtype.itemsize else None


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value if dtype is None else value.to(dtype)
