"""Counts what a process communicates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
