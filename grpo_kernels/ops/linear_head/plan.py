"""How linear_policy_loss plans a run: which tokens are computed, in which order, and how many at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.ops.linear_head.head import Head, Shard
from grpo_kernels.ops.linear_head.loop import Call, Plan
from grpo_kernels.ops.linear_head.sizes import in_blocks, tokens_per_chunk
from grpo_kernels.ops.policy_loss.arguments import Layout
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.reference import Policy
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.shared_positions import add_up

Split = tuple[Tensor | None, Tensor | None]  # tokens without a gradient, and with one; None for none and for all


def plan_of(
    layout: Layout, config: LossConfig, call: Call, tokens: Split, chunk_size: int | None, shard: Shard | None
) -> Plan | None:
    """None if the gradient of a chunk cannot be known before the other chunks are."""
    head, without_grad, with_grad = call.head, *tokens
    count = len(head.targets) if with_grad is None else len(with_grad)
    others = 0 if without_grad is None else len(without_grad)
    size = chunk_size or 0
    if size == 0 and shard is not None:
        size = shard.tokens_per_chunk(count + others, head.weight)
    size = size or _tokens_per_chunk(count, others, head)
    ends = None
    if config.couples_tokens and count > size:
        if call.policy is None or call.policy.term_index is not None:
            return None
        policy = call.policy.policy
        if with_grad is None and policy.cu_seqlens is None:
            size = size // max(layout.shape[1], 1) * layout.shape[1]  # whole rows
            return None if size == 0 else Plan(None, None, None, size, chunk_size or 0)
        if torch.compiler.is_compiling():  # the lengths of rows are values
            return None
        ends = _ends(layout, policy, with_grad)
        if max(end - start for start, end in zip([0, *ends], ends, strict=False)) > size:
            return None
    return Plan(without_grad, with_grad, ends, size, chunk_size or 0)


def _tokens_per_chunk(with_grad: int, without_grad: int, head: Head) -> int:
    """Chunks of one size for the tokens with a gradient, in memory that counts those without one, too."""
    device = head.hidden.device.type
    size = tokens_per_chunk(with_grad + without_grad, len(head.weight), device, head.weight.dtype)
    count = -(-with_grad // size)
    return size if count == 0 else min(size, in_blocks(-(-with_grad // count), device))


def split_tokens(layout: Layout, config: LossConfig, call: Call) -> Split:
    """Participating tokens without and with a gradient, as far as that is known before anything is computed.

    Tokens with a share in a distillation have one.
    """
    assert call.policy is not None
    head, policy, index = call.head, call.policy.policy, call.policy.term_index
    takes_part = policy.mask
    assert takes_part is not None
    has_grad = takes_part
    by_token = policy.advantages.shape == layout.shape
    # through a sequence ratio every token gets a gradient from all terms of its sequence
    if not config.has_other_terms and not (by_token and config.couples_tokens):
        advantages = policy.advantages if by_token else _expand_rows(policy.advantages, layout, policy)
        has_grad = takes_part & (advantages != 0)
        if policy.policy_mask is not None and not config.couples_tokens:
            has_grad = has_grad & policy.policy_mask
    is_live = has_grad.reshape(-1) if index is None else add_up(has_grad.long(), index, len(head.targets)) > 0
    if call.teacher is not None:
        is_live = is_live | (call.teacher.shares != 0)
    kind = torch.where(is_live, 1, torch.where(head.targets != IGNORED, 0, 2))
    order = kind.argsort(stable=True)
    without, with_, _ = torch.bincount(kind, minlength=3).tolist()
    return order[:without], order[without : without + with_]


def _expand_rows(values: Tensor, layout: Layout, policy: Policy) -> Tensor:
    """One value per token from one per row."""
    values = values.reshape(-1)
    if len(values) == 0:
        return values.new_zeros(layout.shape)
    if policy.cu_seqlens is None:
        return values[:, None].expand(layout.shape)
    return values[_rows_of_tokens(layout, policy)]


def _rows_of_tokens(layout: Layout, policy: Policy) -> Tensor:
    """Row of every token; tokens after the last row count as part of it."""
    token = torch.arange(math.prod(layout.shape), device=layout.device)
    if policy.cu_seqlens is None:
        return token // max(layout.shape[1], 1)
    tokens = torch.searchsorted(policy.cu_seqlens[1:].contiguous(), token, right=True)
    return tokens.clamp(max=max(layout.rows - 1, 0))


def _ends(layout: Layout, policy: Policy, selected: Tensor | None) -> list[int]:
    """Ends of the sequences, counted in the selected tokens."""
    tokens = _rows_of_tokens(layout, policy)
    tokens = tokens if selected is None else tokens[selected]
    return [int(end) for end in torch.bincount(tokens, minlength=layout.rows).cumsum(0).tolist()]
