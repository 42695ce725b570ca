"""Hidden states to log-probs of chosen tokens, with the logits of only one chunk of tokens in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.linear_head import reference
from grpo_kernels.ops.linear_head.arguments import (
    check_banned,
    check_chunk_size,
    check_head,
    check_positions,
    check_shard,
    shard_of,
)
from grpo_kernels.ops.linear_head.autograd import recomputed
from grpo_kernels.ops.linear_head.head import Head, LMHead, Shard, Want
from grpo_kernels.ops.linear_head.loop import SUPPORTS, Call, Plan
from grpo_kernels.ops.sampled_support import registration as sampled_support
from grpo_kernels.ops.sampled_support.arguments import check_support, check_support_alone
from grpo_kernels.ops.sampled_support.reference import Entries
from grpo_kernels.ops.token_logprobs import TokenLogprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED

_OP = "linear_logprobs"


def linear_logprobs(
    hidden: Tensor,
    head: LMHead | Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    positions: Tensor | None = None,
    support: tuple[Tensor, Tensor] | None = None,
    return_entropy: bool = False,
    return_sum_pi_squared: bool = False,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> TokenLogprobs:
    """Computes token_logprobs of the head's logits without materialising them or their gradient.

    Logits are accumulated and kept in float32 whatever the dtype of the weight. The backward recomputes them for tokens
    with a nonzero gradient (on a GPU for all tokens, because finding those would wait). Only first derivatives.

    Args:
        hidden: [..., H], one row per target (shift first); bfloat16, float16, float32, float64 on the CPU
        head: an LMHead, or its weight [V, H], of the dtype of hidden. No gradient is computed for it unless it requires
            one. If its columns are split over ranks, hidden states must be equal on all of them, and their gradient is
            complete on each: one all-reduce forward, one backward
        targets: integers [...]; -100 gives log-prob and entropy 0 and no gradient
        temperature, return_entropy, return_sum_pi_squared: as in token_logprobs
        positions: tokens to compute. A mask in the shape of targets gives results of that shape, 0 elsewhere, and waits
            for a GPU; integers [P] into the flattened targets give results [P]
        support: token ids that sampling kept, as integers (token_ids [E], offsets [N + 1]): token i of the N flattened
            targets keeps token_ids[offsets[i]:offsets[i + 1]]. The distribution is that over these ids alone. Only
            their columns are multiplied, and only their rows of the weight get a gradient. A target that is not kept is
            an error, on a GPU when the stream reaches it. chunk_size and the head's lora must be None
        chunk_size: tokens whose logits are in memory at a time, and of a product for the gradients; None means chosen
            from the shapes
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        TokenLogprobs: log-probs in the shape of the targets, or [P] at integer positions, and what else was requested
    """
    lm_head = LMHead.of(_OP, "head", head)
    inputs = check_head(_OP, hidden, lm_head, targets, temperature)
    checks.boolean(_OP, return_entropy=return_entropy, return_sum_pi_squared=return_sum_pi_squared)
    want = Want(return_entropy, return_sum_pi_squared)
    size = check_chunk_size(_OP, chunk_size)
    at = check_positions(_OP, positions, targets)
    is_picked = positions is not None and positions.dtype != torch.bool
    device, shape = hidden.device, targets.shape
    supports = SUPPORTS if support is None else sampled_support.SUPPORTS
    chosen = backends.select(_OP, backend, device.type, inputs.hidden.dtype, supports, device.index)
    if support is None:
        if is_picked and at is not None:
            inputs, shape, at = inputs.at(at), at.shape, None
        elif at is not None:
            inputs = inputs.only(at)
        check_banned(_OP, inputs)
        shard = check_shard(_OP, lm_head, inputs, chosen)
        measured = logprobs_at(chosen, inputs, at, want, size, shard)
        return _shaped(measured, lambda value: value.view(shape))
    check_support_alone(_OP, lm_head, chunk_size=chunk_size)
    inputs = inputs if at is None else inputs.only(at)
    entries = check_support(_OP, support, inputs, lm_head)
    measured = over_support(chosen, inputs, entries, want, None, shard_of(_OP, lm_head))
    return _shaped(measured, lambda value: value[at] if is_picked else value.view(shape))


def _shaped(measured: TokenLogprobs, shape: Callable[[Tensor], Tensor]) -> TokenLogprobs:
    logprobs, *more = measured
    return TokenLogprobs(shape(logprobs), *(None if value is None else shape(value) for value in more))


def over_support(
    backend: str, head: Head, entries: Entries, want: Want, into: Tensor | None, shard: Shard | None
) -> TokenLogprobs:
    """Those of all tokens over the ids that sampling kept; `into` takes the gradient of the weight."""
    logprobs, entropy = sampled_support.apply(backend, head, entries, want.entropy, into, shard)
    squares = None
    if want.sum_pi_squared:
        with torch.no_grad():
            halved, _ = sampled_support.apply(backend, head.at_half_temperature(), entries, False, None, shard)
            squares = (2 * logprobs - halved).exp().clamp(max=1)  # of a target, and so of any id
            squares = torch.where(head.targets == IGNORED, 0, squares)
    return TokenLogprobs(logprobs, entropy if want.entropy else None, squares)


def logprobs_at(
    backend: str, head: Head, at: Tensor | None, want: Want, chunk_size: int | None, shard: Shard | None
) -> TokenLogprobs:
    """Those of all tokens, computed at these places alone, and 0 elsewhere."""
    part = head if at is None else head.at(at)
    if backend == "reference" and shard is None:  # it has no shards; a chunk of it does
        measured = reference.forward(part, want)._asdict()
    else:
        plan = Plan(chunk_tokens=chunk_size or 0, product_tokens=chunk_size or 0)
        measured = recomputed(
            backend, Call(part, want_entropy=want.entropy, want_squares=want.sum_pi_squared, plan=plan), shard, _OP
        )

    def of_all(result: Tensor) -> Tensor:
        return result if at is None else result.new_zeros(len(head.targets)).index_put((at,), result)

    more = {name: of_all(measured[name]) if is_wanted else None for name, is_wanted in want._asdict().items()}
    return TokenLogprobs(of_all(measured["logprobs"]), **more)
