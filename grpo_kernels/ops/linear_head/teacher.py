"""A teacher for distillation: its arguments and their checks."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.linear_head.arguments import (
    FLAGS,
    TOKENS,
    check_other_head,
    columns_text,
    has_same_columns,
    ids_of,
    is_banned,
)
from grpo_kernels.ops.linear_head.divergence import ABSENT, KINDS, TAILS, Distillation
from grpo_kernels.ops.linear_head.head import Head, LMHead

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


def check_teacher(
    op: str, teacher: object, shape: torch.Size, takes_part: Tensor | None, head: Head, lm_head: LMHead
) -> Distillation:
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
    logprobs = checks.shaped(op, "teacher.logprobs", logprobs, checks.FLOATS, device, ids.shape, "teacher.ids")
    checks.constant(op, "teacher.logprobs", logprobs)
    if teacher.tail not in TAILS:
        raise checks.unknown(op, "teacher.tail", teacher.tail, TAILS)
    kind, beta = _check_kind(op, teacher)
    counts, shares = _counts_and_shares(op, teacher, shape, takes_part, head)
    ids, logprobs = _check_values(op, ids, logprobs, counts, head, lm_head)
    return Distillation(ids, logprobs, shares, kind, TAILS.index(teacher.tail), beta)


def check_whole_teacher(
    op: str, teacher: Teacher, shape: torch.Size, takes_part: Tensor | None, head: Head, lm_head: LMHead
) -> tuple[Head, Head, Distillation]:
    """Student's and teacher's heads with the bans of both, and the distillation of tokens of this shape."""
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
    if not has_same_columns(its_head, lm_head):
        want, got = columns_text(lm_head), columns_text(its_head)
        raise ValueError(f"{op}: teacher.head must have the columns of the student's, {want}, got {got}")
    own = check_other_head(op, ("teacher.hidden", "teacher.head"), head, shape, teacher.hidden, its_head)
    bans = [banned for banned in (head.banned, own.banned) if banned is not None]
    banned = torch.cat(bans).sort().values if bans else None
    _, shares = _counts_and_shares(op, teacher, shape, takes_part, head)
    head, own = (dataclasses.replace(each, banned=banned) for each in (head, own))
    return head, own, Distillation(None, None, shares, kind, TAILS.index(teacher.tail), beta)


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
        mask = checks.shaped(op, "teacher.mask", teacher.mask, FLAGS, head.hidden.device, shape, TOKENS)
        counts = checks.flags(op, "teacher.mask", mask).reshape(-1)
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


def _check_values(
    op: str, ids: Tensor, logprobs: Tensor, counts: Tensor, head: Head, lm_head: LMHead
) -> tuple[Tensor, Tensor]:
    """Both as [N, k], log-probs in float64. A GPU checks the values when its stream gets there."""
    ids, logprobs = ids.long(), logprobs.detach().double()
    is_used = ids != ABSENT
    columns, rule = ids_of(lm_head)
    counts = counts.view(ids.shape[:-1])
    ordered = torch.where(is_used, ids, -1 - torch.arange(ids.shape[-1], device=ids.device)).sort(-1).values
    is_repeated = torch.nn.functional.pad(ordered.diff(dim=-1) == 0, (1, 0))
    repeated = torch.where(is_repeated, ordered, -1).amax(-1)

    def require(name: str, rule: str, is_wrong: Tensor, found: Tensor) -> None:
        counted = counts if found.dim() == counts.dim() else counts[..., None]
        checks.values(op, f"teacher.{name}", rule, is_wrong & counted, found)

    require("ids", f"{rule}, or {ABSENT}", is_used & ((ids < 0) | (ids >= columns)), ids)
    require("ids", "differ from each other for a token", repeated >= 0, repeated)
    require("logprobs", "be finite where an id is", is_used & (logprobs - logprobs != 0), logprobs)
    mass = torch.where(is_used, logprobs, -math.inf).logsumexp(-1)
    require("logprobs", "be of probabilities that add up to at most 1", mass > _MOST, mass.exp())
    if head.banned is not None:
        banned = is_used & is_banned(ids.contiguous(), head.banned)
        require("ids", f"not be banned by the head; {ABSENT} leaves a slot unused", banned, ids)
    # whatever stands where nothing counts must not reach an index
    is_used = is_used & counts[..., None]
    ids = torch.where(is_used, ids.clamp(0, columns - 1), ABSENT)
    return ids.flatten(0, -2).contiguous(), torch.where(is_used, logprobs, 0).flatten(0, -2).contiguous()


def _shares(op: str, counts: Tensor, teacher: Teacher, shape: torch.Size, head: Head) -> Tensor:
    """The factor of each token's divergence in the loss but for the coefficient, in float64."""
    weights, normalizer = teacher.weights, teacher.normalizer
    if weights is not None:
        numbers = (*checks.FLOATS, *checks.INTEGERS)
        checks.shaped(op, "teacher.weights", weights, numbers, counts.device, shape, TOKENS)
        checks.constant(op, "teacher.weights", weights)
        share = weights.detach().reshape(-1).double()
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
