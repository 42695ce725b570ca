"""Registers log-probs over a support with torch.

Logits of kept ids are dot products of rows that are gathered from the weight. Over these logits,
the kernels are those of token_logprobs with rows of several lengths. The gradient of the hidden
states gathers the same rows again; that of the weight goes through the entries by token id, so that
every row of it is written once, in a fixed order of additions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.linear_head.head import Head, Measurements, Shard
from grpo_kernels.ops.sampled_support import reference
from grpo_kernels.ops.sampled_support.reference import Entries, Gradient, Kept
from grpo_kernels.ops.token_logprobs import registration as token_logprobs

# On a CPU there is no kernel: the reference computes the log-probs, the CPU's kernels their loss.
SUPPORTS = token_logprobs.SUPPORTS


def _fake(kept: Kept) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(kept.hidden.dtype, torch.float32)
    rows = kept.hidden.new_empty(len(kept.hidden), dtype=dtype)
    return rows, rows.double(), rows.clone(), rows.new_empty(kept.entries.rows.shape)


FORWARD = registry.TorchOp(
    "sampled_support",
    Kept,
    "(Tensor, Tensor, Tensor, Tensor)",
    SUPPORTS,
    _fake,
    triton="forward",
    reference=reference.forward,
    opaque_reference=True,
    folder=__package__,
)
BACKWARD = registry.TorchOp(
    "sampled_support_backward",
    Gradient,
    "Tensor",
    SUPPORTS,
    lambda inputs: torch.empty_like(inputs.logits),
    triton="backward",
    reference=reference.backward,
    opaque_reference=True,
    mutated=("by_hidden", "by_weight"),
    folder=__package__,
)


class _Logprobs(torch.autograd.Function):
    """Log-probs and entropies; the gradient of the weight may be added to a tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kept: Kept,
        into: Tensor | None,
        backend: str,
        shard: Shard | None,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.into, ctx.backend, ctx.shard = into, backend, shard
        ctx.implementation = "reference" if backend == "cpu" else backend
        logprobs, normalizer, entropy, logits = FORWARD(ctx.implementation, kept)
        if shard is not None:
            results = Measurements(logprobs, entropy, logprobs.new_empty(0), normalizer)
            local = shard.local(targets)
            logprobs, entropy, _, normalizer = shard.combine(results, local, kept.entries.owned())
        registry.save(ctx, FORWARD.layout, kept, normalizer, entropy, logits)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        kept, results = registry.saved(ctx, FORWARD.layout)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        by_hidden = torch.empty_like(kept.hidden) if needs_hidden else None
        by_weight = None
        if needs_weight and ctx.into is None:  # torch.compile cannot ask for huge pages on a CPU
            backend = "" if torch.compiler.is_compiling() else ctx.backend
            weight = kept.weight
            by_weight = token_logprobs.empty(weight, weight.shape, weight.dtype, backend).zero_()
        total = ctx.into if by_weight is None else by_weight
        tensors = *map(registry.upstream, upstream), *results
        gradient = Gradient(by_hidden, total, *tensors, kept)  # type: ignore[call-arg, arg-type]
        by_logits = BACKWARD(ctx.implementation, gradient)
        if ctx.shard is not None and by_hidden is not None:
            dist.all_reduce(by_hidden, group=ctx.shard.group)
        by_bias = by_logits.to(kept.bias.dtype) if needs_bias else None
        gradients = (
            None if each is None else registry.first_derivative("sampled_support", each)
            for each in (by_hidden, by_weight, by_bias)
        )
        return *gradients, *(None,) * 5


def apply(
    backend: str,
    head: Head,
    entries: Entries,
    want_entropy: bool,
    into: Tensor | None,
    shard: Shard | None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (empty unless wanted) over the entries.

    The gradient of the weight is added to `into` where it is given.
    """
    hidden, weight = head.hidden.contiguous(), head.weight.contiguous()
    entries = entries if shard is None else entries.part(shard)
    # gradients of an id are added up in float64, which a CPU does in one thread, in order
    bias = None if head.bias is None else head.bias.double()[entries.token_ids]
    kept = Kept(hidden, weight, bias, entries, head.row_temperature, *head.scaling)
    differentiable = cast(Any, _Logprobs.apply)
    logprobs, entropy = differentiable(hidden, weight, bias, kept, into, backend, shard, head.targets)
    return logprobs, entropy if want_entropy else entropy.new_empty(0)
