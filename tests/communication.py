"""Counts what a process communicates, and ranks without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
_LOCAL = ("wait_tensor", "wrap_tensor_autograd", "barrier")


class Communication(TorchDispatchMode):
    """Records every collective as its name and the bytes that this process puts into it.

    Sees torch.distributed's own functions and those that DTensor and FSDP2 call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # its own operations on local tensors come next
        name = func._schema.name.split("::")[-1].strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and name not in _LOCAL:
            # c10d's functions on tensors put the output first
            index = 1 if name.startswith(("allgather_base", "reduce_scatter_base")) else 0
            sent = args[index] if isinstance(args[index], Tensor) else args[index][0]
            self.calls.append((name, sent.nbytes))
        return func(*args, **(kwargs or {}))

    def take(self) -> list[tuple[str, int]]:
        """The collectives since the last call."""
        calls, self.calls = self.calls, []
        return calls


def on_ranks(calls: list[Callable[[], T]], group: object) -> list[T]:
    """Results of the calls, which run at once and of which each is a rank of `group` to torch.distributed.all_reduce.

    Sums alone, of tensors that have the same shape on all ranks and are reduced in the same order.
    """
    barrier, sent = threading.Barrier(len(calls), timeout=60), [torch.empty(0)] * len(calls)
    rank = threading.local()

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: object = group, wanted: object = group) -> None:
        assert group is wanted and op == dist.ReduceOp.SUM
        sent[rank.number] = tensor.clone()
        barrier.wait()
        total = torch.stack(sent).sum(0)
        barrier.wait()
        tensor.copy_(total)

    def run(number: int) -> T:
        rank.number = number
        return calls[number]()

    with mock.patch.object(dist, "all_reduce", all_reduce), ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, range(len(calls))))
