"""token_advantages against verl's loop over time steps and against a recurrence in float64, and over four decades.

Lower bound on bytes per token: 9 read (two float32, one bool; without values one float32 less) and 8 written (two
float32). Whitening needs a sum over the batch first, so it reads and writes the advantages again: 5 and 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Call, Case, Floor, Make, Provider, Same, sized, sweep_of_tokens
from tests import peers

OP, ROWS, LENGTH = "token_advantages", sized(256), 4096
GAMMA, LAM = 0.999, 0.95


class Responses(NamedTuple):
    rewards: Tensor
    values: Tensor
    mask: Tensor
    turns: Tensor


def make(rows: int, length: int, device: torch.device, seed: int = 0) -> Responses:
    """Responses with a reward at the end, noisy values, tool outputs that do not count, and a turn per 512 tokens."""
    options: Any = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    rewards = torch.zeros(rows, length, device=device)
    rewards[:, -1] = torch.rand(rows, **options)
    values = 0.1 * torch.randn(rows, length, **options)
    mask = torch.rand(rows, length, **options) < 0.9
    mask[:, -1] = True  # verl drops rewards at other tokens
    turns = (torch.arange(length, dtype=torch.int32, device=device) // 512).expand(rows, length).contiguous()
    return Responses(rewards, values, mask, turns)


def of(rows: int, length: int) -> Make:
    return lambda device, seed: make(rows, length, device, seed)


def gae(whiten: str, by_turn: bool = False) -> Call:
    config = gk.TokenAdvantageConfig(gamma=GAMMA, lam=LAM, whiten=whiten)

    def call(r: Responses) -> tuple[Tensor, Tensor]:
        turns = r.turns if by_turn else None
        return tuple(gk.token_advantages(r.rewards, r.values, mask=r.mask, turns=turns, config=config))

    return call


def reinforce_plus_plus(r: Responses) -> tuple[Tensor, Tensor]:
    config = gk.TokenAdvantageConfig("reinforce_plus_plus", gamma=GAMMA)
    return tuple(gk.token_advantages(r.rewards, mask=r.mask, config=config))


def verl_gae(r: Responses) -> tuple[Tensor, Tensor]:
    """Its results outside the mask are left over from other tokens."""
    mask = r.mask.float()
    advantages, returns = peers.verl("gae")(r.rewards, r.values, mask, GAMMA, LAM)
    return advantages * mask, returns * mask


def verl_reinforce_plus_plus(r: Responses) -> tuple[Tensor, Tensor]:
    from verl.trainer.config import AlgoConfig

    return peers.verl("reinforce_plus_plus")(r.rewards, r.mask.float(), config=AlgoConfig(gamma=GAMMA))


# the cheapest recurrence that torch has, of which GAE needs one
RECURRENCE = Provider("cumsum in float64", lambda r: r.rewards.cumsum(1, dtype=torch.float64), agrees=False)
# float32 in the peer's sums over a row and over the batch
SAME = Same(rtol=1e-4, atol=1e-4)
TOKENS = ROWS * LENGTH
SHAPE = f"{ROWS} responses of {LENGTH:,} tokens"
CASES = [
    Case(
        OP,
        "gae",
        SHAPE,
        Floor(bytes=26 * TOKENS),
        of(ROWS, LENGTH),
        gae("tokens"),
        (Provider("verl", verl_gae, package="verl"), RECURRENCE),
        (Bar("ratio at least", 30, "verl"), Bar("cost at most", 4, RECURRENCE.name)),
        same=SAME,
        pairs=5,
        quick=("verl",),
    ),
    Case(
        OP,
        "reinforce_plus_plus",
        SHAPE,
        Floor(bytes=22 * TOKENS),
        of(ROWS, LENGTH),
        reinforce_plus_plus,
        (Provider("verl", verl_reinforce_plus_plus, package="verl"),),
        (Bar("ratio at least", 20, "verl"),),
        same=SAME,
        pairs=5,
    ),
    Case(
        OP,
        "gae of turns",
        SHAPE,
        Floor(bytes=30 * TOKENS),
        of(ROWS, LENGTH),
        gae("tokens", by_turn=True),
        (RECURRENCE,),
        (Bar("cost at most", 8, RECURRENCE.name),),
    ),
    *(
        Case(
            OP,
            f"gae, {rows:,} x {length:,}",
            f"{rows:,} responses of {length:,} tokens",
            Floor(bytes=26 * rows * length),
            of(rows, length),
            gae("tokens"),
            devices=("cuda",),  # without verl, whose loop takes seconds a call
        )
        for rows, length in (
            (sized(rows), sized(length))
            for rows, length in ((128, 16_384), (128, 32_768), (16, 131_072), (16_384, 512))
        )
    ),
]
SWEEPS = [sweep_of_tokens(OP, "gae", make, gae("tokens"), 26)]
