"""The batch that a case gives to an adapter, and the ways in which a trainer may lay out and split one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PAD_GROUP = -1


class NotOffered(Exception):
    """Raised by an adapter for a batch or setting that its trainer does not have; the message says why."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """N rows of at most T tokens, and the settings under which a trainer is asked about them.

    A part of a batch, as a micro-batch or a rank has it, knows the batch that it is a part of: counts and shares of all
    rows are those of `total`, and `of_total` takes this part out of a tensor of all rows.
    """

    mask: Tensor  # [N, T] bool: tokens in the loss
    groups: Tensor  # [N] int: the prompt of each row; PAD_GROUP: appended to make a batch divisible, without tokens
    rollouts: Tensor  # [N] int: the answer of each row; rows with the same id are one answer, in their order
    rewards: Tensor  # [N] float32: the reward of the row's answer; NaN: not scored
    advantages: Tensor  # [N] of the row's answer, for losses
    logprobs: Tensor  # [N, T] of the policy, a leaf that requires a gradient
    old_logprobs: Tensor  # [N, T]
    ref_logprobs: Tensor  # [N, T]
    entropy: Tensor  # [N, T]
    token_rewards: Tensor  # [N, T] for GAE
    values: Tensor  # [N, T] of a critic, for GAE

    estimator: str = "mean"  # reward - mean; "mean-std": divided by the std; "leave-one-out": - mean of the others
    aggregation: str | None = "token-mean"  # "seq-mean-token-mean", "seq-mean-token-sum"; None: the trainer's default
    ratio: str = "token"  # "sequence": GSPO
    clip: float = 0.2  # PPO's, on both sides
    kl_coef: float = 0.0
    entropy_coef: float = 0.0  # of a bonus: subtracted from the loss
    gamma: float = 1.0
    lam: float = 1.0
    packed: bool = False  # ask for the layout without padding

    whole: Batch | None = None  # the batch that this one is a part of
    rows: Tensor | None = None  # [N] rows of the whole
    columns: tuple[int, int] | None = None  # first and last + 1 of the whole's tokens: a slice of the context
    ranks: int = 1  # data-parallel ranks, whose gradients are averaged
    steps: int = 1  # micro-batches of each rank, whose gradients are added up

    @property
    def total(self) -> Batch:
        return self if self.whole is None else self.whole

    def of_total(self, values: Tensor) -> Tensor:
        """Takes this part out of values [N] or [N, T] of the whole batch."""
        values = values if self.rows is None else values[self.rows]
        return values if values.dim() == 1 or self.columns is None else values[:, slice(*self.columns)]

    def replace(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **changes)

    def over(self, value: float, *names: str) -> Batch:
        """Fills fields [N, T] with a value wherever the mask is False."""
        return self.replace(**{name: torch.where(self.mask, getattr(self, name), value) for name in names})

    def of_ratio(self, ratio: float) -> Batch:
        return self.replace(logprobs=self.old_logprobs + torch.tensor(ratio, dtype=torch.float64).log())


_BY_ROW = ("groups", "rollouts", "rewards", "advantages")
_BY_TOKEN = ("mask", "logprobs", "old_logprobs", "ref_logprobs", "entropy", "token_rewards", "values")


def make(
    mask: Sequence[Sequence[int] | int],
    rewards: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    rollouts: Sequence[int] | None = None,
    advantages: Sequence[float] | None = None,
    **fields: Any,
) -> Batch:
    """Makes a batch of one group, a rollout a row, whose log-probs and entropies are irregular but fixed numbers.

    Args:
        mask: 0 and 1 for each token, or the length of each row.
        rewards, groups, rollouts, advantages: of each row; by default advantages are 1, -0.5, 1, ...
        **fields: further fields of Batch.
    """
    rows = [[1] * row if isinstance(row, int) else list(row) for row in mask]
    count, width = len(rows), max(map(len, rows))
    place = torch.arange(count * width, dtype=torch.float64).view(count, width)
    old = -1.2 - (place * 1.7).sin()
    for name in ("token_rewards", "values"):
        fields[name] = torch.tensor(fields.get(name, [[0] * width] * count), dtype=torch.float64)
    return Batch(
        mask=torch.tensor([row + [0] * (width - len(row)) for row in rows]).bool(),
        groups=torch.tensor(groups or [0] * count),
        rollouts=torch.tensor(rollouts or range(count)),
        rewards=torch.tensor(rewards or [0] * count, dtype=torch.float32),
        advantages=torch.tensor(advantages or [(1, -0.5)[i % 2] for i in range(count)], dtype=torch.float64),
        logprobs=old + 0.4 * (place * 2.3).cos(),
        old_logprobs=old,
        ref_logprobs=old + 0.5 * (place * 0.9 + 1).sin(),
        entropy=1.5 + (place * 1.3).sin(),
        **fields,
    )


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """A batch of these rows alone, which knows of no other."""
    return batch.replace(**{name: getattr(batch, name)[list(rows)] for name in _BY_ROW + _BY_TOKEN})


def part(batch: Batch, rows: Sequence[int], columns: tuple[int, int] | None = None, **counts: int) -> Batch:
    """The part of a batch that one rank or micro-batch has; counts are `ranks` and `steps`."""
    result = take(batch, rows).replace(whole=batch, rows=torch.tensor(rows), columns=columns, **counts)
    return _by_token(result, lambda values: values if columns is None else values[:, slice(*columns)])


def _by_token(batch: Batch, change: Any) -> Batch:
    return batch.replace(**{name: change(getattr(batch, name)) for name in _BY_TOKEN})


def padded(batch: Batch, left: int, right: int) -> Batch:
    """The batch with more padding on either side of its rows."""
    return _by_token(batch, lambda values: torch.nn.functional.pad(values, (left, right), value=0))


def spread(batch: Batch) -> Batch:
    """The batch with a token that does not count after each of its tokens, as the output of a tool is."""
    return _by_token(batch, lambda values: torch.stack([values, torch.zeros_like(values)], 2).flatten(1))


def split_first(batch: Batch, lengths: Sequence[int]) -> Batch:
    """The batch with the tokens of its first row in several rows of these lengths, which are still one rollout."""
    rows = take(batch, [0] * len(lengths) + list(range(1, len(batch.mask))))
    ends = torch.tensor(lengths).cumsum(0).tolist()

    def change(values: Tensor) -> Tensor:
        values = values.clone()
        for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            values[i] = torch.nn.functional.pad(values[i, end - length : end], (0, values.shape[1] - length))
        return values

    return _by_token(rows, change)
