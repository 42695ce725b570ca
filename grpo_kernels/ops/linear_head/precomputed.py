"""Gradients that are computed with the loss, in the forward pass; in float16 again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.ops.linear_head.head import FACTORS
from grpo_kernels.ops.policy_loss.registration import scaled, scaled_in_place

_COUNT = len(FACTORS)


def may_precompute(hidden: Tensor) -> bool:
    """Whether the gradient may be rounded before it is multiplied by that of the loss.

    Not in float16, whose small numbers are lost: a loss scaler multiplies the loss after the forward pass.
    """
    return hidden.dtype != torch.float16


class PrecomputedGradient(torch.autograd.Function):
    """Hands over the gradients of the forward pass in the backward, once, without a copy.

    `compute` gets the head's factors and which of them need a gradient. It returns the loss, results without a
    gradient, and the gradients of the factors. `only` completes the error of a second backward: when there is one, and
    what to do instead. In a compiled graph the gradients are saved, as nothing is known there of a second backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        op: str,
        only: tuple[str, str],
        backend: str,
        compute: Callable[[tuple[Tensor | None, ...], list[bool]], tuple[Tensor, ...]],
        has_added: bool,
    ) -> tuple[Tensor, ...]:
        outputs = compute((hidden, weight, bias, lora_a, lora_b), list(ctx.needs_input_grad[:_COUNT]))
        results, gradients = outputs[:-_COUNT], outputs[-_COUNT:]
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.has_added, ctx.backend, ctx.op, ctx.only = has_added, backend, op, only
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
        if torch.compiler.is_compiling():
            saved = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
            return *(scaled(ctx.op, gradient, upstream) if need else None for gradient, need in saved), *others
        if ctx.gradients is None:
            with_, hint = ctx.only
            raise RuntimeError(
                f"{ctx.op}: backward must run once{with_}, got a second call; the first handed out the gradients{hint}"
            )
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.has_added:
            rule = f"{ctx.op}: the loss must be given to backward unscaled with weight_grad; scale it by normalizer="
            torch._assert_async((upstream == 1).all(), rule)
        results: list[Tensor | None] = []
        for name, gradient, need in zip(FACTORS, gradients, ctx.needs_input_grad, strict=False):
            is_added = name == "weight" and ctx.has_added
            wanted = need and not is_added
            results.append(scaled_in_place(ctx.op, ctx.backend, gradient, upstream) if wanted else None)
        return *results, *others


class RecomputedGradient(torch.autograd.Function):
    """Computes the loss without gradients in the forward pass, and again with them in the backward.

    `compute` is as for PrecomputedGradient, with the gradient of the loss as another argument.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        compute: Callable[[tuple[Tensor | None, ...], list[bool], Tensor | None], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        factors = hidden, weight, bias, lora_a, lora_b
        results = compute(factors, [False] * _COUNT, None)[:-_COUNT]
        ctx.save_for_backward(*factors)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.compute = compute
        return results

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[:_COUNT])
        if upstream is None:
            return (None,) * (_COUNT + 1)
        gradients = ctx.compute(ctx.saved_tensors, needs, upstream)[-_COUNT:]
        return *(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)), None
