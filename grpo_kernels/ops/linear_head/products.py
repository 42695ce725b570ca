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
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head.head import NOTHING_MORE, Head, Measurements, Shard, Want, columns_of
from grpo_kernels.ops.linear_head.sizes import HALVES, tokens_per_product
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.ops.token_logprobs.reference import Gradient, GradientInto, LogitRows, Measured

# For the CPU only: writes a @ b of bfloat16 to `out`, or adds it, with float32 sums.
registry.define_compiled("_half_product_cpu(Tensor(a!) out, Tensor a, Tensor b, bool add) -> ()")
_ALIGNMENT = 16  # items that a row of a matrix is padded to, for 32 bytes of halves
# Weights of fewer elements get their gradient in float32 first: cuBLAS may split the sums of a small product among
# multiprocessors and add the parts in half precision.
UNSPLIT = 2**24
_MAX_SHARE = 0.75  # above this share of tokens with a gradient, leaving the others out costs more than it saves


Tokens = slice | Tensor


@op_inputs
class Known:
    """Measurements of all tokens from the forward pass, and the gradients of the loss by them."""

    by_logprobs: Tensor | None
    by_entropy: Tensor | None
    normalizer: Tensor
    entropy: Tensor | None


class Chunk(NamedTuple):
    """Tokens of a chunk, their logits (or the gradient that overwrote them), and what was measured of them, [tokens].

    Columns can be kept from the kernels, which then measure and differentiate the rest of the vocabulary alone, however
    little is left of it: the logits have -inf there.

    Attributes:
        ids: those kept apart, negative for none
        columns: of these here, different from each other for a token, [tokens, k]; the padding column is none, or
            one of another rank
        raw: their logits, in float64
        row_scale: where the place of the gradient has exponentials of the logits, which times this and the gradient by
            the log-prob are that by the logits
    """

    hidden: Tensor
    logits: Tensor
    targets: Tensor
    row_temperature: Tensor | None
    measured: Measurements
    ids: Tensor | None = None
    columns: Tensor | None = None
    raw: Tensor | None = None
    row_scale: Tensor | None = None


class Upstream(NamedTuple):
    """The gradient of a loss by a chunk: by what was measured of its tokens, or whole, by the logits.

    Attributes:
        into: where the gradient by the logits belongs: over the logits, or in memory where it is rounded to half
        by_logprob: [tokens]; of the rest where columns are kept apart
        by_entropy: [tokens], likewise
        by_columns: by the logits that are kept apart, [tokens, k]
        is_whole: `into` has the gradient already
    """

    into: Tensor
    by_logprob: Tensor | None = None
    by_entropy: Tensor | None = None
    by_columns: Tensor | None = None
    is_whole: bool = False


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
        shard: combine what is measured of each chunk with the other ranks
        tile: memory of the logits, where another head of this vocabulary has some; None means its own
    """

    def __init__(
        self,
        backend: str,
        head: Head,
        size: int,
        pad_column: bool = False,
        shard: Shard | None = None,
        tile: Tensor | None = None,
    ) -> None:
        self.backend, self.head, self.shard = backend, head, shard
        self.columns = head.weight.shape[0]
        self.adapter = None if head.lora is None else Adapter(head.wide, *head.lora)
        self.in_halves = head.weight.dtype in HALVES and (backend != "cpu" or _multiplies_on_cpu(head.weight))
        self.weight = head.weight if self.in_halves else head.weight.to(head.wide)
        self.logit_columns = self.columns + pad_column
        self.tile = self.matrix(size, head.wide) if tile is None else tile

    def beside(self, head: Head) -> Products:
        """Those of another head of this vocabulary, for the same targets and in the same memory."""
        other = head if self.shard is None else self.shard.part(head)
        has_padding = self.logit_columns > self.columns
        return Products(self.backend, other.for_targets_of(self.head), 0, has_padding, self.shard, self.tile)

    def matrix(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """Memory for [tokens, logit_columns].

        Rows are aligned on a GPU, for fast products and kernels, and on a CPU with a padding column, as a product took
        a third longer with rows of an odd length.
        """
        alignment = 1 if self.backend == "cpu" and self.logit_columns == self.columns else _ALIGNMENT
        stride = -(-self.logit_columns // alignment) * alignment
        return token_logprobs.empty(self.head.hidden, (tokens, stride), dtype, self.backend)[:, : self.logit_columns]

    @property
    def has_exponentials(self) -> bool:
        """Whether a kernel writes the exponentials of a chunk's logits where their gradient would wait, in one read."""
        is_wide_enough = self.head.weight.dtype == torch.bfloat16  # which has all exponents of float32
        return self.backend == "triton" and is_wide_enough and self.logit_columns == self.columns

    def measure(
        self,
        tokens: Tokens,
        want: Want = NOTHING_MORE,
        ids: Tensor | None = None,
        known: Known | None = None,
        exponentials: Tensor | None = None,
    ) -> Chunk:
        """Logits and log-probs of a chunk: with ids to keep apart, of the rest; or only logits, as all is known.

        `exponentials` is where those of the logits belong, with which the gradient is known but for a factor a row.
        """
        head = self.head
        hidden, logits = self.logits(tokens)
        targets, row_temperature = head.targets[tokens], None
        if head.row_temperature is not None:
            row_temperature = head.row_temperature[tokens]
        if known is not None:
            absent = known.normalizer.new_empty(0)
            entropy = absent if known.entropy is None else known.entropy[tokens]
            measured = Measurements(absent, entropy, absent, known.normalizer[tokens])
            return Chunk(hidden, logits, targets, row_temperature, measured)
        if exponentials is not None:
            logprobs, row_scale, entropy, squares = token_logprobs.EXPONENTIALS(
                exponentials, logits, targets, row_temperature, *head.scaling, *want
            )
            measured = Measurements(logprobs, entropy, squares, logprobs.new_empty(0, dtype=torch.float64))
            return Chunk(hidden, logits, targets, row_temperature, measured, row_scale=row_scale)
        columns = raw = None
        if ids is not None:
            columns = columns_of(ids if self.shard is None else ids - self.shard.start, self.columns)
            raw = logits.gather(1, columns).double()
            logits.scatter_(1, columns, -torch.inf)
            targets = torch.where(targets == IGNORED, IGNORED, columns[:, 0])  # any column that is not of the rest
        rows = self._rows(logits, targets, row_temperature)
        logprobs, entropy, normalizer = token_logprobs.FORWARD(self.backend, Measured(rows, want.entropy))
        squares = logprobs.new_empty(0)
        if want.sum_pi_squared:
            squares = token_logprobs.sum_of_squares(self.backend, rows, normalizer)
        measured = Measurements(logprobs[0], entropy.view(-1), squares.view(-1), normalizer[0])
        if self.shard is not None and ids is not None and columns is not None and raw is not None:
            measured, raw = self.shard.combine_rest(measured, raw, columns, ids, targets)
        elif self.shard is not None:
            measured = self.shard.combine(measured, targets)
        return Chunk(hidden, logits, targets, row_temperature, measured, ids, columns, raw)

    def _rows(self, logits: Tensor, targets: Tensor, row_temperature: Tensor | None) -> LogitRows:
        return LogitRows(logits[None], targets[None], _one_row(row_temperature), *self.head.scaling)

    def differentiate(self, chunk: Chunk, upstream: Upstream) -> Tensor:
        """The gradient by the logits of a chunk, or what it is a multiple of in every row, where it belongs."""
        into = upstream.into
        if not upstream.is_whole and chunk.row_scale is None:
            rows = self._rows(chunk.logits, chunk.targets, chunk.row_temperature)
            by_logprob, by_entropy = _one_row(upstream.by_logprob), _one_row(upstream.by_entropy)
            entropy = None if by_entropy is None else chunk.measured.entropy[None]
            gradient = Gradient(by_logprob, by_entropy, chunk.measured.normalizer[None], entropy, rows)
            token_logprobs.BACKWARD_INTO(self.backend, GradientInto(into[None], gradient))
        if upstream.by_columns is not None and chunk.columns is not None:
            into.scatter_(1, chunk.columns, upstream.by_columns.to(into.dtype))
        return into[:, : self.columns]

    def logits(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        hidden = self.head.hidden[tokens]
        logits = self.tile[: hidden.shape[0]]
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

    def to_hidden(self, by_logits: Tensor, by_reduced: Tensor | None, factors: Tensor | None) -> Tensor:
        result = by_logits.new_empty((len(by_logits), self.weight.shape[1]), dtype=self.head.wide)
        multiply(by_logits, self.weight, result)
        if self.adapter is not None and by_reduced is not None:
            result.addmm_(by_reduced, self.adapter.a)
        dtype = self.head.hidden.dtype
        return result.to(dtype) if factors is None else _scaled(result, factors, dtype)

    def to_weight(self, by_logits: Tensor, hidden: Tensor, total: Tensor, add: bool) -> None:
        multiply(by_logits.t(), hidden, total, add)


def _scaled(rows: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows times their factors, rounded once."""
    return torch.mul(rows, factors[:, None], out=torch.empty_like(rows, dtype=dtype))


def _one_row(value: Tensor | None) -> Tensor | None:
    return None if value is None else value[None]


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

    In half precision, gradients by the logits of several chunks wait for one pair of products.

    Args:
        needs: whether hidden states, weight, bias and the adapter's A and B need a gradient
        tokens: tokens with a gradient
        product_tokens: tokens of one pair of products; 0 means chosen from the shapes
        into: tensor that the weight's gradient is added to, instead of a new one
        sparse: some tokens get no gradient, so start from 0
        looks: whether a chunk may have many tokens without a gradient, which are then left out
    """

    def __init__(
        self,
        products: Products,
        needs: list[bool],
        tokens: int,
        product_tokens: int,
        into: Tensor | None = None,
        sparse: bool = False,
        looks: bool = False,
    ) -> None:
        head, self.products, self.looks = products.head, products, looks
        self.needs_hidden, self.needs_weight, self.needs_bias, self.needs_lora_a, self.needs_lora_b = needs
        self.hidden = head.hidden.new_empty(head.hidden.shape if self.needs_hidden else (0,))
        if sparse:
            self.hidden.zero_()
        self.staged: Tensor | None = None
        self.waiting: list[Tokens] = []  # places of the tokens in `staged`
        self.factors: list[tuple[Tensor, Tensor]] = []  # whose products their rows are to be multiplied by, if any
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

    def place(self, tokens: int) -> Tensor | None:
        """The memory where the gradient by a chunk's logits waits for products; None if it belongs over the logits."""
        if self.staged is None:
            return None
        if self.count + tokens > len(self.staged):
            self._multiply_waiting()
        return self.staged[self.count : self.count + tokens]

    def add(self, chunk: Chunk, upstream: Upstream, tokens: Tokens) -> None:
        """Adds the gradient of a chunk, whose logits it may overwrite."""
        by_logits, hidden = self.products.differentiate(chunk, upstream), chunk.hidden
        factors, selected = None, None
        if chunk.row_scale is not None and upstream.by_logprob is not None:
            factors = chunk.row_scale, upstream.by_logprob
        if self.looks:
            selected = tokens_with_grad(upstream.by_logprob, upstream.by_entropy, upstream.by_columns)
        if selected is not None and len(selected) <= _MAX_SHARE * len(hidden):
            by_logits, hidden = _moved_up(by_logits, selected), hidden[selected]
            factors = None if factors is None else (factors[0][selected], factors[1][selected])
            tokens = tokens[selected] if isinstance(tokens, Tensor) else selected + tokens.start
        if len(hidden) == 0:
            return
        if self.staged is None:
            self._multiply(by_logits, hidden, tokens)
            return
        self.waiting.append(tokens)
        if factors is not None:
            self.factors.append(factors)
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
        factors = None
        if self.factors:
            row_scale, by_logprob = (torch.cat(parts) for parts in zip(*self.factors, strict=True))
            # a row that nothing depends on gets no gradient, whatever its logits are
            factors = (row_scale * by_logprob).masked_fill_(by_logprob == 0, 0)
        self._multiply(by_logits, self.products.head.hidden[tokens], tokens, factors)
        self.waiting.clear()
        self.factors.clear()
        self.count = 0

    def _multiply(self, by_logits: Tensor, hidden: Tensor, tokens: Tokens, factors: Tensor | None = None) -> None:
        """Adds the products with the gradient by the logits, which is `by_logits` times the rows' factors."""
        adapter, by_reduced = self.products.adapter, None
        if adapter is not None and (self.needs_hidden or self.needs_lora_a):
            by_reduced = adapter.to_reduced(by_logits)
        if self.needs_hidden:
            self.hidden[tokens] = self.products.to_hidden(by_logits, by_reduced, factors)
        if factors is not None and (self.needs_weight or self.needs_lora_a or self.needs_lora_b):
            hidden = _scaled(hidden, factors, hidden.dtype)  # as every sum over tokens has both
        if self.needs_lora_a and by_reduced is not None:
            self.lora_a.addmm_(by_reduced.t(), hidden.to(by_reduced.dtype))
        if self.needs_lora_b and adapter is not None:
            adapter.add_to_b(by_logits, hidden, self.lora_b)
        if self.needs_weight:
            self.products.to_weight(by_logits, hidden, self.weight, add=self.is_written)
            self.is_written = True
        if self.needs_bias and factors is None:
            self.bias += by_logits.sum(0, dtype=self.bias.dtype)
        elif self.needs_bias and factors is not None:
            multiply(by_logits.t(), factors.to(by_logits.dtype)[:, None], self.bias[:, None], add=True)


def _processors(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _joined(chunks: list[Tokens], device: torch.device) -> Tokens:
    """Places of the tokens of several chunks; a slice if those are slices that follow one another."""
    slices = [part for part in chunks if isinstance(part, slice)]
    if len(slices) == len(chunks) and all(a.stop == b.start for a, b in itertools.pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop)
    return torch.cat(
        [torch.arange(part.start, part.stop, device=device) if isinstance(part, slice) else part for part in chunks]
    )


def _moved_up(rows: Tensor, selected: Tensor) -> Tensor:
    """Only these rows, ascending, in the same memory, as a copy could take half a chunk."""
    each = rows.unbind()
    for to, place in enumerate(selected.tolist()):
        if to < place:
            each[to].copy_(each[place])
    return rows[: len(selected)]


def tokens_with_grad(*gradients: Tensor | None) -> Tensor | None:
    """Tokens where any gradient is not 0; None if those are all tokens, or if looking would wait for a GPU."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present or present[0].device.type != "cpu":
        return None
    are_not_zero = (gradient != 0 for gradient in present)
    has_grad = torch.stack([each if each.dim() == 1 else each.any(1) for each in are_not_zero]).any(0)
    tokens = has_grad.nonzero().squeeze(1)
    return None if len(tokens) == len(has_grad) else tokens
