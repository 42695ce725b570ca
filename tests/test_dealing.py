"""gk.deal_by_length.

Faults in view: a row that is lost or dealt twice, more micro-batches than asked for, a micro-batch that could be
smaller, padding that is not counted.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import grpo_kernels as gk

LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=7)


def tokens(lengths: list[tuple[int, int]], rows: list[int], multiple: int) -> int:
    longest = (max(lengths[row][part] for row in rows) for part in range(2))
    return len(rows) * sum(math.ceil(length / multiple) * multiple for length in longest)


@given(LENGTHS, st.integers(1, 8), st.sampled_from([1, 4]))
@example([(1, 9), (9, 1)], 1, 1)
def test_the_largest_micro_batch_is_as_small_as_neighbours_allow(
    lengths: list[tuple[int, int]], count: int, multiple: int
) -> None:
    parts = gk.deal_by_length(torch.tensor(lengths), count, multiple=multiple)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    sizes = [tokens(lengths, part, multiple) for part in parts]
    assert 1 <= len(parts) <= count and sizes == sorted(sizes, reverse=True)
    rounded = [[math.ceil(length / multiple) for length in pair] for pair in lengths]
    order = sorted(range(len(lengths)), key=lambda row: sum(rounded[row]))
    cuts = itertools.combinations(range(1, len(order)), min(count, len(order)) - 1)
    best = min(
        max(tokens(lengths, order[a:b], multiple) for a, b in itertools.pairwise((0, *cut, len(order)))) for cut in cuts
    )
    assert sizes[0] == best


def test_fewer_and_fuller_micro_batches() -> None:
    lengths = torch.tensor([3, 1, 5, 2, 4, 1])
    assert gk.deal_by_length(lengths, 6, most_tokens=8) == [[0, 4], [1, 5, 3], [2]]
    assert gk.deal_by_length(lengths, 6, most_tokens=12) == [[1, 5, 3, 0], [4, 2]]
    assert gk.deal_by_length(lengths, 6, most_tokens=100) == [[1, 5, 3, 0, 4, 2]]
    assert len(gk.deal_by_length(lengths, 2, most_tokens=5)) == 2  # too few for five tokens
    assert gk.deal_by_length(lengths[:0], 4) == []


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.ones(3), 2), {}, "lengths must"),
        ((torch.ones(3, 1, 1, dtype=torch.long), 2), {}, r"lengths must have shape \[N\] or \[N, K\], got \[3, 1, 1\]"),
        ((torch.ones(3, dtype=torch.long), 0), {}, "count must be at least 1, got 0"),
        ((torch.ones(3, dtype=torch.long), 1.5), {}, "count must"),
        ((torch.ones(3, dtype=torch.long), 1), {"most_tokens": 0}, "most_tokens must be at least 1, got 0"),
        ((torch.ones(3, dtype=torch.long), 1), {"multiple": -1}, "multiple must be at least 1, got -1"),
    ],
    ids=str,
)
def test_refused(arguments: tuple[object, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^deal_by_length: {message}"):
        gk.deal_by_length(*arguments, **options)  # type: ignore[arg-type]
