"""The specification of linear_logprobs: the logits whole, and torch's own gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.ops.token_logprobs import reference as token_logprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.ops.token_logprobs.reference import Scaling


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    targets: Tensor,
    row_temperature: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    lora_scale: float,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = token_logprobs.wide
    # NaN in a row that is not read would reach the gradients of weight and adapter
    hidden = torch.where((targets != IGNORED)[:, None], hidden, 0)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = wide(hidden) @ wide(weight).T
        if lora_a is not None and lora_b is not None:
            logits = logits + lora_scale * (wide(hidden) @ wide(lora_a).T) @ wide(lora_b).T
    if bias is not None:
        logits = logits + wide(bias)
    kept, columns = token_logprobs.columns_of(logits, targets)
    # rows that do not count must not give NaN times 0 for a gradient
    z = Scaling(row_temperature, temperature, softcap, logit_scale).apply(torch.where(kept[:, None], logits, 0))
    logprobs, entropy, normalizer = token_logprobs.distribution(z, columns, want_entropy)

    def finished(result: Tensor) -> Tensor:
        wrong = kept & (columns != targets) & (targets != IGNORED)
        return torch.where(wrong, torch.nan, torch.where(kept, result, 0))

    return finished(logprobs), logits.new_empty(0) if entropy is None else finished(entropy), finished(normalizer)
