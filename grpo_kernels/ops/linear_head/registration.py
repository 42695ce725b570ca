"""Registers linear_logprobs, its backward, and linear_policy_loss with torch.

linear_policy_loss computes the gradient in the forward pass, in three matrix products instead of four. The gradient of
a token depends on its own log-prob, and on those of its sequence if the ratio does, so a chunk can be finished while
its logits are in memory: policy_loss is called for the whole batch, of which the log-probs of the chunks so far are
known, and the part of its gradient that belongs to the chunk is final. That costs a thousandth of a product, and the
last call gives the loss.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from grpo_kernels import registry, shared_positions
from grpo_kernels.ops.linear_head.chunks import Chunk, Gradients, Products, rows_with_grad
from grpo_kernels.ops.linear_head.head import FACTORS, HEAD_SCHEMA, REFERENCE_SCHEMA, Head, ReferenceHead, Shard
from grpo_kernels.ops.linear_head.precomputed import PrecomputedGradient, differentiate_loss, set_up_loss
from grpo_kernels.ops.linear_head.sizes import chunks
from grpo_kernels.ops.policy_loss import registration as policy_loss
from grpo_kernels.ops.policy_loss.config import METRICS
from grpo_kernels.ops.policy_loss.registration import POLICY_SCHEMA, Policy
from grpo_kernels.ops.sampled_support import registration as sampled_support
from grpo_kernels.ops.sampled_support.config import Entries
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED

# Imported here and not at the first call, because torch.compile traces through it.
_reference = importlib.import_module(f"{__package__}.reference")

SUPPORTS = token_logprobs.SUPPORTS
KERNELS = {name: dtypes for name, dtypes in SUPPORTS.items() if name != "reference"}
_HEAD, _REFERENCE, _POLICY = len(Head._fields), len(ReferenceHead._fields), len(Policy._fields)
_MAX_SHARE = 0.75  # above this share of rows with a gradient, leaving the others out costs more than it saves

# linear_logprobs


def logprobs_forward(
    backend: str, head: Head, want_entropy: bool, chunk_rows: int, pad_column: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies (empty unless wanted) and log-sum-exps of all rows."""
    total = len(head.hidden)
    products = Products(backend, head, min(chunk_rows, total), pad_column)
    logprobs = head.hidden.new_empty(total, dtype=head.wide)
    entropy = torch.empty_like(logprobs) if want_entropy else logprobs.new_empty(0)
    normalizer = logprobs.new_empty(total, dtype=torch.float64)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for rows in chunks(total, chunk_rows):
            chunk = products.measure(rows, want_entropy)
            logprobs[rows], normalizer[rows] = chunk.logprobs[0], chunk.normalizer[0]
            if want_entropy:
                entropy[rows] = chunk.entropy[0]
    return logprobs, entropy, normalizer


def logprobs_backward(
    backend: str,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    head: Head,
    normalizer: Tensor,
    entropy: Tensor | None,
    needs: list[bool],
    chunk_rows: int,
    product_rows: int,
    pad_column: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of the head's factors, from logits that are computed again for rows with a gradient."""
    is_ignored = head.targets == IGNORED
    grad_logprobs = None if grad_logprobs is None else torch.where(is_ignored, 0, grad_logprobs)
    grad_entropy = None if grad_entropy is None else torch.where(is_ignored, 0, grad_entropy)
    selected = rows_with_grad(grad_logprobs, grad_entropy)
    if selected is None:
        head = head.without(is_ignored)
    total = len(head.hidden) if selected is None else len(selected)
    products = Products(backend, head, min(chunk_rows, total), pad_column)
    gradients = Gradients(products, needs, total, product_rows, sparse=selected is not None)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part in chunks(total, chunk_rows):
            rows = part if selected is None else selected[part]
            chunk = products.remeasure(rows, normalizer, entropy)
            by_logprob = None if grad_logprobs is None else grad_logprobs[rows]
            by_entropy = None if grad_entropy is None else grad_entropy[rows]
            gradients.add(chunk, by_logprob, by_entropy, rows)
        return gradients.finish()


LOGPROBS_SCHEMA = f"({HEAD_SCHEMA}, bool want_entropy, int chunk_rows, int product_rows) -> (Tensor, Tensor, Tensor)"
BACKWARD_SCHEMA = (
    f"(Tensor? grad_logprobs, Tensor? grad_entropy, {HEAD_SCHEMA}, Tensor normalizer, Tensor? entropy, bool[] needs, "
    "int chunk_rows, int product_rows) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _logprobs_op(backend: str, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    want_entropy, chunk_rows, _ = args[_HEAD:]  # products of the gradients are for the backward
    return logprobs_forward(backend, Head(*args[:_HEAD]), want_entropy, chunk_rows)


def _logprobs_backward_op(
    backend: str, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    return logprobs_backward(backend, grad_logprobs, grad_entropy, Head(*args[:_HEAD]), *args[_HEAD:])


def _fake_logprobs(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    head, (want_entropy, *_) = Head(*args[:_HEAD]), args[_HEAD:]
    logprobs = head.hidden.new_empty(head.targets.shape, dtype=head.wide)
    entropy = torch.empty_like(logprobs) if want_entropy else logprobs.new_empty(0)
    return logprobs, entropy, logprobs.new_empty(logprobs.shape, dtype=torch.float64)


def _fake_logprobs_backward(_: Tensor | None, __: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return fake_gradients(Head(*args[:_HEAD]), args[-3])


def fake_gradients(head: Head, needs: list[bool]) -> tuple[Tensor, ...]:
    """The layout of Gradients.finish: empty where no gradient is needed."""

    def gradient(factor: Tensor | None, is_needed: bool, dimensions: int) -> Tensor:
        if factor is None:
            return head.hidden.new_empty((0,) * dimensions, dtype=head.wide)
        return factor.new_empty(factor.shape if is_needed else (0,) * dimensions)

    dimensions = 1, 2, 1, 2, 2
    return tuple(map(gradient, head.factors, needs, dimensions))


def _set_up_logprobs(backend: str, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    head, (want_entropy, *ctx.sizes) = Head(*inputs[:_HEAD]), inputs[_HEAD:]
    _, entropy, normalizer = output
    ctx.mark_non_differentiable(*((normalizer,) if want_entropy else (entropy, normalizer)))
    ctx.set_materialize_grads(False)
    saved_entropy = entropy if want_entropy else None
    ctx.save_for_backward(*head.factors, head.targets, head.row_temperature, normalizer, saved_entropy)
    ctx.numbers = head.numbers


def _differentiate_logprobs(
    backend: str, ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    others = (None,) * (len(ctx.needs_input_grad) - FACTORS)
    if grad_logprobs is None and grad_entropy is None:
        return *(None,) * FACTORS, *others
    *tensors, normalizer, entropy = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:FACTORS])
    gradients = LOGPROBS_BACKWARD[backend](
        None if grad_logprobs is None else grad_logprobs.contiguous(),
        None if grad_entropy is None else grad_entropy.contiguous(),
        *tensors,
        *ctx.numbers,
        normalizer,
        entropy,
        needs,
        *ctx.sizes,
    )
    needed = (gradient if need else None for gradient, need in zip(gradients, needs, strict=True))
    return *needed, *others


def _no_context(backend: str, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return None


def _no_second_derivative(backend: str, ctx: Any, *grads: Any) -> Any:
    raise RuntimeError("linear_logprobs: a second derivative is not implemented; use create_graph=False")


LOGPROBS = registry.define(
    "linear_logprobs",
    LOGPROBS_SCHEMA,
    KERNELS,
    _fake_logprobs,
    (_set_up_logprobs, _differentiate_logprobs),
    implementation=_logprobs_op,
)
LOGPROBS_BACKWARD = registry.define(
    "linear_logprobs_backward",
    BACKWARD_SCHEMA,
    KERNELS,
    _fake_logprobs_backward,
    (_no_context, _no_second_derivative),
    implementation=_logprobs_backward_op,
)


def apply_logprobs(
    backend: str, head: Head, want_entropy: bool, chunk_rows: int, product_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies, both differentiable, and the log-sum-exp of every row."""
    if backend == "reference":
        return cast(tuple[Tensor, Tensor, Tensor], _reference.forward(*head, want_entropy))
    return cast(tuple[Tensor, Tensor, Tensor], LOGPROBS[backend](*head, want_entropy, chunk_rows, product_rows))


def apply_support(
    backend: str, head: Head, entries: Entries, want_entropy: bool, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (empty unless wanted) over a support of the rows, both differentiable.

    The backward adds the gradient of the weight to `into`, if given.
    """
    scaling = (head.row_temperature, *head.scaling)
    return sampled_support.apply_head(
        backend, head.hidden, head.weight, head.bias, entries, scaling, want_entropy, into
    )


# linear_policy_loss


class Chunking(NamedTuple):
    """Which rows are computed, and how many at a time.

    Attributes:
        shape: shape of the log-probs
        want_entropy: measure entropies
        needs_entropy_gradient: the loss has an entropy bonus
        without_grad: rows without a gradient, measured before all others
        with_grad: rows with a gradient; None means all rows
        ends: ends of the sequences among the rows with a gradient, where chunks may end; None means anywhere
        chunk_rows: rows of a chunk
        product_rows: rows of a product for the gradients in half precision; 0 means chosen from the shapes
        term_index: the row of every term of the loss, -1 for padding; None means that they are the rows
    """

    shape: list[int]
    want_entropy: bool
    needs_entropy_gradient: bool
    without_grad: Tensor | None
    with_grad: Tensor | None
    ends: list[int] | None
    chunk_rows: int
    product_rows: int
    term_index: Tensor | None


_CHUNKING_SCHEMA = (
    "int[] shape, bool want_entropy, bool needs_entropy_gradient, Tensor? without_grad, Tensor? with_grad, "
    "int[]? ends, int chunk_rows, int product_rows, Tensor? term_index"
)
LOSS_SCHEMA = (
    f"({HEAD_SCHEMA}, {REFERENCE_SCHEMA}, {POLICY_SCHEMA}, {_CHUNKING_SCHEMA}, bool[] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Term(Protocol):
    """Another term of the loss, by the logits, in the chunks and products of linear_policy_loss.

    `shares` [N] is not 0 where a row has a part in it. `loss` is known when all chunks are differentiated.
    """

    shares: Tensor

    @property
    def loss(self) -> Tensor: ...

    def measure(self, products: Products, rows: slice | Tensor, want_entropy: bool) -> tuple[Chunk, Tensor, Tensor]:
        """A chunk with columns kept apart, and log-probs and entropies of its whole rows."""

    def differentiate(
        self, chunk: Chunk, rows: slice | Tensor, by_logprob: Tensor, by_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Combines the gradients of the policy loss with those of the term, as Gradients.add takes them."""


class _Batch:
    """The log-probs of the chunks so far, and the policy loss that they give."""

    def __init__(
        self, products: Products, reference: ReferenceHead, policy: Policy, chunking: Chunking, shard: Shard | None
    ) -> None:
        head, self.products, self.policy, self.chunking = products.head, products, policy, chunking
        self.shard = shard
        self.logprobs = head.hidden.new_zeros(len(head.hidden), dtype=head.wide)
        self.entropy = torch.zeros_like(self.logprobs) if chunking.want_entropy else None
        self.reference: Products | None = None
        if reference.hidden is not None and reference.weight is not None:
            other = head.of(reference)
            has_padding = products.logit_columns > products.columns
            self.reference = Products(products.backend, other, len(products.tile), has_padding, products.tile)
            self.ref_logprobs = torch.zeros_like(self.logprobs)

    def measure(self, rows: slice | Tensor, term: Term | None = None) -> Chunk:
        """The chunk of the policy; the reference model's logits are overwritten by it."""
        if self.reference is not None:
            self.ref_logprobs[rows] = self._measure(self.reference, rows, False).logprobs[0]
        if term is None:
            chunk = self._measure(self.products, rows, self.entropy is not None)
            logprobs, entropy = chunk.logprobs[0], chunk.entropy
        else:
            chunk, logprobs, entropy = term.measure(self.products, rows, self.entropy is not None)
        self.logprobs[rows] = logprobs.to(self.logprobs.dtype)
        if self.entropy is not None:
            self.entropy[rows] = entropy.view(-1).to(self.entropy.dtype)
        return chunk

    def _measure(self, products: Products, rows: slice | Tensor, want_entropy: bool) -> Chunk:
        if self.shard is None:
            return products.measure(rows, want_entropy)
        chunk = products.measure(rows, True)
        own = chunk.logprobs[0], chunk.entropy[0], chunk.normalizer[0]
        logprobs, entropy, normalizer = self.shard.combine("linear_policy_loss", own, chunk.targets[0])
        return chunk._replace(logprobs=logprobs[None], entropy=entropy[None], normalizer=normalizer[None])

    def loss(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, metrics, and the gradients by log-prob and entropy of every row."""
        policy = self.policy
        if self.reference is not None:
            policy = policy._replace(ref_logprobs=self._by_term(self.ref_logprobs))
        entropy = None if self.entropy is None else self._by_term(self.entropy)
        backend = policy_loss.beside(self.products.backend)
        loss, metrics, *by_term = policy_loss.apply_with_gradients(
            backend, self._by_term(self.logprobs), entropy, policy, self.chunking.needs_entropy_gradient
        )
        by_logprob, by_entropy = map(self._by_row, by_term)
        return loss, metrics, by_logprob, by_entropy

    def _by_term(self, values: Tensor) -> Tensor:
        index, shape = self.chunking.term_index, self.chunking.shape
        return (values if index is None else shared_positions.gather(values, index)).view(shape)

    def _by_row(self, by_term: Tensor) -> Tensor:
        index = self.chunking.term_index
        if index is None or by_term.numel() == 0:
            return by_term
        return shared_positions.add_up(by_term, index, len(self.logprobs))


def loss_forward(
    backend: str,
    head: Head,
    reference: ReferenceHead,
    policy: Policy,
    chunking: Chunking,
    needs: list[bool],
    into: Tensor | None = None,
    shard: Shard | None = None,
    term: Term | None = None,
) -> tuple[Tensor, ...]:
    """Loss, metrics, and the gradients of the head's factors."""
    if shard is not None:
        head = head._replace(targets=shard.local(head.targets))
    with_grad, size = chunking.with_grad, chunking.chunk_rows
    total = len(head.hidden) if with_grad is None else len(with_grad)
    before = 0 if chunking.without_grad is None else len(chunking.without_grad)
    if with_grad is None and policy.mask is not None:
        is_row = chunking.term_index is None  # then the mask is that of the rows, an eighth of the bytes
        head = head.without(~policy.mask.reshape(-1) if is_row else head.targets == IGNORED)
    largest, is_padded = min(size, max(total, before)), shard is not None or term is not None
    products = Products(backend, head, largest, is_padded)
    batch = _Batch(products, reference, policy, chunking, shard)
    on_cpu = head.hidden.device.type == "cpu"
    is_sparse = on_cpu or with_grad is not None
    gradients = Gradients(products, needs, total, chunking.product_rows, into, is_sparse)
    results = None
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part in chunks(before, size):
            batch.measure(cast(Tensor, chunking.without_grad)[part])
        for part in chunks(total, size, chunking.ends):
            rows: slice | Tensor = part if with_grad is None else with_grad[part]
            chunk = batch.measure(rows, term)
            results = batch.loss()
            by_logprob, by_apart = results[2][rows], None
            by_entropy = results[3][rows] if chunking.needs_entropy_gradient else None
            selected = rows_with_grad(by_logprob, by_entropy, None if term is None else term.shares[rows])
            if selected is not None and len(selected) <= _MAX_SHARE * len(by_logprob):
                chunk, by_logprob = chunk.compact(selected), by_logprob[selected]
                by_entropy = None if by_entropy is None else by_entropy[selected]
                rows = selected + part.start if with_grad is None else with_grad[selected + part.start]
            if term is not None:
                by_logprob, by_entropy, by_apart = term.differentiate(chunk, rows, by_logprob, by_entropy)
            gradients.add(chunk, by_logprob, by_entropy, rows, by_apart)
        loss, metrics = (batch.loss() if results is None else results)[:2]
        if term is not None:
            loss = loss + term.loss.to(loss.dtype)
        by_factors = gradients.finish()
        if shard is not None:
            shard.complete(by_factors, needs)
        return loss, metrics, *by_factors


def _unpack_loss(args: tuple[Any, ...]) -> tuple[Head, ReferenceHead, Policy, Chunking, list[bool]]:
    *rest, needs = args
    head, rest = Head(*rest[:_HEAD]), rest[_HEAD:]
    reference, rest = ReferenceHead(*rest[:_REFERENCE]), rest[_REFERENCE:]
    return head, reference, Policy(*rest[:_POLICY]), Chunking(*rest[_POLICY:]), needs


def _loss_op(backend: str, *args: Any) -> tuple[Tensor, ...]:
    return loss_forward(backend, *_unpack_loss(args))


def _fake_loss(*args: Any) -> tuple[Tensor, ...]:
    head, *_, needs = _unpack_loss(args)
    loss = head.hidden.new_empty((), dtype=head.wide)
    metrics = head.hidden.new_empty(len(METRICS), dtype=torch.float64)
    return loss, metrics, *fake_gradients(head, needs)


LOSS = registry.define(
    "linear_policy_loss",
    LOSS_SCHEMA,
    KERNELS,
    _fake_loss,
    (set_up_loss, functools.partial(differentiate_loss, "linear_policy_loss")),
    implementation=_loss_op,
)


def apply_loss(
    backend: str,
    head: Head,
    reference: ReferenceHead,
    policy: Policy,
    chunking: Chunking,
    into: Tensor | None,
    shard: Shard | None = None,
    term: Term | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and metrics. The loss has a gradient by the head's factors."""
    if torch.compiler.is_compiling():
        results = LOSS[backend](*head, *reference, *policy, *chunking, head.needs_grad)
        return cast(tuple[Tensor, Tensor], results[:2])

    def compute(head: Head, needs: list[bool]) -> tuple[Tensor, ...]:
        return loss_forward(backend, head, reference, policy, chunking, needs, into, shard, term)

    only = (" with memory='fast'", ". memory='low' computes them each time")
    arguments = ("linear_policy_loss", only, backend, head, compute, into is not None)
    results = PrecomputedGradient.apply(*head.factors, *arguments)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], results)
