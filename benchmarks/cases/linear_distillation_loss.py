"""linear_distillation_loss against its three bare matrix products and the installed peers' formulas on whole logits.

Floor: 6 N H V flops in three products. The kernels read the logits twice and write them once; what belongs to the
teacher's k ids is small.
"""

from __future__ import annotations

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Case, Floor, Provider, Sweep
from benchmarks.cases import linear_policy_loss
from benchmarks.head_peers import ON_CPU, QWEN_8B, QWEN_SMALL, Inputs, Shape, bare_products, case

OP = "linear_distillation_loss"
IDS = 64


class TaughtInputs(Inputs):
    """A teacher whose k most probable tokens are drawn at random and hold nine tenths."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, device, seed)
        generator = torch.Generator(device).manual_seed(seed + 1)
        n, vocabulary = shape.rows, shape.vocabulary
        first = torch.randint(vocabulary, (n, 1), generator=generator, device=device)
        stride = vocabulary // IDS
        self.ids = (first + stride * torch.arange(IDS, device=device)) % vocabulary
        scores = torch.randn(n, IDS, generator=generator, device=device)
        self.logprobs = scores.log_softmax(1) + torch.log(torch.tensor(0.9, device=device))

    def student(self) -> Tensor:
        return (self.hidden @ self.weight.T).float().log_softmax(-1).gather(1, self.ids)


def ours(i: TaughtInputs) -> tuple[Tensor, ...]:
    return i.gradients(gk.linear_distillation_loss(i.hidden, i.weight, gk.Teacher(i.ids, i.logprobs)).loss)


def naive(i: TaughtInputs) -> tuple[Tensor, ...]:
    student = i.student()
    rest, left = torch.log(-torch.expm1(student.logsumexp(1))), torch.log(-torch.expm1(i.logprobs.logsumexp(1)))
    divergence = (i.logprobs.exp() * (i.logprobs - student)).sum(1) + left.exp() * (left - rest)
    return i.gradients(divergence.mean())


def trl(i: TaughtInputs) -> tuple[Tensor, ...]:
    from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

    divergence = compute_divergence(add_tail_bucket(i.student()), add_tail_bucket(i.logprobs), 0.0)
    return i.gradients(divergence.mean())


def with_policy_loss(i: TaughtInputs) -> tuple[Tensor, ...]:
    return linear_policy_loss.ours(i, teacher=gk.Teacher(i.ids, i.logprobs))


def two_losses(i: TaughtInputs) -> tuple[Tensor, ...]:
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
    floor = Floor(flops=3 * shape.products)
    return case(OP, shape, f" k={IDS}", ours, floor, TaughtInputs, providers=providers, bars=bars)


def term(shape: Shape) -> Case:
    """The divergence as a term of linear_policy_loss, beside the sum of two losses with products of their own."""
    bars = Bar("ratio at least", 1.6, "two losses"), Bar("cost at most", 1.2, "linear_policy_loss")
    options = {"providers": (Provider("two losses", two_losses), POLICY_LOSS), "bars": bars}
    floor = Floor(flops=3 * shape.products)
    return case(OP, shape, f" k={IDS}, with the policy loss", with_policy_loss, floor, TaughtInputs, **options)


class WholeInputs(Inputs):
    """A teacher of the student's size, by its hidden states."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, device, seed)
        other = Inputs(shape, device, seed + 1)
        self.its_hidden, self.its_weight = other.hidden.detach(), other.weight.detach()
        self.its_logits = torch.zeros(shape.rows, shape.vocabulary, dtype=shape.dtype, device=device)


def whole(i: WholeInputs) -> tuple[Tensor, ...]:
    teacher = gk.Teacher(hidden=i.its_hidden, head=i.its_weight)
    return i.gradients(gk.linear_distillation_loss(i.hidden, i.weight, teacher).loss)


def naive_whole(i: WholeInputs) -> tuple[Tensor, ...]:
    log_q, log_p = (
        (hidden @ weight.T).float().log_softmax(-1)
        for hidden, weight in ((i.hidden, i.weight), (i.its_hidden, i.its_weight))
    )
    return i.gradients((log_p.exp() * (log_p - log_q)).sum(1).mean())


def four_products(i: WholeInputs) -> None:
    torch.mm(i.its_hidden, i.its_weight.T, out=i.its_logits)
    bare_products(i)


def of_hidden_states(shape: Shape) -> Case:
    providers = Provider("naive autograd", naive_whole), Provider("four bare products", four_products, agrees=False)
    bars = (
        Bar("cost at most", 1.15, "four bare products"),
        Bar("ratio at least", 1, "naive autograd"),
        Bar("memory below", 0.2, "naive autograd"),
    )
    floor = Floor(flops=4 * shape.products)
    return case(OP, shape, ", from hidden states", whole, floor, WholeInputs, providers=providers, bars=bars)


CASES = [make(shape) for make in (of_ids, term, of_hidden_states) for shape in (*ON_CPU, QWEN_8B, QWEN_SMALL)]
TINY = Shape(0, 64, 1024, "", "", torch.float32)
SWEEPS = [
    Sweep(
        OP,
        f"forward and backward, H = 64, V = 1,024, k = {IDS}",
        "rows",
        tuple(8 * 10**e for e in range(5)),
        lambda device, size: TaughtInputs(TINY._replace(rows=size), device),
        ours,
        Floor(flops=3 * TINY._replace(rows=1).products),
        fit_from=800,
        batch=10_000,
    )
]
