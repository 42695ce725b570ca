"""Hidden states to log-probs of chosen tokens, with the logits of only one chunk of rows in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.linear_head import registration as op
from grpo_kernels.ops.linear_head.arguments import (
    check_chunk_size,
    check_head,
    check_positions,
    check_shard,
    check_whole,
)
from grpo_kernels.ops.linear_head.head import Head
from grpo_kernels.ops.linear_head.sharded import apply_sharded
from grpo_kernels.ops.linear_head.sizes import rows_per_chunk
from grpo_kernels.ops.sampled_support import check_support
from grpo_kernels.ops.sampled_support import registration as sampled_support
from grpo_kernels.ops.token_logprobs import TokenLogprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.shared_positions import check_term_index, gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_OP = "linear_logprobs"


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    lora: tuple[Tensor, Tensor, float] | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    positions: Tensor | None = None,
    term_index: Tensor | None = None,
    support: tuple[Tensor, Tensor] | None = None,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    vocab_start: int | None = None,
    process_group: ProcessGroup | None = None,
    backend: str | None = None,
) -> TokenLogprobs:
    """Computes token_logprobs(hidden @ weight.T + bias, targets) without materialising the logits or their gradient.

    Logits are accumulated and kept in float32 whatever the dtype of the weight. The backward recomputes them for rows
    with a nonzero gradient (on a GPU for all rows, because finding those would wait). Only first derivatives.

    Args:
        hidden: [..., H], one row per target (shift first); bfloat16, float16, float32, float64 on the CPU
        weight: [V, H] of the same dtype; no gradient is computed for it unless it requires one. A DTensor must be whole
            on every rank
        targets: integers [...]; -100 gives log-prob and entropy 0 and no gradient
        bias: [V]
        lora: (A [r, H], B [V, r], scale) of an adapter of the head. It adds scale * (hidden @ A.T) @ B.T to the logits
            and is never merged into the weight. A and B are float32 or of the dtype of hidden. Excludes support
        temperature, softcap, logit_scale, return_entropy: as in token_logprobs
        positions: rows to compute. A mask in the shape of targets gives results of that shape, 0 elsewhere, and waits
            for a GPU; integers [P] into the flattened targets give results [P]
        term_index: integers of any shape, the flattened position in targets of each result. Several may share one,
            which is computed once and gets the sum of their gradients, in a fixed order; -1 gives 0. positions must be
            None
        support: token ids that sampling kept, as in token_logprobs. Only their columns are multiplied, and only their
            rows of the weight get a gradient; chunk_size, vocab_start and process_group must be None
        chunk_size: rows whose logits are in memory at a time, and of a product for the gradients; None means chosen
            from the shapes
        vocab_start: first column held by this rank, if the columns of weight and bias are split over process_group.
            Targets count over all columns. Hidden states must be equal on all ranks, and their gradient is complete on
            each. One all-reduce forward, one backward
        process_group: ranks that hold the other columns
        backend: "kernel" or "reference"; None means the kernel where there is one
    """
    head = check_head(_OP, hidden, weight, targets, bias, temperature, softcap, logit_scale, lora)
    checks.boolean(_OP, return_entropy=return_entropy)
    size = check_chunk_size(_OP, chunk_size)
    index = None if term_index is None else check_term_index(_OP, term_index, targets.numel(), targets.device)
    if index is not None and positions is not None:
        raise ValueError(f"{_OP}: positions must be None with term_index, which picks the results, got a tensor")
    places = check_positions(_OP, positions, targets)
    device = hidden.device
    if support is not None:
        check_whole(_OP, lora=lora, chunk_size=chunk_size, vocab_start=vocab_start, process_group=process_group)
        return _over_support(head, support, targets.shape, positions, places, index, return_entropy, backend)
    chosen = backends.select(_OP, backend, device.type, head.hidden.dtype, op.SUPPORTS, device.index)
    if places is not None:
        # Not _replace: torch.compile of torch 2.11 fails if its result outlives a graph break, as a mask causes.
        temperatures = None if head.row_temperature is None else head.row_temperature[places]
        head = Head(head.hidden[places], *head.factors[1:], head.targets[places], temperatures, *head.numbers)
    shard = check_shard(_OP, vocab_start, process_group, head, chosen)
    product_rows = size or 0
    size = size or rows_per_chunk(len(head.hidden), len(head.weight), device.type, head.weight.dtype)
    if shard is None:
        logprobs, entropy, _ = op.apply_logprobs(chosen, head, return_entropy, size, product_rows)
    else:
        logprobs, entropy = apply_sharded(chosen, shard, head, return_entropy, size, product_rows)
    is_mask = positions is not None and positions.dtype == torch.bool

    def shaped(result: Tensor) -> Tensor:
        if places is None:
            return result.view(targets.shape) if index is None else gather(result, index)
        return result.new_zeros(targets.numel()).index_put((places,), result).view(targets.shape) if is_mask else result

    return TokenLogprobs(shaped(logprobs), shaped(entropy) if return_entropy else None)


def _over_support(
    head: Head,
    support: tuple[Tensor, Tensor],
    shape: torch.Size,
    positions: Tensor | None,
    places: Tensor | None,
    index: Tensor | None,
    return_entropy: bool,
    backend: str | None,
) -> TokenLogprobs:
    """Rows at other places than these are ignored, which costs nothing here."""
    if places is not None:
        others = torch.ones_like(head.targets, dtype=torch.bool).index_fill(0, places, False)
        ignored = torch.where(others, IGNORED, head.targets)
        head = Head(*head.factors, ignored, head.row_temperature, *head.numbers)
    entries = check_support(_OP, support, head.targets, len(head.weight))
    supports, device = sampled_support.SUPPORTS, head.hidden.device
    chosen = backends.select(_OP, backend, device.type, head.hidden.dtype, supports, device.index)
    logprobs, entropy = op.apply_support(chosen, head, entries, return_entropy)

    def shaped(result: Tensor) -> Tensor:
        if index is not None:
            return gather(result, index)
        is_picked = positions is not None and positions.dtype != torch.bool
        return result[places] if is_picked else result.view(shape)

    return TokenLogprobs(shaped(logprobs), shaped(entropy) if return_entropy else None)
