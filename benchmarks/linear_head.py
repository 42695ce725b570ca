"""Shapes, inputs and peers of the LM head's benchmarks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import grpo_kernels as gk

Case = Callable[[], Any]


class Shape(NamedTuple):
    rows: int
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"N={self.rows} H={self.hidden} V={self.vocabulary}"


SHAPES = (Shape(1024, 256, 32000), Shape(2048, 512, 50304))


class Inputs:
    """A batch of one long row, on-policy: the loss is the mean of -advantage * log-prob, which the peers have too."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        random = torch.Generator().manual_seed(0)
        n, h, v = shape
        self.shape = shape
        self.hidden = torch.randn(n, h, generator=random).to(dtype).requires_grad_()
        self.weight = (torch.randn(v, h, generator=random) / h**0.5).to(dtype).requires_grad_()
        self.targets = torch.randint(v, (n,), generator=random)
        self.ones = torch.ones(n)
        self.cu_seqlens = torch.tensor([0, n])

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
