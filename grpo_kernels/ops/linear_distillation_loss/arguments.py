"""Arguments and results of a distillation, and their checks."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import checks
from grpo_kernels.ops.linear_distillation_loss import registration as op
from grpo_kernels.ops.linear_distillation_loss.config import ABSENT, KINDS, TAILS
from grpo_kernels.ops.linear_head.head import Head

_FLAGS = (torch.bool, *checks.INTEGERS, *checks.FLOATS)
_MOST = 1e-3  # by which a teacher's probabilities may exceed 1 in half precision


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """The divergence from a teacher as a term of linear_policy_loss; its fields as in linear_distillation_loss.

    Attributes:
        ids: teacher_ids, in the shape of the loss's targets and a last dimension k
        logprobs: teacher_logprobs, [..., k]
        coef: factor of the divergence in the loss; with 0 nothing is measured, either
        kind, tail: which divergence
        beta: share of the teacher in the mixture of "jsd"; None means 0.5
        mask: restricts the tokens further than the policy loss does
        weights: of the tokens; the term is the weighted sum instead of the mean
        normalizer: what the sum is divided by instead of the number of tokens
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
        divergence: of every token, in the shape of the mask, without a gradient; 0 for tokens that do not count
        mass: the student's probability of all the teacher's ids, likewise
    """

    loss: Tensor
    divergence: Tensor
    mass: Tensor


class Naming:
    """Names of the teacher's arguments in errors of an op."""

    def __init__(self, op: str, **names: str) -> None:
        self.op, self._names = op, names

    def __getitem__(self, field: str) -> str:
        return self._names.get(field, field)


def check_lesson(
    names: Naming, teacher: Teacher, tokens: torch.Size, takes_part: Tensor | None, head: Head
) -> op.Lesson:
    """Checks a teacher, and returns its ids, log-probs and shares by row; `takes_part` [N] may leave out rows."""
    name, device = names.op, head.hidden.device
    ids, logprobs = teacher.ids, teacher.logprobs
    checks.tensor(name, names["ids"], ids, checks.INTEGERS)
    checks.same_device(name, names["ids"], ids, device)
    if ids.shape[:-1] != tokens or ids.dim() != len(tokens) + 1 or ids.shape[-1] == 0:
        sizes = "".join(f"{size}, " for size in tokens)
        raise ValueError(
            f"{name}: {names['ids']} must have shape [{sizes}k] with k > 0, for hidden of shape "
            f"[{sizes}{head.hidden.shape[-1]}], got {list(ids.shape)}"
        )
    checks.tensor(name, names["logprobs"], logprobs, checks.FLOATS)
    checks.same_device(name, names["logprobs"], logprobs, device)
    checks.constant(name, names["logprobs"], logprobs)
    if logprobs.shape != ids.shape:
        raise ValueError(
            f"{name}: {names['logprobs']} must have the shape of {names['ids']}, {list(ids.shape)}, "
            f"got {list(logprobs.shape)}"
        )
    for field, value, allowed in (("kind", teacher.kind, KINDS), ("tail", teacher.tail, TAILS)):
        if value not in allowed:
            raise checks.unknown(name, names[field], value, allowed)
    beta = _check_beta(names, teacher)
    checks.finite(name, names["coef"], teacher.coef)
    counts = torch.ones(len(head.hidden), dtype=torch.bool, device=device)
    if teacher.mask is not None:
        counts = _per_token(names, "mask", teacher.mask, _FLAGS, tokens, head) != 0
    if takes_part is not None:
        counts = counts & takes_part
    shares = _shares(names, counts, teacher, tokens, head) * teacher.coef
    ids, logprobs = _check_values(names, ids, logprobs, counts, head)
    codes = KINDS.index(teacher.kind), TAILS.index(teacher.tail)
    return op.Lesson(ids, logprobs, shares, *codes, beta)


def _check_beta(names: Naming, teacher: Teacher) -> float:
    if teacher.beta is None:
        return 0.5
    if teacher.kind != "jsd":
        raise ValueError(
            f"{names.op}: {names['beta']} must be left out unless {names['kind']} is 'jsd', got {teacher.beta!r} with "
            f"{teacher.kind!r}"
        )
    checks.finite(names.op, names["beta"], teacher.beta)
    if not 0 < teacher.beta < 1:
        rule = f"must be between 0 and 1, got {teacher.beta!r}; those are the two KL divergences"
        raise ValueError(f"{names.op}: {names['beta']} {rule}")
    return float(teacher.beta)


def _per_token(
    names: Naming, field: str, value: Tensor, dtypes: tuple[torch.dtype, ...], tokens: torch.Size, head: Head
) -> Tensor:
    checks.tensor(names.op, names[field], value, dtypes)
    checks.same_device(names.op, names[field], value, head.hidden.device)
    if value.shape != tokens:
        raise ValueError(
            f"{names.op}: {names[field]} must have the shape of hidden without its last dimension, {list(tokens)}, "
            f"got {list(value.shape)}"
        )
    return value.reshape(-1)


def _check_values(names: Naming, ids: Tensor, logprobs: Tensor, counts: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Both as [N, k], log-probs in float64. A GPU checks the values when its stream gets there."""
    logprobs = logprobs.detach().double()
    is_used = ids != ABSENT
    columns = len(head.weight)
    counts = counts.view(ids.shape[:-1])
    ordered = torch.where(is_used, ids.long(), -1 - torch.arange(ids.shape[-1], device=ids.device)).sort(-1).values
    mass = torch.where(is_used, logprobs, -math.inf).logsumexp(-1)
    is_outside = is_used & ((ids < 0) | (ids >= columns))
    faults = (
        ("ids", f"be in [0, {columns}), or {ABSENT}", is_outside.any(-1)),
        ("ids", "differ from each other in a row", (ordered.diff(dim=-1) == 0).any(-1)),
        ("logprobs", "be finite where an id is", (is_used & (logprobs - logprobs != 0)).any(-1)),
        ("logprobs", "be of probabilities that add up to at most 1", mass > math.log1p(_MOST)),
    )
    for field, rule, is_wrong in faults:
        is_wrong = is_wrong & counts
        if ids.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(~is_wrong.any(), f"{names.op}: {names[field]} must {rule}")
        elif bool(is_wrong.any()):
            row = int(is_wrong.reshape(-1).nonzero()[0])
            value = (ids if field == "ids" else logprobs).reshape(-1, ids.shape[-1])[row]
            raise ValueError(f"{names.op}: {names[field]} must {rule}, got {value.tolist()} in row {row}")
    # whatever stands where nothing counts must not reach an index
    is_used = is_used & counts[..., None]
    ids = torch.where(is_used, ids.long().clamp(0, columns - 1), ABSENT)
    return ids.flatten(0, -2).contiguous(), torch.where(is_used, logprobs, 0).flatten(0, -2).contiguous()


def _shares(names: Naming, counts: Tensor, teacher: Teacher, tokens: torch.Size, head: Head) -> Tensor:
    """The factor of each row's divergence in the loss but for the coefficient, in float64."""
    weights, normalizer = teacher.weights, teacher.normalizer
    if weights is not None:
        checked = _per_token(names, "weights", weights, (*checks.FLOATS, *checks.INTEGERS), tokens, head)
        checks.constant(names.op, names["weights"], checked)
        share = checked.detach().double()
    else:
        share = torch.ones_like(counts, dtype=torch.float64)
    share = torch.where(counts, share, 0)
    if normalizer is None:
        return share if weights is not None else share / counts.sum().clamp(min=1)
    if isinstance(normalizer, Tensor):
        checks.tensor(names.op, names["normalizer"], normalizer, (*checks.FLOATS, *checks.INTEGERS))
        checks.same_device(names.op, names["normalizer"], normalizer, counts.device)
        if normalizer.numel() != 1:
            raise ValueError(
                f"{names.op}: {names['normalizer']} must have one element, got shape {list(normalizer.shape)}"
            )
        checks.constant(names.op, names["normalizer"], normalizer)
        divisor = normalizer.detach().reshape(()).double()
        torch._assert_async(divisor > 0, f"{names.op}: {names['normalizer']} must be positive")
        return share / divisor
    checks.finite(names.op, names["normalizer"], normalizer, minimum=0.0, open_end=True)
    return share / normalizer
