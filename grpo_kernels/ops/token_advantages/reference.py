"""The specification of token_advantages, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.groups import packed_bounds
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.token_advantages.config import WHITEN_TOKENS, Plan
from grpo_kernels.plans import read


@op_inputs
class TokenRewards:
    """Checked arguments of token_advantages: one entry per token, all contiguous.

    `settings` are a TokenAdvantageConfig's.
    """

    rewards: Tensor
    values: Tensor | None
    mask: Tensor
    cu_seqlens: Tensor | None
    turns: Tensor | None
    settings: list[float]


def forward(inputs: TokenRewards) -> tuple[Tensor, Tensor]:
    """Advantages and returns, in the shape of rewards."""
    plan = read(Plan, inputs.settings)
    rewards, values, mask, cu_seqlens, turns = (
        inputs.rewards,
        inputs.values,
        inputs.mask,
        inputs.cu_seqlens,
        inputs.turns,
    )
    if cu_seqlens is None:
        rows = torch.arange(rewards.numel(), device=rewards.device).view(rewards.shape)
        inside = torch.ones_like(mask)
    else:
        bounds = packed_bounds("token_advantages", cu_seqlens, rewards.numel())
        lengths = bounds.diff()
        places = torch.arange(int(lengths.max()) if len(lengths) else 0, device=rewards.device)
        rows, inside = bounds[:-1, None] + places, places < lengths[:, None]
        rows = torch.where(inside, rows, 0)

    def by_row(tokens: Tensor) -> Tensor:
        return tokens.reshape(-1)[rows] if rewards.numel() else tokens.new_zeros(rows.shape)

    valid = by_row(mask) & inside
    reward = torch.where(inside, by_row(rewards).double(), 0)
    # at tokens that do not count, what is no number is padding
    reward = torch.where(valid | (reward.isfinite() & bool(plan.carry_rewards)), reward, 0)
    value = torch.zeros_like(reward) if values is None else torch.where(valid, by_row(values).double(), 0)
    turn = None if turns is None else by_row(turns)
    returns = _returns(reward, value, valid, turn, plan)
    # A row with a NaN reward has no advantages and keeps its values.
    scored = ~(reward.isnan() & valid).any(1, keepdim=True)
    returns = torch.where(scored, returns, value)
    advantages = torch.where(scored, returns - value, 0)
    if turn is not None:
        advantages, returns = _spread(advantages, valid, turn), _spread(returns, valid, turn)
    if plan.whiten == WHITEN_TOKENS:
        # statistics are those of the advantages as they would be returned
        advantages = _whitened(advantages.to(rewards.dtype).double(), valid & scored, plan.whiten_eps)

    def by_token(result: Tensor) -> Tensor:
        # slots that do not count go after the last token: picking the others would wait for their number
        after = torch.where(valid, rows, rewards.numel()).reshape(-1)
        flat = torch.zeros(rewards.numel() + 1, dtype=rewards.dtype, device=rewards.device)
        return flat.scatter(0, after, result.to(rewards.dtype).reshape(-1))[:-1].view(rewards.shape)

    return by_token(advantages), by_token(returns)


def _returns(reward: Tensor, value: Tensor, valid: Tensor, turn: Tensor | None, plan: Plan) -> Tensor:
    """Lambda-returns from each token on, as if the token were the first of its turn."""
    rows, width = reward.shape
    returns = torch.zeros_like(reward)
    next_return, next_value = reward.new_zeros(2, rows)
    carried = reward.new_zeros(rows)
    next_turn = torch.full((rows,), -1, device=reward.device)
    for t in reversed(range(width)):
        entering = plan.gamma * ((1 - plan.lam) * next_value + plan.lam * next_return)
        if turn is not None:
            entering = torch.where(turn[:, t] == next_turn, next_return, entering)
            next_turn = torch.where(valid[:, t], turn[:, t], next_turn)
        carried = carried + reward[:, t]
        next_return = torch.where(valid[:, t], carried + entering, next_return)
        carried = torch.where(valid[:, t], 0, carried)
        next_value = torch.where(valid[:, t], value[:, t], next_value)
        returns[:, t] = torch.where(valid[:, t], next_return, 0)
    return returns


def _spread(tokens: Tensor, valid: Tensor, turn: Tensor) -> Tensor:
    """Gives every token of a turn what its first token has."""
    spread = torch.zeros_like(tokens)
    first = tokens.new_zeros(len(tokens))
    last_turn = torch.full_like(turn[:, :1], -1).squeeze(1)
    for t in range(tokens.shape[1]):
        is_first = valid[:, t] & (turn[:, t] != last_turn)
        first = torch.where(is_first, tokens[:, t], first)
        last_turn = torch.where(is_first, turn[:, t], last_turn)
        spread[:, t] = torch.where(valid[:, t], first, 0)
    return spread


def _whitened(advantages: Tensor, counted: Tensor, eps: float) -> Tensor:
    """Advantages over the root of their variance; 0 where all are equal, and for one alone."""
    count = counted.sum()
    mean = torch.where(counted, advantages, 0).sum() / count.clamp(min=1)
    centered = torch.where(counted, advantages - mean, 0)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    low = torch.where(counted, advantages, torch.inf)
    high = torch.where(counted, advantages, -torch.inf)
    differ = low.amin() < high.amax() if advantages.numel() else count > 0
    spoilt = torch.where(counted, advantages, 0).isfinite().logical_not().any()
    # a row that is not scored keeps its zeros beside an infinite advantage, which makes the variance NaN
    return torch.where(counted & (differ | spoilt), centered / (variance + eps).sqrt(), 0)
