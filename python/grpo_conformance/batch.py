"""The batch that a case gives to an adapter, and the ways in which a trainer may lay out and split one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PAD_GROUP = -1


class NotOffered(Exception):
    """Raised by an adapter for a batch or setting that its trainer does not have; the message says why."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """N rows of at most T tokens, and the settings under which a trainer is asked about them.

    A part of a batch, as a micro-batch or a rank has it, knows the batch that it is a part of: counts and shares of all
    rows are those of `total`, and `of_total` takes this part out of a tensor of all rows.

    Attributes:
        mask: bool [N, T], tokens in the loss
        groups: integers [N], the prompt of each row; PAD_GROUP for rows without tokens, appended to make a batch
            divisible
        rollouts: integers [N], the answer of each row; rows with the same id are one answer, in their order
        rewards: float32 [N], the reward of the row's answer; NaN where it is not scored
        advantages: [N], of the row's answer, for losses
        logprobs: [N, T], of the policy, a leaf that requires a gradient
        old_logprobs: [N, T], of the policy that generated the rows
        ref_logprobs: [N, T], of the reference, for a KL
        teacher_logprobs: [N, T], of a teacher, for distillation
        entropy: [N, T], of the policy, for a bonus
        token_rewards: [N, T], for GAE
        values: [N, T], of a critic, for GAE and for the critic's loss
        returns: [N, T], the targets of the values in the critic's loss
        truncated: bool [N], rows that were cut at the length limit
        lengths: integers [N] of packed rows: tensors [N, T] are then [1, sum], one row after another; None: padded rows
        estimator: "mean", reward - mean; "leave-one-out", reward - mean of the others; "mean-std" and
            "leave-one-out-std", those divided by a standard deviation; None means the trainer's default
        filter_groups: whether groups of equal rewards are left out, as in dynamic sampling; their advantages are NaN
        gamma: discount of GAE
        lam: lambda of GAE
        whiten: whether the advantages of GAE are whitened over the batch
        aggregation: "token-mean", "seq-mean-token-mean" or "seq-mean-token-sum"; None means the trainer's default
        ratio: "token", or "sequence" for GSPO
        clip: PPO's, on both sides
        kl: form of the KL, "k1", "k2" or "k3"; None means the trainer's default
        kl_coef: factor of the KL from the reference in the loss
        entropy_coef: factor of the entropy bonus, which is subtracted from the loss
        teacher_coef: factor of a divergence from the teacher, whichever the trainer has
        value_coef: factor of the critic's loss
        auxiliary: the model's own mean of a further loss over the rows it gets, as of a router of experts
        auxiliary_coef: factor of it
        mask_truncated: whether the trainer is to leave truncated rows out of the loss
        whole: the batch that this one is a part of; None if it is none
        rows: integers [N], rows of the whole; None means all
        columns: first and last + 1 of the whole's tokens, for a slice of the context; None means all
        ranks: data-parallel ranks; an adapter divides the loss by them if its trainer averages their gradients
        steps: micro-batches of each rank, whose gradients are added up
    """

    mask: Tensor
    groups: Tensor
    rollouts: Tensor
    rewards: Tensor
    advantages: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    teacher_logprobs: Tensor
    entropy: Tensor
    token_rewards: Tensor
    values: Tensor
    returns: Tensor
    truncated: Tensor
    lengths: Tensor | None = None

    estimator: str | None = "mean"
    filter_groups: bool = False
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = False
    aggregation: str | None = "token-mean"
    ratio: str = "token"
    clip: float = 0.2
    kl: str | None = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    teacher_coef: float = 0.0
    value_coef: float = 0.0
    auxiliary: float = 0.0
    auxiliary_coef: float = 0.0
    mask_truncated: bool = False

    whole: Batch | None = None
    rows: Tensor | None = None
    columns: tuple[int, int] | None = None
    ranks: int = 1
    steps: int = 1

    @property
    def total(self) -> Batch:
        return self if self.whole is None else self.whole

    @property
    def has_rollouts(self) -> bool:
        """Whether a rollout of the whole batch has several rows."""
        return len(set(self.total.rollouts.tolist())) < len(self.total.rollouts)

    def of_total(self, values: Tensor) -> Tensor:
        """Takes this part out of values [N] or [N, T] of the whole batch."""
        values = values if self.rows is None else values[self.rows]
        return values if values.dim() == 1 or self.columns is None else values[:, slice(*self.columns)]

    def replace(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **changes)

    def over(self, value: float, *names: str) -> Batch:
        """Fills fields [N, T] with a value wherever the mask is False."""
        return self.replace(**{name: torch.where(self.mask, getattr(self, name), value) for name in names})

    def of_ratio(self, ratio: float, ref: float | Tensor = 1.0) -> Batch:
        """The batch with this ratio everywhere, this one of the reference, and log-probs that are at most 0."""
        gap = math.log(ratio)
        old = self.old_logprobs - max(gap, 0.0)
        logprobs = old + gap
        return self.replace(old_logprobs=old, logprobs=logprobs, ref_logprobs=logprobs + torch.as_tensor(ref).log())


@dataclasses.dataclass(frozen=True)
class Logits:
    """The arguments of `logprobs`: logits [N, L, V] at each of tokens [N, L], prompt first, and the temperature."""

    logits: Tensor
    tokens: Tensor
    temperature: float = 1.0

    @property
    def total(self) -> Logits:
        return self

    def replace(self, **changes: Any) -> Logits:
        return dataclasses.replace(self, **changes)


_BY_ROW = ("groups", "rollouts", "rewards", "advantages", "truncated")
_BY_TOKEN = (
    *("mask", "logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs"),
    *("entropy", "token_rewards", "values", "returns"),
)


def make(
    mask: Sequence[Sequence[int] | int],
    rewards: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    rollouts: Sequence[int] | None = None,
    **fields: Any,
) -> Batch:
    """Makes a batch of one group, a rollout a row, whose log-probs and entropies are irregular but fixed numbers.

    The mask is 0 and 1 for each token, or the length of each row. Other fields of Batch may be given; advantages are
    1, -0.5, 1, ... unless they are.
    """
    rows = [[1] * row if isinstance(row, int) else list(row) for row in mask]
    count, width = len(rows), max(map(len, rows))
    place = torch.arange(count * width, dtype=torch.float64).view(count, width)
    old = -1.2 - (place * 1.7).sin()
    zeros, ones = [[0] * width] * count, [(1, -0.5)[i % 2] for i in range(count)]
    for name, default in (("token_rewards", zeros), ("values", zeros), ("advantages", ones)):
        fields[name] = torch.tensor(fields.get(name, default), dtype=torch.float64)
    return Batch(
        mask=torch.tensor([row + [0] * (width - len(row)) for row in rows]).bool(),
        groups=torch.tensor(groups or [0] * count),
        rollouts=torch.tensor(rollouts or range(count)),
        rewards=torch.tensor(rewards or [0] * count, dtype=torch.float32),
        logprobs=old + 0.4 * (place * 2.3).cos(),
        old_logprobs=old,
        ref_logprobs=old + 0.5 * (place * 0.9 + 1).sin(),
        teacher_logprobs=old + 0.5 * (place * 0.7 + 2).sin(),
        entropy=1.5 + (place * 1.3).sin(),
        returns=fields["values"] + (place * 1.1).sin(),
        truncated=torch.tensor(fields.pop("truncated", [False] * count)),
        **fields,
    )


def part(batch: Batch, rows: Sequence[int], columns: tuple[int, int] | None = None, **counts: int) -> Batch:
    """The part of a batch that one rank or micro-batch has; counts are `ranks` and `steps`."""
    result = _changed(batch, lambda values: values[:, slice(*(columns or (None,)))], rows)
    return result.replace(whole=batch, rows=torch.tensor(rows), columns=columns, **counts)


def padded(batch: Batch, left: int, right: int) -> Batch:
    """The batch with more padding on either side of its rows."""
    return _changed(batch, lambda values: F.pad(values, (left, right), value=0))


def packed(batch: Batch) -> Batch:
    """The batch in the layout without padding: each row up to its last token, one after another."""
    places = torch.arange(batch.mask.shape[1])
    lengths = ((places + 1) * batch.mask).amax(1)
    is_kept = places < lengths[:, None]
    return _changed(batch, lambda values: values[is_kept][None]).replace(lengths=lengths)


def spread(batch: Batch, is_noisy: bool = False) -> Batch:
    """The batch with a token that does not count after each of its tokens, as the output of a tool is."""

    def change(values: Tensor) -> Tensor:
        is_number = is_noisy and values.dtype != torch.bool
        between = values.roll(1, 1) if is_number else torch.zeros_like(values)
        return torch.stack([values, between], 2).flatten(1)

    return _changed(batch, change)


def probe(batch: Batch, name: str) -> Batch:
    """The batch, or part of one, with other values in a field, so that a result that reads it moves."""
    values = getattr(batch.total, name)
    if name == "mask":
        other = values.clone()
        other[tuple(values.nonzero()[0])] = False
    elif name == "truncated":
        other = ~values
    elif name == "groups":
        other = torch.zeros_like(values)
    elif name == "rollouts":
        other = values.roll(1) if len(set(values.tolist())) > 1 else torch.arange(len(values))
    elif isinstance(values, Tensor):
        other = values + 0.3 * (torch.arange(values.numel()).view(values.shape) * 2.0 + 1).cos()
    else:
        other = values + 1
    changed = batch.total.replace(**{name: other})
    if batch.whole is None or batch.rows is None:
        return changed
    return part(changed, batch.rows.tolist(), batch.columns, ranks=batch.ranks, steps=batch.steps)


def split_first(batch: Batch, lengths: Sequence[int]) -> Batch:
    """The batch with the tokens of its first row in several rows of these lengths, which are still one rollout."""

    def change(values: Tensor) -> Tensor:
        rows = torch.split(values[0, : sum(lengths)], list(lengths))
        first = [F.pad(row, (0, values.shape[1] - len(row))) for row in rows]
        return torch.stack([*first, *values[len(lengths) :]])

    return _changed(batch, change, [0] * len(lengths) + list(range(1, len(batch.mask))))


def _changed(batch: Batch, change: Callable[[Tensor], Tensor], rows: Sequence[int] | None = None) -> Batch:
    """A batch of these rows, or of all, whose values of tokens are changed."""
    index = list(range(len(batch.mask)) if rows is None else rows)
    by_row = {name: getattr(batch, name)[index] for name in _BY_ROW}
    return batch.replace(**by_row, **{name: change(getattr(batch, name)[index]) for name in _BY_TOKEN})
