"""Advantages of tokens from rewards and, with a critic, values of tokens."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.token_advantages import registration as op
from grpo_kernels.ops.token_advantages.config import TokenAdvantageConfig
from grpo_kernels.ops.token_advantages.reference import TokenRewards
from grpo_kernels.rollouts import JoinedRows

_OP = "token_advantages"
_MASKS = (torch.bool, *checks.INTEGERS, *checks.FLOATS)


class TokenAdvantages(NamedTuple):
    """Result of token_advantages: float32, or float64 for float64 rewards, in the shape of rewards; 0 outside the mask.

    Attributes:
        advantages: of each token, or with turns of the token's turn
        returns: the target of a critic, which is the advantage before whitening plus the value
    """

    advantages: Tensor
    returns: Tensor


def token_advantages(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    turns: Tensor | None = None,
    rollouts: Tensor | None = None,
    config: TokenAdvantageConfig | str = "gae",
    backend: str | None = None,
) -> TokenAdvantages:
    """Computes GAE or discounted returns over the tokens of each row, and normalises them over the batch.

    Tokens outside the mask are skipped as if they were not there, except for their rewards, which belong to the token
    before them (config.carry_rewards). A row with a NaN reward is not scored: its advantages are 0 and its returns are
    its values. Nothing waits for the GPU. There is no gradient.

    Args:
        rewards: per token, [B, T] or packed [M] with `cu_seqlens`
        values: a critic's value before each token, in the shape of rewards; required by "gae", otherwise refused
        mask: in the shape of rewards; nonzero tokens count, None means all. Of other slots only finite rewards are read
        cu_seqlens: int32 or int64 [B + 1], bounds of the rows of packed input
        turns: integers in the shape of rewards; neighbouring tokens that count and have the same number form a turn,
            which acts as one step. Tokens with a negative number do not count
        rollouts: integer ids [B]; the rows of one id follow each other as one, in their order, across which turns go on
        config: a TokenAdvantageConfig or the name of an estimator (TokenAdvantageConfig.names())
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        TokenAdvantages: advantages and returns in the shape of rewards, 0 outside the mask
    """
    settings = TokenAdvantageConfig.of(config)
    checks.tensor(_OP, "rewards", rewards, checks.FLOATS)
    if rewards.dim() != (2 if cu_seqlens is None else 1):
        raise ValueError(f"{_OP}: rewards must have shape [B, T], or [M] with cu_seqlens, got {list(rewards.shape)}")
    if settings.needs_values != (values is not None):
        rule = "be given" if settings.needs_values else "be left out"
        got = "None" if values is None else type(values).__name__
        raise ValueError(f"{_OP}: values must {rule} for estimator {settings.estimator!r}, got {got}")
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    rewards = rewards.detach().to(dtype).contiguous()
    if values is not None:
        values = _per_token("values", values, checks.FLOATS, rewards).detach().to(dtype).contiguous()
    if mask is None:
        mask = torch.ones_like(rewards, dtype=torch.bool)
    else:
        mask = _per_token("mask", mask, _MASKS, rewards)
        mask = checks.flags(_OP, "mask", mask).contiguous()
    if turns is not None:
        turns = _per_token("turns", turns, checks.INTEGERS, rewards)
        mask = (mask & (turns >= 0)).contiguous()
        if turns.dtype == torch.int64:  # the kernels compare int32
            checks.values(_OP, "turns", "be below 2**31", mask & (turns >= 2**31), turns)
        turns = turns.int().contiguous()
    if cu_seqlens is not None:
        checks.tensor(_OP, "cu_seqlens", cu_seqlens, (torch.int64, torch.int32))
        checks.same_device(_OP, "cu_seqlens", cu_seqlens, rewards.device)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
            raise ValueError(f"{_OP}: cu_seqlens must have shape [B + 1], got {list(cu_seqlens.shape)}")
        checks.no_token_left_out(_OP, cu_seqlens, len(rewards), mask)
        cu_seqlens = cu_seqlens.long().contiguous()
    chosen = backends.select(_OP, backend, rewards.device.type, dtype, op.SUPPORTS, rewards.device.index)
    inputs = TokenRewards(rewards, values, mask, cu_seqlens, turns, settings.settings)
    if rollouts is None:
        return TokenAdvantages(*op.OP(chosen, inputs))
    joined = JoinedRows(_OP, rollouts, rewards, cu_seqlens)
    inputs = dataclasses.replace(
        inputs,
        rewards=joined.join(rewards),
        values=None if values is None else joined.join(values),
        mask=joined.join(mask),
        cu_seqlens=joined.cu_seqlens,
        turns=None if turns is None else joined.join(turns),
    )
    return TokenAdvantages(*map(joined.split, op.OP(chosen, inputs)))


def _per_token(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], rewards: Tensor) -> Tensor:
    return checks.shaped(_OP, name, value, dtypes, rewards.device, rewards.shape, "rewards")
