"""The LM head, a chunk of tokens at a time: matrix products around the kernels of token_logprobs.

The logits of a chunk are whole rows. One kernel turns them into log-probs, another overwrites them with their own
gradient, and everything else is matrix products, which BLAS does best.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.linear_head.head import Head
from grpo_kernels.ops.linear_head.sizes import HALVES, tokens_per_product
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.ops.token_logprobs.reference import Gradient, GradientInto, LogitRows, Measured, Scaling

# For the CPU only: writes a @ b of bfloat16 to `out`, or adds it, with float32 sums.
registry.define_compiled("_half_product_cpu(Tensor(a!) out, Tensor a, Tensor b, bool add) -> ()")
_ALIGNMENT = 16  # items that a row of a matrix is padded to, for 32 bytes of halves
# Weights of fewer elements get their gradient in float32 first: cuBLAS may split the sums of a small product among
# multiprocessors and add the parts in half precision.
UNSPLIT = 2**24


class SeparateColumns(NamedTuple):
    """Columns of a chunk's tokens that are kept from the kernels, [tokens, k], in float64.

    Their logits in the chunk are -inf. The kernels measure and differentiate the rest of the vocabulary alone, however
    little is left of it, and no gradient of these columns is the difference of two large numbers.

    Attributes:
        columns: different from each other for a token; the padding column stands for none
        scaled: logits as the distribution has them; -inf for none
        slopes: derivatives of these by the logits
    """

    columns: Tensor
    scaled: Tensor
    slopes: Tensor


class Chunk(NamedTuple):
    """Tokens of a chunk, their logits (or the gradient that overwrote them), and measurements of them, [1, tokens].

    Measurements that were not asked for are empty.
    """

    hidden: Tensor
    logits: Tensor
    targets: Tensor
    row_temperature: Tensor | None
    logprobs: Tensor
    entropy: Tensor
    normalizer: Tensor
    separate: SeparateColumns | None = None

    def compact(self, tokens: Tensor) -> Chunk:
        """The chunk of only these tokens, ascending. Logits move up in place, as a copy could take half a chunk."""
        rows = self.logits.unbind()
        for to, token in enumerate(tokens.tolist()):
            if to < token:
                rows[to].copy_(rows[token])

        def pick(value: Tensor) -> Tensor:
            return value if value.numel() == 0 else value[:, tokens]

        return Chunk(
            hidden=self.hidden[tokens],
            logits=self.logits[: len(tokens)],
            targets=pick(self.targets),
            row_temperature=None if self.row_temperature is None else pick(self.row_temperature),
            logprobs=pick(self.logprobs),
            entropy=pick(self.entropy),
            normalizer=pick(self.normalizer),
            separate=None if self.separate is None else SeparateColumns(*(value[tokens] for value in self.separate)),
        )


class Adapter:
    """A low-rank term of the logits, scale (x A^T) B^T, in float32. Nothing of the weight's size is formed."""

    def __init__(self, dtype: torch.dtype, a: Tensor, b: Tensor, scale: float) -> None:
        self.a, self.b, self.scale = a.to(dtype), b.to(dtype), scale

    def reduce(self, hidden: Tensor) -> Tensor:
        """The factor of B^T, [tokens, r]."""
        return torch.mm(hidden.to(self.a.dtype), self.a.t()).mul_(self.scale)

    def add_to_logits(self, hidden: Tensor, logits: Tensor) -> None:
        multiply(self.reduce(hidden), self.b.t(), logits, add=True)

    def to_reduced(self, by_logits: Tensor) -> Tensor:
        """The gradient by x A^T, [tokens, r]."""
        result = self.b.new_empty(len(by_logits), self.b.shape[1])
        multiply(by_logits, self.b.to(by_logits.dtype), result)
        return result.mul_(self.scale)

    def add_to_b(self, by_logits: Tensor, hidden: Tensor, total: Tensor) -> None:
        multiply(by_logits.t(), self.reduce(hidden).to(by_logits.dtype), total, add=True)


class Products:
    """The three matrix products of a chunk, accumulated in float32, with logits that were never rounded to half.

    Args:
        size: tokens of the largest chunk
        pad_column: append a column of logits that are -inf, for targets that belong to another rank's columns
        tile: memory of the logits, where another head of this vocabulary has some; None means its own
    """

    def __init__(
        self,
        backend: str,
        head: Head,
        size: int,
        pad_column: bool = False,
        tile: Tensor | None = None,
    ) -> None:
        self.backend, self.head = backend, head
        self.columns = head.weight.shape[0]
        self.adapter = None if head.lora is None else Adapter(head.wide, *head.lora)
        self.in_halves = head.weight.dtype in HALVES and (backend != "cpu" or _multiplies_on_cpu(head.weight))
        self.weight = head.weight if self.in_halves else head.weight.to(head.wide)
        self.logit_columns = self.columns + pad_column
        self.tile = self.matrix(size, head.wide) if tile is None else tile

    def matrix(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """Memory for [tokens, logit_columns].

        Rows are aligned on a GPU, for fast products and kernels, and on a CPU with a padding column, as a product took
        a third longer with rows of an odd length.
        """
        alignment = 1 if self.backend == "cpu" and self.logit_columns == self.columns else _ALIGNMENT
        stride = -(-self.logit_columns // alignment) * alignment
        return token_logprobs.empty(self.head.hidden, (tokens, stride), dtype, self.backend)[:, : self.logit_columns]

    def measure(self, tokens: slice | Tensor, want_entropy: bool, columns: Tensor | None = None) -> Chunk:
        """Logits and log-probs of a chunk; with columns to keep apart, the measurements are of the rest."""
        head = self.head
        hidden, logits = self.logits(tokens)
        targets = head.targets[tokens]
        row_temperature = None if head.row_temperature is None else head.row_temperature[tokens]
        separate = None
        if columns is not None:
            separate = self._separate(logits, columns, row_temperature)
            targets = torch.where(targets == IGNORED, IGNORED, columns[:, 0])  # any column that is not of the rest
        targets, row_temperature = targets[None], None if row_temperature is None else row_temperature[None]
        measured = Measured(LogitRows(logits[None], targets, row_temperature, *head.scaling), want_entropy)
        logprobs, entropy, normalizer = token_logprobs.FORWARD(self.backend, measured)
        return Chunk(hidden, logits, targets, row_temperature, logprobs, entropy, normalizer, separate)

    def _separate(self, logits: Tensor, columns: Tensor, row_temperature: Tensor | None) -> SeparateColumns:
        raw = logits.gather(1, columns).double()
        logits.scatter_(1, columns, -torch.inf)
        scaling = Scaling(None if row_temperature is None else row_temperature.double(), *self.head.scaling)
        return SeparateColumns(columns, scaling.apply(raw), scaling.slope(torch.where(columns == self.columns, 0, raw)))

    def remeasure(self, tokens: slice | Tensor, normalizer: Tensor, entropy: Tensor | None) -> Chunk:
        """A chunk of which everything but the logits is known."""
        head = self.head
        hidden, logits = self.logits(tokens)
        absent = normalizer.new_empty(0)
        return Chunk(
            hidden=hidden,
            logits=logits,
            targets=head.targets[tokens][None],
            row_temperature=None if head.row_temperature is None else head.row_temperature[tokens][None],
            logprobs=absent,
            entropy=absent if entropy is None else entropy[tokens][None],
            normalizer=normalizer[tokens][None],
        )

    def differentiate(
        self,
        chunk: Chunk,
        by_logprob: Tensor | None,
        by_entropy: Tensor | None,
        into: Tensor | None,
        by_separate: Tensor | None = None,
    ) -> Tensor:
        """The gradient by the logits of a chunk, which overwrites them, or `into`, where it is rounded to half.

        `by_separate` is that of the columns that were kept apart.
        """
        into = chunk.logits if into is None else into
        gradient = Gradient(
            None if by_logprob is None else by_logprob[None],
            None if by_entropy is None else by_entropy[None],
            chunk.normalizer,
            None if by_entropy is None else chunk.entropy,
            LogitRows(chunk.logits[None], chunk.targets, chunk.row_temperature, *self.head.scaling),
        )
        token_logprobs.BACKWARD_INTO(self.backend, GradientInto(into[None], gradient))
        if by_separate is not None and chunk.separate is not None:
            into.scatter_(1, chunk.separate.columns, by_separate.to(into.dtype))
        return into[:, : self.columns]

    def logits(self, tokens: slice | Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.head.hidden[tokens]
        logits = self.tile[: len(hidden)]
        if self.logit_columns > self.columns:
            logits[:, self.columns] = -torch.inf  # the gradient of the last chunk may be there
        out = logits[:, : self.columns]
        multiply(hidden.to(self.weight.dtype), self.weight.t(), out)
        if self.adapter is not None:
            self.adapter.add_to_logits(hidden, out)
        if self.head.bias is not None:
            out += self.head.bias
        if self.head.banned is not None:
            logits.index_fill_(1, self.head.banned, -torch.inf)
        return hidden, logits

    def to_hidden(self, by_logits: Tensor, by_reduced: Tensor | None) -> Tensor:
        result = by_logits.new_empty((len(by_logits), self.weight.shape[1]), dtype=self.head.wide)
        multiply(by_logits, self.weight, result)
        if self.adapter is not None and by_reduced is not None:
            result.addmm_(by_reduced, self.adapter.a)
        return result.to(self.head.hidden.dtype)

    def to_weight(self, by_logits: Tensor, hidden: Tensor, total: Tensor, add: bool) -> None:
        multiply(by_logits.t(), hidden, total, add)


def _multiplies_on_cpu(factor: Tensor) -> bool:
    """Whether the CPU has a product for this dtype that does not round its sums; torch's does."""
    return factor.dtype == torch.bfloat16 and factor.device.type == "cpu" and registry.HAS_HALF_PRODUCTS


def multiply(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """Writes a @ b to `out` or adds it; never by a factor of 0, because `out` may be uninitialised.

    For a float32 `out`, halves are multiplied exactly and added in float32.
    """
    if _multiplies_on_cpu(a) and out.stride(1) == 1 and (out.dtype == torch.float32 or not add):
        a, b = (factor if 1 in factor.stride() else factor.contiguous() for factor in (a, b))
        registry.ops._half_product_cpu(out, a, b, add)
        return
    if a.dtype in HALVES and out.dtype == torch.float32:
        if not a.is_cuda:
            a, b = a.float(), b.float()
        elif add:
            torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, out=out)
            return
        else:
            torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
            return
    if add:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))
    else:
        torch.mm(a, b.to(a.dtype), out=out)


class Gradients:
    """Gradients of the head's factors as far as they are needed, complete after the last chunk.

    In half precision on a GPU, gradients by the logits of several chunks wait for one pair of products.

    Args:
        needs: whether hidden states, weight, bias and the adapter's A and B need a gradient
        tokens: tokens with a gradient
        product_tokens: tokens of one pair of products; 0 means chosen from the shapes
        into: tensor that the weight's gradient is added to, instead of a new one
        sparse: some tokens get no gradient, so start from 0
    """

    def __init__(
        self,
        products: Products,
        needs: list[bool],
        tokens: int,
        product_tokens: int,
        into: Tensor | None = None,
        sparse: bool = False,
    ) -> None:
        head, self.products = products.head, products
        self.needs_hidden, self.needs_weight, self.needs_bias, self.needs_lora_a, self.needs_lora_b = needs
        self.hidden = head.hidden.new_empty(head.hidden.shape if self.needs_hidden else (0,))
        if sparse:
            self.hidden.zero_()
        self.staged: Tensor | None = None
        self.waiting: list[slice | Tensor] = []  # places of the tokens in `staged`
        self.count = 0
        if products.in_halves:
            chunk_tokens = len(products.tile)
            shape, processors = tuple(head.weight.shape), _processors(head.weight.device)
            size = product_tokens or tokens_per_product(tokens, chunk_tokens, shape, self.needs_weight, processors)
            self.staged = products.matrix(max(size, chunk_tokens), head.weight.dtype)
        self.into, self.is_written = into, into is not None
        if into is None:
            is_single = self.staged is not None and tokens <= len(self.staged)
            is_single = is_single and (head.weight.numel() >= UNSPLIT or head.weight.device.type == "cpu")
            shape = tuple(head.weight.shape) if self.needs_weight else (0, 0)
            into = token_logprobs.empty(
                head.weight, shape, head.weight.dtype if is_single else head.wide, products.backend
            )
        self.weight = into
        self.bias = head.weight.new_zeros(products.columns if self.needs_bias else 0, dtype=head.wide)
        self.lora_a, self.lora_b = (
            head.weight.new_zeros((0, 0) if factor is None or not is_needed else factor.shape, dtype=head.wide)
            for factor, is_needed in ((head.lora_a, self.needs_lora_a), (head.lora_b, self.needs_lora_b))
        )

    def add(
        self,
        chunk: Chunk,
        by_logprob: Tensor | None,
        by_entropy: Tensor | None,
        tokens: slice | Tensor,
        by_separate: Tensor | None = None,
    ) -> None:
        """Adds the gradient of a chunk, whose logits it may overwrite; `by_separate` as in Products.differentiate."""
        if len(chunk.hidden) == 0:
            return
        into = self.place(len(chunk.hidden))
        by_logits = self.products.differentiate(chunk, by_logprob, by_entropy, into, by_separate)
        self.add_by_logits(by_logits, chunk.hidden, tokens)

    def place(self, count: int) -> Tensor | None:
        """Where the gradient by the logits of this many tokens belongs; None means over the logits themselves."""
        if self.staged is None:
            return None
        if self.count + count > len(self.staged):
            self._multiply_waiting()
        return self.staged[self.count : self.count + count]

    def add_by_logits(self, by_logits: Tensor, hidden: Tensor, tokens: slice | Tensor) -> None:
        """Adds the gradient of tokens with these hidden states, which was written to its place."""
        if self.staged is None:
            self._multiply(by_logits, hidden, tokens)
            return
        self.waiting.append(tokens)
        self.count += len(by_logits)

    def finish(self) -> tuple[Tensor, ...]:
        """The gradients in the dtypes of their tensors; the weight's is empty if it was added to `into`."""
        self._multiply_waiting()
        head = self.products.head
        if not self.is_written:
            self.weight.zero_()
        weight = self.weight if self.into is None else self.weight.new_empty(0)
        totals = (self.bias, head.bias), (self.lora_a, head.lora_a), (self.lora_b, head.lora_b)
        others = (total if factor is None else total.to(factor.dtype) for total, factor in totals)
        return self.hidden, weight.to(head.weight.dtype), *others

    def _multiply_waiting(self) -> None:
        if self.staged is None or self.count == 0:
            return
        tokens = _joined(self.waiting, self.staged.device)
        by_logits = self.staged[: self.count, : self.products.columns]
        self._multiply(by_logits, self.products.head.hidden[tokens], tokens)
        self.waiting.clear()
        self.count = 0

    def _multiply(self, by_logits: Tensor, hidden: Tensor, tokens: slice | Tensor) -> None:
        adapter, by_reduced = self.products.adapter, None
        if adapter is not None and (self.needs_hidden or self.needs_lora_a):
            by_reduced = adapter.to_reduced(by_logits)
        if self.needs_hidden:
            self.hidden[tokens] = self.products.to_hidden(by_logits, by_reduced)
        if self.needs_lora_a and by_reduced is not None:
            self.lora_a.addmm_(by_reduced.t(), hidden.to(by_reduced.dtype))
        if self.needs_lora_b and adapter is not None:
            adapter.add_to_b(by_logits, hidden, self.lora_b)
        if self.needs_weight:
            self.products.to_weight(by_logits, hidden, self.weight, add=self.is_written)
            self.is_written = True
        if self.needs_bias:
            self.bias += by_logits.sum(0, dtype=self.bias.dtype)


def _processors(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _joined(chunks: list[slice | Tensor], device: torch.device) -> slice | Tensor:
    """Places of the tokens of several chunks; a slice if those are slices that follow one another."""
    slices = [part for part in chunks if isinstance(part, slice)]
    if len(slices) == len(chunks) and all(a.stop == b.start for a, b in itertools.pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop)
    return torch.cat(
        [torch.arange(part.start, part.stop, device=device) if isinstance(part, slice) else part for part in chunks]
    )


def tokens_with_grad(*gradients: Tensor | None) -> Tensor | None:
    """Tokens where any gradient is not 0; None if those are all tokens, or if looking would wait for a GPU."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present or present[0].device.type != "cpu":
        return None
    first, *others = present
    has_grad = first != 0
    for gradient in others:
        has_grad |= gradient != 0
    tokens = has_grad.nonzero().squeeze(1)
    return None if len(tokens) == len(has_grad) else tokens
