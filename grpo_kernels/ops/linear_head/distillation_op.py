"""Registers linear_distillation_loss with torch.

The chunk loop is that of linear_policy_loss: three matrix products, and the gradient is computed with the loss. The
teacher's ids are kept apart from the kernels of token_logprobs, which measure and differentiate the rest of the
vocabulary. Both parts meet in small tensors, [tokens, k], in float64. As a term of linear_policy_loss the loss has no
chunks of its own: the targets are kept apart with the ids, and both losses share the products.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head import divergence as _reference
from grpo_kernels.ops.linear_head.chunks import Chunk, Gradients, Products, SeparateColumns
from grpo_kernels.ops.linear_head.divergence import ABSENT, KINDS, LEAST_REST, RENORMALISE, TAILS, TeacherTokens
from grpo_kernels.ops.linear_head.head import FACTORS, Head
from grpo_kernels.ops.linear_head.logprobs_op import KERNELS, fake_gradients
from grpo_kernels.ops.linear_head.precomputed import PrecomputedGradient, RecomputedGradient, may_precompute
from grpo_kernels.ops.linear_head.sizes import chunks, tokens_per_chunk
from grpo_kernels.ops.token_logprobs.config import IGNORED

_terms_in_triton = registry.lazy("terms", "grpo_kernels.ops.linear_head")


@op_inputs
class Chunking:
    """Tokens with a share, or None for all; tokens of a chunk, and of a product for the gradients."""

    tokens: Tensor | None
    chunk_tokens: int
    product_tokens: int

    @classmethod
    def of(cls, shares: Tensor, head: Head, chunk_size: int | None) -> Chunking:
        """Leaves out tokens without a share on the CPU; a GPU would have to be waited for."""
        device, tokens = head.hidden.device, None
        if device.type == "cpu" and not torch.compiler.is_compiling():
            tokens = shares.nonzero().squeeze(1)
            tokens = None if len(tokens) == len(shares) else tokens
        total = len(head.hidden) if tokens is None else len(tokens)
        size = chunk_size or tokens_per_chunk(total, len(head.weight), device.type, head.weight.dtype)
        return cls(tokens, size, chunk_size or 0)


@op_inputs
class Distillation:
    """Arguments of linear_distillation_loss, and which factors of the head need a gradient."""

    head: Head
    teacher: TeacherTokens
    chunking: Chunking
    needs: list[bool]


def forward(backend: str, inputs: Distillation, into: Tensor | None = None) -> tuple[Tensor, ...]:
    """The loss, divergence and mass of every token, and the gradients of the head's factors."""
    head, teacher, chunking, needs = inputs.head, inputs.teacher, inputs.chunking, inputs.needs
    selected, size = chunking.tokens, chunking.chunk_tokens
    total = len(head.hidden) if selected is None else len(selected)
    is_ignored = teacher.shares == 0
    head = dataclasses.replace(head, targets=torch.where(is_ignored, IGNORED, 0))
    if selected is None:
        head = head.without(is_ignored)
    products = Products(backend, head, min(size, total), pad_column=True)
    wants_grad = any(needs)
    gradients = None
    if wants_grad:
        gradients = Gradients(products, needs, total, chunking.product_tokens, into, sparse=selected is not None)
    values = head.hidden.new_zeros(len(head.hidden), dtype=torch.float64)
    mass = torch.zeros_like(values)
    with torch.autocast(head.hidden.device.type, enabled=False):
        for part in chunks(total, size):
            tokens = part if selected is None else selected[part]
            chunk = products.measure(tokens, False, _columns(teacher.ids[tokens], products))
            values[tokens], mass[tokens], by_rest, by_id = _terms(
                backend, chunk.normalizer[0], cast(SeparateColumns, chunk.separate), teacher, tokens
            )
            if gradients is not None:
                gradients.add(chunk, by_rest.to(head.wide), None, tokens, by_id.to(head.wide))
        loss = (teacher.shares * values).sum().to(head.wide)
        results = fake_gradients(head, [False] * len(FACTORS)) if gradients is None else gradients.finish()
    return loss, values.to(head.wide), mass.to(head.wide), *results


def _columns(ids: Tensor, products: Products) -> Tensor:
    return torch.where(ids == ABSENT, products.columns, ids)


def _terms(
    backend: str, others: Tensor, separate: SeparateColumns, teacher: TeacherTokens, tokens: slice | Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divergence and mass of each token, and the gradients: of the rest as of minus a log-prob, and of the ids' logits.

    With u the derivative by each category's log-probability and U their sum, the scaled logit of an id gets u - U q.
    Each other column gets the share of the rest that it holds, times the same of the last category.

    Args:
        others: log-sum-exp of all columns but the ids
        apart: the ids' columns, perhaps followed by another
    """
    shares, ids, logprobs = teacher.shares[tokens], teacher.ids[tokens], teacher.logprobs[tokens]
    if backend == "triton":
        settings = KINDS[teacher.kind], TAILS[teacher.tail], teacher.beta, LEAST_REST
        *results, by_scaled = _terms_in_triton(others, separate.scaled, ids, logprobs, shares, *settings)
        return *results, by_scaled.mul_(separate.slopes[:, : by_scaled.shape[1]])
    counts, scaled = shares != 0, separate.scaled[:, : ids.shape[1]]
    log_p, log_q, log_mass, log_rest = _reference.categories(scaled, others, logprobs, ids == ABSENT, teacher.tail)
    values = _reference.divergence(log_p, log_q, teacher.kind, teacher.beta).sum(1)
    slopes = _reference.slopes(log_p, log_q, teacher.kind, teacher.beta)
    total = slopes.sum(1)
    by_rest = shares * (total * log_rest.exp() - slopes[:, -1])
    # logits that no category depends on, or none at all
    by_rest = torch.where((others != -torch.inf) & (teacher.tail != RENORMALISE), by_rest, 0)
    by_id = separate.slopes[:, : ids.shape[1]] * (slopes[:, :-1] - total[:, None] * log_q[:, :-1].exp())
    by_id = torch.where(counts[:, None], shares[:, None] * by_id, 0)
    values, mass = torch.where(counts, values, 0), torch.where(counts, log_mass.exp(), 0)
    return values, mass, torch.where(counts, by_rest, 0), by_id


class Term:
    """The divergence as a term of linear_policy_loss, in the chunks of that loss.

    Attributes:
        shares: of each token in the loss
        divergence: of each token that was differentiated
        mass: the student's probability of the teacher's ids, likewise
    """

    def __init__(self, backend: str, teacher: TeacherTokens, targets: Tensor) -> None:
        self.backend = backend
        self.teacher, self.targets, self.shares = teacher, targets, teacher.shares
        self.divergence, self.mass = torch.zeros_like(self.shares), torch.zeros_like(self.shares)

    @property
    def loss(self) -> Tensor:
        return (self.shares * self.divergence).sum()

    def measure(self, products: Products, tokens: slice | Tensor, want_entropy: bool) -> tuple[Chunk, Tensor, Tensor]:
        """A chunk whose ids and targets are kept apart, and log-probs and entropies of its whole tokens."""
        ids, targets = self.teacher.ids[tokens], self.targets[tokens]
        is_ignored = targets == IGNORED
        is_wrong = ~is_ignored & ((targets < 0) | (targets >= products.columns))
        needs_none = is_ignored | is_wrong | (ids == targets[:, None]).any(1)
        columns = torch.cat((_columns(ids, products), torch.where(needs_none, products.columns, targets)[:, None]), 1)
        chunk = products.measure(tokens, want_entropy, columns)
        whole = _whole(chunk, targets)

        def finished(value: Tensor) -> Tensor:  # as the kernels do
            return torch.where(is_wrong, torch.nan, torch.where(is_ignored, 0, value))

        return chunk, finished(whole.logprobs), finished(whole.entropy) if want_entropy else whole.entropy

    def differentiate(
        self, chunk: Chunk, tokens: slice | Tensor, by_logprob: Tensor, by_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of both losses: by log-prob and by entropy of the rest, and by the logits kept apart.

        Let R be the probability of the rest and r the share of it that a column has. The gradient by the column's
        logit, -g R r - e R r (log(R r) + H), is one by a log-prob and by the entropy of the rest alone.
        """
        separate, whole = cast(SeparateColumns, chunk.separate), _whole(chunk, self.targets[tokens])
        target = separate.scaled[:, -1]  # unless it is one of the ids
        others = torch.logaddexp(whole.rest, target)
        self.divergence[tokens], self.mass[tokens], by_others, by_id = _terms(
            self.backend, others, separate, self.teacher, tokens
        )
        finite = torch.where(others == -torch.inf, 0, others)
        by_rest, by_target = by_others * (whole.rest - finite).exp(), by_others * (target - finite).exp()
        upstream = by_logprob.double()[:, None]
        is_target = torch.zeros_like(separate.scaled, dtype=torch.bool).scatter_(1, whole.place, True)
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
        by_separate = separate.slopes * by_scaled
        by_separate += torch.cat((by_id, -separate.slopes[:, -1:] * by_target[:, None]), 1)
        return by_rest.to(by_logprob.dtype), by_entropy_of_rest, by_separate.to(by_logprob.dtype)


class _Whole(NamedTuple):
    """The distribution of whole tokens, in float64.

    Attributes:
        place: which of the columns kept apart is the target, [tokens, 1]
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
    separate, rest = cast(SeparateColumns, chunk.separate), chunk.normalizer[0]
    place = (separate.columns == targets[:, None]).int().argmax(1, keepdim=True)
    of_target = separate.scaled.gather(1, place)[:, 0]
    others = torch.logaddexp(_reference.logsumexp(separate.scaled.scatter(1, place, -torch.inf)), rest)
    total = torch.logaddexp(others, of_target)
    # the difference of of_target and total would lose its digits where the target is nearly certain
    logprobs = -torch.logaddexp(torch.zeros_like(others), others - of_target)
    log_p = (separate.scaled - total[:, None]).scatter(1, place, logprobs[:, None])
    log_share = rest - total
    entropy = chunk.entropy.double()
    if len(entropy) > 0:
        p, share, entropy = log_p.exp(), log_share.exp(), entropy[0]
        entropy = torch.where(share == 0, 0, share * (entropy - log_share)) - torch.where(p == 0, 0, p * log_p).sum(1)
    return _Whole(place, log_p, rest, log_share, logprobs, entropy)


def _fake(inputs: Distillation) -> tuple[Tensor, ...]:
    head = inputs.head
    of_token = head.hidden.new_empty(len(head.hidden), dtype=head.wide)
    return of_token.new_empty(()), of_token, torch.empty_like(of_token), *fake_gradients(head, inputs.needs)


LOSS = registry.ComposedOp(
    "linear_distillation_loss",
    Distillation,
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    KERNELS,
    _fake,
    forward,
)


def apply(
    backend: str,
    head: Head,
    teacher: TeacherTokens,
    chunk_size: int | None,
    into: Tensor | None,
    op: str = "linear_distillation_loss",
    only: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, which has a gradient by the head's factors; divergence and mass of every token.

    `op` and `only` are for the error of a second backward, as in PrecomputedGradient.
    """
    if backend == "reference":
        return _reference.forward(head, teacher)
    chunking, rest = Chunking.of(teacher.shares, head, chunk_size), head.without_factors()

    def compute(
        factors: tuple[Tensor | None, ...], needs: list[bool], upstream: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        own = teacher if upstream is None else dataclasses.replace(teacher, shares=teacher.shares * upstream)
        inputs = Distillation(rest.with_factors(*factors), own, chunking, needs)
        if torch.compiler.is_compiling():
            return cast(tuple[Tensor, ...], LOSS(backend, inputs))
        return forward(backend, inputs, into)

    if not (torch.is_grad_enabled() and any(head.needs_grad)):
        return cast(tuple[Tensor, Tensor, Tensor], compute(head.factors, [False] * len(FACTORS))[:3])
    if not may_precompute(head.hidden):
        return cast(tuple[Tensor, Tensor, Tensor], RecomputedGradient.apply(*head.factors, compute))  # type: ignore[no-untyped-call]
    arguments = (op, (only, ""), backend, compute, into is not None)
    results = PrecomputedGradient.apply(*head.factors, *arguments)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor], results)
