"""linear_logprobs against the installed peers, forward and backward.

Floor: 2 N H V flops forward, and 6 N H V backward: the logits again, and two products for the gradients. Keeping the
logits would save their second product.
"""

from __future__ import annotations

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Case, Floor, Sweep
from benchmarks.head_peers import PEERS, SHAPES, Inputs, Shape, same

OP = "linear_logprobs"


def ours(i: Inputs) -> tuple[Tensor, ...]:
    return i.gradients(-gk.linear_logprobs(i.hidden, i.weight, i.targets).logprobs.mean())


def case(shape: Shape) -> Case:
    return Case(
        OP,
        str(shape),
        shape.model,
        Floor(flops=4 * shape.products),
        lambda device, seed: Inputs(shape, device, seed),
        ours,
        tuple(p for p in PEERS if p.name in ("naive autograd", "trl", "verl")),
        same=same(shape),
        dtype=str(shape.dtype).removeprefix("torch."),
        devices=(shape.device,),
        pairs=3,
        returned=lambda i: i.gradient_bytes,
    )


CASES = [case(shape) for shape in SHAPES]
TINY = Shape(0, 64, 1024, "", "", torch.float32)
SWEEPS = [
    Sweep(
        OP,
        "forward and backward, H = 64, V = 1,024",
        "rows",
        tuple(8 * 10**e for e in range(5)),
        lambda device, size: Inputs(TINY._replace(rows=size), device),
        ours,
        Floor(flops=4 * TINY._replace(rows=1).products),
        fit_from=800,
        batch=10_000,
    )
]
