"""Distillation from a teacher's most probable tokens or hidden states, straight from the student's hidden states."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.linear_head import divergence
from grpo_kernels.ops.linear_head.arguments import (
    FLAGS,
    TOKENS,
    check_chunk_size,
    check_head,
    check_weight_grad,
    shard_of,
)
from grpo_kernels.ops.linear_head.autograd import may_precompute, precomputed, recomputed
from grpo_kernels.ops.linear_head.head import LMHead, Shard
from grpo_kernels.ops.linear_head.loop import SUPPORTS, Call, Plan
from grpo_kernels.ops.linear_head.teacher import DistillationLoss, Teacher, check_teacher, check_whole_teacher
from grpo_kernels.ops.token_logprobs.config import IGNORED

_OP = "linear_distillation_loss"


def linear_distillation_loss(
    hidden: Tensor,
    head: LMHead | Tensor,
    teacher: Teacher,
    *,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    chunk_size: int | None = None,
    weight_grad: Tensor | None = None,
    backend: str | None = None,
) -> DistillationLoss:
    """Divergence of the student from a teacher, of whom the k most probable tokens or the hidden states are known.

    The loss is its mean over the tokens, computed with its gradient in three matrix products, four with the teacher's
    hidden states, and one more of each head in float16, whose gradient the backward computes. The logits of only one
    chunk of tokens are in memory at a time.

    Args:
        hidden: [..., H], one row per token (shift first); bfloat16, float16, float32, float64 on the CPU
        head: the student's LMHead, or its weight [V, H]. If its columns are split over ranks, those of a teacher's head
            must be split alike, a teacher's ids may be of any rank, and all ranks get the same loss: one all-reduce per
            chunk forward (two with a teacher's hidden states, but for "forward_kl"), and those of linear_policy_loss
        teacher: ids and log-probs [..., k], or hidden states [..., H'] and a head, and which divergence
        mask: [...], tokens that take part beside teacher.mask; None means all
        temperature: of the student, as in linear_logprobs, and of a teacher's head. A teacher's log-probs should be of
            the same temperature
        chunk_size: tokens whose logits are in memory at a time; None means chosen from the shapes
        weight_grad: tensor that the gradient of the weight is added to, as in linear_policy_loss
        backend: "kernel" or "reference"; None means the kernel where there is one

    Returns:
        DistillationLoss: the scalar loss, and the divergence and mass of each token
    """
    hidden = checks.tensor(_OP, "hidden", checks.local(_OP, "hidden", hidden), checks.FLOATS)
    lm_head, shape = LMHead.of(_OP, "head", head), hidden.shape[:-1]
    targets = torch.zeros(shape, dtype=torch.long, device=hidden.device)
    inputs = check_head(_OP, hidden, lm_head, targets, temperature)
    size = check_chunk_size(_OP, chunk_size)
    device = inputs.hidden.device
    chosen = backends.select(_OP, backend, device.type, inputs.hidden.dtype, SUPPORTS, device.index)
    is_added = chosen != "reference" and torch.is_grad_enabled() and any(inputs.needs_grad)
    is_added = is_added and may_precompute(inputs.hidden)
    check_weight_grad(_OP, weight_grad, inputs, is_added, "with the reference backend, without gradients or in float16")
    takes_part = None
    if mask is not None:
        checks.shaped(_OP, "mask", mask, FLAGS, device, shape, TOKENS)
        takes_part = checks.flags(_OP, "mask", mask).reshape(-1)
    if isinstance(teacher, Teacher) and teacher.hidden is not None:
        inputs, its_head, whole = check_whole_teacher(_OP, teacher, shape, takes_part, inputs, lm_head)
        call = Call(inputs, teacher=whole, other=its_head)
    else:
        call = Call(inputs, teacher=check_teacher(_OP, teacher, shape, takes_part, inputs, lm_head))
    loss, *of_tokens = distill(chosen, call, size, weight_grad, shard_of(_OP, lm_head), (_OP, "", ""))
    return DistillationLoss(loss, *(value.view(shape) for value in of_tokens))


def distill(
    backend: str,
    call: Call,
    chunk_size: int | None,
    into: Tensor | None,
    shard: Shard | None,
    once: tuple[str, str, str],
) -> DistillationLoss:
    """The loss, which has a gradient by the head's factors, and what was measured of each token.

    Args:
        call: with a teacher
        once: as in autograd.Precomputed
    """
    head, teacher = call.head, call.teacher
    assert teacher is not None
    if backend == "reference" and shard is None:  # it has no shards; a chunk of it does
        return DistillationLoss(*divergence.forward(head, teacher, call.other))
    head = dataclasses.replace(head, targets=torch.where(teacher.shares == 0, IGNORED, 0))
    size = chunk_size or 0
    if size == 0 and shard is not None:
        size = shard.tokens_per_chunk(len(head.targets), head.weight)
    plan = Plan(chunk_tokens=size, product_tokens=chunk_size or 0)
    call = dataclasses.replace(call, head=head, plan=plan)
    if may_precompute(head.hidden) and torch.is_grad_enabled() and any(head.needs_grad):
        results = precomputed(backend, call, into, shard, once)
    else:
        results = recomputed(backend, call, shard, once[0])
    return DistillationLoss(results["loss"], results["divergence"], results["mass"])
