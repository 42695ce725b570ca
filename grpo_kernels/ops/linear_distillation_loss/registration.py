"""Registers linear_distillation_loss with torch.

The chunk loop is that of linear_policy_loss: three matrix products, and the gradient is computed with the loss. A
chunk's logits at the teacher's ids, [rows, k], are taken out and replaced with -inf. What the kernels of token_logprobs
then measure and differentiate is the rest of the vocabulary alone: its log-sum-exp is exact however little is left, and
no gradient of an id is the difference of two large numbers. Both parts meet in small tensors in float64.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.linear_distillation_loss.config import ABSENT, FORWARD_KL, RENORMALISE, REVERSE_KL
from grpo_kernels.ops.linear_head.chunks import Chunk, Gradients, Products
from grpo_kernels.ops.linear_head.head import FACTORS, HEAD_SCHEMA, Head
from grpo_kernels.ops.linear_head.registration import (
    KERNELS,
    PrecomputedGradient,
    differentiate_loss,
    fake_gradients,
    set_up_loss,
)
from grpo_kernels.ops.linear_head.sizes import chunks
from grpo_kernels.ops.token_logprobs import registration as token_logprobs
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.ops.token_logprobs.reference import Scaling

# Imported here and not at the first call, because torch.compile traces through it.
_reference = importlib.import_module("grpo_kernels.ops.linear_distillation_loss.reference")

_HEAD = len(Head._fields)


class Teacher(NamedTuple):
    """The lesson for the student: ids and their log-probs [N, k], and the share of each row in the loss [N]."""

    ids: Tensor
    logprobs: Tensor
    shares: Tensor
    kind: int
    tail: int
    beta: float


class Chunking(NamedTuple):
    """Rows with a share, or None for all; rows of a chunk, and of a product for the gradients."""

    rows: Tensor | None
    chunk_rows: int
    product_rows: int


SCHEMA = (
    f"({HEAD_SCHEMA}, Tensor teacher_ids, Tensor teacher_logprobs, Tensor shares, int kind, int tail, float beta, "
    "Tensor? rows, int chunk_rows, int product_rows, bool[] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_TEACHER = len(Teacher._fields)


class _Explicit(NamedTuple):
    """The teacher's columns of a chunk: their places (the padding column if absent), scaled logits and slopes."""

    at: Tensor
    is_absent: Tensor
    scaled: Tensor
    slopes: Tensor


def forward(
    backend: str, head: Head, teacher: Teacher, chunking: Chunking, needs: list[bool], into: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The loss, divergence and mass of every row, and the gradients of the head's factors."""
    selected, size = chunking.rows, chunking.chunk_rows
    total = len(head.hidden) if selected is None else len(selected)
    if selected is None:
        head = head.without(teacher.shares == 0)
    products = Products(backend, head, min(size, total), pad_column=True)
    wants_grad = any(needs)
    gradients = None
    if wants_grad:
        gradients = Gradients(products, needs, total, chunking.product_rows, into, sparse=selected is not None)
    values = head.hidden.new_zeros(len(head.hidden), dtype=torch.float64)
    mass = torch.zeros_like(values)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part in chunks(total, size):
            rows = part if selected is None else selected[part]
            chunk, explicit = _measure(products, rows, teacher)
            values[rows], mass[rows], by_rest, by_id = _terms(chunk.normalizer[0], explicit, teacher, rows)
            if gradients is not None:
                by_rest, by_id = by_rest.to(head.wide), by_id.to(head.wide)
                gradients.add(chunk, by_rest, None, rows, (explicit.at, by_id))
        loss = (teacher.shares * values).sum().to(head.wide)
        results = fake_gradients(head, [False] * FACTORS) if gradients is None else gradients.finish()
    return loss, values.to(head.wide), mass.to(head.wide), *results


def _measure(products: Products, rows: slice | Tensor, teacher: Teacher) -> tuple[Chunk, _Explicit]:
    """The chunk without the teacher's ids, and these."""
    head, backend = products.head, products.backend
    ids = teacher.ids[rows]
    is_absent = ids == ABSENT
    at = torch.where(is_absent, products.columns, ids)
    hidden, logits = products.logits(rows)
    raw = logits.gather(1, at).double()
    logits.scatter_(1, at, -torch.inf)
    row_temperature = None if head.row_temperature is None else head.row_temperature[rows]
    scaling = Scaling(None if row_temperature is None else row_temperature.double(), *head.scaling)
    explicit = _Explicit(at, is_absent, scaling.apply(raw), scaling.slope(torch.where(is_absent, 0, raw)))
    targets = torch.where(teacher.shares[rows] == 0, IGNORED, at[:, 0])[None]
    row_temperature = None if row_temperature is None else row_temperature[None]
    measurements = token_logprobs.FORWARD[backend](logits[None], targets, row_temperature, *head.scaling, False, False)
    return Chunk(hidden, logits, targets, row_temperature, *measurements), explicit


def _terms(
    others: Tensor, explicit: _Explicit, teacher: Teacher, rows: slice | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divergence and mass of each row, and the gradients: of the rest as of minus a log-prob, and of the ids' logits.

    With u the derivative by each category's log-probability and U their sum, the scaled logit of an id gets u - U q.
    Each other column gets the share of the rest that it holds, times the same of the last category.
    """
    shares = teacher.shares[rows]
    counts = shares != 0
    log_p, log_q, log_mass, log_rest = _reference.categories(
        explicit.scaled, others, teacher.logprobs[rows], explicit.is_absent, teacher.tail
    )
    values = _reference.divergence(log_p, log_q, teacher.kind, teacher.beta).sum(1)
    slopes = _slopes(log_p, log_q, teacher.kind, teacher.beta)
    total = slopes.sum(1)
    by_rest = shares * (total * log_rest.exp() - slopes[:, -1])
    # logits that no category depends on, or none at all
    by_rest = torch.where((others > -torch.inf) & (teacher.tail != RENORMALISE), by_rest, 0)
    by_id = shares[:, None] * explicit.slopes * (slopes[:, :-1] - total[:, None] * log_q[:, :-1].exp())
    by_id = torch.where(counts[:, None], by_id, 0)
    values, mass = torch.where(counts, values, 0), torch.where(counts, log_mass.exp(), 0)
    return values, mass, torch.where(counts, by_rest, 0), by_id


def _slopes(log_p: Tensor, log_q: Tensor, kind: int, beta: float) -> Tensor:
    """The derivative of the divergence by the log-probability of each category of the student."""
    exists = log_p > -torch.inf
    log_p, log_q = torch.where(exists, log_p, 0), torch.where(exists, log_q, 0)
    p, q = log_p.exp(), log_q.exp()
    if kind == FORWARD_KL:
        slopes = -p
    elif kind == REVERSE_KL:
        slopes = q * (log_q - log_p + 1)
    else:
        slopes = (1 - beta) * q * (log_q - _reference.mixture(log_p, log_q, beta))
    return torch.where(exists, slopes, 0)


def _unpack(args: tuple[Any, ...]) -> tuple[Head, Teacher, Chunking, list[bool]]:
    *rest, needs = args
    head, rest = Head(*rest[:_HEAD]), rest[_HEAD:]
    return head, Teacher(*rest[:_TEACHER]), Chunking(*rest[_TEACHER:]), needs


def _op(backend: str, *args: Any) -> tuple[Tensor, ...]:
    return forward(backend, *_unpack(args))


def _fake(*args: Any) -> tuple[Tensor, ...]:
    head, *_, needs = _unpack(args)
    of_row = head.hidden.new_empty(len(head.hidden), dtype=head.wide)
    return of_row.new_empty(()), of_row, torch.empty_like(of_row), *fake_gradients(head, needs)


LOSS = registry.define(
    "linear_distillation_loss",
    SCHEMA,
    KERNELS,
    _fake,
    (set_up_loss, differentiate_loss),
    implementation=_op,
)


def apply(
    backend: str, head: Head, teacher: Teacher, chunking: Chunking, into: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, which has a gradient by the head's factors; divergence and mass of every row."""
    if backend == "reference":
        return cast(tuple[Tensor, Tensor, Tensor], _reference.forward(*head, *teacher))
    if torch.compiler.is_compiling():
        results = LOSS[backend](*head, *teacher, *chunking, head.needs_grad)
        return cast(tuple[Tensor, Tensor, Tensor], results[:3])

    def compute(head: Head, needs: list[bool]) -> tuple[Tensor, ...]:
        return forward(backend, head, teacher, chunking, needs, into)

    arguments = ("linear_distillation_loss", ("", ""), backend, head, compute, into is not None)
    results = PrecomputedGradient.apply(*head.factors, *arguments)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor], results)
