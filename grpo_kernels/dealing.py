"""Rows dealt to micro-batches by length."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from grpo_kernels import checks

_OP = "deal_by_length"


def deal_by_length(
    lengths: Tensor, count: int, *, most_tokens: int | None = None, multiple: int = 1
) -> list[list[int]]:
    """Deals rows to micro-batches by length, so that the largest has as few tokens as can be, with its padding.

    Rows that are neighbours by their length come together. Gradients of micro-batches add up: with weights that
    are counted over the whole batch, as token_shares counts them, the dealing does not change the gradient.

    Args:
        lengths: integers [N], the tokens of each row, or [N, K] for rows of K parts that are padded apart, such as
            prompts and completions
        count: micro-batches, at most
        most_tokens: tokens that a micro-batch may have, padding included: fewer micro-batches, if that allows fewer. A
            micro-batch has more, if `count` would not suffice
        multiple: of which the padded length of each part is a multiple

    Returns:
        the rows of each micro-batch, largest micro-batch first; none is empty
    """
    checks.tensor(_OP, "lengths", lengths, checks.INTEGERS)
    if lengths.dim() not in (1, 2):
        raise ValueError(f"{_OP}: lengths must have shape [N] or [N, K], got {list(lengths.shape)}")
    for name, value in (("count", count), ("most_tokens", most_tokens), ("multiple", multiple)):
        if value is not None and checks.integer(_OP, name, value) < 1:
            raise ValueError(f"{_OP}: {name} must be at least 1, got {value}")
    parts = lengths if lengths.dim() == 2 else lengths[:, None]
    rounded = -(-parts.long() // multiple) * multiple
    dealing = _Dealing(rounded.tolist())
    if most_tokens is not None:
        count = min(count, max(1, len(dealing.cut(most_tokens))))
    low, high = dealing.tokens(dealing.order[-1:]), dealing.tokens(dealing.order)
    while low < high:
        middle = (low + high) // 2
        if len(dealing.cut(middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return sorted(dealing.cut(low), key=dealing.tokens, reverse=True)


class _Dealing:
    """Rows by length, of which neighbours make a micro-batch."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self.lengths = lengths
        self.order = sorted(range(len(lengths)), key=lambda row: sum(lengths[row]))

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens of a micro-batch, with its padding."""
        longest = [max(part) for part in zip(*(self.lengths[row] for row in rows), strict=True)]
        return len(rows) * int(sum(longest))

    def cut(self, most_tokens: int) -> list[list[int]]:
        """The rows in as few micro-batches as `most_tokens` allows."""
        parts, columns = list[list[int]](), list[int]()
        for row in self.order:
            wider = [max(pair) for pair in zip(columns, self.lengths[row], strict=False)]
            if not parts or (len(parts[-1]) + 1) * sum(wider) > most_tokens:
                parts.append([])
                wider = self.lengths[row]
            parts[-1].append(row)
            columns = wider
        return parts
