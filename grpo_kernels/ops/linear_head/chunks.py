"""The LM head, a chunk of rows at a time: matrix products around the kernels of token_logprobs.

The logits of a chunk are whole rows. One kernel turns them into log-probs, another overwrites them with their own
gradient, and everything else is matrix products, which BLAS does best.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.token_logprobs import registration as token_logprobs

_HALVES = (torch.float16, torch.bfloat16)
_LARGE = 2**22  # bytes above which the first touch of memory costs as much as a pass over it

# For the CPU only: asks for huge pages for a tensor that has not been written yet.
registry.define_compiled("_expect_large_tensor_cpu(Tensor tensor) -> ()")


class Head(NamedTuple):
    """Arguments of the LM head: hidden [N, H], weight [V, H], bias [V], targets and row_temperature [N]."""

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
        """dtype of logits, log-probs and accumulated gradients."""
        return torch.promote_types(self.hidden.dtype, torch.float32)

    @property
    def scaling(self) -> tuple[float, float | None, float]:
        return self.temperature, self.softcap, self.logit_scale

    @property
    def needs_grad(self) -> list[bool]:
        return [value is not None and value.requires_grad for value in (self.hidden, self.weight, self.bias)]

    def without(self, is_ignored: Tensor) -> Head:
        """Sets hidden states of ignored rows to 0, because NaN there times a gradient of 0 would be NaN."""
        return self._replace(hidden=torch.where(is_ignored[:, None], 0, self.hidden))


HEAD_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? row_temperature, float temperature, "
    "float? softcap, float logit_scale"
)


def rows_per_chunk(rows: int, vocabulary: int, device_type: str) -> int:
    """A third of the rows if there are many, as long as their logits are not too large.

    A chunk reads the weight twice, and reads and writes its gradient: 16 bytes an element for 6 flops a row. From 256
    rows on, arithmetic dominates; a few hundred more make the products another few percent faster. The naive
    computation peaks at three or more times the logits of all rows, so a third of the rows is a ninth of its memory.
    Beyond 192 MiB of logits (1 GiB on a GPU) larger chunks gain nothing.
    """
    limit = max(64, (3 * 2**24 if device_type == "cpu" else 2**28) // vocabulary)
    count = max(-(-rows // limit), min(3, -(-rows // 256)), 1)
    return max(1, -(-rows // count // 16) * 16)  # chunks of one size, in whole blocks of the products


def chunks(rows: int, size: int, ends: list[int] | None = None) -> Iterator[slice]:
    """Slices of at most `size` rows; with the `ends` of sequences, of as many whole sequences as fit."""
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


class Chunk(NamedTuple):
    """Rows of a chunk, their logits (or the gradient that overwrote them), and measurements of them, [1, rows].

    Measurements that were not asked for are empty.
    """

    hidden: Tensor
    logits: Tensor
    targets: Tensor
    row_temperature: Tensor | None
    logprobs: Tensor
    entropy: Tensor
    normalizer: Tensor

    def compact(self, rows: Tensor) -> Chunk:
        """The chunk of only these rows, ascending. Their logits move up in place, as a copy could take half a chunk."""
        of_rows = self.logits.unbind()
        for to, row in enumerate(rows.tolist()):
            if to < row:
                of_rows[to].copy_(of_rows[row])

        def pick(value: Tensor) -> Tensor:
            return value if value.numel() == 0 else value[:, rows]

        return Chunk(
            hidden=self.hidden[rows],
            logits=self.logits[: len(rows)],
            targets=pick(self.targets),
            row_temperature=None if self.row_temperature is None else pick(self.row_temperature),
            logprobs=pick(self.logprobs),
            entropy=pick(self.entropy),
            normalizer=pick(self.normalizer),
        )


class Products:
    """The three matrix products of a chunk, accumulated in float32, with logits that were never rounded to half.

    Args:
        size: rows of the largest chunk
        pad_column: append a column of logits that are -inf, for targets that belong to another rank's columns
    """

    def __init__(self, backend: str, head: Head, size: int, pad_column: bool = False) -> None:
        self.backend, self.head = backend, head
        self.columns = head.weight.shape[0]
        # tensor cores multiply halves exactly and add in float32; the CPU's half products would round their results
        self.on_tensor_cores = head.weight.is_cuda and head.weight.dtype in _HALVES
        self.weight = head.weight if self.on_tensor_cores else head.weight.to(head.wide)
        self.tile = _empty(head.hidden, (size, self.columns + pad_column), head.wide, backend)
        if pad_column:
            self.tile[:, self.columns] = -torch.inf

    def measure(self, rows: slice | Tensor, want_entropy: bool) -> Chunk:
        """Logits and log-probs of a chunk."""
        head = self.head
        hidden, logits = self._logits(rows)
        targets = head.targets[rows][None]
        row_temperature = None if head.row_temperature is None else head.row_temperature[rows][None]
        measurements = token_logprobs.FORWARD[self.backend](
            logits[None], targets, row_temperature, *head.scaling, want_entropy, False
        )
        return Chunk(hidden, logits, targets, row_temperature, *measurements)

    def remeasure(self, rows: slice | Tensor, normalizer: Tensor, entropy: Tensor | None) -> Chunk:
        """A chunk of which everything but the logits is known."""
        head = self.head
        hidden, logits = self._logits(rows)
        absent = normalizer.new_empty(0)
        return Chunk(
            hidden=hidden,
            logits=logits,
            targets=head.targets[rows][None],
            row_temperature=None if head.row_temperature is None else head.row_temperature[rows][None],
            logprobs=absent,
            entropy=absent if entropy is None else entropy[rows][None],
            normalizer=normalizer[rows][None],
        )

    def differentiate(self, chunk: Chunk, by_logprob: Tensor | None, by_entropy: Tensor | None) -> Tensor:
        """Overwrites the logits of a chunk with their gradient."""
        token_logprobs.INPLACE[self.backend](
            chunk.logits[None],
            None if by_logprob is None else by_logprob[None],
            None if by_entropy is None else by_entropy[None],
            chunk.targets,
            chunk.normalizer,
            chunk.entropy if by_entropy is not None else None,
            chunk.row_temperature,
            *self.head.scaling,
        )
        return chunk.logits[:, : self.columns]

    def _logits(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.head.hidden[rows]
        logits = self.tile[: len(hidden)]
        out = logits[:, : self.columns]
        if self.on_tensor_cores:
            torch.ops.aten.mm.dtype_out(hidden, self.weight.t(), torch.float32, out=out)
        else:
            torch.mm(hidden.to(self.head.wide), self.weight.t(), out=out)
        if self.head.bias is not None:
            out += self.head.bias
        return hidden, logits

    def to_hidden(self, by_logits: Tensor) -> Tensor:
        return torch.mm(by_logits, self.weight).to(self.head.hidden.dtype)

    def to_weight(self, by_logits: Tensor, hidden: Tensor, total: Tensor, add: bool) -> None:
        """Writes to `total` or adds to it. Not by a factor of 0, because `total` may be uninitialised."""
        if self.on_tensor_cores and total.dtype == torch.float32:
            if add:
                torch.ops.aten.addmm.dtype_out(total, by_logits.t(), hidden, torch.float32, out=total)
            else:
                torch.ops.aten.mm.dtype_out(by_logits.t(), hidden, torch.float32, out=total)
        elif add:
            total.addmm_(by_logits.to(total.dtype).t(), hidden.to(total.dtype))
        else:
            torch.mm(by_logits.t(), hidden.to(total.dtype), out=total)


class Gradients:
    """Gradients of hidden states, weight and bias as far as they are needed, complete after the last chunk.

    Args:
        needs: whether hidden states, weight and bias need a gradient
        into: tensor that the weight's gradient is added to, instead of a new one
        sparse: some rows get no gradient, so start from 0
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

    def add(self, by_logits: Tensor, hidden: Tensor, rows: slice | Tensor) -> None:
        if len(hidden) == 0:
            return
        if self.needs_hidden or self.needs_weight:
            rounded = by_logits.to(self.products.weight.dtype)  # once for both products, where tensor cores need halves
        if self.needs_hidden:
            self.hidden[rows] = self.products.to_hidden(rounded)
        if self.needs_weight:
            self.products.to_weight(rounded, hidden, self.weight, add=self.is_written)
            self.is_written = True
        if self.needs_bias:
            self.bias += by_logits.sum(0)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients in the dtypes of their tensors; the weight's is empty if it was added to `into`."""
        head = self.products.head
        if not self.is_written:
            self.weight.zero_()
        weight = self.weight if self.into is None else self.weight.new_empty(0)
        bias = self.bias if head.bias is None else self.bias.to(head.bias.dtype)
        return self.hidden, weight.to(head.weight.dtype), bias


def rows_with_grad(*gradients: Tensor | None) -> Tensor | None:
    """Rows where any gradient is not 0; None if those are all rows, or if looking would wait for a GPU."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present or present[0].device.type != "cpu":
        return None
    has_grad = present[0] != 0
    for gradient in present[1:]:
        has_grad |= gradient != 0
    rows = has_grad.nonzero().squeeze(1)
    return None if len(rows) == len(has_grad) else rows


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> Tensor:
    memory = like.new_empty(shape, dtype=dtype)
    if backend == "cpu" and memory.numel() * memory.element_size() >= _LARGE:
        torch.ops.grpo_kernels._expect_large_tensor_cpu(memory)
    return memory
