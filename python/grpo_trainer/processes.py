"""Several processes that train one policy: what each does for all, and how they come to hold the same.

Every process has the same data, draws the same random numbers and takes the same decisions; what takes time is shared:
sampling, scoring, embedding, forward and backward passes. What one found the others get, so that groups, clusters,
thresholds and figures are computed from the whole batch everywhere. In one process every function here is the identity.

The functions that wait for the other processes must be called by all of them, in the same order.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

Kind = TypeVar("Kind")
BUCKET = 1 << 24  # elements of gradients that are summed together


class ProcessError(RuntimeError):
    """Another process failed, or holds something else; the message says which and what."""


def world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world() > 1 else 0


def is_first() -> bool:
    """The one that writes: logs, checkpoints, reports."""
    return rank() == 0


def were_launched() -> bool:
    """Whether a launcher started several, whatever has been made of it since."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def end() -> None:
    if world() > 1:
        dist.destroy_process_group()


# What one process does of a whole


def share(count: int) -> range:
    """Of so many things in a row this process's, as many as any other's or one fewer."""
    return range(count * rank() // world(), count * (rank() + 1) // world())


def total(value: Tensor) -> Tensor:
    """The sum over all processes, the same bits in each."""
    if world() == 1:
        return value
    sent = _sent(value.clone())
    dist.all_reduce(sent)
    return sent.to(value.device, value.dtype)


def whole(part: Tensor, where: Tensor | Sequence[int], count: int) -> Tensor:
    """The `count` rows of which each process has some, and `where` says which. Each must be one process's."""
    if world() == 1:
        return part
    found = part.new_zeros((count, *part.shape[1:]))
    found[torch.as_tensor(where, dtype=torch.int64, device=part.device)] = part
    return total(found)


def most(value: int) -> int:
    """The largest of all processes."""
    if world() == 1:
        return value
    sent = _sent(torch.tensor([value]))
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return int(sent)


def first(value: Kind) -> Kind:
    """What the first process has."""
    if world() == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held, 0)
    return held[0]


class Pieces:
    """Rows in micro-batches, dealt out in turn.

    They are those of one process wherever each of several gets one of full size, so that what is computed of a row,
    which depends on the rows beside it in the last bits, is the same.
    """

    def __init__(self, rows: Tensor, size: int, in_step: bool = False) -> None:
        """in_step  all processes get as many, because they wait for each other in every forward pass"""
        self.all = rows.split(max(1, min(size, -(-len(rows) // world()))))
        self.in_step = in_step

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        """Rows; and whether they count, or are there only for the others' sake."""
        for at in range(rank(), len(self.all), world()):
            yield self.all[at], True
        if self.in_step and 0 < len(self.all) % world() <= rank():
            yield self.all[0], False

    def whole(self, found: Sequence[Tensor]) -> Tensor:
        """What was found of each piece, stacked in the order of the rows; `found` has this process's that count."""
        if world() == 1:
            return torch.stack(list(found))
        like = self._like(found)
        mine = torch.stack(list(found)) if found else like.new_zeros((0, *like.shape))
        return whole(mine, range(rank(), len(self.all), world()), len(self.all))

    def _like(self, found: Sequence[Tensor]) -> Tensor:
        """The first process always has one; another may have none to tell the shape by."""
        if world() <= len(self.all):
            return found[0]
        about = first((found[0].shape, found[0].dtype) if is_first() else None)
        assert about is not None
        return torch.zeros(about[0], dtype=about[1], device=self.all[0].device)


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Gradients of a loss that is a sum over processes. A parameter that got none anywhere still has none."""
    if world() == 1:
        return
    held = [each for each in parameters if each.requires_grad and not is_sharded(each)]
    if not held:
        return
    given = _sent(torch.tensor([each.grad is not None for each in held], dtype=torch.int32))
    dist.all_reduce(given, dist.ReduceOp.MAX)
    held = [each for each, is_given in zip(held, given.tolist(), strict=True) if is_given]
    for some in _buckets(held):
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in some]
        flat = total(torch.cat([each.flatten() for each in gradients]))
        parts = flat.split([each.numel() for each in some])
        for each, part in zip(some, parts, strict=True):
            each.grad = part.view_as(each)


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, to be one message."""
    some: list[Tensor] = []
    for each in parameters:
        if some and (each.dtype != some[0].dtype or sum(map(torch.numel, some)) + each.numel() > BUCKET):
            yield some
            some = []
        some.append(each)
    if some:
        yield some


# That all hold the same, and fail together


@contextmanager
def together() -> Iterator[None]:
    """What fails in one process fails in all: there with its own error, elsewhere with a ProcessError that has its
    message. Nothing inside may wait for other processes."""
    if world() == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if most(int(failure is not None)):
        said: list[str | None] = [None] * world()
        dist.all_gather_object(said, None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        others = [f"process {number}: {text}" for number, text in enumerate(said) if text is not None]
        raise ProcessError("; ".join(others))


def agree(what: str, *values: Tensor | float | None) -> None:
    """Ends the run where processes hold different bits: from there on they would train apart."""
    if world() == 1:
        return
    digest = sum(_digest(value) for value in values)
    sent = _sent(torch.tensor([digest, -digest]))
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    highest, lowest = int(sent[0]), -int(sent[1])
    if highest != lowest:
        raise ProcessError(f"process {rank()}: {what} must be the same in all {world()} processes, and is not")


def _digest(value: Tensor | float | None) -> int:
    """A sum of the bits, in which a row counts by its place; small enough for a few of them to be added."""
    if value is None:
        return 1
    held = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    held = held.to_local() if is_sharded(held) else held  # type: ignore[attr-defined]
    if held.numel() == 0:
        return 2
    rows = held.shape[0] if held.dim() else 1
    held = held.detach().contiguous().flatten()
    if held.dtype == torch.bool:
        held = held.to(torch.uint8)
    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[held.dtype.itemsize]
    sums = held.view(of_size).view(rows, -1).sum(1, dtype=torch.int64)
    return int((sums * (2 * torch.arange(rows, device=sums.device) + 1)).sum()) % (1 << 40)


def _sent(value: Tensor) -> Tensor:
    """Where the backend takes it from: NCCL knows no tensor of the CPU."""
    is_nccl = dist.get_backend() == "nccl"
    return value.to("cuda" if is_nccl else "cpu").contiguous()


# Weights of which every process has a part (FSDP2)


def is_sharded(value: Tensor) -> bool:
    return type(value).__name__ == "DTensor" or type(getattr(value, "data", value)).__name__ == "DTensor"


def shard(policy: Any, device: torch.device) -> None:
    """Layer by layer: the weights of one are whole only while it runs. A value head, which a phase may add later and is
    small, stays whole in every process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    # a warning against changing what a module returns in place, which nothing here does
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (world(),))
    for layer in [each for each in policy.modules() if isinstance(each, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh)
    head = policy.value_head
    ignored = set() if head is None else set(head.to(device).parameters())
    fully_shard(policy, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
    for each in policy.modules():
        if isinstance(each, FSDPModule):
            # losses have the divisor of the whole in them: gradients are summed, with what every backend has for it
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)


def full(value: Tensor) -> Tensor:
    """All of a tensor of which this process has a part. All processes must ask."""
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]


def full_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """On the CPU of the first process; the others help. What is tied is there once, under its first name."""
    found = {}
    tied = dict(module.named_parameters(remove_duplicate=False)).keys() - dict(module.named_parameters()).keys()
    for name, value in module.state_dict().items():
        if name in tied:
            continue
        given = full(value)
        if is_first():
            found[name] = given.cpu()
    return found


def part_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Of a whole tensor what this process has of the parameter."""
    if not is_sharded(parameter):
        return value.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(parameter.device), mesh, placements)


def clip_sharded(parameters: Iterable[Tensor], limit: float) -> float:
    """The norm over all parts, as torch.nn.utils.clip_grad_norm_ has it of one process; some parameters may be whole
    everywhere."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    squares = torch.zeros(2, dtype=torch.float64)
    for each in gradients:
        local = each.to_local() if is_sharded(each) else each  # type: ignore[attr-defined]
        squares[int(is_sharded(each))] += float(local.double().square().sum())
    norm = float((squares[0] + total(squares[1])).sqrt())
    scale = min(1.0, limit / (norm + 1e-6))
    if scale < 1:
        for each in gradients:
            each.mul_(scale)
    return norm
