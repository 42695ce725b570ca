"""linear_distillation_loss against its three bare matrix products and the installed peers' formulas on whole logits.

Floor: 6 N H V flops in three products. The kernels read the logits twice and write them once; what belongs to the
teacher's k ids is small.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Case, Provider
from benchmarks.cases import linear_policy_loss
from benchmarks.head_peers import ON_CPU, QWEN_8B, QWEN_SMALL, TINY, Inputs, Shape, bare_products, case, sweep

OP = "linear_distillation_loss"
IDS = 64


def taught(i: Inputs) -> None:
    """Adds a teacher whose k most probable tokens are drawn at random and hold nine tenths."""
    n, vocabulary = i.shape.rows, i.shape.vocabulary
    first = torch.randint(vocabulary, (n, 1), **i.options)
    i.ids = (first + vocabulary // IDS * torch.arange(IDS, device=first.device)) % vocabulary
    i.logprobs = torch.randn(n, IDS, **i.options).log_softmax(1) + math.log(0.9)


def student(i: Inputs) -> Tensor:
    return (i.hidden @ i.weight.T).float().log_softmax(-1).gather(1, i.ids)


def ours(i: Inputs) -> tuple[Tensor, ...]:
    return i.gradients(gk.linear_distillation_loss(i.hidden, i.weight, gk.Teacher(i.ids, i.logprobs)).loss)


def naive(i: Inputs) -> tuple[Tensor, ...]:
    own = student(i)
    rest, left = torch.log(-torch.expm1(own.logsumexp(1))), torch.log(-torch.expm1(i.logprobs.logsumexp(1)))
    divergence = (i.logprobs.exp() * (i.logprobs - own)).sum(1) + left.exp() * (left - rest)
    return i.gradients(divergence.mean())


def trl(i: Inputs) -> tuple[Tensor, ...]:
    from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

    divergence = compute_divergence(add_tail_bucket(student(i)), add_tail_bucket(i.logprobs), 0.0)
    return i.gradients(divergence.mean())


def with_policy_loss(i: Inputs) -> tuple[Tensor, ...]:
    return linear_policy_loss.ours(i, teacher=gk.Teacher(i.ids, i.logprobs))


def two_losses(i: Inputs) -> tuple[Tensor, ...]:
    distilled = gk.linear_distillation_loss(i.hidden, i.weight, gk.Teacher(i.ids, i.logprobs)).loss
    arguments = {"advantages": i.ones, "cu_seqlens": i.cu_seqlens, "config": linear_policy_loss.CONFIG}
    policy = gk.linear_policy_loss(i.hidden, i.weight, i.targets, None, **arguments).loss
    return i.gradients(policy + distilled)


PEERS = (Provider("naive autograd", naive), Provider("trl", trl, package="trl"))
POLICY_LOSS = Provider("linear_policy_loss", linear_policy_loss.ours, agrees=False)


def of_ids(shape: Shape) -> Case:
    providers = (*PEERS, Provider("three bare products", bare_products, agrees=False), POLICY_LOSS)
    bars = (
        Bar("cost at most", 1.25 if shape.device == "cpu" else 1.2, "three bare products"),
        Bar("cost at most", 1.2, "linear_policy_loss"),
        *(Bar("ratio at least", 1, peer.name) for peer in PEERS),
        Bar("memory below", 0.2, "naive autograd"),
    )
    return case(OP, shape, f" k={IDS}", ours, shape.floor(3), taught, providers=providers, bars=bars)


def term(shape: Shape) -> Case:
    """The divergence as a term of linear_policy_loss, beside the sum of two losses with products of their own."""
    bars = Bar("ratio at least", 1.6, "two losses"), Bar("cost at most", 1.2, "linear_policy_loss")
    options = {"providers": (Provider("two losses", two_losses), POLICY_LOSS), "bars": bars}
    return case(OP, shape, f" k={IDS}, with the policy loss", with_policy_loss, shape.floor(3), taught, **options)


def taught_whole(i: Inputs) -> None:
    """Adds a teacher of the student's size, by its hidden states."""
    n, h, v = i.shape[:3]
    i.its_hidden, i.its_weight = i.random(n, h), i.random(v, h) / h**0.5
    i.its_logits = i.hidden.new_zeros(n, v)


def whole(i: Inputs) -> tuple[Tensor, ...]:
    teacher = gk.Teacher(hidden=i.its_hidden, head=i.its_weight)
    return i.gradients(gk.linear_distillation_loss(i.hidden, i.weight, teacher).loss)


def naive_whole(i: Inputs) -> tuple[Tensor, ...]:
    log_q, log_p = (
        (hidden @ weight.T).float().log_softmax(-1)
        for hidden, weight in ((i.hidden, i.weight), (i.its_hidden, i.its_weight))
    )
    return i.gradients((log_p.exp() * (log_p - log_q)).sum(1).mean())


def four_products(i: Inputs) -> None:
    torch.mm(i.its_hidden, i.its_weight.T, out=i.its_logits)
    bare_products(i)


def of_hidden_states(shape: Shape) -> Case:
    providers = Provider("naive autograd", naive_whole), Provider("four bare products", four_products, agrees=False)
    bars = (
        Bar("cost at most", 1.15, "four bare products"),
        Bar("ratio at least", 1, "naive autograd"),
        Bar("memory below", 0.2, "naive autograd"),
    )
    return case(OP, shape, ", from hidden states", whole, shape.floor(4), taught_whole, providers=providers, bars=bars)


CASES = [make(shape) for make in (of_ids, term, of_hidden_states) for shape in (*ON_CPU, QWEN_8B, QWEN_SMALL)]
SWEEPS = [sweep(OP, ours, TINY.floor(3), taught, f", k = {IDS}")]
