"""Collectives for training one policy with several processes.

Every process reads the same data, draws the same random numbers and takes the same decisions. The expensive work is
divided: sampling, scoring, embedding, forward and backward passes. Results are gathered, so every process computes
groups, clusters, thresholds and metrics from the whole batch. In a single process every function here is the identity.

Collectives must be called by all processes in the same order.
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

T = TypeVar("T")
BUCKET_SIZE = 1 << 24  # gradient elements in one all-reduce


class ProcessError(RuntimeError):
    """Another process failed or holds different values; the message says which process and what."""


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


def is_main_process() -> bool:
    """Whether this process writes the logs, checkpoints and reports."""
    return rank() == 0


def is_launched() -> bool:
    """Whether a launcher started several processes, even if no process group exists yet."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def start() -> torch.device:
    """Joins the processes that a launcher such as torchrun started, and returns this process's device."""
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true":
            raise ValueError(
                "accelerate: processes must be launched without one of its plugins, as `distributed` decides whether "
                f"weights are sharded, got {plugin}"
            )
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if is_launched() and not dist.is_initialized():
        dist.init_process_group("nccl" if has_gpu else "gloo")
    return device


def destroy_process_group() -> None:
    if world_size() > 1:
        dist.destroy_process_group()


# Dividing work and gathering results


def local_range(count: int) -> range:
    """Contiguous part of `count` items that belongs to this process; sizes differ by at most one."""
    return range(count * rank() // world_size(), count * (rank() + 1) // world_size())


def all_reduce_sum(value: Tensor) -> Tensor:
    """Sum over all processes, bitwise identical in each."""
    if world_size() == 1:
        return value
    buffer = _on_backend_device(value.clone())
    dist.all_reduce(buffer)
    return buffer.to(value.device, value.dtype)


def all_reduce_max(value: int) -> int:
    """Maximum over all processes."""
    if world_size() == 1:
        return value
    buffer = _on_backend_device(torch.tensor([value]))
    dist.all_reduce(buffer, dist.ReduceOp.MAX)
    return int(buffer)


def all_gather_rows(part: Tensor, rows: Tensor | Sequence[int], count: int) -> Tensor:
    """Gathers rows that are spread over the processes.

    Args:
        part: [len(rows), ...] rows that this process holds.
        rows: their indices in the result; each index belongs to exactly one process.
        count: number of rows of the result.
    """
    if world_size() == 1:
        return part
    whole = part.new_zeros((count, *part.shape[1:]))
    whole[torch.as_tensor(rows, dtype=torch.int64, device=part.device)] = part
    return all_reduce_sum(whole)


def all_gather_objects(value: T) -> list[T]:
    """Values of all processes; any picklable object."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast(value: T) -> T:
    """Value of the main process; any picklable object."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


class MicroBatches:
    """Micro-batches of rows that are dealt to the processes in turn.

    Wherever every process gets a full micro-batch the split is that of a single process. A row's result depends on the
    rows beside it in the last bits, so the same split gives the same bits.

    Args:
        rows: indices of the rows of each micro-batch.
        equal_count: give every process the same number of micro-batches, for models whose forward pass is a collective.
    """

    def __init__(self, rows: Sequence[Tensor], equal_count: bool = False) -> None:
        self.all = rows
        self.equal_count = equal_count

    @staticmethod
    def size(rows: int, size: int) -> int:
        """Rows of a micro-batch, at most `size`, so that every process has one."""
        return max(1, min(size, -(-rows // world_size())))

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        """Yields rows and whether they count; others are computed since another process waits for the forward pass."""
        for i in range(rank(), len(self.all), world_size()):
            yield self.all[i], True
        if self.equal_count and 0 < len(self.all) % world_size() <= rank():
            yield self.all[0], False

    def all_gather(self, results: Sequence[Tensor]) -> Tensor:
        """Stacks one result per micro-batch in the order of the rows, given those of this process that count."""
        if world_size() == 1:
            return torch.stack(list(results))
        example = self._example(results)
        local = torch.stack(list(results)) if results else example.new_zeros((0, *example.shape))
        return all_gather_rows(local, range(rank(), len(self.all), world_size()), len(self.all))

    def _example(self, results: Sequence[Tensor]) -> Tensor:
        """A tensor of the results' shape; a process without a micro-batch learns it from the main process."""
        if world_size() <= len(self.all):
            return results[0]
        shape_and_dtype = broadcast((results[0].shape, results[0].dtype) if is_main_process() else None)
        assert shape_and_dtype is not None
        shape, dtype = shape_and_dtype
        return torch.zeros(shape, dtype=dtype, device=self.all[0].device)


def all_reduce_gradients(parameters: Iterable[Tensor]) -> None:
    """Sums gradients over the processes; a parameter without a gradient in every process keeps none."""
    if world_size() == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad and not is_sharded(parameter)]
    if not trained:
        return
    has_gradient = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    has_gradient = _on_backend_device(has_gradient)
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
    trained = [parameter for parameter, is_reached in zip(trained, has_gradient.tolist(), strict=True) if is_reached]
    for bucket in _buckets(trained):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = all_reduce_sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = flat.split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive parameters of one dtype that share an all-reduce."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        is_full = sum(map(torch.numel, bucket)) + parameter.numel() > BUCKET_SIZE
        if bucket and (parameter.dtype != bucket[0].dtype or is_full):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


# Failing together and staying identical


@contextmanager
def fail_together() -> Iterator[None]:
    """Turns an exception in one process into an exception in all.

    The failing process raises its own error, the others a ProcessError with its message. The body must not contain
    collectives.
    """
    if world_size() == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    if all_reduce_max(int(failure is not None)):
        messages: list[str | None] = [None] * world_size()
        dist.all_gather_object(messages, None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        failures = [f"process {number}: {text}" for number, text in enumerate(messages) if text is not None]
        raise ProcessError("; ".join(failures))


def assert_identical(what: str, *values: Tensor | float | None) -> None:
    """Ends the run if the values differ between processes in any bit, as training would diverge from here on."""
    if world_size() == 1:
        return
    digest = sum(_digest(value) for value in values)
    buffer = _on_backend_device(torch.tensor([digest, -digest]))
    dist.all_reduce(buffer, dist.ReduceOp.MAX)
    highest, lowest = int(buffer[0]), -int(buffer[1])
    if highest != lowest:
        raise ProcessError(f"process {rank()}: {what} must be the same in all {world_size()} processes, and is not")


def _digest(value: Tensor | float | None) -> int:
    """Sum of the value's bits, rows weighted by position; below 2^40, so that several digests can be added."""
    if value is None:
        return 1
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    if tensor.numel() == 0:
        return 2
    rows = tensor.shape[0] if tensor.dim() else 1
    tensor = tensor.detach().contiguous().flatten()
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[tensor.dtype.itemsize]
    sums = tensor.view(integer).view(rows, -1).sum(1, dtype=torch.int64)
    return int((sums * (2 * torch.arange(rows, device=sums.device) + 1)).sum()) % (1 << 40)


def _on_backend_device(value: Tensor) -> Tensor:
    """Copy on a device that the backend can send from: NCCL cannot send CPU tensors."""
    is_nccl = dist.get_backend() == "nccl"
    return value.to("cuda" if is_nccl else "cpu").contiguous()


# Sharded weights (FSDP2)


def is_sharded(value: Tensor) -> bool:
    return type(value).__name__ == "DTensor" or type(getattr(value, "data", value)).__name__ == "DTensor"


def shard(policy: Any, device: torch.device) -> None:
    """Shards the policy's weights layer by layer; a layer's weights are gathered only while it runs.

    The value head is small and may be added by a later phase, so it stays replicated. A separate critic, which may come
    later too, is sharded by itself.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from transformers.modeling_layers import GradientCheckpointingLayer

    # warns against modifying a module's output in place, which this trainer never does
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if policy.critic is not None:
        shard(policy.critic, device)
    mesh = init_device_mesh(device.type, (world_size(),))
    for layer in [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]:
        if not isinstance(layer, FSDPModule):
            fully_shard(layer, mesh=mesh)
    head = policy.value_head
    replicated = set() if head is None else set(head.to(device).parameters())
    fully_shard(policy, mesh=mesh, reshard_after_forward=True, ignored_params=replicated)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # losses are already divided by the counts of the whole batch: gradients are summed, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def full_tensor(value: Tensor) -> Tensor:
    """Gathers a sharded tensor. All processes must call it."""
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]


def unsharded_copy(lm: Any) -> Any:
    """A copy of a sharded model with all weights, on the CPU. All processes must call it."""
    weights = {name: full_tensor(value).cpu() for name, value in lm.state_dict().items()}
    with torch.random.fork_rng():
        copied = type(lm)(lm.config).to(lm.dtype)
    copied.load_state_dict(weights)
    for name, buffer in lm.named_buffers():  # those outside of the file, which casting the model has rounded
        if name not in weights:
            copied.get_buffer(name).data = buffer.cpu()
    return copied


def full_state_dict(module: torch.nn.Module) -> dict[str, Tensor]:
    """Gathers all weights on the CPU of the main process, tied ones once under their first name; empty elsewhere."""
    weights = {}
    tied = dict(module.named_parameters(remove_duplicate=False)).keys() - dict(module.named_parameters()).keys()
    for name, value in module.state_dict().items():
        if name in tied:
            continue
        gathered = full_tensor(value)
        if is_main_process():
            weights[name] = gathered.cpu()
    return weights


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Part of a full tensor that corresponds to this process's part of a parameter."""
    if not is_sharded(parameter):
        return value.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(parameter.device), mesh, placements)


def clip_sharded_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> float:
    """`torch.nn.utils.clip_grad_norm_` for parameters of which some are sharded and some replicated."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = torch.zeros(2, dtype=torch.float64)  # of replicated and of sharded gradients
    for gradient in gradients:
        local = gradient.to_local() if is_sharded(gradient) else gradient  # type: ignore[attr-defined]
        squares[int(is_sharded(gradient))] += float(local.double().square().sum())
    norm = float((squares[0] + all_reduce_sum(squares[1])).sqrt())
    scale = min(1.0, max_norm / (norm + 1e-6))
    if scale < 1:
        for gradient in gradients:
            gradient.mul_(scale)
    return norm
