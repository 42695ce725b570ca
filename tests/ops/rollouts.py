"""Rollouts of tokens, written as one row each and as several rows."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows that are pieces of rollouts, which follow each other in any order but that of the pieces of one rollout.

    A piece is its rollout, its first token there, and its number of tokens. `names` are the ids of the rollouts.
    """

    lengths: list[int]
    pieces: list[tuple[int, int, int]]
    names: Tensor

    @property
    def of_row(self) -> Tensor:
        return torch.tensor([rollout for rollout, *_ in self.pieces], dtype=torch.int64)

    @property
    def ids(self) -> Tensor:
        return self.names[self.of_row]

    @property
    def is_token(self) -> Tensor:
        """Slots [R, T] of the whole rollouts that hold a token."""
        return torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *(count for *_, count in self.pieces)]).cumsum(0)

    def packed(self, whole: Tensor) -> Tensor:
        """Values [M] of the pieces, from those of whole rollouts [R, T], and of two tokens of no row."""
        parts = [whole[rollout, first : first + count] for rollout, first, count in self.pieces]
        return torch.cat([*parts, whole.new_full((2,), whole.dtype != torch.bool)])

    def padded(self, whole: Tensor) -> Tensor:
        parts = [whole[rollout, first : first + count] for rollout, first, count in self.pieces]
        return pad_sequence(parts, batch_first=True)

    def whole(self, values: Tensor) -> Tensor:
        """The inverse of packed, and of padded."""
        result = values.new_zeros(self.is_token.shape)
        for row, (rollout, first, count) in enumerate(self.pieces):
            start = int(self.cu_seqlens[row])
            own = values[row, :count] if values.dim() == 2 else values[start : start + count]
            result[rollout, first : first + count] = own
        return result


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    waiting = []
    for rollout, length in enumerate(lengths):
        cuts = sorted(draw(st.lists(st.integers(0, length), max_size=3)))
        bounds = [0, *cuts, length]
        waiting.append([(rollout, a, b - a) for a, b in itertools.pairwise(bounds)])
    order = draw(st.permutations([rollout for rollout, parts in enumerate(waiting) for _ in parts]))
    pieces = [waiting[rollout].pop(0) for rollout in order]
    names = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=len(lengths), max_size=len(lengths), unique=True))
    names = draw(st.sampled_from((names, list(range(len(lengths))))))
    return Rows(lengths, pieces, torch.tensor(names))
