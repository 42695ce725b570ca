"""Gradients that are computed with the loss, in the forward pass.

They take one of two routes. Traced, they are outputs of a torch op that its backward scales. In eager mode an autograd
function keeps them and hands them over without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.ops.linear_head.head import FACTORS, Head
from grpo_kernels.ops.policy_loss import registration as policy_loss


def set_up_loss(_: str, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """For an op whose last outputs are the gradients of its first inputs, the head's factors, by its first output."""
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[-FACTORS:])
    ctx.others = len(inputs) - FACTORS


def differentiate_loss(op: str, backend: str, ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    others = (None,) * ctx.others
    if upstream is None:
        return *(None,) * FACTORS, *others
    gradients = zip(ctx.saved_tensors, ctx.needs_input_grad[:FACTORS], strict=True)
    scale = policy_loss.scaled
    scaled = (scale(op, backend, gradient, upstream, False) if need else None for gradient, need in gradients)
    return *scaled, *others


class PrecomputedGradient(torch.autograd.Function):
    """Hands over the gradients of the forward pass in the backward, once, without a copy.

    `compute` returns the loss, results without a gradient, and the gradients of the head's factors. `only` completes
    the error of a second backward: when there is one, and what to do instead.
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
        head: Head,
        compute: Callable[[Head, list[bool]], tuple[Tensor, ...]],
        has_added: bool,
    ) -> tuple[Tensor, ...]:
        head = head._replace(hidden=hidden, weight=weight, bias=bias, lora_a=lora_a, lora_b=lora_b)
        outputs = compute(head, list(ctx.needs_input_grad[:FACTORS]))
        results, ctx.gradients = outputs[:-FACTORS], outputs[-FACTORS:]
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.has_added, ctx.backend, ctx.op, ctx.only = has_added, backend, op, only
        return results

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if upstream is None:
            return tuple(results)
        if ctx.gradients is None:
            with_, hint = ctx.only
            raise RuntimeError(
                f"{ctx.op}: backward must run once{with_}, got a second call; the first handed out the gradients{hint}"
            )
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.has_added:
            rule = f"{ctx.op}: the loss must be given to backward unscaled with weight_grad; scale it by normalizer="
            torch._assert_async((upstream == 1).all(), rule)
        for place, gradient in enumerate(gradients):
            is_weight_added = place == 1 and ctx.has_added
            if ctx.needs_input_grad[place] and not is_weight_added:
                results[place] = policy_loss.scaled(ctx.op, ctx.backend, gradient, upstream, is_owned=True)
        return tuple(results)
