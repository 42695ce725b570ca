"""policy_loss against the installed peers, compiled torch and two exponentials: PPO clip + k3 + all metrics, forward
and backward.

Lower bound on bytes per token: 4 each for log-probs, old and reference, 1 for the mask, 4 written: 17; the peers move
560 to 860.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Call, Case, Floor, Make, Provider, Same, Sweep, sized
from tests import peers_trl

OP, ROWS, WIDTH, BETA = "policy_loss", sized(256), 2048, 0.04
OURS = gk.LossConfig.trl(loss_type="dapo", beta=BETA, use_bias_correction_kl=False)
CLIP, UNCLIPPED = gk.LossConfig(), gk.LossConfig(clip_low=None, clip_high=None)
VERL = gk.LossConfig.verl(loss_mode="vanilla", use_kl_loss=True, kl_loss_coef=BETA, kl_loss_type="low_var_kl")


class Batch:
    """Log-probs slightly off-policy with all tokens valid, a mask of `share` of them, and the masked ones packed."""

    def __init__(self, rows: int, width: int, device: torch.device, seed: int, share: float = 1.0) -> None:
        options: Any = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
        noise = lambda: torch.randn(rows, width, **options)  # noqa: E731
        self.logprobs = (0.5 * noise() - 1).clamp(max=-1e-3)
        self.old, self.ref = (self.logprobs + 0.1 * noise() for _ in range(2))
        if share == 0.5:
            self.chosen = (torch.arange(width, device=device) < width // 2).expand(rows, width).clone()
        else:
            self.chosen = torch.rand(rows, width, **options) < share
        self.advantages = torch.randn(rows, **options)
        self.logprobs.requires_grad_()
        self.inputs = self.logprobs, self.old, self.advantages
        self.mask = torch.ones_like(self.chosen)
        self.is_weights = (0.1 * noise()).exp()
        self.tokens = self.mask.sum()  # what a trainer divides by, the tokens of all micro-batches
        self.cu_seqlens = F.pad(self.chosen.sum(1).cumsum(0), (1, 0))
        self.packed = [t.detach()[self.chosen] for t in (self.logprobs, self.old, self.ref)]
        self.packed[0].requires_grad_()

    @functools.cached_property
    def of_trl(self) -> list[peers_trl.PolicyLoss]:
        """TRL's loss with all of its inputs but the log-probs, which TRL has before it computes the loss.

        The second is for samples of vLLM, which have importance weights.
        """
        inputs = {"advantages": self.advantages, "old_per_token_logps": self.old, "ref_per_token_logps": self.ref}
        inputs["importance_sampling_ratio"] = self.is_weights
        options = {"loss_type": "dapo", "beta": BETA, "use_bias_correction_kl": False}
        arguments = -self.logprobs.detach(), self.mask, inputs
        return [peers_trl.PolicyLoss(*arguments, use_vllm=use_vllm, **options) for use_vllm in (False, True)]

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, self.logprobs)[0]


def of(rows: int = ROWS, share: float = 1.0) -> Make:
    return lambda device, seed: Batch(rows, WIDTH, device, seed, share)


def loss(b: Batch, config: gk.LossConfig = OURS, logprobs: Tensor | None = None, **arguments: Any) -> Tensor:
    """Our loss of all tokens, or of those of another mask."""
    arguments = {"mask": b.mask, "config": config} | arguments
    return gk.policy_loss(b.logprobs if logprobs is None else logprobs, b.old, b.advantages, **arguments).loss


def gradient(of: Callable[[Batch], Tensor]) -> Call:
    return lambda b: b.gradient(of(b))


def packed(b: Batch) -> Tensor:
    """The masked tokens packed, as a head that computes only these returns them."""
    lp, old, ref = b.packed
    result = gk.policy_loss(lp, old, b.advantages, cu_seqlens=b.cu_seqlens, ref_logprobs=ref, config=OURS)
    return torch.autograd.grad(result.loss, lp)[0]


def plain(
    lp: Tensor, old: Tensor, ref: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | float = 1.0
) -> tuple[Tensor, ...]:
    """TRL's formula as one function without host synchronisation, for torch.compile."""
    ratio, weight, distance = (lp - old).exp(), mask.float(), ref - lp
    term = -torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    kl = distance.exp() - distance - 1
    count = weight.sum().clamp(min=1)
    loss = ((term * weights + BETA * kl) * weight).sum() / count
    low = (ratio < 0.8) & (advantages < 0)[:, None]
    high = (ratio > 1.2) & (advantages > 0)[:, None]
    per_row = weight.sum(1)
    fractions = [(flag * weight).sum(1) / per_row for flag in (low, high)]
    metrics = [(value * weight).sum() / count for value in (kl, -lp, low, high, low | high)]
    return loss, torch.stack([*metrics, fractions[0].min(), fractions[1].max()]).detach()


def by(function: Any) -> Call:
    return gradient(lambda b: function(b.logprobs, b.old, b.ref, b.advantages, b.mask)[0])


def by_with_weights(function: Any) -> Call:
    return gradient(lambda b: function(b.logprobs, b.old, b.ref, b.advantages, b.mask, b.is_weights)[0])


@functools.cache
def verl_actor() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.workers.config import FSDPActorConfig
    return FSDPActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=4)


def verl(b: Batch) -> Tensor:
    from verl.trainer.ppo import core_algos

    advantages = b.advantages[:, None].expand_as(b.old)
    vanilla = core_algos.get_policy_loss_fn("vanilla")
    loss, _ = vanilla(b.old, b.logprobs, advantages, b.mask, "token-mean", verl_actor())
    kl = core_algos.kl_penalty(b.logprobs, b.ref, "low_var_kl")
    return b.gradient(loss + BETA * core_algos.agg_loss(kl, b.mask, "token-mean"))


# with settings that PPO's clipped loss does not have
SETTINGS = {
    "the same again": functools.partial(loss, config=CLIP),
    "ipo": functools.partial(loss, config=gk.LossConfig(loss="ipo")),
    "icepop": functools.partial(loss, config=gk.LossConfig(loss="icepop")),
    "topr": functools.partial(loss, config=gk.LossConfig(loss="topr")),
    "gspo": functools.partial(loss, config=gk.LossConfig(ratio="sequence")),
    "is_weights": lambda b: loss(b, CLIP, is_weights=b.is_weights),
    "policy_mask": lambda b: loss(b, CLIP, policy_mask=b.chosen),
}
# PPO's clipped loss with what a function of gk.variants computes from the log-probs, or a loss of its own
VARIANTS = {
    "GVPO": lambda b: gk.variants.gvpo_loss(*b.inputs, 8, mask=b.mask),
    "REAL": lambda b: gk.variants.real_loss(*b.inputs, 8, mask=b.mask),
    "FlowRL": lambda b: gk.variants.flowrl_loss(b.logprobs, b.old, b.ref, b.advantages, b.advantages, mask=b.mask),
    "FIPO": lambda b: loss(b, CLIP, is_weights=gk.variants.future_kl_weights(*b.inputs, mask=b.mask)),
    "Clip-Cov": lambda b: loss(b, CLIP, is_weights=gk.variants.clip_cov_weights(*b.inputs, mask=b.mask)),
    "KL-Cov": lambda b: (
        loss(b, UNCLIPPED) + gk.variants.kl_cov_penalty(*b.inputs, gk.token_shares(b.mask), mask=b.mask)
    ),
    "tokens of high entropy": lambda b: loss(b, CLIP, policy_mask=gk.variants.high_entropy_mask(-b.old, b.mask, 0.2)),
    "average": lambda b: loss(b, CLIP, gk.variants.average_logprobs(b.logprobs, b.old, mask=b.mask)),
    "geometric_average": lambda b: loss(
        b, CLIP, gk.variants.geometric_average_logprobs(b.logprobs, b.old, mask=b.mask)
    ),
}

# float32 gradients of 1e-6, against the largest of them
SAME = Same(rtol=1e-4, of_largest=1e-5)
ours = gradient(lambda b: loss(b, ref_logprobs=b.ref))
clip = gradient(lambda b: loss(b, CLIP))
ALL_TOKENS = Provider("all tokens", ours, agrees=False)
BY_MASK = Provider(
    "the same by a mask on dense arrays",
    gradient(lambda b: loss(b, mask=b.chosen, ref_logprobs=b.ref)),
    agrees=False,
)


def some_tokens(name: str, shape: str, rows: int, share: float, *bars: Bar) -> Case:
    return Case(
        OP,
        name,
        shape,
        Floor(bytes=17 * share * rows * WIDTH),
        of(rows, share),
        packed,
        (ALL_TOKENS, BY_MASK),
        bars,
        same=SAME,
    )


class Nothing(torch.autograd.Function):
    """Takes and returns what a loss does."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor) -> Tensor:
        ctx.save_for_backward(logprobs)
        return logprobs.new_empty(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return ctx.saved_tensors[0]


def of_constants(b: Batch) -> Tensor:
    return loss(b, CLIP, b.logprobs.detach())


def small_call(name: str, call: Call, nothing: Call, most: float) -> Case:
    return Case(
        OP,
        name,
        "2 responses of 8 tokens",
        Floor(bytes=13 * 16),
        lambda device, seed: Batch(2, 8, device, seed),
        call,
        (Provider("an empty autograd function", nothing, agrees=False),),
        (Bar("cost at most", most, "an empty autograd function"),),
        devices=("cpu",),
        pairs=40,
    )


CASES = [
    Case(
        OP,
        "clip and k3",
        "256 responses of 2,048 tokens",
        Floor(bytes=17 * ROWS * WIDTH),
        of(),
        ours,
        same=SAME,
        quick=("trl",),
        providers=(
            Provider("trl", gradient(lambda b: b.of_trl[0](b.logprobs)), package="trl"),
            Provider("verl", verl, package="verl", ours=gradient(lambda b: loss(b, VERL, ref_logprobs=b.ref))),
            Provider("torch.compile", by(torch.compile(plain, dynamic=False))),
            Provider("torch eager", by(plain)),
            Provider("two torch.exp", lambda b: torch.exp(torch.exp(b.old)), agrees=False),
        ),
        bars=(
            Bar("ratio at least", 15, "trl"),
            Bar("ratio at least", 10, "verl"),
            Bar("ratio at least", 3, "torch.compile"),
            Bar("cost at most", 3, "two torch.exp"),
        ),
    ),
    *(
        Case(
            OP,
            f"micro-batch of {rows} x {width:,}",
            f"{rows} responses of {width:,} tokens, a normalizer on the device, importance weights",
            Floor(bytes=21 * rows * width),
            lambda device, seed, rows=rows, width=width: Batch(rows, width, device, seed),
            # a trainer's call: its own normalizer, on the device, and weights for the engine's log-probs
            gradient(lambda b: loss(b, ref_logprobs=b.ref, is_weights=b.is_weights, normalizer={"tokens": b.tokens})),
            (
                Provider("trl", gradient(lambda b: b.of_trl[1](b.logprobs)), package="trl"),
                Provider("torch eager", by_with_weights(plain)),
                Provider("torch.compile", by_with_weights(torch.compile(plain, dynamic=False))),
            ),
            same=SAME,
            devices=("cuda",),
        )
        for rows, width in ((1, 16_384), (8, 2048), (4, 16_384), (16, 4096))
    ),
    # the host's share of a call, beside what torch itself takes for an autograd function that computes nothing
    small_call("one small call", clip, lambda b: b.gradient(Nothing.apply(b.logprobs)), 4),
    small_call("one small call, forward", lambda b: loss(b, CLIP), lambda b: Nothing.apply(b.logprobs), 8),
    small_call("one small call without a gradient", of_constants, lambda b: Nothing.apply(b.logprobs), 6),
    # settings of the kernel: no slower than 1.5 times the loss that they vary
    Case(
        OP,
        "clip, and other losses",
        "256 responses of 2,048 tokens, one thread",
        Floor(bytes=13 * ROWS * WIDTH),
        of(),
        clip,
        tuple(Provider(name, gradient(of), agrees=False) for name, of in SETTINGS.items()),
        tuple(Bar("ratio at most", 1.5, name) for name in SETTINGS),
        devices=("cpu",),
        pairs=40,
        one_thread=True,
    ),
    # plain torch beside the kernel, without a bar
    Case(
        OP,
        "clip, and variants",
        "256 responses of 2,048 tokens, one thread",
        Floor(bytes=13 * ROWS * WIDTH),
        of(),
        clip,
        tuple(Provider(name, gradient(of), agrees=False) for name, of in VARIANTS.items()),
        devices=("cpu",),
        one_thread=True,
    ),
    # so many that both sides run on several threads
    some_tokens(
        "half the tokens, packed",
        "2,048 responses, half padding",
        8 * ROWS,
        0.5,
        Bar("ratio at least", 1.6, "all tokens"),
    ),
    # no bar: the 32,768 tokens stay on one thread, all 524,288 do not
    some_tokens("one token in 16, packed", "256 responses of 2,048 tokens", ROWS, 1 / 16),
    some_tokens(
        "one token in 16 of many, packed",
        "8,192 responses of 2,048 tokens",
        32 * ROWS,
        1 / 16,
        Bar("ratio at least", 8, "all tokens"),
    ),
]
SWEEPS = [
    Sweep(
        OP,
        "clip and k3",
        "tokens",
        tuple(2**e for e in range(8, 25, 2)),
        lambda device, size: Batch(max(1, size // WIDTH), min(size, WIDTH), device, 0),
        ours,
        Floor(bytes=17),
        fit_from=2**18,
    )
]
