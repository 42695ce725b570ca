"""The type of the cases for CUDA graphs, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import registry

Inputs = dict[str, Tensor]
ROWS, WIDTH, HIDDEN, COLUMNS = 4, 4, 16, 32
TOKENS = ROWS * WIDTH
GPU_BACKENDS = ("cuda", "triton")


class Case(NamedTuple):
    """Draws inputs, and calls an op on them with a backend; the results include gradients."""

    draw: Callable[[], Inputs]
    call: Callable[[Inputs, str], list[Tensor]]


def has_kernel(op: str, backend: str) -> bool:
    """Whether an op has a kernel of its own on a backend."""
    return hasattr(registry.ops, f"{op}_{backend}")


def runs_on(name: str, backend: str) -> bool:
    """Whether the op of a case has a kernel on a backend. Ops that are made of others run on each."""
    op = name.partition(" ")[0]
    op = {"gigpo_advantages": "group_advantages", "similarity_advantages": "similarity_groups"}.get(op, op)
    own = [other for other in GPU_BACKENDS if has_kernel(op, other)]
    return backend in own or not own


def present(*results: Any) -> list[Tensor]:
    return [result.detach() for result in results if result is not None]


def with_gradients(inputs: Inputs, loss: Tensor, *results: Any) -> list[Tensor]:
    """The results, and the gradients of all inputs that require one."""
    leaves = [value for value in inputs.values() if value.requires_grad]
    return present(loss, *results, *torch.autograd.grad(loss, leaves))


def bounds() -> Tensor:
    """Four rows of packed tokens; the last tokens may belong to none."""
    return torch.cat((torch.zeros(1, dtype=torch.int64), torch.randint(0, TOKENS + 1, (ROWS,)).sort().values))


def segment_ids(shape: tuple[int, ...]) -> Tensor:
    steps = (torch.rand(shape) < 0.4).long()
    steps[..., 0] = 0
    return steps.cumsum(-1)
