"""linear_logprobs over a vocabulary whose columns are split among the ranks of a process group."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.ops.linear_head.chunks import Head
from grpo_kernels.ops.linear_head.registration import logprobs_backward, logprobs_forward
from grpo_kernels.ops.token_logprobs.config import IGNORED

_NOT_HERE = 1.0  # marks a target of another rank; a log-prob is at most 0


def apply_sharded(
    backend: str, group: Any, start: int, head: Head, want_entropy: bool, chunk_rows: int, product_rows: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of whole rows, from this rank's columns `start`, `start` + 1, ..."""
    differentiable = (head.hidden, head.weight, head.bias)
    arguments = (backend, group, start, head, want_entropy, chunk_rows, product_rows)
    results = _Sharded.apply(*differentiable, *arguments)  # type: ignore[no-untyped-call]
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
        backend: str,
        group: Any,
        start: int,
        head: Head,
        want_entropy: bool,
        chunk_rows: int,
        product_rows: int,
    ) -> tuple[Tensor, Tensor]:
        columns = weight.shape[0]
        local = head.targets - start
        is_here = (local >= 0) & (local < columns)
        is_ignored = head.targets == IGNORED
        targets = torch.where(is_ignored, IGNORED, torch.where(is_here, local, columns))
        head = head._replace(hidden=hidden, weight=weight, bias=bias, targets=targets)
        results = logprobs_forward(backend, head, True, chunk_rows, pad_column=True)
        logprobs, entropy, normalizer = _combine(group, results, is_here, is_ignored)
        ctx.save_for_backward(hidden, weight, bias, targets, head.row_temperature, normalizer, entropy)
        ctx.scaling = head.scaling
        ctx.call = (backend, group, chunk_rows, product_rows)
        ctx.set_materialize_grads(False)
        return logprobs, entropy if want_entropy else logprobs.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        backend, group, chunk_rows, product_rows = ctx.call
        *tensors, normalizer, entropy = ctx.saved_tensors
        if grad_entropy is not None and grad_entropy.numel() == 0:
            grad_entropy = None
        needs = list(ctx.needs_input_grad[:3])
        hidden, weight, bias = logprobs_backward(
            backend,
            None if grad_logprobs is None else grad_logprobs.contiguous(),
            None if grad_entropy is None else grad_entropy.contiguous(),
            Head(*tensors, *ctx.scaling),
            normalizer,
            entropy,
            needs,
            chunk_rows,
            product_rows,
            pad_column=True,
        )
        # all ranks must agree on whether hidden states need a gradient, or they would wait for each other
        if needs[0]:
            dist.all_reduce(hidden, group=group)
        gradients = (g if need else None for g, need in zip((hidden, weight, bias), needs, strict=True))
        return *gradients, *(None,) * 7


def _combine(
    group: Any, results: tuple[Tensor, Tensor, Tensor], is_here: Tensor, is_ignored: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and log-sum-exps over the columns of all ranks."""
    logprobs, entropy, normalizer = results
    slots = normalizer.new_zeros(dist.get_world_size(group), 3, len(normalizer))
    slot = slots[dist.get_rank(group)]
    slot[0], slot[1], slot[2] = normalizer, torch.where(is_here, logprobs, _NOT_HERE), entropy
    dist.all_reduce(slots, group=group)
    normalizers, candidates, entropies = slots.unbind(1)
    is_owner = candidates != _NOT_HERE
    owners = is_owner.sum(0)
    if logprobs.device.type == "cpu" and not bool(((owners == 1) | is_ignored).all()):
        raise RuntimeError("linear_logprobs: targets must be columns of exactly one rank each, or -100")
    total = normalizers.logsumexp(0)
    of_owner = torch.where(is_owner, normalizers, 0).sum(0)
    # not the difference of two large numbers: exact where the target is nearly certain
    others = torch.where(is_owner, 0, torch.exp(normalizers - of_owner)).sum(0)
    of_target = torch.where(is_owner, candidates, 0).sum(0) - torch.log1p(others)
    of_target = torch.where(owners == 1, of_target, torch.nan)
    share = torch.exp(normalizers - total)
    of_row = torch.where(share == 0, 0, share * (entropies + (total - normalizers))).sum(0)

    def finish(value: Tensor) -> Tensor:
        return torch.where(is_ignored, 0, value).to(logprobs.dtype)

    return finish(of_target), finish(of_row), torch.where(is_ignored, 0, total)
