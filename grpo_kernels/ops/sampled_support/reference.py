"""Log-probs over a support in plain torch, on every device: gathers of a few rows at a time, and sums by row and by id.

In float64 it is the specification. The functions are those of triton.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from grpo_kernels.groups import TokenRows, reduce_runs
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.ops.token_logprobs.reference import Scaling, wide

# Numbers of a matrix that are gathered at a time: on a CPU as many as stay in its cache.
_GATHERED, _GATHERED_ELSEWHERE = 2**17, 2**26


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _chunks(count: int, matrix: Tensor) -> Iterator[slice]:
    """Parts of so many gathered rows."""
    numbers = _GATHERED if _on_cpu(matrix) else _GATHERED_ELSEWHERE
    size = max(numbers // max(matrix.shape[1], 1), 1)
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    rows: Tensor,
    bounds: Tensor,
    order: Tensor,
) -> Tensor:
    result = hidden.new_empty(token_ids.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
    places = rows.clamp(min=0)
    for part in _chunks(len(token_ids), weight):
        products = wide(weight.index_select(0, token_ids[part])) * wide(hidden.index_select(0, places[part]))
        result[part] = products.sum(1)
    if bias is not None:
        result = result + wide(bias.index_select(0, token_ids))
    return torch.where(rows >= 0, result, 0)


def _sums(factors: Tensor, matrix: Tensor, places: Tensor, bounds: Tensor) -> Tensor:
    """Sums of factors[e] * matrix[places[e]] over the entries bounds[i] to bounds[i + 1] - 1, for each i.

    The order is fixed: embedding_bag goes through the entries of each i. The matrix must have the dtype of the sums, so
    that a CPU converts the rows of a chunk, and adds them with index_add_, which has no fixed order on a GPU.
    """
    if matrix.dtype == torch.float32 or not _on_cpu(matrix):
        return embedding_bag(
            places, wide(matrix), bounds, mode="sum", per_sample_weights=factors, include_last_offset=True
        )
    result = factors.new_zeros(len(bounds) - 1, matrix.shape[1])
    own = torch.searchsorted(bounds[1:], torch.arange(len(places), device=bounds.device), right=True)
    for part in _chunks(len(places), matrix):
        result.index_add_(0, own[part], wide(matrix.index_select(0, places[part])) * factors[part, None])
    return result


def to_hidden(by_logits: Tensor, weight: Tensor, token_ids: Tensor, bounds: Tensor) -> Tensor:
    return _sums(by_logits, weight, token_ids, bounds).to(weight.dtype)


def add_weight(
    by_logits: Tensor,
    hidden: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    order: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Adds the gradients by weight and bias: of each id a sum in a fixed order, rounded once."""
    total = weight if weight is not None else bias
    if total is None or len(token_ids) == 0:
        return
    columns = len(total)
    keys = torch.where(rows >= 0, token_ids, columns)[order]  # ascending
    factors, places = by_logits[order], rows[order].clamp(min=0)
    ids = torch.arange(columns, device=total.device)
    if _on_cpu(total):  # others have no entries
        ids = torch.unique_consecutive(keys)
        ids = ids[ids < columns]
    bounds = torch.searchsorted(keys, torch.cat((ids, ids.new_full((1,), columns))))
    if bias is not None:
        _add_rows(bias, ids, reduce_runs(factors, bounds, "sum", 0.0))
    if weight is None:
        return
    if not _on_cpu(weight):
        _add_rows(weight, ids, _sums(factors, hidden, places, bounds))
        return
    for part in _chunks(len(ids), hidden):
        own = bounds[part.start : part.stop + 1]
        entries = slice(int(own[0]), int(own[-1]))
        _add_rows(weight, ids[part], _sums(factors[entries], hidden, places[entries], own - own[0]))


def _add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Adds rows to those of other ids each, and rounds once."""
    if total.dtype == rows.dtype and _on_cpu(total):
        total.index_add_(0, ids, rows)
    else:
        total.index_copy_(0, ids, (total.index_select(0, ids).to(rows.dtype) + rows).to(total.dtype))


class _Rows:
    """Logits [E] of kept ids after scaling, in rows of several lengths."""

    def __init__(self, logits: Tensor, places: Tensor, bounds: Tensor, scaling: Scaling) -> None:
        self.rows = TokenRows("sampled_support", logits.shape, bounds, logits.device)
        self.kept = places != IGNORED
        self.target = bounds[:-1] + places  # of rows that are kept
        temperature = scaling.row_temperature
        if temperature is not None:
            temperature = self.rows.spread(temperature)
        self.scaling, self.logits = scaling._replace(row_temperature=temperature), logits[:, None]
        self.z = self.scaling.apply(self.logits)[:, 0]

    def of_targets(self, values: Tensor) -> Tensor:
        """The values of the rows' targets; NaN in a row that keeps no id."""
        padded = torch.cat((values, values.new_full((1,), math.nan)))
        has_ids = self.rows.counts(torch.ones_like(values, dtype=torch.bool)) > 0
        return padded[torch.where(self.kept & has_ids, self.target, len(values))]


def logprobs(
    logits: Tensor,
    places: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    want_entropy: bool,
    bounds: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and log-sum-exps, by the formulas of token_logprobs.reference.distribution."""
    own = _Rows(logits, places, bounds, Scaling(row_temperature, temperature, softcap, logit_scale))
    rows, z = own.rows, own.z
    top = reduce_runs(z, bounds, "max", -math.inf)
    top = torch.where(top.isinf(), math.nan, top)
    gap = rows.spread(top) - z
    below = torch.where(gap == 0, 0, torch.exp(-gap))
    others = rows.sum((gap == 0).to(z.dtype)) - 1 + rows.sum(below)
    log_sum = torch.log1p(others)

    def finished(result: Tensor) -> Tensor:
        return torch.where(own.kept, result, 0)

    entropy = z.new_empty(0)
    if want_entropy:
        spread = rows.sum(torch.where(below == 0, 0, below * gap))
        entropy = finished(log_sum + spread / (1 + others))
    return finished((own.of_targets(z) - top) - log_sum), entropy, finished(top.double() + log_sum.double())


def logprobs_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    normalizer: Tensor,
    entropy: Tensor | None,
    logits: Tensor,
    places: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    bounds: Tensor,
) -> Tensor:
    """The gradient by the formulas of token_logprobs.reference.backward."""
    own = _Rows(logits, places, bounds, Scaling(row_temperature, temperature, softcap, logit_scale))
    spread, high = own.rows.spread, normalizer.to(logits.dtype)
    log_p = (own.z - spread(high)) - spread((normalizer - high.double()).to(logits.dtype))
    p = torch.exp(log_p)
    gradient, moves = torch.zeros_like(logits), torch.zeros_like(own.kept)
    if grad_logprobs is not None:
        is_target = torch.arange(len(logits), device=logits.device) == spread(own.target)
        gradient = spread(grad_logprobs) * torch.where(is_target, -torch.expm1(log_p), -p)
        moves = moves | (grad_logprobs != 0)
    if grad_entropy is not None and entropy is not None:
        gradient = gradient - spread(grad_entropy) * torch.where(p == 0, 0, p * (log_p + spread(entropy)))
        moves = moves | (grad_entropy != 0)
    # entries of rows that nothing depends on get 0, whatever they hold
    return torch.where(spread(own.kept & moves), gradient * own.scaling.slope(own.logits)[:, 0], 0)
