"""The specification of linear_logprobs: the logits whole, and torch's own gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.ops.linear_head.head import Head, Measurements, Want
from grpo_kernels.ops.token_logprobs import reference as token_logprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.ops.token_logprobs.reference import Scaling


def logits_of(head: Head, is_ignored: Tensor) -> Tensor:
    """The logits of all tokens. NaN in a token that is not read would reach the gradients of weight and adapter."""
    wide = token_logprobs.wide
    hidden = wide(torch.where(is_ignored[:, None], 0, head.hidden))
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden @ wide(head.weight).T
        if head.lora_a is not None and head.lora_b is not None:
            logits = logits + head.lora_scale * (hidden @ wide(head.lora_a).T) @ wide(head.lora_b).T
    if head.bias is not None:
        logits = logits + wide(head.bias)
    return logits if head.banned is None else logits.index_fill(1, head.banned, -math.inf)


class _Readable(torch.autograd.Function):
    """Sets rows that hold NaN or infinity to 0, as they times a gradient of 0 would be NaN in that of the weight."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, is_unreadable: Tensor) -> Tensor:
        return torch.where(is_unreadable[:, None], 0, hidden)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


class _Unreadable(torch.autograd.Function):
    """Gives NaN for these rows, and takes their gradient as NaN, but as 0 where nothing depends on them."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, is_unreadable: Tensor) -> Tensor:
        ctx.save_for_backward(is_unreadable)
        return torch.where(is_unreadable, math.nan, result)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (is_unreadable,) = ctx.saved_tensors
        return torch.where(is_unreadable & (upstream != 0), math.nan, upstream), None


def forward(head: Head, want: Want) -> Measurements:
    targets = head.targets
    is_unreadable = ~head.hidden.isfinite().all(-1)
    hidden = _Readable.apply(head.hidden, is_unreadable)  # type: ignore[no-untyped-call]
    logits = logits_of(dataclasses.replace(head, hidden=hidden), targets == IGNORED)
    kept, columns = token_logprobs.columns_of(logits, targets)
    # tokens that do not count must not give NaN times 0 for a gradient
    z = Scaling(head.row_temperature, *head.scaling).apply(torch.where(kept[:, None], logits, 0))
    logprobs, entropy, normalizer = token_logprobs.distribution(z, columns, want.entropy)

    def finished(result: Tensor) -> Tensor:
        result = _Unreadable.apply(result, is_unreadable)  # type: ignore[no-untyped-call]
        wrong = kept & (columns != targets) & (targets != IGNORED)
        return torch.where(wrong, torch.nan, torch.where(kept, result, 0))

    absent = logits.new_empty(0)
    squares = absent
    if want.sum_pi_squared:
        log_p = z.detach() - normalizer.detach()[..., None]
        squares = finished(log_p.exp().square().sum(-1).to(z.dtype))
    return Measurements(
        finished(logprobs), absent if entropy is None else finished(entropy), squares, finished(normalizer)
    )
