"""Distillation from a teacher's most probable tokens, straight from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels import backends, checks
from grpo_kernels.ops.linear_distillation_loss import registration as op
from grpo_kernels.ops.linear_distillation_loss.arguments import (
    DistillationLoss,
    Naming,
    Teacher,
    check_lesson,
)
from grpo_kernels.ops.linear_head.arguments import check_chunk_size, check_head, check_weight_grad
from grpo_kernels.ops.linear_head.registration import SUPPORTS

__all__ = ["DistillationLoss", "Teacher", "linear_distillation_loss"]

_OP = "linear_distillation_loss"
_NAMES = Naming(_OP, ids="teacher_ids", logprobs="teacher_logprobs")


def linear_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    bias: Tensor | None = None,
    lora: tuple[Tensor, Tensor, float] | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    kind: str = "forward_kl",
    tail: str = "bucket",
    beta: float | None = None,
    chunk_size: int | None = None,
    weight_grad: Tensor | None = None,
    backend: str | None = None,
) -> DistillationLoss:
    """Divergence of the student from a teacher of whom the k most probable tokens are known.

    The loss is its mean over the tokens, computed with its gradient in three matrix products, of which only one chunk
    of rows is in memory at a time.

    Args:
        hidden: [..., H], one row per token (shift first); bfloat16, float16, float32, float64 on the CPU
        weight, bias, lora, temperature, softcap, logit_scale: the student's head, as in linear_logprobs. Both
            distributions should be of the same temperature
        teacher_ids: integers [..., k], different from each other in a row; -1 for unused slots
        teacher_logprobs: [..., k], of the whole vocabulary, finite where an id is
        mask: [...], tokens that take part; None means all. What belongs to the others may hold anything
        weights: [...], one per token; the loss is the weighted sum of the divergences instead of their mean
        normalizer: what the sum of the divergences is divided by instead of the number of tokens, for example the count
            over all micro-batches and ranks
        kind: "forward_kl" (of the student from the teacher), "reverse_kl", or "jsd": beta * KL(teacher, mixture) +
            (1 - beta) * KL(student, mixture), where the mixture is beta * teacher + (1 - beta) * student
        tail: what becomes of all other tokens: "bucket", together they are one more token; "ignore", they are left out
            of the sum; "renormalise", both distributions are restricted to the teacher's ids
        beta: of "jsd", between 0 and 1; None means 0.5
        chunk_size: rows whose logits are in memory at a time; None means chosen from the shapes
        weight_grad: tensor that the gradient of the weight is added to, as in linear_policy_loss
        backend: "kernel" or "reference"; None means the kernel where there is one
    """
    hidden = checks.tensor(_OP, "hidden", checks.local(_OP, "hidden", hidden), checks.FLOATS)
    tokens = hidden.shape[:-1]
    targets = torch.zeros(tokens, dtype=torch.long, device=hidden.device)
    head = check_head(_OP, hidden, weight, targets, bias, temperature, softcap, logit_scale, lora)
    size = check_chunk_size(_OP, chunk_size)
    device = head.hidden.device
    chosen = backends.select(_OP, backend, device.type, head.hidden.dtype, SUPPORTS, device.index)
    is_added = chosen != "reference" and torch.is_grad_enabled() and any(head.needs_grad)
    check_weight_grad(_OP, weight_grad, head, is_added, "with the reference backend and without gradients")
    teacher = Teacher(
        teacher_ids, teacher_logprobs, 1.0, kind, tail, beta, mask=mask, weights=weights, normalizer=normalizer
    )
    lesson = check_lesson(_NAMES, teacher, tokens, None, head)
    loss, divergence, mass = op.apply(chosen, head, lesson, op.Chunking.of(lesson, head, size), weight_grad)
    return DistillationLoss(loss, divergence.view(tokens), mass.view(tokens))
