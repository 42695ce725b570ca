"""endpoint_segments against its reference, a loop over tokens, against the arithmetic of a token, and over four decades
of tokens.

Lower bound on bytes per token: 17 read (four float32, one bool) and 13 written (two float32, one int32, one bool). On a
CPU it is bound by arithmetic: each token takes an exp, an expm1 and two recurrences along the row, for which torch has
the operators exp, expm1 and, as its cheapest recurrence in float64, cumsum. They decide nothing, and a cut may depend
on every token before it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Call, Case, Floor, Make, Provider, Same, sized, sweep_of_tokens

OP, ROWS, LENGTH = "endpoint_segments", sized(256), 4096


@dataclass
class Responses:
    rewards: Tensor
    logprobs: Tensor
    old: Tensor
    values: Tensor
    mask: Tensor


def make(rows: int, length: int, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.float32) -> Responses:
    """Responses with a reward at the end, a piecewise constant critic, and a policy slightly off the sampler."""
    options: Any = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    rewards = torch.zeros(rows, length, device=device)
    rewards[:, -1] = torch.rand(rows, **options)
    now = -torch.rand(rows, length, **options).square()
    old = now + 0.05 * torch.randn(rows, length, **options)
    jumps = torch.randn(rows, length, **options) * (torch.rand(rows, length, **options) < 0.05)
    mask = torch.rand(rows, length, **options) < 0.99
    return Responses(*(t.to(dtype) for t in (rewards, now, old, 0.1 * jumps.cumsum(1))), mask)


def of(rows: int, length: int, dtype: torch.dtype = torch.float32) -> Make:
    return lambda device, seed: make(rows, length, device, seed, dtype)


def compared(call: Call) -> Call:
    """The results of a call that are compared: advantages and endpoint mask."""
    return lambda r: operator.attrgetter("advantages", "endpoint_mask")(call(r))


def with_norm(norm: str, has_critic: bool, backend: str | None = None) -> Call:
    options = {"config": gk.SegmentConfig(norm=norm), "backend": backend} | ({} if has_critic else {"groups": 8})
    return lambda r: gk.endpoint_segments(
        r.rewards, r.logprobs, r.old, r.mask, values=r.values if has_critic else None, **options
    )


ours, reference = (compared(with_norm("none", True, backend)) for backend in (None, "reference"))


def arithmetic(r: Responses) -> list[Tensor]:
    sums = [numbers.cumsum(1, dtype=torch.float64) for numbers in (r.rewards, r.values)]
    return [torch.exp(r.logprobs - r.old), torch.expm1(r.logprobs), *sums]


ARITHMETIC = Provider("exp, expm1 and two cumsum", arithmetic, agrees=False)


def same(got: tuple[Tensor, Tensor], gold: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[1], gold[1]), "different endpoints"
    Same(rtol=1e-12, atol=1e-12)(got[0], gold[0])


FEW = (2, 1024)  # rows and tokens for the loop, which takes seconds on all
SHAPE = f"{ROWS} responses of {LENGTH:,} tokens"
CASES = [
    Case(
        # Constant advantages make both sides of the test equal up to rounding, which only float64 keeps below
        # group_epsilon, so the loop is compared in float64 and timed in float32.
        OP,
        "norm=none",
        SHAPE,
        Floor(bytes=30 * ROWS * LENGTH),
        of(ROWS, LENGTH),
        ours,
        same=same,
        checked=of(*FEW, torch.float64),
        pairs=5,
        providers=(
            Provider(
                "the reference, a loop over tokens",
                reference,
                devices=("cpu",),
                few=of(*FEW),
                share=FEW[0] * FEW[1] / (ROWS * LENGTH),
            ),
        ),
        bars=(Bar("ratio at least", 50, "the reference, a loop over tokens"),),
    ),
    *(
        Case(
            OP,
            f"norm={norm}, {'with' if critic else 'without'} a critic",
            SHAPE,
            Floor(bytes=(30 if critic else 26) * ROWS * LENGTH),
            of(ROWS, LENGTH),
            with_norm(norm, critic),
            (ARITHMETIC,),
            (Bar("cost at most", 3, ARITHMETIC.name),),
        )
        for critic in (True, False)
        for norm in ("none", "batch")
    ),
    Case(
        OP,
        "norm=none, long rows",
        "512 responses of 8,192 tokens",
        Floor(bytes=30 * sized(512) * 8192),
        of(sized(512), 8192),
        ours,
        same=same,
        devices=("cuda",),
    ),
]
SWEEPS = [sweep_of_tokens(OP, "norm=none", make, ours, 30)]
