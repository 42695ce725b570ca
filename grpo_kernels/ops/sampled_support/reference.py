"""Log-probs over a support in plain torch, on every device: a few rows of a matrix at a time.

In float64 it is the specification. It reads values, so it waits for a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head.head import Shard
from grpo_kernels.ops.token_logprobs import reference as token_logprobs
from grpo_kernels.ops.token_logprobs.reference import LogitRows, Measured, wide

# Numbers of a matrix that are gathered at a time: as many as stay in the cache of a CPU.
_GATHERED = 2**17
ELSEWHERE = -2  # in place of the row of an entry


@op_inputs
class Entries:
    """Kept token ids of N rows, one after the other, as int64 tensors.

    A row takes part if its target is not ignored and it keeps more than one id: the only id of a
    row is certain.

    Attributes:
        token_ids: kept ids [E]
        rows: row of each entry [E]; -1 for entries of rows that take no part, ELSEWHERE for columns of other ranks
        bounds: entries of row i are bounds[i] to bounds[i + 1] - 1 [N + 1]
        order: entries by ascending id, then row; those of rows that take no part are last [E]
        places: target of each row as a place among its entries [N]; IGNORED for ignored rows, -1 if
            it is not kept
    """

    token_ids: Tensor
    rows: Tensor
    bounds: Tensor
    order: Tensor
    places: Tensor

    def part(self, shard: Shard) -> Entries:
        """Those of a rank's columns; the others stay, as ids of which the logit is -inf."""
        columns = self.token_ids - shard.start
        is_here = (columns >= 0) & (columns < shard.columns)
        token_ids, rows = torch.where(is_here, columns, 0), torch.where(is_here, self.rows, ELSEWHERE)
        return dataclasses.replace(self, token_ids=token_ids, rows=rows, order=token_ids.argsort(stable=True))

    def owned(self) -> Tensor:
        """How many ids a token has on this rank, and on all, [2, N]."""
        is_here = pad((self.rows != ELSEWHERE).cumsum(0), (1, 0))
        return torch.stack((is_here[self.bounds].diff(), self.bounds.diff()))


@op_inputs
class Kept:
    """Hidden states [N, H], weight [V, H], entries with their bias [E], and the logits' scaling."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    entries: Entries
    row_temperature: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float


@op_inputs
class Gradient:
    """Tensors for the gradients that are needed, upstream gradients, and results of the forward.

    The gradient of the hidden states is written, that of the weight is added.
    """

    by_hidden: Tensor | None
    by_weight: Tensor | None
    grad_logprobs: Tensor
    grad_entropy: Tensor
    normalizer: Tensor
    entropy: Tensor
    logits: Tensor
    kept: Kept


def forward(kept: Kept) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, log-sum-exps and entropies of the rows, and logits of the entries."""
    logits = _logits(kept)
    results = logits.new_empty(3, len(kept.hidden), dtype=torch.float64)
    for part, _, rows in _padded(kept, logits):
        results[:, part] = torch.stack(token_logprobs.forward(Measured(rows, want_entropy=True)))
    logprobs, entropy, normalizer = (values.clone() for values in results)
    return logprobs.to(logits.dtype), normalizer, entropy.to(logits.dtype), logits


def backward(inputs: Gradient) -> Tensor:
    """The gradient of the logits, from which the others follow."""
    kept, entries, by_logits = inputs.kept, inputs.kept.entries, _by_logits(inputs)
    if inputs.by_hidden is not None:
        sums = _sums(by_logits, kept.weight, entries.token_ids, entries.bounds[:-1])
        inputs.by_hidden.copy_(sums)
    if inputs.by_weight is not None:
        _add_by_id(inputs.by_weight, by_logits, kept.hidden, entries)
    return by_logits


def _rows_at_a_time(matrix: Tensor) -> int:
    return max(_GATHERED // matrix.shape[1], 1)


def _logits(kept: Kept) -> Tensor:
    """Logits [E] of the entries; 0 in rows that take no part, and -inf for columns of other ranks."""
    token_ids, rows = kept.entries.token_ids, kept.entries.rows
    size = _rows_at_a_time(kept.weight)
    parts = zip(token_ids.split(size), rows.clamp(min=0).split(size), strict=True)
    weight, hidden = kept.weight.index_select, kept.hidden.index_select
    logits = torch.cat([(wide(weight(0, ids)) * wide(hidden(0, at))).sum(1) for ids, at in parts])
    if kept.bias is not None:
        logits = (logits + kept.bias).to(logits.dtype)
    return torch.where(rows >= 0, logits, 0).masked_fill(rows == ELSEWHERE, -math.inf)


def _padded(kept: Kept, logits: Tensor) -> Iterator[tuple[Tensor, Tensor, LogitRows]]:
    """Rows [n] of about one length, places of their entries [n, K], and these with logits.

    The place of padding is -1, its logit -inf.
    """
    bounds, temperature = kept.entries.bounds, kept.row_temperature
    padded, sizes = pad(logits, (0, 1), value=-math.inf), bounds.diff()
    _, powers = torch.frexp((sizes - 1).double())
    for power in powers.unique().tolist():
        part = (powers == power).nonzero()[:, 0]
        place = torch.arange(2**power, device=bounds.device)
        places = torch.where(place < sizes[part, None], bounds[part, None] + place, -1)
        own = None if temperature is None else temperature[part]
        scaling = kept.temperature, kept.softcap, kept.logit_scale
        yield part, places, LogitRows(padded[places], kept.entries.places[part], own, *scaling)


def _by_logits(inputs: Gradient) -> Tensor:
    """The gradient of the logits [E]; 0 in rows that take no part, for any upstream gradient."""
    of_rows = inputs.grad_logprobs, inputs.grad_entropy, inputs.normalizer, inputs.entropy
    result = inputs.logits.new_zeros(len(inputs.logits) + 1)
    for part, places, rows in _padded(inputs.kept, inputs.logits):
        of_part = (values[part] for values in of_rows)
        result[places] = token_logprobs.backward(token_logprobs.Gradient(*of_part, rows))
    return torch.where(inputs.kept.entries.rows >= 0, result[:-1], 0)


def _add_by_id(total: Tensor, by_logits: Tensor, matrix: Tensor, entries: Entries) -> None:
    """Adds to the row of each id the sum of its entries, a few ids at a time, rounded once."""
    order = entries.order[by_logits[entries.order] != 0]
    ids, counts = entries.token_ids[order].unique_consecutive(return_counts=True)
    size, first = _rows_at_a_time(matrix), 0
    for part, own in zip(ids.split(size), counts.split(size), strict=True):
        summed = order[first : first + int(own.sum())]
        first += len(summed)
        sums = _sums(by_logits[summed], matrix, entries.rows[summed], own.cumsum(0) - own)
        if total.dtype == sums.dtype:
            total.index_add_(0, part, sums)
        else:
            total[part] = (total[part] + sums).to(total.dtype)


def _sums(factors: Tensor, matrix: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """Sums of factors[e] * matrix[places[e]] over the entries from one start to the next."""
    if matrix.dtype != factors.dtype:  # of halves only the rows in use are converted
        used, places = places.unique(return_inverse=True)
        matrix = wide(matrix.index_select(0, used))
    return embedding_bag(places, matrix, starts, mode="sum", per_sample_weights=factors)
