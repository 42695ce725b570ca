"""Registers linear_logprobs and its backward, which computes the logits again, with torch."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head import reference
from grpo_kernels.ops.linear_head.chunks import Gradients, Products, tokens_with_grad
from grpo_kernels.ops.linear_head.head import FACTORS, Head, Shard
from grpo_kernels.ops.linear_head.sizes import chunks
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED

SUPPORTS = token_logprobs.SUPPORTS
KERNELS = {name: dtypes for name, dtypes in SUPPORTS.items() if name != "reference"}
_COUNT = len(FACTORS)


@op_inputs
class Logprobs:
    """Arguments of linear_logprobs: tokens of a chunk, and of a product for the gradients (0: by the shapes)."""

    head: Head
    want_entropy: bool
    chunk_tokens: int
    product_tokens: int


@op_inputs
class LogprobsGradient:
    """Upstream gradients, arguments and results of linear_logprobs, and which factors need a gradient."""

    grad_logprobs: Tensor | None
    grad_entropy: Tensor | None
    normalizer: Tensor
    entropy: Tensor | None
    inputs: Logprobs
    needs: list[bool]


def logprobs_forward(backend: str, inputs: Logprobs, shard: Shard | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies (empty unless wanted) and log-sum-exps of all tokens."""
    head, total = inputs.head, len(inputs.head.hidden)
    products = Products(backend, head, min(inputs.chunk_tokens, total), pad_column=shard is not None)
    logprobs = head.hidden.new_empty(total, dtype=head.wide)
    entropy = torch.empty_like(logprobs) if inputs.want_entropy else logprobs.new_empty(0)
    normalizer = logprobs.new_empty(total, dtype=torch.float64)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for tokens in chunks(total, inputs.chunk_tokens):
            chunk = products.measure(tokens, inputs.want_entropy)
            logprobs[tokens], normalizer[tokens] = chunk.logprobs[0], chunk.normalizer[0]
            if inputs.want_entropy:
                entropy[tokens] = chunk.entropy[0]
    return logprobs, entropy, normalizer


def logprobs_backward(backend: str, inputs: LogprobsGradient, shard: Shard | None = None) -> tuple[Tensor, ...]:
    """Gradients of the head's factors, from logits that are computed again for tokens with a gradient."""
    head, chunk_tokens = inputs.inputs.head, inputs.inputs.chunk_tokens
    is_ignored = head.targets == IGNORED
    grad_logprobs, grad_entropy = (
        None if gradient is None else torch.where(is_ignored, 0, gradient)
        for gradient in (inputs.grad_logprobs, inputs.grad_entropy)
    )
    selected = tokens_with_grad(grad_logprobs, grad_entropy)
    if selected is None:
        head = head.without(is_ignored)
    total = len(head.hidden) if selected is None else len(selected)
    products = Products(backend, head, min(chunk_tokens, total), pad_column=shard is not None)
    gradients = Gradients(products, inputs.needs, total, inputs.inputs.product_tokens, sparse=selected is not None)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part in chunks(total, chunk_tokens):
            tokens = part if selected is None else selected[part]
            chunk = products.remeasure(tokens, inputs.normalizer, inputs.entropy)
            by_logprob = None if grad_logprobs is None else grad_logprobs[tokens]
            by_entropy = None if grad_entropy is None else grad_entropy[tokens]
            gradients.add(chunk, by_logprob, by_entropy, tokens)
        return gradients.finish()


def _fake_logprobs(inputs: Logprobs) -> tuple[Tensor, Tensor, Tensor]:
    head = inputs.head
    logprobs = head.hidden.new_empty(head.targets.shape, dtype=head.wide)
    entropy = torch.empty_like(logprobs) if inputs.want_entropy else logprobs.new_empty(0)
    return logprobs, entropy, torch.empty_like(logprobs, dtype=torch.float64)


def fake_gradients(head: Head, needs: list[bool]) -> tuple[Tensor, ...]:
    """The layout of Gradients.finish: empty where no gradient is needed."""

    def gradient(factor: Tensor | None, is_needed: bool, dimensions: int) -> Tensor:
        if factor is None:
            return head.hidden.new_empty((0,) * dimensions, dtype=head.wide)
        return factor.new_empty(factor.shape if is_needed else (0,) * dimensions)

    return tuple(map(gradient, head.factors, needs, (1, 2, 1, 2, 2)))


LOGPROBS = registry.ComposedOp(
    "linear_logprobs", Logprobs, "(Tensor, Tensor, Tensor)", KERNELS, _fake_logprobs, logprobs_forward
)
LOGPROBS_BACKWARD = registry.ComposedOp(
    "linear_logprobs_backward",
    LogprobsGradient,
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    KERNELS,
    lambda inputs: fake_gradients(inputs.inputs.head, inputs.needs),
    logprobs_backward,
)


class _LinearLogprobs(torch.autograd.Function):
    """Log-probs, entropies (empty unless wanted) and log-sum-exps; the head's factors are the first arguments.

    With a shard, each rank measures its own columns, and an all-reduce of a tensor with a slot per rank combines them.
    A target on another rank is a target in a padding column here. The gradient of the hidden states is a sum over the
    ranks: one all-reduce in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        inputs: Logprobs,
        shard: Shard | None,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        if shard is not None:
            inputs = dataclasses.replace(inputs, head=shard.part(inputs.head))
            own = logprobs_forward(backend, dataclasses.replace(inputs, want_entropy=True), shard)
            logprobs, entropy, normalizer = shard.combine("linear_logprobs", own, inputs.head.targets)
        else:
            logprobs, entropy, normalizer = LOGPROBS(backend, inputs)
        if not inputs.want_entropy:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        registry.save(ctx, LOGPROBS.layout, inputs, normalizer, entropy if inputs.want_entropy else None)
        ctx.shard, ctx.backend = shard, backend
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if by_logprobs is None and by_entropy is None:
            return (None,) * (_COUNT + 3)
        inputs, (normalizer, entropy) = registry.saved(ctx, LOGPROBS.layout)
        assert normalizer is not None
        needs = list(ctx.needs_input_grad[:_COUNT])
        upstream = registry.upstream(by_logprobs), registry.upstream(by_entropy if inputs.want_entropy else None)
        gradient = LogprobsGradient(*upstream, normalizer, entropy, inputs, needs)
        if ctx.shard is not None:
            gradients = logprobs_backward(ctx.backend, gradient, ctx.shard)
            ctx.shard.complete(gradients, needs)
        else:
            gradients = LOGPROBS_BACKWARD(ctx.backend, gradient)
        finished = (registry.first_derivative("linear_logprobs", value) for value in gradients)
        return *(value if need else None for value, need in zip(finished, needs, strict=True)), None, None, None


def apply_logprobs(backend: str, inputs: Logprobs, shard: Shard | None = None) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, both differentiable. The reference has no shards; its kernel of a chunk does."""
    if backend == "reference" and shard is None:
        results = reference.forward(inputs.head, inputs.want_entropy)
        return results[0], results[1]
    results = _LinearLogprobs.apply(*inputs.head.factors, inputs, shard, backend)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], results)
