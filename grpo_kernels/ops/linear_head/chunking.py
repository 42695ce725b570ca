"""Chunks of linear_policy_loss: which tokens are computed, in which order, and how many at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.ops.linear_head.head import Head, Shard
from grpo_kernels.ops.linear_head.loss_op import Chunking
from grpo_kernels.ops.linear_head.sizes import tokens_per_chunk
from grpo_kernels.ops.policy_loss.arguments import Layout
from grpo_kernels.ops.policy_loss.config import LossConfig
from grpo_kernels.ops.policy_loss.reference import Policy
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.shared_positions import add_up


def chunking_of(
    layout: Layout,
    head: Head,
    policy: Policy,
    config: LossConfig,
    want_entropy: bool,
    split: tuple[Tensor | None, Tensor | None],
    index: Tensor | None,
    chunk_size: int | None,
    shard: Shard | None,
) -> Chunking | None:
    """None if the gradient of a chunk cannot be known before the other chunks are."""
    without_grad, with_grad = split
    tokens = len(head.targets) if with_grad is None else len(with_grad)
    others = 0 if without_grad is None else len(without_grad)
    if shard is not None:
        size = chunk_size or shard.tokens_per_chunk(tokens + others, head.weight)
    else:
        size = chunk_size or _tokens_per_chunk(tokens, others, head)
    ends = None
    if config.couples_tokens and tokens > size:
        if index is not None:
            return None
        if with_grad is None and policy.cu_seqlens is None:
            longest = layout.shape[1]
            size = size // max(longest, 1) * longest
        elif torch.compiler.is_compiling():  # the lengths of rows are values
            return None
        else:
            ends = _ends(layout, policy, with_grad)
            longest = max(end - start for start, end in zip([0, *ends], ends, strict=False))
        if longest > size or size == 0:
            return None
    needs_entropy_gradient = want_entropy and config.entropy_coef != 0
    return Chunking(
        list(layout.shape),
        want_entropy,
        needs_entropy_gradient,
        without_grad,
        with_grad,
        ends,
        size,
        product_tokens=chunk_size or 0,
        term_index=index,
    )


def _tokens_per_chunk(with_grad: int, without_grad: int, head: Head) -> int:
    """Chunks of one size for the tokens with a gradient, in memory that counts those without one, too."""
    size = tokens_per_chunk(with_grad + without_grad, len(head.weight), head.hidden.device.type, head.weight.dtype)
    count = -(-with_grad // size)
    return size if count == 0 else min(size, -(-with_grad // count // 16) * 16)


def split_tokens(
    layout: Layout,
    head: Head,
    policy: Policy,
    config: LossConfig,
    index: Tensor | None,
    shares: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Participating tokens without and with a gradient, as far as that is known before anything is computed.

    Tokens with a share in another term of the loss have one.
    """
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
    if shares is not None:
        is_live = is_live | (shares != 0)
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
    ends = torch.bincount(tokens, minlength=layout.rows).cumsum(0)
    return [int(end) for end in ends.tolist()]
