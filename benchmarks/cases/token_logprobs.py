"""token_logprobs against the installed peers and plain torch.

Lower bound on bytes per row of V logits of s bytes: V s read by the forward; V s read and V s written by the backward,
which in place allocates nothing. On the CPU the first touch of newly allocated memory is part of every provider's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Call, Case, Floor, Make, Provider, Same, Sweep, sized

OP, ROWS, VOCABULARY = "token_logprobs", sized(512), sized(151936)
MANY = sized(8192)


class Inputs(NamedTuple):
    logits: Tensor
    targets: Tensor
    weights: Tensor


def make(rows: int, device: torch.device, seed: int, dtype: torch.dtype, vocabulary: int = VOCABULARY) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator, device=device) * 4 + 20
    logits = logits.to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=generator, device=device)
    return Inputs(logits, targets, torch.linspace(-1, 1, rows, device=device))


def of(rows: int, dtype: torch.dtype = torch.float32) -> Make:
    return lambda device, seed: make(rows, device, seed, dtype)


Function = Callable[[Tensor, Tensor], Tensor]


def ours(logits: Tensor, targets: Tensor) -> Tensor:
    return gk.token_logprobs(logits, targets).logprobs


def ours_capped(logits: Tensor, targets: Tensor) -> Tensor:
    return gk.token_logprobs(logits, targets, softcap=30.0).logprobs


def trl(logits: Tensor, targets: Tensor) -> Tensor:
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(logits, targets)


def verl(logits: Tensor, targets: Tensor) -> Tensor:
    from verl.utils.torch_functional import logprobs_from_logits

    return logprobs_from_logits(logits, targets, inplace_backward=False)


def by_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def forward(function: Function) -> Call:
    def call(i: Inputs) -> Tensor:
        with torch.no_grad():
            return function(i.logits, i.targets)

    return call


def both_passes(function: Function) -> Call:
    return lambda i: torch.autograd.grad((function(i.logits, i.targets) * i.weights).sum(), i.logits)[0]


def providers(passes: Callable[[Function], Call]) -> tuple[Provider, ...]:
    return (
        Provider("trl", passes(trl), package="trl"),
        Provider("verl", passes(verl), package="verl"),
        Provider("torch, log_softmax", passes(by_log_softmax)),
        Provider("torch.compile", passes(torch.compile(by_log_softmax, dynamic=False))),
    )


class Head(NamedTuple):
    """A head that produces the logits; its backward reads their gradient, which may replace them in place."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor


def head(device: torch.device, seed: int) -> Head:
    generator = torch.Generator(device).manual_seed(seed)
    hidden, weight = (torch.randn(n, 1, generator=generator, device=device) for n in (128, VOCABULARY))
    targets = torch.randint(VOCABULARY, (128,), generator=generator, device=device)
    return Head(hidden, weight.requires_grad_(), targets)


def in_place(i: Head) -> Tensor:
    result = gk.token_logprobs(i.hidden @ i.weight.T, i.targets, inplace_backward=True)
    return torch.autograd.grad(result.logprobs.sum(), i.weight)[0]


# logits around 20 in float32: a log-probability is exact to a few units of their last place, 2e-6
SAME = Same(rtol=1e-5, atol=1e-5)
MODEL = f"{ROWS} tokens of qwen2.5's {VOCABULARY:,} logits"
SIZE = ROWS * VOCABULARY


def logits_bytes(i: Inputs) -> int:
    return i.logits.numel() * i.logits.element_size()


CASES = [
    Case(
        OP,
        "forward and backward",
        MODEL,
        Floor(bytes=3 * 4 * SIZE),
        of(ROWS),
        both_passes(ours),
        providers(both_passes),
        same=SAME,
        checked=of(8),
        pairs=7,
        arrays={"the logits": logits_bytes},
        bars=(
            Bar("ratio at least", 2, "trl"),
            Bar("ratio at least", 2, "torch, log_softmax"),
            Bar("ratio at least", 1, "torch.compile"),
            Bar("memory below", 1.1, "the logits"),  # one gradient
        ),
    ),
    Case(
        OP,
        "forward",
        MODEL,
        Floor(bytes=4 * SIZE),
        of(ROWS),
        forward(ours),
        providers(forward),
        same=SAME,
        checked=of(8),
        pairs=7,
        quick=("torch, log_softmax",),
        bars=(Bar("ratio at least", 1, "torch.compile"),),
    ),
    Case(
        # the peers round to bfloat16, so results are compared in float32
        OP,
        "forward in bfloat16",
        MODEL,
        Floor(bytes=2 * SIZE),
        of(ROWS, torch.bfloat16),
        forward(ours),
        (Provider("torch, log_softmax", forward(by_log_softmax)),),
        same=SAME,
        checked=of(8),
        dtype="bfloat16",
        pairs=7,
    ),
    Case(
        OP,
        "in place, from a head",
        f"128 tokens of {VOCABULARY:,} logits",
        Floor(bytes=4 * 4 * 128 * VOCABULARY),
        head,
        in_place,
        devices=("cpu",),
        pairs=5,
        arrays={"the logits": lambda i: 4 * len(i.hidden) * len(i.weight)},
        bars=(Bar("memory below", 1.1, "the logits"),),  # the logits themselves
    ),
    *(
        Case(
            OP,
            f"{model}, {name}",
            f"{MANY:,} tokens of {size:,} logits",
            Floor(bytes=passes * 2 * MANY * size),
            lambda device, seed, size=size: make(MANY, device, seed, torch.bfloat16, size),
            way(call),
            others,
            same=SAME,
            checked=of(8),
            dtype="bfloat16",
            devices=("cuda",),
        )
        for model, size in (("qwen3-8b", VOCABULARY), ("llama-3.1-8b", sized(128256)))
        for name, passes, way, call, others in (
            ("forward", 1, forward, ours, providers(forward)),
            ("forward and backward", 3, both_passes, ours, providers(both_passes)),
            ("forward with softcap", 1, forward, ours_capped, ()),
        )
    ),
]
SWEEPS = [
    Sweep(
        OP,
        "forward and backward, V = 1,024",
        "logits",
        tuple(1024 * 10**e for e in range(6)),
        lambda device, size: make(size // 1024, device, 0, torch.float32, 1024),
        both_passes(ours),
        Floor(bytes=12),
        fit_from=10**6,
    )
]
