"""The optimal token baseline: at each place of the responses to a prompt, their returns weighted by gradient energy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from grpo_kernels import checks
from grpo_kernels.groups import RowGroups
from grpo_kernels.ops.token_advantages import TokenAdvantages

_OP = "optimal_token_baseline"
_MASKS = (torch.bool, *checks.INTEGERS, *checks.FLOATS)
PLACES = ("position", "rank")
_ROUNDING = 2**-7  # of probabilities in bfloat16 near 1


def optimal_token_baseline(
    rewards: Tensor,
    old_logprobs: Tensor,
    sum_pi_squared: Tensor,
    groups: int | Tensor,
    *,
    mask: Tensor | None = None,
    is_weights: Tensor | None = None,
    places: str = "position",
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> TokenAdvantages:
    """Subtracts from the return of each token the baseline that minimises the variance of the policy gradient.

    At each place, the baseline is the mean of the returns of a prompt's responses, weighted by the energy W of the
    gradient up to there: the sum of 1 - 2 p + sum(p^2) over their tokens, whose first p is the chosen token's. A single
    response has baseline 0, and equal returns have advantage 0. A row with a NaN reward is not scored: it enters no
    baseline, and its results are 0. Plain torch in float64, without a wait for the GPU or a gradient.

    Args:
        rewards: per token, [B, T]
        old_logprobs: log-probabilities of the tokens, in the shape of rewards
        sum_pi_squared: sum of the squared probabilities of the vocabulary at each token, in the shape of rewards:
            (2 * logits).logsumexp(-1).sub(2 * logits.logsumexp(-1)).exp()
        groups: prompt of each row, as an int (that many consecutive rows) or integer ids [B]
        mask: in the shape of rewards; nonzero tokens count, None means all. Other slots are not read
        is_weights: importance weights of the tokens, whose squares scale their energy
        places: which tokens are compared: "position" those of one column, "rank" those with equally many tokens that
            count before them, for responses with tool outputs between
        zero_tail: the response that alone is the longest has baseline 0 after the last token of all others
        eps: added to the sum of the weights

    Returns:
        TokenAdvantages: advantages and returns in the shape of rewards, 0 outside the mask
    """
    _check_rewards(rewards)
    reward, logprob = rewards.detach().double(), _number("old_logprobs", old_logprobs, rewards)
    squares = _number("sum_pi_squared", sum_pi_squared, rewards)
    weights = None if is_weights is None else _number("is_weights", is_weights, rewards)
    if places not in PLACES:
        raise checks.unknown(_OP, "places", places, PLACES)
    checks.finite(_OP, "eps", eps, minimum=0.0)
    counts = _mask(mask, rewards)
    counts = counts & ~(reward.isnan() & counts).any(1, keepdim=True)
    # arguments in another order would give numbers, too
    checks.values(_OP, "old_logprobs", "be at most 0", counts & ~(logprob <= _ROUNDING), logprob)
    outside = ~((squares >= 0) & (squares <= 1 + _ROUNDING))
    checks.values(_OP, "sum_pi_squared", "be within [0, 1]", counts & outside, squares)
    rows = RowGroups.of(_OP, groups, rewards)

    def own(values: Tensor) -> Tensor:
        return torch.where(counts, values, 0)

    returns = own(own(reward).flip(1).cumsum(1).flip(1))
    energy = own(1 - 2 * logprob.exp() + squares)
    if weights is not None:
        energy = own(energy * weights.square())
    energy = own(energy.cumsum(1))
    if places == "rank":
        # tokens that count go to the front, and their baselines return
        forth = counts.logical_not().byte().sort(dim=1, stable=True).indices
        back = forth.sort(1).indices
        front = [tokens.gather(1, forth) for tokens in (returns, energy, counts)]
        baselines = _baselines(front[0], front[1], front[2], rows, zero_tail, eps).gather(1, back)
    else:
        baselines = _baselines(returns, energy, counts, rows, zero_tail, eps)
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return TokenAdvantages(own(returns - baselines).to(dtype), returns.to(dtype))


def _baselines(returns: Tensor, energy: Tensor, counts: Tensor, rows: RowGroups, zero_tail: bool, eps: float) -> Tensor:
    """The baseline of every slot [B, T]."""

    def reduce(values: Tensor, how: str, initial: float) -> Tensor:
        """Over the rows of each group, which every one of them gets."""
        return rows.reduce(values, how, initial)[rows.group]

    baselines = reduce(returns * energy, "sum", 0.0) / (reduce(energy, "sum", 0.0) + eps)
    low = reduce(torch.where(counts, returns, torch.inf), "min", torch.inf)
    high = reduce(torch.where(counts, returns, -torch.inf), "max", -torch.inf)
    baselines = torch.where(low == high, low, baselines)
    # up to the last token that counts; the number of those is less where the mask has gaps
    places = torch.arange(1.0, returns.shape[1] + 1, dtype=torch.float64, device=returns.device)
    lengths = functional.pad(places * counts, (1, 0)).amax(1, keepdim=True)
    scored = reduce((lengths > 0).double(), "sum", 0.0)
    longest = reduce(lengths, "max", 0.0)
    is_longest = lengths == longest
    if zero_tail:
        is_only = reduce(is_longest.double(), "sum", 0.0) == 1
        second = reduce(torch.where(is_longest, 0, lengths), "max", 0.0)
        baselines = torch.where(is_longest & is_only & (places > second), 0, baselines)
    return torch.where(scored > 1, baselines, 0)


def _check_rewards(rewards: Tensor) -> None:
    checks.tensor(_OP, "rewards", rewards, checks.FLOATS)
    if rewards.dim() != 2:
        raise ValueError(f"{_OP}: rewards must have shape [B, T], got {list(rewards.shape)}")


def _number(name: str, value: Tensor, rewards: Tensor) -> Tensor:
    return _like_rewards(name, value, checks.FLOATS, rewards).detach().double()


def _like_rewards(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], rewards: Tensor) -> Tensor:
    return checks.shaped(_OP, name, value, dtypes, rewards.device, rewards.shape, "rewards")


def _mask(mask: Tensor | None, rewards: Tensor) -> Tensor:
    if mask is None:
        return torch.ones_like(rewards, dtype=torch.bool)
    return checks.flags(_OP, "mask", _like_rewards("mask", mask, _MASKS, rewards))
