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
class WholeTeacher:
    """Checked arguments of a distillation from hidden states: the teacher's head, and the share of each token [N].

    Both heads have the same banned ids, and the student's temperature.
    """

    head: Head
    shares: Tensor
    kind: int
    beta: float


@op_inputs
class TeacherTokens:
    """Checked arguments of a distillation: ids and log-probs [N, k], and the share of each token in the loss [N]."""

    ids: Tensor
    logprobs: Tensor
    shares: Tensor
    kind: int
    tail: int
    beta: float


def forward(head: Head, teacher: TeacherTokens) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the divergence of every token, and the student's probability of the teacher's ids."""
    teacher_ids, shares, tail = teacher.ids, teacher.shares, teacher.tail
    counts = shares != 0
    logits = logits_of(head, ~counts)
    # a token that does not count may have a temperature of NaN, which times 0 would be the weight's gradient
    z = Scaling(head.row_temperature, *head.scaling).apply(torch.where(counts[:, None], logits, 0))
    is_absent = teacher_ids == ABSENT
    columns = z.shape[1]
    at = torch.where(is_absent, columns, teacher_ids)
    padded = torch.cat([z, z.new_full((len(z), 1), -math.inf)], 1)
    chosen = padded.gather(1, at)
    others = logsumexp(padded.scatter(1, at, -math.inf))
    log_p, log_q, log_mass, _ = categories(chosen, others, teacher.logprobs, is_absent, tail)
    values = torch.where(counts, divergence(log_p, log_q, teacher.kind, teacher.beta).sum(1), 0)
    mass = torch.where(counts, log_mass.exp(), 0)
    return (shares * values).sum().to(values.dtype), values.detach(), mass.detach()


def forward_whole(head: Head, teacher: WholeTeacher) -> tuple[Tensor, Tensor]:
    """The loss and the divergence of every token, over the whole vocabulary."""
    counts = teacher.shares != 0

    def log_probs(of: Head) -> Tensor:
        logits = torch.where(counts[:, None], logits_of(of, ~counts), 0)
        z = Scaling(head.row_temperature, *of.scaling).apply(logits)
        return z - logsumexp(z)[:, None]

    with torch.no_grad():
        log_p = log_probs(teacher.head)
    values = divergence(log_p, log_probs(head), teacher.kind, teacher.beta).sum(1)
    values = torch.where(counts, values, 0)
    return (teacher.shares * values).sum().to(values.dtype), values.detach()


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
