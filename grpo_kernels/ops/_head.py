"""The LM head, a chunk of rows at a time: matrix products around the kernels of token_logprobs.

A chunk's logits are whole rows: one pass of the kernels folds them into log-probs, another turns them into their
gradient in place, and all that is left are products of matrices, for which there is BLAS.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.ops import registry, token_logprobs

_HALVES = (torch.float16, torch.bfloat16)
_LARGE = 2**22  # bytes, from which memory's first touch costs as much as a pass over it

# Not for others to call: advice to the CPU's memory about a tensor that nobody has written yet.
registry.define_compiled("_expect_large_tensor_cpu(Tensor tensor) -> ()")


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> Tensor:
    memory = like.new_empty(shape, dtype=dtype)
    if backend == "cpu" and memory.numel() * memory.element_size() >= _LARGE:
        torch.ops.grpo_kernels._expect_large_tensor_cpu(memory)
    return memory


class Head(NamedTuple):
    """Hidden states [N, H], weight [V, H], bias [V], and what belongs to a row, [N]. Targets may be V with `ghost`."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    row_temperature: Tensor | None
    temperature: float
    softcap: float | None
    logit_scale: float

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def clean(self, counts: Tensor) -> Head:
        """With 0 for the hidden states of rows that do not count: NaN there times a gradient of 0 would be NaN."""
        return self._replace(hidden=torch.where(counts[:, None], self.hidden, 0))


def rows_per_chunk(rows: int, vocabulary: int, device_type: str) -> int:
    """A third of the rows where they are many, as long as their logits are not too large.

    A chunk reads the weight twice, and reads and writes its gradient: 16 bytes an element for 6 flops a row, so with
    256 rows or more arithmetic is what takes the time; the products of a few hundred more are another few percent
    faster. What the naive way has at its peak is at least three times the logits of all rows: a third of them is a
    ninth of it. From 192 MiB (on a GPU a GiB) on, more gain nothing.
    """
    most = max(64, (3 * 2**24 if device_type == "cpu" else 2**28) // vocabulary)
    count = max(-(-rows // most), min(3, -(-rows // 256)), 1)
    return max(1, -(-rows // count // 16) * 16)  # chunks of one size, in whole blocks of the products


def chunks(rows: int, size: int, ends: list[int] | None = None) -> Iterator[slice]:
    """Slices of at most `size` rows; with `ends`, of as many whole sequences as fit, whose ends those are."""
    first = 0
    if ends is None:
        while first < rows:
            yield slice(first, min(first + size, rows))
            first += size
        return
    last = 0
    for end in ends:
        if end - first > size and last > first:
            yield slice(first, last)
            first = last
        last = end
    if last > first:
        yield slice(first, last)


class Measured(NamedTuple):
    """A chunk's rows, its logits (or what becomes of them) and what was found out about them, [1, rows]."""

    rows: Tensor  # hidden states
    logits: Tensor
    targets: Tensor
    row_temperature: Tensor | None
    logprobs: Tensor
    entropy: Tensor
    normalizer: Tensor

    def only(self, places: Tensor) -> Measured:
        def some(value: Tensor | None) -> Tensor | None:
            return None if value is None or value.numel() == 0 else value[:, places]

        return Measured(
            self.rows[places], self.logits[places], self.targets[:, places], some(self.row_temperature),
            self.logprobs[:, places], self.entropy if self.entropy.numel() == 0 else self.entropy[:, places],
            self.normalizer[:, places],
        )  # fmt: skip


class Products:
    """The three products. float32 accumulation, and logits that nothing has rounded to half precision.

    ghost: another column, of logits that are -inf, for targets that are none of these columns.
    """

    def __init__(self, backend: str, head: Head, size: int, ghost: bool = False) -> None:
        self.backend, self.head = backend, head
        self.columns = head.weight.shape[0]
        # tensor cores multiply halves exactly and add in float32; the CPU's products would round their results
        self.on_tensor_cores = head.weight.is_cuda and head.weight.dtype in _HALVES
        self.weight = head.weight if self.on_tensor_cores else head.weight.to(head.wide)
        self.tile = _empty(head.hidden, (size, self.columns + ghost), head.wide, backend)
        if ghost:
            self.tile[:, self.columns] = -torch.inf

    def measure(self, chosen: slice | Tensor, want_entropy: bool) -> Measured:
        head = self.head
        rows, logits = self._logits(chosen)
        targets = head.targets[chosen][None]
        row_temperature = None if head.row_temperature is None else head.row_temperature[chosen][None]
        scaling = (row_temperature, head.temperature, head.softcap, head.logit_scale)
        found = token_logprobs.FORWARD[self.backend](logits[None], targets, *scaling, want_entropy, False)
        return Measured(rows, logits, targets, row_temperature, *found)

    def remeasure(self, chosen: slice | Tensor, normalizer: Tensor, entropy: Tensor | None) -> Measured:
        """A chunk of which everything but the logits is known."""
        head = self.head
        rows, logits = self._logits(chosen)
        row_temperature = None if head.row_temperature is None else head.row_temperature[chosen][None]
        none = normalizer.new_empty(0)
        return Measured(
            rows, logits, head.targets[chosen][None], row_temperature, none,
            none if entropy is None else entropy[chosen][None], normalizer[chosen][None],
        )  # fmt: skip

    def differentiate(self, chunk: Measured, by_logprob: Tensor | None, by_entropy: Tensor | None) -> Tensor:
        """The gradient by a chunk's logits, in their place."""
        head = self.head
        token_logprobs.INPLACE[self.backend](
            chunk.logits[None],
            None if by_logprob is None else by_logprob[None],
            None if by_entropy is None else by_entropy[None],
            chunk.targets,
            chunk.normalizer,
            chunk.entropy if by_entropy is not None else None,
            chunk.row_temperature,
            head.temperature,
            head.softcap,
            head.logit_scale,
        )
        return chunk.logits[:, : self.columns]

    def _logits(self, chosen: slice | Tensor) -> tuple[Tensor, Tensor]:
        rows = self.head.hidden[chosen]
        logits = self.tile[: len(rows)]
        out = logits[:, : self.columns]
        if self.on_tensor_cores:
            torch.ops.aten.mm.dtype_out(rows, self.weight.t(), torch.float32, out=out)
        else:
            torch.mm(rows.to(self.head.wide), self.weight.t(), out=out)
        if self.head.bias is not None:
            out += self.head.bias
        return rows, logits

    def factor(self, by_logits: Tensor) -> Tensor:
        """As the two products of the gradients take it: rounded once for both, where tensor cores need halves."""
        return by_logits.to(self.weight.dtype)

    def to_hidden(self, by_logits: Tensor) -> Tensor:
        return torch.mm(by_logits, self.weight).to(self.head.hidden.dtype)

    def to_weight(self, by_logits: Tensor, rows: Tensor, total: Tensor, add: bool) -> None:
        """Writes to `total` or adds to it. Not 0 times what was there: that may be memory that nobody wrote."""
        if self.on_tensor_cores and total.dtype == torch.float32:
            if add:
                torch.ops.aten.addmm.dtype_out(total, by_logits.t(), rows, torch.float32, out=total)
            else:
                torch.ops.aten.mm.dtype_out(by_logits.t(), rows, torch.float32, out=total)
        elif add:
            total.addmm_(by_logits.to(total.dtype).t(), rows.to(total.dtype))
        else:
            torch.mm(by_logits.t(), rows.to(total.dtype), out=total)


class Gradients:
    """Of the hidden states, the weight and the bias: those that are needed, complete once every chunk was added.

    into: where the weight's gradient is added instead of to a new tensor.
    """

    def __init__(self, products: Products, needs: list[bool], into: Tensor | None = None, sparse: bool = False) -> None:
        head, self.products = products.head, products
        self.needs_hidden, self.needs_weight, self.needs_bias = needs
        self.hidden = head.hidden.new_empty(head.hidden.shape if self.needs_hidden else (0,))
        if sparse:
            self.hidden.zero_()
        self.into, self.is_written = into, into is not None
        shape = tuple(head.weight.shape) if self.needs_weight and into is None else (0, 0)
        self.weight = _empty(head.weight, shape, head.wide, products.backend) if into is None else into
        self.bias = head.weight.new_zeros(products.columns if self.needs_bias else 0, dtype=head.wide)

    def add(self, by_logits: Tensor, rows: Tensor, chosen: slice | Tensor) -> None:
        if len(rows) == 0:
            return
        factor = self.products.factor(by_logits) if self.needs_hidden or self.needs_weight else by_logits
        if self.needs_hidden:
            self.hidden[chosen] = self.products.to_hidden(factor)
        if self.needs_weight:
            self.products.to_weight(factor, rows, self.weight, add=self.is_written)
            self.is_written = True
        if self.needs_bias:
            self.bias += by_logits.sum(0)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """In the dtypes of what they belong to; the weight's is empty where it was added to something given."""
        head = self.products.head
        if not self.is_written:
            self.weight.zero_()
        weight = self.weight if self.into is None else self.weight.new_empty(0)
        bias = self.bias if head.bias is None else self.bias.to(head.bias.dtype)
        return self.hidden, weight.to(head.weight.dtype), bias


def moving(*gradients: Tensor | None) -> Tensor | None:
    """The places where one of them is not 0; None where that is everywhere, or where looking would wait for a GPU."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not given or given[0].device.type != "cpu":
        return None
    moves = given[0] != 0
    for gradient in given[1:]:
        moves |= gradient != 0
    places = moves.nonzero().squeeze(1)
    return None if len(places) == len(moves) else places
