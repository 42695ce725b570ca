"""Distillation from a teacher's most probable tokens, alone or beside another objective.

The teacher's ids are kept apart from the kernels of token_logprobs, and with them the target that the other objective
reads. Both parts of the vocabulary meet in small tensors, [tokens, k], in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels import registry
from grpo_kernels.ops.linear_head import divergence
from grpo_kernels.ops.linear_head.divergence import ABSENT, KINDS, LEAST_REST, RENORMALISE, TAILS, Distillation
from grpo_kernels.ops.linear_head.head import NO_COLUMN, Measurements
from grpo_kernels.ops.linear_head.objectives import Objective
from grpo_kernels.ops.linear_head.products import Chunk, Products, Tokens, Upstream
from grpo_kernels.ops.token_logprobs.config import IGNORED
from grpo_kernels.ops.token_logprobs.reference import Scaling

_terms_in_triton = registry.lazy("terms", "grpo_kernels.ops.linear_head")


class TopK:
    """`targets` count over all ranks; `other` is the objective whose loss this one's is added to."""

    def __init__(self, products: Products, targets: Tensor, teacher: Distillation, other: Objective | None) -> None:
        self.products, self.targets, self.teacher, self.other = products, targets, teacher, other
        self.divergence, self.mass = torch.zeros_like(teacher.shares), torch.zeros_like(teacher.shares)

    def before(self, tokens: Tokens) -> Tensor:
        """The teacher's ids, and last the target unless it is one of them."""
        ids = self.teacher.of_ids[0][tokens]
        if self.other is None:
            return ids
        self.other.before(tokens)
        targets = self.targets[tokens][:, None]
        is_wrong = (targets < 0) & (targets != IGNORED)
        targets = torch.where(is_wrong, NO_COLUMN, targets)
        return torch.cat((ids, torch.where((ids == targets).any(1, keepdim=True), ABSENT, targets)), 1)

    def read(self, chunk: Chunk, tokens: Tokens, upstream: Upstream | None) -> Upstream | None:
        assert chunk.columns is not None and chunk.raw is not None
        head, temperature = self.products.head, chunk.row_temperature
        scaling = Scaling(None if temperature is None else temperature.double(), *head.scaling)
        scaled, rest = scaling.apply(chunk.raw), chunk.measured.normalizer
        whole, others = None, rest
        if self.other is not None:
            columns = self.products.columns if self.products.shard is None else NO_COLUMN
            whole = _whole(scaled, chunk, self.targets[tokens], columns)
            upstream = self.other.read(chunk._replace(measured=whole.measured), tokens, upstream)
            others = torch.logaddexp(rest, scaled[:, -1])  # of all columns but the ids
        values, mass, by_others, by_scaled = self._terms(others, scaled, tokens)
        self.divergence[tokens], self.mass[tokens] = values, mass
        if upstream is None:
            return None
        by_rest, by_entropy = by_others, None
        if whole is not None:
            finite = torch.where(others == -torch.inf, 0, others)
            by_rest, by_target = (by_others * (part - finite).exp() for part in (rest, scaled[:, -1]))
            by_other_loss, by_rest_of_other, by_entropy = whole.gradient(upstream)
            by_rest = by_rest + by_rest_of_other
            by_scaled = by_other_loss + torch.cat((by_scaled, -by_target[:, None]), 1)
        slopes = scaling.slope(torch.where(chunk.columns == self.products.columns, 0, chunk.raw))
        return upstream._replace(
            by_logprob=by_rest.to(head.wide), by_entropy=by_entropy, by_columns=(slopes * by_scaled).to(head.wide)
        )

    def _terms(self, others: Tensor, scaled: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Divergence and mass of each token, and the gradients: of the rest as of minus a log-prob, and of the ids.

        With u the derivative by each category's log-probability and U their sum, an id's scaled logit gets u - U q.
        Each other column gets the share of the rest that it holds, times the same of the last category.
        """
        teacher = self.teacher
        shares, ids, logprobs = (values[tokens] for values in (teacher.shares, *teacher.of_ids))
        if self.products.backend == "triton":
            settings = KINDS[teacher.kind], TAILS[teacher.tail], teacher.beta, LEAST_REST
            results: tuple[Tensor, Tensor, Tensor, Tensor] = _terms_in_triton(
                others, scaled, ids, logprobs, shares, *settings
            )
            return results
        counts, scaled = shares != 0, scaled[:, : ids.shape[1]]
        log_p, log_q, log_mass, log_rest = divergence.categories(scaled, others, logprobs, ids == ABSENT, teacher.tail)
        values = divergence.divergence(log_p, log_q, teacher.kind, teacher.beta).sum(1)
        slopes = divergence.slopes(log_p, log_q, teacher.kind, teacher.beta)
        total = slopes.sum(1)
        by_rest = shares * (total * log_rest.exp() - slopes[:, -1])
        # logits that no category depends on, or none at all
        by_rest = torch.where((others != -torch.inf) & (teacher.tail != RENORMALISE), by_rest, 0)
        by_scaled = shares[:, None] * (slopes[:, :-1] - total[:, None] * log_q[:, :-1].exp())

        def counted(value: Tensor) -> Tensor:
            return torch.where(counts, value, 0)

        by_scaled = torch.where(counts[:, None], by_scaled, 0)
        return counted(values), counted(log_mass.exp()), counted(by_rest), by_scaled

    def results(self) -> dict[str, Tensor]:
        loss = (self.teacher.shares * self.divergence).sum().to(self.products.head.wide)
        of_other = {"loss": torch.zeros_like(loss)} if self.other is None else self.other.results()
        wide = {"divergence": self.divergence.to(loss.dtype), "mass": self.mass.to(loss.dtype)}
        return {**of_other, **wide, "distillation": loss, "loss": of_other["loss"] + loss}


class _Whole(NamedTuple):
    """The distribution of whole tokens, in float64.

    Attributes:
        place: which of the columns kept apart is the target, [tokens, 1]
        log_p: log-probabilities of the columns kept apart
        log_share: log-probability of the rest
        entropy_of_rest: empty unless it was measured
        measured: as the kernels give it: 0 for ignored targets, NaN for those that are no column
    """

    place: Tensor
    log_p: Tensor
    log_share: Tensor
    entropy_of_rest: Tensor
    measured: Measurements

    def gradient(self, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients by the scaled logits kept apart, and by log-prob and entropy of the rest.

        Let R be the probability of the rest and r the share of it that a column has. The gradient by the column's
        logit, -g R r - e R r (log(R r) + H), is one by a log-prob and by the entropy of the rest alone.
        """
        by_logprob, by_entropy = upstream.by_logprob, upstream.by_entropy
        assert by_logprob is not None
        of_tokens = by_logprob.double()
        is_target = torch.zeros_like(self.log_p, dtype=torch.bool).scatter_(1, self.place, True)
        p, share = self.log_p.exp(), self.log_share.exp()
        # 1 - p would be the difference of two large numbers
        by_scaled = of_tokens[:, None] * torch.where(is_target, -torch.expm1(self.log_p), -p)
        by_rest = of_tokens * share
        if by_entropy is None:
            return by_scaled, by_rest, None
        of_entropy = by_entropy.double()
        entropy = self.measured.entropy
        gap = self.log_p + entropy[:, None]
        by_scaled = by_scaled - of_entropy[:, None] * torch.where(p == 0, 0, p * gap)
        gap = self.log_share + entropy - self.entropy_of_rest
        by_rest = by_rest + torch.where(share == 0, 0, of_entropy * share * gap)
        return by_scaled, by_rest, (of_entropy * share).to(by_entropy.dtype)


def _whole(scaled: Tensor, chunk: Chunk, targets: Tensor, columns: int) -> _Whole:
    """From the ids kept apart, of which the last is a target, and what was measured of the rest."""
    assert chunk.ids is not None
    _, entropy_of_rest, squares, rest = chunk.measured
    place = (chunk.ids == targets[:, None]).int().argmax(1, keepdim=True)
    of_target = scaled.gather(1, place)[:, 0]
    others = torch.logaddexp(divergence.logsumexp(scaled.scatter(1, place, -torch.inf)), rest)
    total = torch.logaddexp(others, of_target)
    # the difference of of_target and total would lose its digits where the target is nearly certain
    logprobs = -torch.logaddexp(torch.zeros_like(others), others - of_target)
    log_p = (scaled - total[:, None]).scatter(1, place, logprobs[:, None])
    log_share = rest - total
    is_ignored = targets == IGNORED
    is_wrong = ~is_ignored & ((targets < 0) | (targets >= columns))

    def finished(value: Tensor) -> Tensor:
        return torch.where(is_wrong, torch.nan, torch.where(is_ignored, 0, value))

    p, share = log_p.exp(), log_share.exp()
    entropy_of_rest = entropy_of_rest.double()
    entropy = entropy_of_rest
    if len(entropy) > 0:
        entropy = torch.where(share == 0, 0, share * (entropy - log_share)) - torch.where(p == 0, 0, p * log_p).sum(1)
        entropy = finished(entropy)
    if len(squares) > 0:
        squares = finished(torch.where(share == 0, 0, share * share * squares) + (p * p).sum(1))
    measured = Measurements(finished(logprobs), entropy, squares, total)
    return _Whole(place, log_p, log_share, entropy_of_rest, measured)
