"""A description of an op from which test_promises.py checks what all ops promise.

Each op's folder has a file cases.py with OPS, its descriptions by name: one for each part of the op whose promises
other code keeps. A folder of several ops has a file of that kind for each, such as policy_loss_cases.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from grpo_kernels.backends import Supports
from tests.harness import device_of

Inputs = dict[str, Any]  # by name; tensors on the CPU, of float64 where they hold numbers
Results = dict[str, Tensor]  # by name; the gradient by an input x is "d_x"


class Same(NamedTuple):
    """A batch written in another way: inputs of one call or of several, and how their results make those of the batch.

    Results that `combine` leaves out are not compared. With `is_exact`, those of one implementation have the same bits.
    """

    inputs: list[Inputs]
    combine: Callable[[list[Results]], Results]
    is_exact: bool = False


def in_parts(inputs: Inputs, parts: list[Tensor], *names: str, **changes: Any) -> Same:
    """One call for the rows of each part, with other arguments; results of rows that are in no part are 0.

    All inputs and results have an entry for each row. Only results with these names are compared, without names all.
    """
    rows, count = torch.cat(parts), len(next(iter(inputs.values())))

    def joined(results: list[Results]) -> Results:
        together = {name: torch.cat([part[name] for part in results]) for name in names or results[0]}
        whole = {name: value.new_zeros(count, *value.shape[1:]) for name, value in together.items()}
        return {name: value.index_copy(0, rows, together[name]) for name, value in whole.items()}

    return Same([{name: value[part] for name, value in inputs.items()} | changes for part in parts], joined)


def end_to_end(value: Tensor, lengths: list[int], extra: int) -> Tensor:
    """The first tokens of each row one after the other, then tokens of no row, which no mask has and hold no number."""
    parts = [row[:length] for row, length in zip(value, lengths, strict=True)]
    fill = math.nan if value.is_floating_point() else value.dtype != torch.bool
    return torch.cat([*parts, value.new_full((extra,), fill)])


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], Same]:
    return lambda inputs: Same([inputs | {name: change(inputs[name])}], lambda results: results[0])


def groups_apart(inputs: Inputs) -> Same:
    return in_parts(inputs, [(inputs["groups"] == name).nonzero()[:, 0] for name in inputs["groups"].unique()])


def groups_of_one_size(inputs: Inputs) -> Same:
    order, (size,) = inputs["groups"].sort().indices, inputs["groups"].unique(return_counts=True)[1].unique().tolist()
    return in_parts(inputs, [order], groups=size)


def permuted(inputs: Inputs) -> Same:
    return in_parts(inputs, [torch.randperm(len(next(iter(inputs.values()))))])


@dataclasses.dataclass(frozen=True)
class Op:
    """Description of an op for test_promises.py.

    Attributes:
        draw: a batch of about 60 tokens, seeded by the caller, with every feature that promises are about
        call: results of a batch on a backend; "loss", a scalar, if there are leaves
        supports: dtypes by implementation
        leaves: inputs with a gradient
        ignored: for each input with slots that nothing may depend on, where they are; gradients there are 0
        rewrites: the batch written in other ways, by the name of the promise: permuted rows, packed, in micro-batches
        working: dtype of numbers in the tests that compare with float64
        adds_in_any_order: memory layouts and torch.compile may change the order of sums, as in matrix products
        multiplies: consists of torch's matrix products, whose bits depend on the number of threads on some CPUs
    """

    draw: Callable[[], Inputs]
    call: Callable[[Inputs, str | None], Results]
    supports: Supports
    leaves: tuple[str, ...] = ()
    ignored: Callable[[Inputs], dict[str, Tensor]] = lambda inputs: {}
    rewrites: dict[str, Callable[[Inputs], Same]] = dataclasses.field(default_factory=dict)
    working: torch.dtype = torch.float32
    adds_in_any_order: bool = False
    multiplies: bool = False


def placed(op: Op, inputs: Inputs, dtype: torch.dtype, place: Callable[[Tensor], Tensor]) -> Inputs:
    """Inputs with numbers of this dtype, each tensor put on a device by `place`; leaves require a gradient."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        if isinstance(value, dict):
            return {name: moved(part) for name, part in value.items()}
        if not isinstance(value, Tensor):
            return value
        return place(value.to(dtype) if value.dtype == torch.float64 else value)

    result = {name: moved(value) for name, value in inputs.items()}
    return result | {name: result[name].detach().requires_grad_() for name in op.leaves}


def drawn(op: Op, seed: int, place: Callable[[Tensor], Tensor] = lambda value: value) -> Inputs:
    """A batch in the working dtype; those of all seeds have the same shapes, so that a CUDA graph can take each."""
    torch.manual_seed(seed)
    return placed(op, op.draw(), op.working, place)


def tensors(inputs: Inputs) -> list[Tensor]:
    return [value.detach() for value in tree_flatten(inputs)[0] if isinstance(value, Tensor)]


def evaluated(op: Op, inputs: Inputs, backend: str | None) -> Results:
    """Results, and gradients of the loss by the leaves."""
    results = op.call(inputs, backend)
    if op.leaves:
        gradients = torch.autograd.grad(results["loss"], [inputs[name] for name in op.leaves])
        results = results | {f"d_{name}": gradient for name, gradient in zip(op.leaves, gradients, strict=True)}
    return {name: value.detach() for name, value in results.items()}


def run(op: Op, inputs: Inputs, backend: str | None, dtype: torch.dtype) -> Results:
    """Results, and gradients of the loss, on the host; of inputs that are moved to the backend's device."""
    device = device_of(backend or "cuda")
    results = evaluated(op, placed(op, inputs, dtype, lambda value: value.to(device)), backend)
    return {name: value.cpu() for name, value in results.items()}


def assert_same_bits(results: Results, expected: Results) -> None:
    assert results.keys() == expected.keys()
    for name, want in expected.items():
        torch.testing.assert_close(
            results[name], want, rtol=0, atol=0, equal_nan=True, msg=lambda text, of=name: f"{of}: {text}"
        )
