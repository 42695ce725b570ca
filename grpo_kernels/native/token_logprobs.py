"""The CUDA implementation: compiled ops, which write a gradient that is allocated here."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def forward(
    logits: Tensor,
    targets: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    want_entropy: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    results = torch.ops.grpo_kernels._token_logprobs_cuda(
        logits, targets, row_temperature, temperature, softcap, logit_scale, want_entropy
    )
    return cast(tuple[Tensor, Tensor, Tensor], results)


def backward(grad_logprobs: Tensor | None, grad_entropy: Tensor | None, logits: Tensor, *saved: Any) -> Tensor:
    gradient = logits.new_empty(logits.shape)
    torch.ops.grpo_kernels._token_logprobs_backward_cuda(gradient, grad_logprobs, grad_entropy, logits, *saved)
    return gradient


def backward_inplace(logits: Tensor, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, *saved: Any) -> None:
    torch.ops.grpo_kernels._token_logprobs_backward_cuda(logits, grad_logprobs, grad_entropy, logits, *saved)
