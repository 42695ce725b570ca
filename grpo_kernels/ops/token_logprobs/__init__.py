"""Log-probs of chosen tokens from logits, and the entropy of every row."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.token_logprobs import registration as op
from grpo_kernels.ops.token_logprobs.arguments import check_logits, check_overwritable, check_scaling, rows_of
from grpo_kernels.ops.token_logprobs.reference import Measured

_OP = "token_logprobs"


class TokenLogprobs(NamedTuple):
    """One entry per target, in float32, or float64 for float64 logits.

    Attributes:
        logprobs: log-prob of the target, never above 0
        entropy: entropy of the row's distribution in nats, never below 0; None unless requested
        sum_pi_squared: sum of the squares of the row's probabilities, without a gradient; None unless requested
    """

    logprobs: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None = None


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    return_sum_pi_squared: bool = False,
    inplace_backward: bool = False,
    backend: str | None = None,
) -> TokenLogprobs:
    """Computes log softmax(softcap(logit_scale * logits) / temperature) at the targets without storing the softmax.

    A logit of -inf is a masked token, with probability 0 whatever the softcap. NaN and +inf make their own row NaN and
    no other. Nothing waits for the GPU: an invalid target is an error on the CPU and gives NaN on a GPU, and so does an
    element of a temperature tensor that is not positive and finite. Only logits have a gradient, and only a first one.

    Args:
        logits: [..., V]; bfloat16, float16, float32, float64 on the CPU; copied unless columns are contiguous
        targets: integers [...]; -100 gives log-prob and entropy 0 and no gradient, and the row is not read
        temperature: positive number, or a tensor with one per target ([...]) or per first dimension ([B], [B, 1])
        softcap: positive number; logits become softcap * tanh(x / softcap). None leaves them unchanged
        logit_scale: positive number
        return_entropy: also return the differentiable entropy of every row
        return_sum_pi_squared: also return the sum of the squares of every row's probabilities, in one read more; for
            gk.optimal_token_baseline
        inplace_backward: the backward overwrites the logits with their gradient, which saves their size in memory.
            Nothing else may read them, backward runs once, and torch.compile is not supported
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        TokenLogprobs: log-probs in the shape of the targets, and what else was requested, or None
    """
    check_logits(_OP, logits, targets)
    scaling = check_scaling(_OP, temperature, softcap, logit_scale, targets, logits.dtype)
    checks.boolean(
        _OP,
        return_entropy=return_entropy,
        return_sum_pi_squared=return_sum_pi_squared,
        inplace_backward=inplace_backward,
    )
    if inplace_backward:
        check_overwritable(_OP, "inplace_backward", logits)
    chosen = backends.select(_OP, backend, logits.device.type, logits.dtype, op.SUPPORTS, logits.device.index)
    rows = rows_of(logits, targets, scaling)
    inputs = Measured(rows, return_entropy)
    logprobs, entropy, normalizer = op.apply(chosen, inputs, inplace_backward)
    squares = None
    if return_sum_pi_squared:
        detached = dataclasses.replace(rows, logits=rows.logits.detach())
        squares = op.sum_of_squares(chosen, detached, normalizer).to(logprobs.dtype).view(targets.shape)
    return TokenLogprobs(logprobs.view(targets.shape), entropy.view(targets.shape) if return_entropy else None, squares)
