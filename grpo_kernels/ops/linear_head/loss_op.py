"""Registers linear_policy_loss with torch: the chunk loop.

linear_policy_loss computes the gradient in the forward pass, in three matrix products instead of four. The gradient of
a token depends on its own log-prob, and on those of its sequence if the ratio does, so a chunk can be finished while
its logits are in memory: policy_loss is called for the whole batch, of which the log-probs of the chunks so far are
known, and the part of its gradient that belongs to the chunk is final. That costs a thousandth of a product, and the
last call gives the loss.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, cast

import torch
from torch import Tensor

from grpo_kernels import registry, shared_positions
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head.chunks import Chunk, Gradients, Products, tokens_with_grad
from grpo_kernels.ops.linear_head.head import Head, Shard
from grpo_kernels.ops.linear_head.logprobs_op import KERNELS, fake_gradients
from grpo_kernels.ops.linear_head.precomputed import PrecomputedGradient
from grpo_kernels.ops.linear_head.sizes import chunks
from grpo_kernels.ops.policy_loss import registration as policy_loss
from grpo_kernels.ops.policy_loss.reference import Policy, PolicyInputs
from grpo_kernels.ops.policy_loss.reference.metrics import METRICS
from grpo_kernels.ops.token_logprobs.config import IGNORED

_MAX_SHARE = 0.75  # above this share of tokens with a gradient, leaving the others out costs more than it saves


@op_inputs
class Chunking:
    """Which tokens are computed, and how many at a time.

    Attributes:
        shape: shape of the log-probs
        want_entropy: measure entropies
        needs_entropy_gradient: the loss has an entropy bonus
        without_grad: tokens without a gradient, measured before all others
        with_grad: tokens with a gradient; None means all tokens
        ends: ends of the sequences among the tokens with a gradient, where chunks may end; None means anywhere
        chunk_tokens: tokens of a chunk
        product_tokens: tokens of a product for the gradients in half precision; 0 means chosen from the shapes
        term_index: the token of every term of the loss, -1 for padding; None means that they are the tokens
    """

    shape: list[int]
    want_entropy: bool
    needs_entropy_gradient: bool
    without_grad: Tensor | None
    with_grad: Tensor | None
    ends: list[int] | None
    chunk_tokens: int
    product_tokens: int
    term_index: Tensor | None


@op_inputs
class HeadLoss:
    """Arguments of linear_policy_loss, and which factors of the head need a gradient."""

    head: Head
    reference: Head | None
    policy: Policy
    chunking: Chunking
    needs: list[bool]


class Term(Protocol):
    """Another term of the loss, by the logits, in the chunks and products of linear_policy_loss.

    `shares` [N] is not 0 where a token has a part in it. `loss` is known when all chunks are differentiated.
    """

    shares: Tensor

    @property
    def loss(self) -> Tensor: ...

    def measure(self, products: Products, tokens: slice | Tensor, want_entropy: bool) -> tuple[Chunk, Tensor, Tensor]:
        """A chunk with columns kept apart, and log-probs and entropies of its whole tokens."""

    def differentiate(
        self, chunk: Chunk, tokens: slice | Tensor, by_logprob: Tensor, by_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Combines the gradients of the policy loss with those of the term, as Gradients.add takes them."""


class _Batch:
    """The log-probs of the chunks so far, and the policy loss that they give."""

    def __init__(self, products: Products, inputs: HeadLoss, shard: Shard | None) -> None:
        head, self.products, self.policy, chunking = products.head, products, inputs.policy, inputs.chunking
        self.chunking = chunking
        self.shard = shard
        self.logprobs = head.hidden.new_zeros(len(head.hidden), dtype=head.wide)
        self.entropy = torch.zeros_like(self.logprobs) if chunking.want_entropy else None
        self.reference: Products | None = None
        if inputs.reference is not None:
            other = inputs.reference if shard is None else shard.part(inputs.reference)
            other = other.for_targets_of(head)
            has_padding = products.logit_columns > products.columns
            self.reference = Products(products.backend, other, len(products.tile), has_padding, products.tile)
            self.ref_logprobs = torch.zeros_like(self.logprobs)

    def measure(self, tokens: slice | Tensor, term: Term | None = None) -> Chunk:
        """The chunk of the policy; the reference model's logits are overwritten by it."""
        if self.reference is not None:
            self.ref_logprobs[tokens] = self._measure(self.reference, tokens, False).logprobs[0]
        if term is None:
            chunk = self._measure(self.products, tokens, self.entropy is not None)
            logprobs, entropy = chunk.logprobs[0], chunk.entropy
        else:
            chunk, logprobs, entropy = term.measure(self.products, tokens, self.entropy is not None)
        self.logprobs[tokens] = logprobs.to(self.logprobs.dtype)
        if self.entropy is not None:
            self.entropy[tokens] = entropy.view(-1).to(self.entropy.dtype)
        return chunk

    def _measure(self, products: Products, tokens: slice | Tensor, want_entropy: bool) -> Chunk:
        if self.shard is None:
            return products.measure(tokens, want_entropy)
        chunk = products.measure(tokens, True)
        own = chunk.logprobs[0], chunk.entropy[0], chunk.normalizer[0]
        logprobs, entropy, normalizer = self.shard.combine("linear_policy_loss", own, chunk.targets[0])
        return chunk._replace(logprobs=logprobs[None], entropy=entropy[None], normalizer=normalizer[None])

    def loss(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, metrics, and the gradients by log-prob and entropy of every token."""
        policy = self.policy
        if self.reference is not None:
            policy = dataclasses.replace(policy, ref_logprobs=self._by_term(self.ref_logprobs))
        entropy = None if self.entropy is None else self._by_term(self.entropy)
        backend = policy_loss.beside(self.products.backend, self.logprobs.device, self.logprobs.dtype)
        inputs = PolicyInputs(self._by_term(self.logprobs), entropy, policy, self.chunking.needs_entropy_gradient)
        loss, metrics, *by_term = policy_loss.apply_with_gradients(backend, inputs)
        by_logprob, by_entropy = by_term
        if self.chunking.needs_entropy_gradient:  # otherwise there is none
            by_entropy = self._by_row(by_entropy)
        return loss, metrics, self._by_row(by_logprob), by_entropy

    def _by_term(self, values: Tensor) -> Tensor:
        index, shape = self.chunking.term_index, self.chunking.shape
        return (values if index is None else shared_positions.gather(values, index)).view(shape)

    def _by_row(self, by_term: Tensor) -> Tensor:
        index = self.chunking.term_index
        if index is None:
            return by_term
        return shared_positions.add_up(by_term, index, len(self.logprobs))


def loss_forward(
    backend: str,
    inputs: HeadLoss,
    into: Tensor | None = None,
    shard: Shard | None = None,
    term: Term | None = None,
) -> tuple[Tensor, ...]:
    """Loss, metrics, log-probs and entropies of the tokens, and the gradients of the head's factors."""
    head, policy, chunking, needs = inputs.head, inputs.policy, inputs.chunking, inputs.needs
    if shard is not None:
        head = shard.part(head)
    with_grad, size = chunking.with_grad, chunking.chunk_tokens
    total = len(head.hidden) if with_grad is None else len(with_grad)
    before = 0 if chunking.without_grad is None else len(chunking.without_grad)
    if with_grad is None and policy.mask is not None:
        is_token = chunking.term_index is None  # then the mask is that of the tokens, an eighth of the bytes
        head = head.without(~policy.mask.reshape(-1) if is_token else head.targets == IGNORED)
    largest, is_padded = min(size, max(total, before)), shard is not None or term is not None
    products = Products(backend, head, largest, is_padded)
    batch = _Batch(products, inputs, shard)
    on_cpu = head.hidden.device.type == "cpu"
    is_sparse = on_cpu or with_grad is not None
    gradients = Gradients(products, needs, total, chunking.product_tokens, into, is_sparse)
    results = None
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part in chunks(before, size):
            batch.measure(cast(Tensor, chunking.without_grad)[part])
        for part in chunks(total, size, chunking.ends):
            tokens: slice | Tensor = part if with_grad is None else with_grad[part]
            chunk = batch.measure(tokens, term)
            results = batch.loss()
            by_logprob, by_separate = results[2][tokens], None
            by_entropy = results[3][tokens] if chunking.needs_entropy_gradient else None
            selected = tokens_with_grad(by_logprob, by_entropy, None if term is None else term.shares[tokens])
            if selected is not None and len(selected) <= _MAX_SHARE * len(by_logprob):
                chunk, by_logprob = chunk.compact(selected), by_logprob[selected]
                by_entropy = None if by_entropy is None else by_entropy[selected]
                tokens = selected + part.start if with_grad is None else with_grad[selected + part.start]
            if term is not None:
                by_logprob, by_entropy, by_separate = term.differentiate(chunk, tokens, by_logprob, by_entropy)
            gradients.add(chunk, by_logprob, by_entropy, tokens, by_separate)
        loss, metrics = (batch.loss() if results is None else results)[:2]
        if term is not None:
            loss = loss + term.loss.to(loss.dtype)
        by_factors = gradients.finish()
        if shard is not None:
            shard.complete(by_factors, needs)
        entropy = metrics.new_empty(0) if batch.entropy is None else batch.entropy
        return loss, metrics, batch.logprobs, entropy, *by_factors


def _fake_loss(inputs: HeadLoss) -> tuple[Tensor, ...]:
    head = inputs.head
    loss = head.hidden.new_empty((), dtype=head.wide)
    metrics = head.hidden.new_empty(len(METRICS), dtype=torch.float64)
    logprobs = head.hidden.new_empty(len(head.hidden), dtype=head.wide)
    entropy = torch.empty_like(logprobs) if inputs.chunking.want_entropy else metrics.new_empty(0)
    return loss, metrics, logprobs, entropy, *fake_gradients(head, inputs.needs)


LOSS = registry.ComposedOp(
    "linear_policy_loss",
    HeadLoss,
    f"({', '.join(['Tensor'] * 9)})",
    KERNELS,
    _fake_loss,
    loss_forward,
)


def apply(
    backend: str,
    inputs: HeadLoss,
    into: Tensor | None,
    shard: Shard | None = None,
    term: Term | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, metrics, log-probs and entropies. The loss has a gradient by the head's factors."""

    def compute(factors: tuple[Tensor | None, ...], needs: list[bool]) -> tuple[Tensor, ...]:
        own = dataclasses.replace(inputs, head=inputs.head.with_factors(*factors), needs=needs)
        if torch.compiler.is_compiling():
            return cast(tuple[Tensor, ...], LOSS(backend, own))
        return loss_forward(backend, own, into, shard, term)

    only = (" with memory='fast'", ". memory='low' computes them each time")
    arguments = ("linear_policy_loss", only, backend, compute, into is not None)
    results = PrecomputedGradient.apply(*inputs.head.factors, *arguments)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], results)
