"""Registers linear_distillation_loss with torch.

The chunk loop is that of linear_policy_loss: three matrix products, and the gradient is computed with the loss. The
teacher's ids are kept apart from the kernels of token_logprobs, which measure and differentiate the rest of the
vocabulary. Both parts meet in small tensors, [rows, k], in float64. As a term of linear_policy_loss the loss has no
chunks of its own: the targets are kept apart with the ids, and both losses share the products.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.linear_distillation_loss.config import ABSENT, FORWARD_KL, RENORMALISE, REVERSE_KL
from grpo_kernels.ops.linear_head.chunks import Apart, Chunk, Gradients, Products
from grpo_kernels.ops.linear_head.head import FACTORS, HEAD_SCHEMA, Head
from grpo_kernels.ops.linear_head.precomputed import PrecomputedGradient, differentiate_loss, set_up_loss
from grpo_kernels.ops.linear_head.registration import KERNELS, fake_gradients
from grpo_kernels.ops.linear_head.sizes import chunks, rows_per_chunk
from grpo_kernels.ops.token_logprobs.config import IGNORED

# Imported here and not at the first call, because torch.compile traces through it.
_reference = importlib.import_module(f"{__package__}.reference")

_HEAD = len(Head._fields)


class Lesson(NamedTuple):
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

    @classmethod
    def of(cls, lesson: Lesson, head: Head, chunk_size: int | None) -> Chunking:
        """Leaves out rows without a share on the CPU; a GPU would have to be waited for."""
        device, rows = head.hidden.device, None
        if device.type == "cpu" and not torch.compiler.is_compiling():
            rows = lesson.shares.nonzero().squeeze(1)
            rows = None if len(rows) == len(lesson.shares) else rows
        total = len(head.hidden) if rows is None else len(rows)
        size = chunk_size or rows_per_chunk(total, len(head.weight), device.type, head.weight.dtype)
        return cls(rows, size, chunk_size or 0)


SCHEMA = (
    f"({HEAD_SCHEMA}, Tensor teacher_ids, Tensor teacher_logprobs, Tensor shares, int kind, int tail, float beta, "
    "Tensor? rows, int chunk_rows, int product_rows, bool[] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LESSON = len(Lesson._fields)


def forward(
    backend: str, head: Head, lesson: Lesson, chunking: Chunking, needs: list[bool], into: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The loss, divergence and mass of every row, and the gradients of the head's factors."""
    selected, size = chunking.rows, chunking.chunk_rows
    total = len(head.hidden) if selected is None else len(selected)
    is_ignored = lesson.shares == 0
    head = head._replace(targets=torch.where(is_ignored, IGNORED, 0))
    if selected is None:
        head = head.without(is_ignored)
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
            chunk = products.measure(rows, False, _columns(lesson.ids[rows], products))
            values[rows], mass[rows], by_rest, by_id = _terms(
                chunk.normalizer[0], cast(Apart, chunk.apart), lesson, rows
            )
            if gradients is not None:
                gradients.add(chunk, by_rest.to(head.wide), None, rows, by_id.to(head.wide))
        loss = (lesson.shares * values).sum().to(head.wide)
        results = fake_gradients(head, [False] * FACTORS) if gradients is None else gradients.finish()
    return loss, values.to(head.wide), mass.to(head.wide), *results


def _columns(ids: Tensor, products: Products) -> Tensor:
    return torch.where(ids == ABSENT, products.columns, ids)


def _terms(others: Tensor, apart: Apart, lesson: Lesson, rows: slice | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divergence and mass of each row, and the gradients: of the rest as of minus a log-prob, and of the ids' logits.

    With u the derivative by each category's log-probability and U their sum, the scaled logit of an id gets u - U q.
    Each other column gets the share of the rest that it holds, times the same of the last category.

    Args:
        others: log-sum-exp of all columns but the ids
        apart: the ids' columns, perhaps followed by another
    """
    shares, ids = lesson.shares[rows], lesson.ids[rows]
    counts, scaled = shares != 0, apart.scaled[:, : ids.shape[1]]
    log_p, log_q, log_mass, log_rest = _reference.categories(
        scaled, others, lesson.logprobs[rows], ids == ABSENT, lesson.tail
    )
    values = _reference.divergence(log_p, log_q, lesson.kind, lesson.beta).sum(1)
    slopes = _slopes(log_p, log_q, lesson.kind, lesson.beta)
    total = slopes.sum(1)
    by_rest = shares * (total * log_rest.exp() - slopes[:, -1])
    # logits that no category depends on, or none at all
    by_rest = torch.where((others > -torch.inf) & (lesson.tail != RENORMALISE), by_rest, 0)
    by_id = apart.slopes[:, : ids.shape[1]] * (slopes[:, :-1] - total[:, None] * log_q[:, :-1].exp())
    by_id = torch.where(counts[:, None], shares[:, None] * by_id, 0)
    values, mass = torch.where(counts, values, 0), torch.where(counts, log_mass.exp(), 0)
    return values, mass, torch.where(counts, by_rest, 0), by_id


def _slopes(log_p: Tensor, log_q: Tensor, kind: int, beta: float) -> Tensor:
    """The derivative of the divergence by the log-probability of each category of the student."""
    exists = log_p > -torch.inf
    log_p, log_q = torch.where(exists, log_p, 0), torch.where(exists, log_q, 0)
    p, (q, finite) = log_p.exp(), _reference.student(log_q)
    if kind == FORWARD_KL:
        slopes = -p
    elif kind == REVERSE_KL:
        slopes = q * (finite - log_p + 1)
    else:
        slopes = (1 - beta) * q * (finite - _reference.mixture(log_p, log_q, beta))
    return torch.where(exists, slopes, 0)


class Term:
    """The divergence as a term of linear_policy_loss, in the chunks of that loss.

    Attributes:
        shares: of each row in the loss
        divergence: of each row that was differentiated
        mass: the student's probability of the teacher's ids, likewise
    """

    def __init__(self, lesson: Lesson, targets: Tensor) -> None:
        self.lesson, self.targets, self.shares = lesson, targets, lesson.shares
        self.divergence, self.mass = torch.zeros_like(self.shares), torch.zeros_like(self.shares)

    @property
    def loss(self) -> Tensor:
        return (self.shares * self.divergence).sum()

    def measure(self, products: Products, rows: slice | Tensor, want_entropy: bool) -> tuple[Chunk, Tensor, Tensor]:
        """A chunk whose ids and targets are kept apart, and log-probs and entropies of its whole rows."""
        ids, targets = self.lesson.ids[rows], self.targets[rows]
        is_ignored = targets == IGNORED
        is_wrong = ~is_ignored & ((targets < 0) | (targets >= products.columns))
        needs_none = is_ignored | is_wrong | (ids == targets[:, None]).any(1)
        columns = torch.cat((_columns(ids, products), torch.where(needs_none, products.columns, targets)[:, None]), 1)
        chunk = products.measure(rows, want_entropy, columns)
        whole = _whole(chunk, targets)

        def finished(value: Tensor) -> Tensor:  # as the kernels do
            return torch.where(is_wrong, torch.nan, torch.where(is_ignored, 0, value))

        return chunk, finished(whole.logprobs), finished(whole.entropy) if want_entropy else whole.entropy

    def differentiate(
        self, chunk: Chunk, rows: slice | Tensor, by_logprob: Tensor, by_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of both losses: by log-prob and by entropy of the rest, and by the logits kept apart.

        Let R be the probability of the rest and r the share of it that a column has. The gradient by the column's
        logit, -g R r - e R r (log(R r) + H), is one by a log-prob and by the entropy of the rest alone.
        """
        apart, whole = cast(Apart, chunk.apart), _whole(chunk, self.targets[rows])
        target = apart.scaled[:, -1]  # unless it is one of the ids
        others = torch.logaddexp(whole.rest, target)
        self.divergence[rows], self.mass[rows], by_others, by_id = _terms(others, apart, self.lesson, rows)
        finite = torch.where(others == -torch.inf, 0, others)
        by_rest, by_target = by_others * (whole.rest - finite).exp(), by_others * (target - finite).exp()
        upstream = by_logprob.double()[:, None]
        is_target = torch.zeros_like(apart.scaled, dtype=torch.bool).scatter_(1, whole.place, True)
        p, share = whole.log_p.exp(), whole.log_share.exp()
        # 1 - p would be the difference of two large numbers
        by_scaled = upstream * torch.where(is_target, -torch.expm1(whole.log_p), -p)
        by_rest = by_rest + upstream[:, 0] * share
        by_entropy_of_rest = None
        if by_entropy is not None:
            upstream = by_entropy.double()[:, None]
            by_scaled = by_scaled - upstream * torch.where(p == 0, 0, p * (whole.log_p + whole.entropy[:, None]))
            gap = whole.log_share + whole.entropy - chunk.entropy[0]
            by_rest = by_rest + torch.where(share == 0, 0, upstream[:, 0] * share * gap)
            by_entropy_of_rest = (upstream[:, 0] * share).to(by_entropy.dtype)
        by_apart = apart.slopes * by_scaled
        by_apart += torch.cat((by_id, -apart.slopes[:, -1:] * by_target[:, None]), 1)
        return by_rest.to(by_logprob.dtype), by_entropy_of_rest, by_apart.to(by_logprob.dtype)


class _Whole(NamedTuple):
    """The distribution of whole rows, in float64.

    Attributes:
        place: which of the columns kept apart is the target, [rows, 1]
        log_p: log-probabilities of the columns kept apart
        rest: log-sum-exp of the rest
        log_share: log-probability of the rest
        logprobs: of the targets
        entropy: empty unless the rest's was measured
    """

    place: Tensor
    log_p: Tensor
    rest: Tensor
    log_share: Tensor
    logprobs: Tensor
    entropy: Tensor


def _whole(chunk: Chunk, targets: Tensor) -> _Whole:
    apart, rest = cast(Apart, chunk.apart), chunk.normalizer[0]
    place = (apart.columns == targets[:, None]).int().argmax(1, keepdim=True)
    of_target = apart.scaled.gather(1, place)[:, 0]
    others = torch.logaddexp(_reference.logsumexp(apart.scaled.scatter(1, place, -torch.inf)), rest)
    total = torch.logaddexp(others, of_target)
    # the difference of of_target and total would lose its digits where the target is nearly certain
    logprobs = -torch.logaddexp(torch.zeros_like(others), others - of_target)
    log_p = (apart.scaled - total[:, None]).scatter(1, place, logprobs[:, None])
    log_share = rest - total
    entropy = chunk.entropy.double()
    if len(entropy) > 0:
        p, share, entropy = log_p.exp(), log_share.exp(), entropy[0]
        entropy = torch.where(share == 0, 0, share * (entropy - log_share)) - torch.where(p == 0, 0, p * log_p).sum(1)
    return _Whole(place, log_p, rest, log_share, logprobs, entropy)


def _unpack(args: tuple[Any, ...]) -> tuple[Head, Lesson, Chunking, list[bool]]:
    *rest, needs = args
    head, rest = Head(*rest[:_HEAD]), rest[_HEAD:]
    return head, Lesson(*rest[:_LESSON]), Chunking(*rest[_LESSON:]), needs


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
    (set_up_loss, functools.partial(differentiate_loss, "linear_distillation_loss")),
    implementation=_op,
)


def apply(
    backend: str,
    head: Head,
    lesson: Lesson,
    chunking: Chunking,
    into: Tensor | None,
    op: str = "linear_distillation_loss",
    only: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, which has a gradient by the head's factors; divergence and mass of every row.

    `op` and `only` are for the error of a second backward, as in PrecomputedGradient.
    """
    if backend == "reference":
        return cast(tuple[Tensor, Tensor, Tensor], _reference.forward(*head, *lesson))
    needs = head.needs_grad if torch.is_grad_enabled() else [False] * FACTORS
    if torch.compiler.is_compiling():
        results = LOSS[backend](*head, *lesson, *chunking, needs)
        return cast(tuple[Tensor, Tensor, Tensor], results[:3])
    if not any(needs):
        return cast(tuple[Tensor, Tensor, Tensor], forward(backend, head, lesson, chunking, needs)[:3])

    def compute(head: Head, needs: list[bool]) -> tuple[Tensor, ...]:
        return forward(backend, head, lesson, chunking, needs, into)

    arguments = (op, (only, ""), backend, head, compute, into is not None)
    results = PrecomputedGradient.apply(*head.factors, *arguments)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor], results)
