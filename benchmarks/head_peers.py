"""Shapes, inputs and peers of the LM head benchmarks."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Call, Case, Floor, Provider, Same, Sweep, sized

Add = Callable[["Inputs"], None]


class Shape(NamedTuple):
    rows: int
    hidden: int
    vocabulary: int
    model: str
    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"N={self.rows} H={self.hidden} V={self.vocabulary}"

    def floor(self, products: float) -> Floor:
        """Lower bound of so many matrix products."""
        return Floor(flops=2.0 * products * self.rows * self.hidden * self.vocabulary)


SMALL = Shape(1024, 256, 32000, "a head of 256 with llama-2's vocabulary", "cpu", torch.float32)
ON_CPU = (SMALL, Shape(2048, 512, 50304, "pythia-70m's head", "cpu", torch.float32))


def of_model(model: str, hidden: int, vocabulary: int, rows: int = 8192) -> Shape:
    return Shape(sized(rows), sized(hidden), sized(vocabulary), f"{model}'s head", "cuda", torch.bfloat16)


QWEN_8B, QWEN_SMALL = of_model("qwen3-8b", 4096, 151936), of_model("qwen2.5-0.5b", 896, 151936)
# Every op and every peer is timed on these.
COMMON = (
    QWEN_8B,
    QWEN_SMALL,
    of_model("llama-3.1-8b", 4096, 128256),
    of_model("qwen3-1.7b", 2048, 151936),
    of_model("gpt-oss-20b", 2880, 201088),
)
# Ours alone.
OTHERS = (
    of_model("qwen3-0.6b", 1024, 151936),
    of_model("qwen3-4b", 2560, 151936),
    of_model("qwen3-32b", 5120, 151936),
    of_model("llama-3.3-70b", 8192, 128256),
    of_model("qwen3-8b", 4096, 151936, rows=16_384),
    of_model("qwen3-8b", 4096, 151936, rows=32_768),
)
# On a CPU with matrix units for it; others convert to float32.
HALVES = Shape(512, 1024, 32000, "a head of 1,024 with llama-2's vocabulary", "cpu", torch.bfloat16)
TINY = Shape(1, 64, 1024, "", "", torch.float32)  # of the sweeps


class Inputs:
    """An on-policy batch of one long row: the loss is the mean of -advantage * log-prob, as in the peers.

    `add` may add attributes, and replace `leaves`, of which the gradients are.
    """

    def __init__(self, shape: Shape, add: Add | None, device: torch.device, seed: int = 0) -> None:
        self.shape, self.options = shape, {"generator": torch.Generator(device).manual_seed(seed), "device": device}
        n, h, v = shape[:3]
        self.hidden = self.random(n, h).requires_grad_()
        self.weight = (self.random(v, h) / h**0.5).requires_grad_()
        self.leaves = self.hidden, self.weight
        self.targets = torch.randint(v, (n,), **self.options)
        self.ones = torch.ones(n, device=device)
        self.cu_seqlens = torch.tensor([0, n], device=device)
        if add is not None:
            add(self)

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, **self.options).to(self.shape.dtype)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self.leaves)

    @functools.cached_property
    def results(self) -> tuple[Tensor, ...]:
        """Preallocated outputs of the bare products."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        return hidden @ weight.T, torch.zeros_like(hidden), torch.zeros_like(weight)


def gradient_bytes(i: Inputs) -> int:
    return sum(leaf.nbytes for leaf in i.leaves)


def case(op: str, shape: Shape, suffix: str, call: Call, floor: Floor, add: Add | None = None, **options: Any) -> Case:
    """A call on the inputs of a head, which returns their gradients."""
    # the peers round their logits to the dtype of the weight, for bfloat16 by up to one part in 256
    same = Same(of_largest=1e-5 if shape.dtype == torch.float32 else 2e-2)
    fixed = {"dtype": str(shape.dtype).removeprefix("torch."), "devices": (shape.device,), "pairs": 5}
    fixed |= {"same": same, "returned": gradient_bytes}
    make = functools.partial(Inputs, shape, add)
    return Case(op, f"{shape}{suffix}", shape.model, floor, make, call, **fixed | options)


def sweep(op: str, call: Call, floor: Floor, add: Add | None = None, suffix: str = "") -> Sweep:
    """Rows of a small head, with the floor of one."""
    return Sweep(
        op,
        f"forward and backward, H = 64, V = 1,024{suffix}",
        "rows",
        tuple(8 * 10**e for e in range(5)),
        lambda device, size: Inputs(TINY._replace(rows=size), add, device),
        call,
        floor,
        fit_from=800,
    )


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
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as COLUMNS

    logprobs = ChunkedLogProbFunction.apply(i.hidden, i.weight, None, i.targets, 1.0, COLUMNS, None, 1.0, ())[0]
    return i.gradients(-logprobs.mean())


def verl(i: Inputs) -> tuple[Tensor, ...]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    logprobs, _ = FusedLinearForPPO()(i.hidden[None], i.weight, i.targets[None])
    return i.gradients(-logprobs.mean())


def liger(i: Inputs) -> tuple[Tensor, ...]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return i.gradients(liger_fused_linear_cross_entropy(i.hidden, i.weight, i.targets))


def quack(i: Inputs) -> tuple[Tensor, ...]:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return i.gradients(chunked_linear_cross_entropy(i.hidden, i.weight, i.targets))


def cut_cross_entropy(i: Inputs) -> tuple[Tensor, ...]:
    from cut_cross_entropy import linear_cross_entropy

    return i.gradients(linear_cross_entropy(i.hidden, i.weight, i.targets))


def peers(with_entropy: Call) -> tuple[Provider, ...]:
    """The peers; verl's head always computes entropies, so that it is compared with our call `with_entropy`."""
    return tuple(dataclasses.replace(p, ours=with_entropy) if p.name == "verl" else p for p in _PEERS)


_PEERS = (
    Provider("naive autograd", naive),
    Provider("F.linear_cross_entropy", torch_fused),
    Provider("F.linear_cross_entropy, chunked", torch_chunked),
    Provider("trl", trl, package="trl"),
    Provider("verl", verl, package="verl"),
    Provider("torch.compile", torch.compile(naive, dynamic=False), devices=("cuda",)),
    Provider("liger", liger, package="liger_kernel", devices=("cuda",)),
    Provider("quack", quack, package="quack", devices=("cuda",)),
    Provider("cut-cross-entropy", cut_cross_entropy, package="cut_cross_entropy", devices=("cuda",)),
)


def bare_products(i: Inputs) -> None:
    """The three products of the lower bound, unchunked, into preallocated outputs."""
    hidden, weight = i.hidden.detach(), i.weight.detach()
    logits, to_hidden, to_weight = i.results
    torch.mm(hidden, weight.T, out=logits)
    torch.mm(logits, weight, out=to_hidden)
    torch.mm(logits.T, hidden, out=to_weight)
