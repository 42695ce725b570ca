"""The two ways to the gradient of a run: computed with the loss in the forward pass, or afterwards in the backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.linear_head.head import FACTORS, Head, Shard
from grpo_kernels.ops.linear_head.loop import RUN, Call, run
from grpo_kernels.ops.linear_head.products import Known
from grpo_kernels.ops.policy_loss.registration import scaled, scaled_in_place
from grpo_kernels.ops.token_logprobs.config import IGNORED

_COUNT = len(FACTORS)
_HEAD = registry.Layout(Head)


def may_precompute(hidden: Tensor) -> bool:
    """Whether the gradient may be rounded before it is multiplied by that of the loss.

    Not in float16, whose small numbers are lost: a loss scaler multiplies the loss after the forward pass.
    """
    return hidden.dtype != torch.float16


def _run(backend: str, call: Call, into: Tensor | None = None, shard: Shard | None = None) -> list[Tensor]:
    """A run; an op of its own under torch.compile, which traces nothing that has more than tensors."""
    results: list[Tensor] = RUN(backend, call) if into is None and shard is None else run(backend, call, into, shard)
    return results


class Precomputed(torch.autograd.Function):
    """Hands over the gradients of the forward pass in the backward, once, without a copy.

    `once` completes the error of a second backward: the op, when it has one backward only, and what to do instead. In a
    compiled graph the gradients are saved, as nothing is known there of a second backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        backend: str,
        call: Call,
        into: Tensor | None,
        shard: Shard | None,
        once: tuple[str, str, str],
    ) -> tuple[Tensor, ...]:
        head = call.head.with_factors(hidden, weight, bias, lora_a, lora_b)
        call = dataclasses.replace(call, head=head, needs=list(ctx.needs_input_grad[:_COUNT]))
        outputs = _run(backend, call, into, shard)
        results, gradients = tuple(outputs[:-_COUNT]), outputs[-_COUNT:]
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.has_added, ctx.backend, ctx.once = into is not None, backend, once
        if torch.compiler.is_compiling():
            ctx.save_for_backward(*gradients)
        else:
            ctx.gradients = gradients
        return results

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        others = (None,) * (len(ctx.needs_input_grad) - _COUNT)
        if upstream is None:
            return *(None,) * _COUNT, *others
        op, condition, hint = ctx.once
        if torch.compiler.is_compiling():
            saved = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
            return *(scaled(op, gradient, upstream) if need else None for gradient, need in saved), *others
        if ctx.gradients is None:
            raise RuntimeError(
                f"{op}: backward must run once{condition}, got a second call; the first handed out the gradients{hint}"
            )
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.has_added:
            rule = f"{op}: the loss must be given to backward unscaled with weight_grad; scale it by normalizer="
            torch._assert_async((upstream == 1).all(), rule)
        results: list[Tensor | None] = []
        for name, gradient, need in zip(FACTORS, gradients, ctx.needs_input_grad, strict=False):
            is_added = name == "weight" and ctx.has_added
            wanted = need and not is_added
            results.append(scaled_in_place(op, ctx.backend, gradient, upstream) if wanted else None)
        return *results, *others


class Recomputed(torch.autograd.Function):
    """Runs without gradients in the forward pass, and again with them in the backward.

    The loss has a gradient; where there is none, log-probs and entropies have one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        backend: str,
        call: Call,
        shard: Shard | None,
        op: str,
    ) -> tuple[Tensor, ...]:
        call = dataclasses.replace(call, head=call.head.with_factors(hidden, weight, bias, lora_a, lora_b))
        results = _run(backend, call, None, shard)
        with_grad = 2 if call.want_entropy and not call.has_loss else 1
        ctx.mark_non_differentiable(*results[with_grad:])
        ctx.set_materialize_grads(False)
        # only what the backward reads, as the owner of other results may overwrite them
        if call.has_loss:
            registry.save(ctx, RUN.layout, call)
        else:
            registry.save(ctx, _HEAD, call.head, results[-1], results[1] if call.want_entropy else None)
            ctx.plan = call.plan
        ctx.backend, ctx.shard, ctx.op, ctx.has_loss = backend, shard, op, call.has_loss
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        others = (None,) * (len(ctx.needs_input_grad) - _COUNT)
        if all(each is None for each in upstream):
            return *(None,) * _COUNT, *others
        needs = list(ctx.needs_input_grad[:_COUNT])
        if ctx.has_loss:
            by_loss = upstream[0]
            assert by_loss is not None
            call, _ = registry.saved(ctx, RUN.layout)
            call = dataclasses.replace(call.scaled(by_loss.detach()), needs=needs)
        else:
            head, (normalizer, entropy) = registry.saved(ctx, _HEAD)
            assert normalizer is not None
            is_ignored = head.targets == IGNORED
            by_logprobs, by_entropy = (
                None if each is None else torch.where(is_ignored, 0, each.detach())
                for each in (upstream[0], None if entropy is None else upstream[1])
            )
            known = Known(by_logprobs, by_entropy, normalizer, entropy)
            call = Call(head, known=known, plan=ctx.plan, needs=needs)
        gradients = _run(ctx.backend, call, None, ctx.shard)[-_COUNT:]
        finished = (registry.first_derivative(ctx.op, gradient) for gradient in gradients)
        return *(value if need else None for value, need in zip(finished, needs, strict=True)), *others


def precomputed(
    backend: str, call: Call, into: Tensor | None, shard: Shard | None, once: tuple[str, str, str]
) -> dict[str, Tensor]:
    """The results by name. The loss has a gradient by the head's factors."""
    results = Precomputed.apply(*call.head.factors, backend, call, into, shard, once)  # type: ignore[no-untyped-call]
    return dict(zip(call.results, results, strict=True))


def recomputed(backend: str, call: Call, shard: Shard | None, op: str) -> dict[str, Tensor]:
    """The results by name. The loss, or else log-probs and entropies, have a gradient by the head's factors."""
    if torch.is_grad_enabled() and any(call.head.needs_grad):
        results = Recomputed.apply(*call.head.factors, backend, call, shard, op)  # type: ignore[no-untyped-call]
    else:
        results = _run(backend, call, None, shard)
    return dict(zip(call.results, results, strict=True))
