"""Distillation from a teacher's most probable tokens, straight from hidden states."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import backends, checks, invariance
from grpo_kernels.ops.linear_distillation_loss import registration as op
from grpo_kernels.ops.linear_distillation_loss.config import ABSENT, KINDS, TAILS
from grpo_kernels.ops.linear_head.arguments import check_chunk_size, check_head, check_weight_grad
from grpo_kernels.ops.linear_head.distributed_weight import takes_dtensors
from grpo_kernels.ops.linear_head.head import Head
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from grpo_kernels.ops.linear_head.sizes import rows_per_chunk

_OP = "linear_distillation_loss"
_FLAGS = (torch.bool, *checks.INTEGERS, *checks.FLOATS)
_MOST = 1e-3  # by which a teacher's probabilities may exceed 1 in half precision


class DistillationLoss(NamedTuple):
    """The result of linear_distillation_loss.

    Attributes:
        loss: scalar to call backward() on
        divergence: of every token, in the shape of the mask, without a gradient; 0 where the mask is
        mass: the student's probability of all the teacher's ids, likewise
    """

    loss: Tensor
    divergence: Tensor
    mass: Tensor


@takes_dtensors(_OP, can_split=False)
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
    beta: float = 0.5,
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
        beta: of "jsd", between 0 and 1
        chunk_size: rows whose logits are in memory at a time; None means chosen from the shapes
        weight_grad: tensor that the gradient of the weight is added to, as in linear_policy_loss
        backend: "cuda", "triton", "cpu" or "reference"; None means the first that can
    """
    invariance.refuse(_OP, "torch's exp and log in float64 depend on a value's place")
    checks.tensor(_OP, "hidden", hidden, checks.FLOATS)
    checks.tensor(_OP, "teacher_ids", teacher_ids, checks.INTEGERS)
    checks.same_device(_OP, "teacher_ids", teacher_ids, hidden.device)
    tokens = hidden.shape[:-1]
    if teacher_ids.shape[:-1] != tokens or teacher_ids.dim() != hidden.dim() or teacher_ids.shape[-1] == 0:
        raise ValueError(
            f"{_OP}: teacher_ids must have shape {[*tokens, 'k']} with k > 0, for hidden of shape "
            f"{list(hidden.shape)}, got {list(teacher_ids.shape)}"
        )
    checks.tensor(_OP, "teacher_logprobs", teacher_logprobs, checks.FLOATS)
    checks.same_device(_OP, "teacher_logprobs", teacher_logprobs, hidden.device)
    if teacher_logprobs.shape != teacher_ids.shape:
        raise ValueError(
            f"{_OP}: teacher_logprobs must have the shape of teacher_ids, {list(teacher_ids.shape)}, "
            f"got {list(teacher_logprobs.shape)}"
        )
    targets = torch.zeros(tokens, dtype=torch.long, device=hidden.device)
    head = check_head(_OP, hidden, weight, targets, bias, temperature, softcap, logit_scale, lora)
    for name, value, allowed in (("kind", kind, KINDS), ("tail", tail, TAILS)):
        if value not in allowed:
            raise checks.unknown(_OP, name, value, allowed)
    checks.finite(_OP, "beta", beta)
    if not 0 < beta < 1:
        raise ValueError(f"{_OP}: beta must be between 0 and 1, got {beta!r}; those are the two KL divergences")
    size = check_chunk_size(_OP, chunk_size)
    counts = _flags("mask", mask, tokens, head)
    shares = _shares(counts, weights, normalizer, tokens, head)
    device = head.hidden.device
    chosen = backends.select(_OP, backend, device.type, head.hidden.dtype, SUPPORTS, device.index)
    is_added = chosen != "reference" and torch.is_grad_enabled() and any(head.needs_grad)
    check_weight_grad(_OP, weight_grad, head, is_added, "with the reference backend and without gradients")
    ids, logprobs = _check_teacher(teacher_ids, teacher_logprobs, counts, head)
    rows = None
    if device.type == "cpu" and not torch.compiler.is_compiling():
        rows = shares.nonzero().squeeze(1)
        rows = None if len(rows) == len(shares) else rows
    teacher = op.Teacher(ids, logprobs, shares, KINDS.index(kind), TAILS.index(tail), float(beta))
    total = len(head.hidden) if rows is None else len(rows)
    chunk_rows = size or rows_per_chunk(total, len(head.weight), device.type, head.weight.dtype)
    loss, divergence, mass = op.apply(chosen, head, teacher, op.Chunking(rows, chunk_rows, size or 0), weight_grad)
    return DistillationLoss(loss, divergence.view(tokens), mass.view(tokens))


def _flags(name: str, value: Tensor | None, tokens: torch.Size, head: Head) -> Tensor:
    if value is None:
        return torch.ones(tokens.numel(), dtype=torch.bool, device=head.hidden.device)
    return _per_token(name, value, _FLAGS, tokens, head) != 0


def _per_token(name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], tokens: torch.Size, head: Head) -> Tensor:
    checks.tensor(_OP, name, value, dtypes)
    checks.same_device(_OP, name, value, head.hidden.device)
    if value.shape != tokens:
        raise ValueError(
            f"{_OP}: {name} must have the shape of hidden without its last dimension, {list(tokens)}, "
            f"got {list(value.shape)}"
        )
    return value.reshape(-1)


def _check_teacher(ids: Tensor, logprobs: Tensor, counts: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Both as [N, k], log-probs in float64. A GPU checks the values when its stream gets there."""
    logprobs = logprobs.detach().double()
    is_used = ids != ABSENT
    columns = len(head.weight)
    counts = counts.view(ids.shape[:-1])
    ordered = torch.where(is_used, ids.long(), -1 - torch.arange(ids.shape[-1], device=ids.device)).sort(-1).values
    mass = torch.where(is_used, logprobs, -math.inf).logsumexp(-1)
    faults = {
        f"teacher_ids must be in [0, {columns}), or {ABSENT}": (is_used & ((ids < 0) | (ids >= columns))).any(-1),
        "teacher_ids must differ from each other in a row": (ordered.diff(dim=-1) == 0).any(-1),
        "teacher_logprobs must be finite where an id is": (is_used & (logprobs - logprobs != 0)).any(-1),
        "teacher_logprobs must be of probabilities that add up to at most 1": mass > math.log1p(_MOST),
    }
    for rule, is_wrong in faults.items():
        is_wrong = is_wrong & counts
        if ids.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(~is_wrong.any(), f"{_OP}: {rule}")
        elif bool(is_wrong.any()):
            row = int(is_wrong.reshape(-1).nonzero()[0])
            value = (ids if "ids" in rule.split()[0] else logprobs).reshape(-1, ids.shape[-1])[row]
            raise ValueError(f"{_OP}: {rule}, got {value.tolist()} in row {row}")
    # whatever stands where nothing counts must not reach an index
    is_used = is_used & counts[..., None]
    ids = torch.where(is_used, ids.long().clamp(0, columns - 1), ABSENT)
    return ids.flatten(0, -2).contiguous(), torch.where(is_used, logprobs, 0).flatten(0, -2).contiguous()


def _shares(
    counts: Tensor, weights: Tensor | None, normalizer: float | Tensor | None, tokens: torch.Size, head: Head
) -> Tensor:
    """The factor of each row's divergence in the loss, in float64."""
    if weights is not None:
        share = _per_token("weights", weights, (*checks.FLOATS, *checks.INTEGERS), tokens, head).detach().double()
    else:
        share = torch.ones_like(counts, dtype=torch.float64)
    share = torch.where(counts, share, 0)
    if normalizer is None:
        return share if weights is not None else share / counts.sum().clamp(min=1)
    if isinstance(normalizer, Tensor):
        checks.tensor(_OP, "normalizer", normalizer, (*checks.FLOATS, *checks.INTEGERS))
        checks.same_device(_OP, "normalizer", normalizer, counts.device)
        if normalizer.numel() != 1:
            raise ValueError(f"{_OP}: normalizer must have one element, got shape {list(normalizer.shape)}")
        divisor = normalizer.detach().reshape(()).double()
        torch._assert_async(divisor > 0, f"{_OP}: normalizer must be positive")
        return share / divisor
    checks.finite(_OP, "normalizer", normalizer, minimum=0.0, open_end=True)
    return share / normalizer
