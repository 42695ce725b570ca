"""logits_policy_loss against its two parts one after the other, TRL and plain torch: PPO clip, forward and backward.

Lower bound on bytes per row of V logits of s bytes: V s read and V s written. Read once more for the gradient, as here
where a row does not fit in a cache, they are 3 V s.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Call, Case, Floor, Make, Provider, Same, Sweep

OP, VOCABULARY = "logits_policy_loss", 151936
CONFIG = gk.LossConfig(clip_high=0.28, aggregation="token-mean")


class Inputs(NamedTuple):
    """Logits [1, T, V] whose log-probs are slightly off `old`; a token in ten is clipped."""

    logits: Tensor
    targets: Tensor
    old: Tensor
    advantages: Tensor


def make(tokens: int, device: torch.device, seed: int, dtype: torch.dtype, vocabulary: int = VOCABULARY) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(1, tokens, vocabulary, generator=generator, device=device) * 4 + 20
    logits = logits.to(dtype)
    targets = torch.randint(vocabulary, (1, tokens), generator=generator, device=device)
    noise = torch.randn(1, tokens, generator=generator, device=device)
    old = gk.token_logprobs(logits, targets).logprobs + 0.15 * noise
    return Inputs(logits.requires_grad_(), targets, old, torch.ones(1, device=device))


def of(tokens: int, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY) -> Make:
    return lambda device, seed: make(tokens, device, seed, dtype, vocabulary)


def ours(i: Inputs, **options: Any) -> Tensor:
    return gk.logits_policy_loss(i.logits, i.targets, i.old, i.advantages, config=CONFIG, **options).loss


def two_ops(i: Inputs) -> Tensor:
    logprobs = gk.token_logprobs(i.logits, i.targets).logprobs
    return gk.policy_loss(logprobs, i.old, i.advantages, config=CONFIG).loss


def clipped(logprobs: Tensor, i: Inputs) -> Tensor:
    ratio = (logprobs - i.old).exp()
    return -torch.min(ratio * i.advantages, ratio.clamp(0.8, 1.28) * i.advantages).mean()


def by_log_softmax(i: Inputs) -> Tensor:
    return clipped(i.logits.float().log_softmax(-1).gather(-1, i.targets[..., None])[..., 0], i)


def trl(i: Inputs) -> Tensor:
    from trl.trainer.utils import selective_log_softmax

    return clipped(selective_log_softmax(i.logits, i.targets), i)


def gradient(loss: Call) -> Call:
    return lambda i: torch.autograd.grad(loss(i), i.logits)[0]


class Head(NamedTuple):
    """A head that produces the logits; its backward reads their gradient, which may replace them in place."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor


def head(device: torch.device, seed: int) -> Head:
    generator = torch.Generator(device).manual_seed(seed)
    hidden, weight = (torch.randn(n, 1, generator=generator, device=device) for n in (128, VOCABULARY))
    targets = torch.randint(VOCABULARY, (1, 128), generator=generator, device=device)
    return Head(hidden[None], weight.requires_grad_(), targets)


def in_place(i: Head) -> Tensor:
    ones = torch.ones(1, device=i.hidden.device)
    result = gk.logits_policy_loss(i.hidden @ i.weight.T, i.targets, None, ones, config=CONFIG, inplace=True)
    return torch.autograd.grad(result.loss, i.weight)[0]


def logits_bytes(i: Inputs) -> int:
    return i.logits.numel() * i.logits.element_size()


TWO_OPS = Provider("token_logprobs, then policy_loss", gradient(two_ops))
BY_LOG_SOFTMAX = Provider("torch, log_softmax", gradient(by_log_softmax))
# gradients of 1e-3, against the largest of them; in bfloat16 the last digit may differ
SAME, SAME_HALF = Same(rtol=1e-4, of_largest=1e-5), Same(rtol=2**-7, of_largest=1e-5)
CASES = [
    Case(
        OP,
        "clip",
        f"256 tokens of qwen2.5's {VOCABULARY:,} logits",
        Floor(bytes=2 * 4 * 256 * VOCABULARY),
        of(256),
        gradient(ours),
        (TWO_OPS, Provider("trl", gradient(trl), package="trl"), BY_LOG_SOFTMAX),
        same=SAME,
        checked=of(8),
        pairs=7,
        target=0.0,
        arrays={"the logits": logits_bytes},
        bars=(
            Bar("ratio at least", 2, "trl"),
            Bar("ratio at least", 2, "torch, log_softmax"),
            Bar("memory below", 1.1, "the logits"),  # one gradient
        ),
    ),
    Case(
        OP,
        "clip in bfloat16",
        f"256 tokens of qwen2.5's {VOCABULARY:,} logits",
        Floor(bytes=2 * 2 * 256 * VOCABULARY),
        of(256, torch.bfloat16),
        gradient(ours),
        (TWO_OPS, BY_LOG_SOFTMAX),
        same=SAME_HALF,
        checked=of(8, torch.bfloat16),
        dtype="bfloat16",
        pairs=7,
        target=0.0,
    ),
    Case(
        OP,
        "in place, from a head",
        f"128 tokens of {VOCABULARY:,} logits",
        Floor(bytes=3 * 4 * 128 * VOCABULARY),
        head,
        in_place,
        pairs=5,
        target=0.0,
        arrays={"the logits": lambda i: 4 * i.hidden.numel() * len(i.weight)},
        bars=(Bar("memory below", 1.1, "the logits"),),  # the logits themselves
    ),
    *(
        Case(
            OP,
            f"{model}, clip",
            f"8,192 tokens of {size:,} logits",
            Floor(bytes=2 * 2 * 8192 * size),
            of(8192, torch.bfloat16, size),
            gradient(ours),
            (TWO_OPS, BY_LOG_SOFTMAX),
            same=SAME_HALF,
            checked=of(8, torch.bfloat16, size),
            dtype="bfloat16",
            devices=("cuda",),
        )
        for model, size in (("llama-3.1-8b", 128256), ("qwen3-8b", 151936))
    ),
]
SWEEPS = [
    Sweep(
        OP,
        "forward and backward, V = 1,024",
        "logits",
        tuple(1024 * 10**e for e in range(6)),
        lambda device, size: make(size // 1024, device, 0, torch.float32, 1024),
        gradient(ours),
        Floor(bytes=8),
        fit_from=10**6,
    )
]
