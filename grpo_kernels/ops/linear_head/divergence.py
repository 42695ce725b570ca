"""The specification of linear_distillation_loss: the logits whole, and torch's own gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.inputs import op_inputs
from grpo_kernels.ops.linear_head.head import Head
from grpo_kernels.ops.linear_head.reference import logits_of
from grpo_kernels.ops.token_logprobs.reference import Scaling

# Names, and their codes: the positions.
KINDS = ("forward_kl", "reverse_kl", "jsd")
FORWARD_KL, REVERSE_KL, JSD = range(len(KINDS))
TAILS = ("bucket", "ignore", "renormalise")
BUCKET, IGNORE, RENORMALISE = range(len(TAILS))
ABSENT = -1  # an unused slot of a teacher's ids
# The rest of a teacher's probability is known to the rounding of 1 in float32.
LEAST_REST = 2.0**-24


@op_inputs
class Distillation:
    """Checked arguments of a distillation.

    Attributes:
        ids: the teacher's most probable ids [N, k]; None where its head gives all logits. Both heads then have the same
            banned ids, and the student's temperature
        logprobs: of the ids
        shares: of each token in the loss, [N]
        kind, tail, beta: which divergence
    """

    ids: Tensor | None
    logprobs: Tensor | None
    shares: Tensor
    kind: int
    tail: int
    beta: float

    @property
    def of_ids(self) -> tuple[Tensor, Tensor]:
        assert self.ids is not None and self.logprobs is not None
        return self.ids, self.logprobs


def forward(head: Head, teacher: Distillation, its_head: Head | None) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the divergence and mass of every token."""
    shares = teacher.shares
    counts = shares != 0

    def scaled(of: Head) -> Tensor:
        """Logits as the distribution has them.

        A token that does not count may have a temperature of NaN, which times 0 would be the weight's gradient.
        """
        logits = torch.where(counts[:, None], logits_of(of, ~counts), 0)
        return Scaling(head.row_temperature, *of.scaling).apply(logits)

    z = scaled(head)
    if its_head is None:
        log_p, log_q, mass = _categories_of(z, teacher)
    else:
        with torch.no_grad():
            its = scaled(its_head)
        log_p, log_q = its - logsumexp(its)[:, None], z - logsumexp(z)[:, None]
        mass = torch.ones_like(z[:, 0])
    values = divergence(log_p, log_q, teacher.kind, teacher.beta).sum(1)
    values, mass = (torch.where(counts, value, 0) for value in (values, mass))
    return (shares * values).sum().to(values.dtype), values.detach(), mass.detach()


def _categories_of(z: Tensor, teacher: Distillation) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of teacher and student for each category, and the student's of all ids, of scaled logits."""
    ids, logprobs = teacher.of_ids
    is_absent = ids == ABSENT
    at = torch.where(is_absent, z.shape[1], ids)
    padded = torch.cat([z, z.new_full((len(z), 1), -math.inf)], 1)
    others = logsumexp(padded.scatter(1, at, -math.inf))
    log_p, log_q, log_mass, _ = categories(padded.gather(1, at), others, logprobs, is_absent, teacher.tail)
    return log_p, log_q, log_mass.exp()


def categories(
    chosen: Tensor, others: Tensor, teacher_logprobs: Tensor, is_absent: Tensor, tail: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of teacher and student for each category, [N, k + 1], and the student's of all ids and no id.

    The last category is every other id; -inf for both is a category that does not exist.

    Args:
        chosen: scaled logits of the teacher's ids, [N, k], -inf for absent ones
        others: log-sum-exp of all other logits, [N], -inf if there are none
    """
    log_p = torch.where(is_absent, -math.inf, teacher_logprobs.to(chosen.dtype))
    among = logsumexp(chosen)
    total = torch.logaddexp(among, others)
    log_mass, log_rest = among - total, others - total
    nothing = torch.full_like(others, -math.inf)
    if tail == RENORMALISE:
        has_any = among != -math.inf
        log_p = log_p - torch.where(has_any, logsumexp(log_p), 0)[:, None]
        log_q, last = chosen - torch.where(has_any, among, 0)[:, None], (nothing, nothing)
    else:
        log_q = chosen - total[:, None]
        left = torch.log((-torch.expm1(logsumexp(log_p))).clamp(min=LEAST_REST))
        exists = (others != -math.inf) & (tail == BUCKET)
        last = torch.where(exists, left, nothing), torch.where(exists, log_rest, nothing)
    log_p, log_q = (torch.cat([values, end[:, None]], 1) for values, end in zip((log_p, log_q), last, strict=True))
    return log_p, log_q, log_mass, log_rest


def divergence(log_p: Tensor, log_q: Tensor, kind: int, beta: float) -> Tensor:
    """The part of each category; NaN stays."""
    exists = (log_p != -math.inf) | (log_q != -math.inf)
    log_p, log_q = torch.where(exists, log_p, 0), torch.where(exists, log_q, 0)
    (p, finite_p), (q, finite_q) = probabilities(log_p), probabilities(log_q)
    if kind == FORWARD_KL:
        part = torch.where(p == 0, 0, p * (finite_p - log_q))
    elif kind == REVERSE_KL:
        part = q * (finite_q - torch.where(q == 0, 0, log_p))
    else:
        log_m = mixture(log_p, log_q, beta)
        part = beta * p * (finite_p - log_m) + (1 - beta) * q * (finite_q - log_m)
    return torch.where(exists, part, 0)


def slopes(log_p: Tensor, log_q: Tensor, kind: int, beta: float) -> Tensor:
    """The derivative of the divergence by the log-probability of each category of the student."""
    exists = (log_p != -math.inf) | (log_q != -math.inf)
    log_p, log_q = torch.where(exists, log_p, 0), torch.where(exists, log_q, 0)
    (p, _), (q, finite) = probabilities(log_p), probabilities(log_q)
    if kind == FORWARD_KL:
        result = -p
    elif kind == REVERSE_KL:
        result = q * (finite - torch.where(q == 0, 0, log_p) + 1)
    else:
        result = (1 - beta) * q * (finite - mixture(log_p, log_q, beta))
    return torch.where(exists, result, 0)


def probabilities(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, and their logarithms with 0 for that of 0, so that their product is 0 and not NaN."""
    has_any = logprobs != -math.inf
    finite = torch.where(has_any, logprobs, 0)
    return torch.where(has_any, finite.exp(), 0), finite


def mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Log of beta * p + (1 - beta) * q."""
    return torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))


def logsumexp(values: Tensor) -> Tensor:
    """Over the last dimension; -inf where there is nothing, with a gradient of 0 instead of torch's NaN."""
    top = values.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0, top)
    total = (values - top).exp().sum(-1)
    is_empty = total == 0
    return torch.where(is_empty, -math.inf, torch.where(is_empty, 1, total).log() + top[..., 0])
