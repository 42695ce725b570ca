"""Batches for the tests of token_advantages, and the advantages that the definition gives, step by step in float64."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.token_advantages.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

BACKENDS = runnable_backends(SUPPORTS)
FAST = tuple(name for name in BACKENDS if name in ("cpu", "reference"))
F32, F64 = torch.float32, torch.float64
NAN, INF = math.nan, math.inf


@dataclasses.dataclass
class Batch:
    rewards: Tensor
    values: Tensor | None
    mask: Tensor | None
    turns: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def run(
        self, config: gk.TokenAdvantageConfig | str, backend: str | None, dtype: torch.dtype = F64
    ) -> gk.TokenAdvantages:
        device = device_of(backend or "cuda")

        def put(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return (tensor.to(dtype) if tensor.dtype.is_floating_point else tensor).to(device)

        rewards = put(self.rewards)
        assert rewards is not None
        more = {name: put(getattr(self, name)) for name in ("mask", "turns", "cu_seqlens")}
        return gk.token_advantages(rewards, put(self.values), **more, config=config, backend=backend)

    def rows(self) -> list[tuple[int, int]]:
        if self.cu_seqlens is not None:
            return list(itertools.pairwise(self.cu_seqlens.tolist()))
        width = self.rewards.shape[1]
        return [(row * width, (row + 1) * width) for row in range(len(self.rewards))]

    def packed(self, behind: int = 3) -> Batch:
        """The same rows one after the other, the last padding of each cut off, with tokens behind the last row."""
        assert self.mask is not None
        lengths = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in self.mask]

        def pack(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            parts = [row[:length] for row, length in zip(tensor, lengths, strict=True)]
            return torch.cat([*parts, torch.ones(behind).to(tensor.dtype)])

        bounds = torch.tensor([0, *itertools.accumulate(lengths)])
        rewards = pack(self.rewards)
        assert rewards is not None
        return Batch(rewards, pack(self.values), pack(self.mask), pack(self.turns), bounds)

    def with_garbage(self) -> Batch:
        """NaN and wrong turns in slots that do not count; rewards in gaps stay, those of padding are no numbers."""
        assert self.mask is not None
        junk = ~self.mask
        is_padding = self.mask.flip(1).cumsum(1).flip(1) == 0
        no_numbers = torch.where(torch.arange(junk.shape[1]) % 2 == 0, NAN, INF)
        return dataclasses.replace(
            self,
            rewards=torch.where(is_padding, no_numbers, self.rewards),
            values=None if self.values is None else torch.where(junk, NAN, self.values),
            turns=None if self.turns is None else torch.where(junk, 7, self.turns),
        )


def batch_of(
    seed: int,
    rows: int,
    width: int,
    *,
    values: bool = True,
    turns: bool = False,
    gaps: float = 0.2,
    terminal: bool = False,
) -> Batch:
    """Random rows with gaps in the mask and padding behind them; the first row is whole, the second empty."""
    draw = torch.Generator().manual_seed(seed)
    rewards = torch.randn(rows, width, generator=draw, dtype=F64)
    mask = torch.rand(rows, width, generator=draw) >= gaps
    lengths = torch.randint(0, width + 1, (rows, 1), generator=draw)
    mask &= torch.arange(width) < lengths
    if rows > 1:
        mask[0], mask[1] = True, False
    if terminal:
        last = (mask.long() * torch.arange(1, width + 1)).argmax(1, keepdim=True)
        rewards = torch.where(torch.arange(width) == last, rewards, 0)
    critic = torch.randn(rows, width, generator=draw, dtype=F64) if values else None
    numbers = None
    if turns:
        numbers = (torch.rand(rows, width, generator=draw) < 0.2).cumsum(1) * 2
        numbers = torch.where(torch.rand(rows, width, generator=draw) < 0.1, -1, numbers)
    # values that float32 and float64 hold alike
    return Batch(rewards.float().double(), None if critic is None else critic.float().double(), mask, numbers)


def steps_of(batch: Batch, row: tuple[int, int]) -> list[list[int]]:
    """Tokens of the steps of a row: its turns, or each token that counts."""
    mask = [True] * batch.rewards.numel() if batch.mask is None else batch.mask.flatten().tolist()
    tokens = [t for t in range(*row) if mask[t]]
    if batch.turns is None:
        return [[t] for t in tokens]
    turns = batch.turns.flatten().tolist()
    return [list(turn) for _, turn in itertools.groupby((t for t in tokens if turns[t] >= 0), turns.__getitem__)]


def carried(batch: Batch) -> list[float]:
    """Rewards of tokens that do not count at the last token before them that does, if they are numbers."""
    rewards = batch.rewards.double().flatten().tolist()
    for row in batch.rows():
        counts = {t for step in steps_of(batch, row) for t in step}
        last = None
        for t in range(*row):
            if t in counts:
                last = t
            elif last is not None and math.isfinite(rewards[t]):
                rewards[last] += rewards[t]
    return rewards


def expected(batch: Batch, config: gk.TokenAdvantageConfig | str) -> tuple[Tensor, Tensor]:
    """Advantages and returns by the temporal differences of steps."""
    config = gk.TokenAdvantageConfig.of(config)
    rewards = carried(batch) if config.carry_rewards else batch.rewards.double().flatten().tolist()
    values = [0.0] * len(rewards) if batch.values is None else batch.values.double().flatten().tolist()
    advantages, returns, scored = [0.0] * len(rewards), [0.0] * len(rewards), []
    for row in batch.rows():
        steps = steps_of(batch, row)
        is_scored = not any(math.isnan(rewards[t]) for step in steps for t in step)
        advantage, next_value = 0.0, 0.0
        for step in reversed(steps):
            value = values[step[0]]
            difference = sum(rewards[t] for t in step) + config.gamma * next_value - value
            advantage = difference + config.gamma * config.lam * advantage if is_scored else 0.0
            next_value = value
            for t in step:
                advantages[t], returns[t] = advantage, advantage + value
                scored += [t] if is_scored else []
    result = torch.tensor(advantages, dtype=F64)
    if config.whiten == "tokens":
        counted = result[scored]
        whitened = torch.zeros_like(counted)
        if len(scored) > 1 and counted.min() < counted.max():
            whitened = (counted - counted.mean()) / (counted.var() + config.whiten_eps).sqrt()
        result[scored] = whitened
    shape = batch.rewards.shape
    return result.view(shape), torch.tensor(returns, dtype=F64).view(shape)
