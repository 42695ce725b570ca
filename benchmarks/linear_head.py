"""Shapes, inputs and peers of the LM head's benchmarks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import grpo_kernels as gk
from benchmarks.paired import Ratio, paired

Case = Callable[[], Any]


class Shape(NamedTuple):
    rows: int
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"N={self.rows} H={self.hidden} V={self.vocabulary}"


HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float32)
# On a GPU that of an 8B model's head, which has not been run yet.
SHAPES = (Shape(8192, 4096, 151936),) if HAS_GPU else (Shape(1024, 256, 32000), Shape(2048, 512, 50304))


class Inputs:
    """A batch of one long row, on-policy: the loss is the mean of -advantage * log-prob, which the peers have too."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        n, h, v = shape
        self.shape = shape
        self.hidden = torch.randn(n, h, device=DEVICE).to(DTYPE).requires_grad_()
        self.weight = (torch.randn(v, h, device=DEVICE) / h**0.5).to(DTYPE).requires_grad_()
        self.targets = torch.randint(v, (n,), device=DEVICE)
        self.ones = torch.ones(n, device=DEVICE)
        self.cu_seqlens = torch.tensor([0, n], device=DEVICE)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden, self.weight))


CONFIG = gk.LossConfig(loss="reinforce", aggregation="token-mean")


def ours(i: Inputs, **options: Any) -> tuple[Tensor, ...]:
    given = {"advantages": i.ones, "cu_seqlens": i.cu_seqlens, "config": CONFIG} | options
    result = gk.linear_policy_loss(i.hidden, i.weight, i.targets, None, **given)
    return i.gradients(result.loss)


def naive(i: Inputs) -> tuple[Tensor, ...]:
    logprobs = (i.hidden @ i.weight.T).float().log_softmax(-1).gather(1, i.targets[:, None])
    return i.gradients(-logprobs.mean())


def torch_fused(i: Inputs) -> tuple[Tensor, ...]:
    return i.gradients(F.linear_cross_entropy(i.hidden, i.weight, i.targets))


def torch_chunked(i: Inputs) -> tuple[Tensor, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = torch.nn.LinearCrossEntropyOptions()
        return i.gradients(F.linear_cross_entropy(i.hidden, i.weight, i.targets, options=options))


def trl(i: Inputs) -> tuple[Tensor, ...]:
    from trl.kernels import ChunkedLogProbFunction

    # 4,096 rows at a time is what TRL's trainers say
    logprobs = ChunkedLogProbFunction.apply(i.hidden, i.weight, None, i.targets, 1.0, 4096, None, 1.0, ())[0]
    return i.gradients(-logprobs.mean())


def liger(i: Inputs) -> tuple[Tensor, ...]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return i.gradients(liger_fused_linear_cross_entropy(i.hidden, i.weight, i.targets))


def compared(i: Inputs, ours: Callable[[Inputs], Any], theirs: Callable[[Inputs], Any]) -> Ratio:
    """Nobody is timed who computes something else."""
    # the peers round their logits to the dtype of the weight: by a part in 256 of a bfloat16
    near = 1e-5 if torch.float32 == DTYPE else 2e-2
    for got, gold in zip(theirs(i), ours(i), strict=True):
        torch.testing.assert_close(got, gold, rtol=10 * near, atol=near * float(gold.abs().max()))
    return paired(lambda: ours(i), lambda: theirs(i), pairs=5)


class BareProducts:
    """What no way around takes: the three products, whole, into memory that is there already."""

    def __init__(self, i: Inputs) -> None:
        self.hidden, self.weight = i.hidden.detach(), i.weight.detach()
        self.logits = self.hidden @ self.weight.T
        self.to_hidden, self.to_weight = torch.zeros_like(self.hidden), torch.zeros_like(self.weight)

    def __call__(self) -> None:
        torch.mm(self.hidden, self.weight.T, out=self.logits)
        torch.mm(self.logits, self.weight, out=self.to_hidden)
        torch.mm(self.logits.T, self.hidden, out=self.to_weight)
