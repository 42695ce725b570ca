"""A teacher for distillation: its arguments and their checks."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.linear_head.arguments import is_banned
from grpo_kernels.ops.linear_head.divergence import ABSENT, KINDS, TAILS, TeacherTokens
from grpo_kernels.ops.linear_head.head import Head

_FLAGS = (torch.bool, *checks.INTEGERS, *checks.FLOATS)
_MOST = 1e-3  # by which a teacher's probabilities may exceed 1 in half precision


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher of whom the k most probable tokens are known, and which divergence from it is measured.

    Attributes:
        ids: integers [..., k] for tokens [...], different from each other for a token; -1 for unused slots
        logprobs: [..., k], of the whole vocabulary, finite where an id is
        coef: factor of the divergence in the loss; with 0 nothing is measured, either
        kind: "forward_kl" (of the student from the teacher), "reverse_kl", or "jsd": beta * KL(teacher, mixture) +
            (1 - beta) * KL(student, mixture), where the mixture is beta * teacher + (1 - beta) * student
        tail: what becomes of all other tokens: "bucket", together they are one more token; "ignore", they are left out
            of the sum; "renormalise", both distributions are restricted to the teacher's ids
        beta: of "jsd", between 0 and 1; None means 0.5
        mask: [...], tokens that count; None means all. What belongs to the others may hold anything
        weights: [...]; the loss is the weighted sum of the divergences instead of their mean over the tokens
        normalizer: what the sum of the divergences is divided by instead of the number of tokens, for example the count
            over all micro-batches and ranks
    """

    ids: Tensor
    logprobs: Tensor
    coef: float = 1.0
    kind: str = "forward_kl"
    tail: str = "bucket"
    beta: float | None = None
    mask: Tensor | None = None
    weights: Tensor | None = None
    normalizer: float | Tensor | None = None


class DistillationLoss(NamedTuple):
    """The result of linear_distillation_loss.

    Attributes:
        loss: scalar to call backward() on
        divergence: of every token, in the shape of the tokens, without a gradient; 0 for tokens that do not count
        mass: the student's probability of all the teacher's ids, likewise
    """

    loss: Tensor
    divergence: Tensor
    mass: Tensor


def check_teacher(op: str, teacher: object, shape: torch.Size, takes_part: Tensor | None, head: Head) -> TeacherTokens:
    """The teacher's ids, log-probs and shares of tokens of this shape; `takes_part` [N] may leave out some."""
    if not isinstance(teacher, Teacher):
        raise TypeError(f"{op}: teacher must be a Teacher, got {type(teacher).__name__}")
    device, ids, logprobs = head.hidden.device, teacher.ids, teacher.logprobs
    checks.tensor(op, "teacher.ids", ids, checks.INTEGERS)
    checks.same_device(op, "teacher.ids", ids, device)
    if ids.shape[:-1] != shape or ids.dim() != len(shape) + 1 or ids.shape[-1] == 0:
        sizes = "".join(f"{size}, " for size in shape)
        raise ValueError(
            f"{op}: teacher.ids must have shape [{sizes}k] with k > 0, for hidden of shape "
            f"[{sizes}{head.hidden.shape[-1]}], got {list(ids.shape)}"
        )
    checks.tensor(op, "teacher.logprobs", logprobs, checks.FLOATS)
    checks.same_device(op, "teacher.logprobs", logprobs, device)
    checks.constant(op, "teacher.logprobs", logprobs)
    if logprobs.shape != ids.shape:
        raise ValueError(
            f"{op}: teacher.logprobs must have the shape of teacher.ids, {list(ids.shape)}, got {list(logprobs.shape)}"
        )
    for field, value, allowed in (("kind", teacher.kind, KINDS), ("tail", teacher.tail, TAILS)):
        if value not in allowed:
            raise checks.unknown(op, f"teacher.{field}", value, allowed)
    beta = _check_beta(op, teacher)
    checks.finite(op, "teacher.coef", teacher.coef)
    counts = torch.ones(len(head.hidden), dtype=torch.bool, device=device)
    if teacher.mask is not None:
        counts = _per_token(op, "teacher.mask", teacher.mask, _FLAGS, shape, head) != 0
    if takes_part is not None:
        counts = counts & takes_part
    shares = _shares(op, counts, teacher, shape, head) * teacher.coef
    ids, logprobs = _check_values(op, ids, logprobs, counts, head)
    codes = KINDS.index(teacher.kind), TAILS.index(teacher.tail)
    return TeacherTokens(ids, logprobs, shares, *codes, beta)


def _check_beta(op: str, teacher: Teacher) -> float:
    if teacher.beta is None:
        return 0.5
    if teacher.kind != "jsd":
        raise ValueError(
            f"{op}: teacher.beta must be left out unless teacher.kind is 'jsd', got {teacher.beta!r} with "
            f"{teacher.kind!r}"
        )
    checks.finite(op, "teacher.beta", teacher.beta)
    if not 0 < teacher.beta < 1:
        rule = f"must be between 0 and 1, got {teacher.beta!r}; those are the two KL divergences"
        raise ValueError(f"{op}: teacher.beta {rule}")
    return float(teacher.beta)


def _per_token(
    op: str, name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: torch.Size, head: Head
) -> Tensor:
    checks.tensor(op, name, value, dtypes)
    checks.same_device(op, name, value, head.hidden.device)
    if value.shape != shape:
        raise ValueError(
            f"{op}: {name} must have the shape of hidden without its last dimension, {list(shape)}, "
            f"got {list(value.shape)}"
        )
    return value.reshape(-1)


def _check_values(op: str, ids: Tensor, logprobs: Tensor, counts: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Both as [N, k], log-probs in float64. A GPU checks the values when its stream gets there."""
    logprobs = logprobs.detach().double()
    is_used = ids != ABSENT
    columns = len(head.weight)
    counts = counts.view(ids.shape[:-1])
    ordered = torch.where(is_used, ids.long(), -1 - torch.arange(ids.shape[-1], device=ids.device)).sort(-1).values
    mass = torch.where(is_used, logprobs, -math.inf).logsumexp(-1)
    is_outside = is_used & ((ids < 0) | (ids >= columns))
    faults = [
        ("ids", f"be in [0, {columns}), or {ABSENT}", is_outside.any(-1)),
        ("ids", "differ from each other for a token", (ordered.diff(dim=-1) == 0).any(-1)),
        ("logprobs", "be finite where an id is", (is_used & (logprobs - logprobs != 0)).any(-1)),
        ("logprobs", "be of probabilities that add up to at most 1", mass > math.log1p(_MOST)),
    ]
    if head.banned is not None:
        banned = (is_used & is_banned(ids.long().contiguous(), head.banned)).any(-1)
        faults.append(("ids", "not be banned by the head; -1 leaves a slot unused", banned))
    for field, rule, is_wrong in faults:
        is_wrong = is_wrong & counts
        if ids.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(~is_wrong.any(), f"{op}: teacher.{field} must {rule}")
        elif bool(is_wrong.any()):
            token = int(is_wrong.reshape(-1).nonzero()[0])
            value = (ids if field == "ids" else logprobs).reshape(-1, ids.shape[-1])[token]
            raise ValueError(f"{op}: teacher.{field} must {rule}, got {value.tolist()} of token {token}")
    # whatever stands where nothing counts must not reach an index
    is_used = is_used & counts[..., None]
    ids = torch.where(is_used, ids.long().clamp(0, columns - 1), ABSENT)
    return ids.flatten(0, -2).contiguous(), torch.where(is_used, logprobs, 0).flatten(0, -2).contiguous()


def _shares(op: str, counts: Tensor, teacher: Teacher, shape: torch.Size, head: Head) -> Tensor:
    """The factor of each token's divergence in the loss but for the coefficient, in float64."""
    weights, normalizer = teacher.weights, teacher.normalizer
    if weights is not None:
        checked = _per_token(op, "teacher.weights", weights, (*checks.FLOATS, *checks.INTEGERS), shape, head)
        checks.constant(op, "teacher.weights", checked)
        share = checked.detach().double()
    else:
        share = torch.ones_like(counts, dtype=torch.float64)
    share = torch.where(counts, share, 0)
    if normalizer is None:
        return share if weights is not None else share / counts.sum().clamp(min=1)
    if isinstance(normalizer, Tensor):
        checks.tensor(op, "teacher.normalizer", normalizer, (*checks.FLOATS, *checks.INTEGERS))
        checks.same_device(op, "teacher.normalizer", normalizer, counts.device)
        if normalizer.numel() != 1:
            raise ValueError(f"{op}: teacher.normalizer must have one element, got shape {list(normalizer.shape)}")
        checks.constant(op, "teacher.normalizer", normalizer)
        divisor = normalizer.detach().reshape(()).double()
        torch._assert_async(divisor > 0, f"{op}: teacher.normalizer must be positive")
        return share / divisor
    checks.finite(op, "teacher.normalizer", normalizer, minimum=0.0, open_end=True)
    return share / normalizer
