"""linear_logprobs over a vocabulary whose columns are split among the ranks of a process group."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels.ops.linear_head.head import FACTORS, Head, Shard
from grpo_kernels.ops.linear_head.registration import logprobs_backward, logprobs_forward


def apply_sharded(
    backend: str, shard: Shard, head: Head, want_entropy: bool, chunk_rows: int, product_rows: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of whole rows, from this rank's columns."""
    arguments = (backend, shard, head, want_entropy, chunk_rows, product_rows)
    results = _Sharded.apply(*head.factors, *arguments)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], results)


class _Sharded(torch.autograd.Function):
    """Each rank computes log-sum-exp, entropy and possibly the target's log-prob over its own columns.

    One all-reduce of a tensor with a slot per rank combines them. A target on another rank is a target in a padding
    column here. The gradient of the hidden states is a sum over ranks: one all-reduce in the backward.
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
        shard: Shard,
        head: Head,
        want_entropy: bool,
        chunk_rows: int,
        product_rows: int,
    ) -> tuple[Tensor, Tensor]:
        targets = shard.local(head.targets)
        head = head._replace(hidden=hidden, weight=weight, bias=bias, lora_a=lora_a, lora_b=lora_b, targets=targets)
        results = logprobs_forward(backend, head, True, chunk_rows, pad_column=True)
        logprobs, entropy, normalizer = shard.combine("linear_logprobs", results, targets)
        ctx.save_for_backward(*head.factors, targets, head.row_temperature, normalizer, entropy)
        ctx.numbers = head.numbers
        ctx.call = (backend, shard, chunk_rows, product_rows)
        ctx.set_materialize_grads(False)
        return logprobs, entropy if want_entropy else logprobs.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        backend, shard, chunk_rows, product_rows = ctx.call
        *tensors, normalizer, entropy = ctx.saved_tensors
        if grad_entropy is not None and grad_entropy.numel() == 0:
            grad_entropy = None
        needs = list(ctx.needs_input_grad[:FACTORS])
        gradients = logprobs_backward(
            backend,
            None if grad_logprobs is None else grad_logprobs.contiguous(),
            None if grad_entropy is None else grad_entropy.contiguous(),
            Head(*tensors, *ctx.numbers),
            normalizer,
            entropy,
            needs,
            chunk_rows,
            product_rows,
            pad_column=True,
        )
        shard.complete(gradients, needs)
        needed = (gradient if need else None for gradient, need in zip(gradients, needs, strict=True))
        return *needed, *(None,) * 6
