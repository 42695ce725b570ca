"""A teacher for distillation: its arguments and their checks."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.linear_head.arguments import check_other_head, is_banned
from grpo_kernels.ops.linear_head.divergence import ABSENT, KINDS, TAILS, TeacherTokens, WholeTeacher
from grpo_kernels.ops.linear_head.head import Head, LMHead

_FLAGS = (torch.bool, *checks.INTEGERS, *checks.FLOATS)
# The largest logarithm of a sum of probabilities: bfloat16 rounds log-probs between -8 and -16 by up to 2^-5, and they
# may be float32 since.
_MOST = 2**-5


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher, and which divergence from it is measured.

    It is either its most probable tokens, `ids` and `logprobs`, or its whole distribution, `hidden` and `head`, whose
    logits are computed a chunk at a time.

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
        hidden: [..., H'] of the teacher's last layer, for linear_distillation_loss; it gets no gradient
        head: with `hidden` only, the teacher's LMHead, or its weight [V, H'], over the student's vocabulary, and of its
            temperature. An id that either head bans has probability 0 in both
    """

    ids: Tensor | None = None
    logprobs: Tensor | None = None
    coef: float = 1.0
    kind: str = "forward_kl"
    tail: str = "bucket"
    beta: float | None = None
    mask: Tensor | None = None
    weights: Tensor | None = None
    normalizer: float | Tensor | None = None
    hidden: Tensor | None = None
    head: LMHead | Tensor | None = None


class DistillationLoss(NamedTuple):
    """The result of linear_distillation_loss.

    Attributes:
        loss: scalar to call backward() on
        divergence: of every token, in the shape of the tokens, without a gradient; 0 for tokens that do not count or
            have a weight of 0
        mass: the student's probability of all the teacher's ids, likewise; 1 where a teacher's hidden states count
    """

    loss: Tensor
    divergence: Tensor
    mass: Tensor


def check_teacher(op: str, teacher: object, shape: torch.Size, takes_part: Tensor | None, head: Head) -> TeacherTokens:
    """The teacher's ids, log-probs and shares of tokens of this shape; `takes_part` [N] may leave out some."""
    if not isinstance(teacher, Teacher):
        raise TypeError(f"{op}: teacher must be a Teacher, got {type(teacher).__name__}")
    if teacher.head is not None:
        raise ValueError(
            f"{op}: teacher.head must be None without teacher.hidden, got {type(teacher.head).__name__}; give the "
            "hidden states, or ids and log-probs alone"
        )
    device, ids, logprobs = head.hidden.device, teacher.ids, teacher.logprobs
    checks.tensor(op, "teacher.ids", ids, checks.INTEGERS)
    assert ids is not None
    checks.same_device(op, "teacher.ids", ids, device)
    if ids.shape[:-1] != shape or ids.dim() != len(shape) + 1 or ids.shape[-1] == 0:
        sizes = "".join(f"{size}, " for size in shape)
        raise ValueError(
            f"{op}: teacher.ids must have shape [{sizes}k] with k > 0, for hidden of shape "
            f"[{sizes}{head.hidden.shape[-1]}], got {list(ids.shape)}"
        )
    checks.tensor(op, "teacher.logprobs", logprobs, checks.FLOATS)
    assert logprobs is not None
    checks.same_device(op, "teacher.logprobs", logprobs, device)
    checks.constant(op, "teacher.logprobs", logprobs)
    if logprobs.shape != ids.shape:
        raise ValueError(
            f"{op}: teacher.logprobs must have the shape of teacher.ids, {list(ids.shape)}, got {list(logprobs.shape)}"
        )
    if teacher.tail not in TAILS:
        raise checks.unknown(op, "teacher.tail", teacher.tail, TAILS)
    kind, beta = _check_kind(op, teacher)
    counts, shares = _counts_and_shares(op, teacher, shape, takes_part, head)
    ids, logprobs = _check_values(op, ids, logprobs, counts, head)
    return TeacherTokens(ids, logprobs, shares, kind, TAILS.index(teacher.tail), beta)


def check_whole_teacher(
    op: str, teacher: Teacher, shape: torch.Size, takes_part: Tensor | None, head: Head
) -> tuple[Head, WholeTeacher]:
    """The student's head with the teacher's bans, and the teacher of tokens of this shape."""
    if teacher.head is None:
        raise ValueError(
            f"{op}: teacher.head must be given with teacher.hidden, of which it computes the logits, got None"
        )
    for name in ("ids", "logprobs"):
        if getattr(teacher, name) is not None:
            raise ValueError(f"{op}: teacher.{name} must be None beside teacher.hidden, got a tensor")
    if teacher.tail != "bucket":
        raise ValueError(
            f"{op}: teacher.tail must be left out beside teacher.hidden, which leaves no tail, got {teacher.tail!r}"
        )
    kind, beta = _check_kind(op, teacher)
    its_head = LMHead.of(op, "teacher.head", teacher.head)
    if its_head.vocab_start is not None:
        raise ValueError(f"{op}: teacher.head.vocab_start must be None, got {its_head.vocab_start}")
    if len(its_head.weight) != len(head.weight):
        raise ValueError(
            f"{op}: teacher.head must have the {len(head.weight)} ids of the student's, got {len(its_head.weight)}"
        )
    own = check_other_head(op, ("teacher.hidden", "teacher.head"), head, shape, teacher.hidden, its_head)
    bans = [banned for banned in (head.banned, own.banned) if banned is not None]
    banned = torch.cat(bans).sort().values if bans else None
    _, shares = _counts_and_shares(op, teacher, shape, takes_part, head)
    head, own = (dataclasses.replace(each, banned=banned) for each in (head, own))
    return head, WholeTeacher(own, shares, kind, beta)


def _check_kind(op: str, teacher: Teacher) -> tuple[int, float]:
    if teacher.kind not in KINDS:
        raise checks.unknown(op, "teacher.kind", teacher.kind, KINDS)
    return KINDS.index(teacher.kind), _check_beta(op, teacher)


def _counts_and_shares(
    op: str, teacher: Teacher, shape: torch.Size, takes_part: Tensor | None, head: Head
) -> tuple[Tensor, Tensor]:
    """Tokens that count, and the factor of each token's divergence in the loss, [N]."""
    checks.finite(op, "teacher.coef", teacher.coef)
    counts = torch.ones(len(head.hidden), dtype=torch.bool, device=head.hidden.device)
    if teacher.mask is not None:
        mask = _per_token(op, "teacher.mask", teacher.mask, _FLAGS, shape, head)
        counts = checks.flags(op, "teacher.mask", mask)
    if takes_part is not None:
        counts = counts & takes_part
    return counts, _shares(op, counts, teacher, shape, head) * float(teacher.coef)


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
    ids, logprobs = ids.long(), logprobs.detach().double()
    is_used = ids != ABSENT
    columns = len(head.weight)
    counts = counts.view(ids.shape[:-1])
    ordered = torch.where(is_used, ids, -1 - torch.arange(ids.shape[-1], device=ids.device)).sort(-1).values
    mass = torch.where(is_used, logprobs, -math.inf).logsumexp(-1)
    is_outside = is_used & ((ids < 0) | (ids >= columns))
    faults = [
        ("ids", f"be in [0, {columns}), or {ABSENT}", is_outside.any(-1)),
        ("ids", "differ from each other for a token", (ordered.diff(dim=-1) == 0).any(-1)),
        ("logprobs", "be finite where an id is", (is_used & (logprobs - logprobs != 0)).any(-1)),
        ("logprobs", "be of probabilities that add up to at most 1", mass > _MOST),
    ]
    if head.banned is not None:
        banned = (is_used & is_banned(ids.contiguous(), head.banned)).any(-1)
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
    ids = torch.where(is_used, ids.clamp(0, columns - 1), ABSENT)
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
        torch._assert_async(divisor >= 0, f"{op}: teacher.normalizer must not be negative")
        return share / torch.where(divisor == 0, 1, divisor)  # a count from elsewhere can be 0, which counts as 1
    checks.finite(op, "teacher.normalizer", normalizer, minimum=0.0, open_end=True)
    return share / normalizer
