"""Hidden states to log-probs of chosen tokens, with the logits of only one chunk of tokens in memory."""

from __future__ import annotations

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
)
from grpo_kernels.ops.linear_head.autograd import recomputed
from grpo_kernels.ops.linear_head.head import Head, LMHead, Shard
from grpo_kernels.ops.linear_head.loop import SUPPORTS, Call, Plan
from grpo_kernels.ops.sampled_support import registration as sampled_support
from grpo_kernels.ops.sampled_support.arguments import check_support, check_support_alone
from grpo_kernels.ops.token_logprobs import TokenLogprobs

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
        temperature, return_entropy: as in token_logprobs
        positions: tokens to compute. A mask in the shape of targets gives results of that shape, 0 elsewhere, and waits
            for a GPU; integers [P] into the flattened targets give results [P]
        support: token ids that sampling kept, as integers (token_ids [E], offsets [N + 1]): token i of the N flattened
            targets keeps token_ids[offsets[i]:offsets[i + 1]]. The distribution is that over these ids alone. Only
            their columns are multiplied, and only their rows of the weight get a gradient. A target that is not kept is
            an error, on a GPU when the stream reaches it. chunk_size, and lora and vocab_start of the head, must be
            None
        chunk_size: tokens whose logits are in memory at a time, and of a product for the gradients; None means chosen
            from the shapes
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        TokenLogprobs: log-probs in the shape of the targets, or [P] at integer positions, and the entropies or None
    """
    lm_head = LMHead.of(_OP, "head", head)
    inputs = check_head(_OP, hidden, lm_head, targets, temperature)
    checks.boolean(_OP, return_entropy=return_entropy)
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
        logprobs, entropy = logprobs_at(chosen, inputs, at, return_entropy, size, shard)
        return TokenLogprobs(logprobs.view(shape), None if entropy is None else entropy.view(shape))
    check_support_alone(_OP, lm_head, chunk_size=chunk_size)
    inputs = inputs if at is None else inputs.only(at)
    entries = check_support(_OP, support, inputs)
    logprobs, entropy = sampled_support.apply(chosen, inputs, entries, return_entropy, None)

    def picked(result: Tensor) -> Tensor:
        return result[at] if is_picked else result.view(shape)

    return TokenLogprobs(picked(logprobs), picked(entropy) if return_entropy else None)


def logprobs_at(
    backend: str, head: Head, at: Tensor | None, want_entropy: bool, chunk_size: int | None, shard: Shard | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies of all tokens, computed at these places alone, and 0 elsewhere."""
    part = head if at is None else head.at(at)
    if backend == "reference" and shard is None:  # it has no shards; a chunk of it does
        logprobs, entropy, _ = reference.forward(part, want_entropy)
        measured = {"logprobs": logprobs, "entropy": entropy}
    else:
        plan = Plan(chunk_tokens=chunk_size or 0, product_tokens=chunk_size or 0)
        measured = recomputed(backend, Call(part, want_entropy=want_entropy, plan=plan), shard, _OP)

    def of_all(result: Tensor) -> Tensor:
        return result if at is None else result.new_zeros(len(head.targets)).index_put((at,), result)

    return of_all(measured["logprobs"]), of_all(measured["entropy"]) if want_entropy else None
