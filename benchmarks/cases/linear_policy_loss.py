"""linear_policy_loss against its three bare matrix products and the installed peers, forward and backward.

Floor: 6 N H V flops in three products. Our kernels read the float32 logits once, and read and write
them once: 12 bytes each. On a GPU in bfloat16 they read them once and write 2 bytes: 6 each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Case, Provider
from benchmarks.head_peers import COMMON, HALVES, ON_CPU, OTHERS, SMALL, TINY, Inputs, Shape, bare_products, case, sweep
from benchmarks.head_peers import peers as peers_with

OP = "linear_policy_loss"
CONFIG = gk.LossConfig(loss="reinforce", aggregation="token-mean")
CLIP = gk.LossConfig(aggregation="token-mean")


def ours(i: Inputs, **options: Any) -> tuple[Tensor, ...]:
    kwargs = {"old_logprobs": None, "advantages": i.ones, "cu_seqlens": i.cu_seqlens, "config": CONFIG} | options
    head = kwargs.pop("head", i.weight)
    return i.gradients(gk.linear_policy_loss(i.hidden, head, i.targets, **kwargs).loss)


PEERS = peers_with(lambda i: ours(i, return_entropy=True))


def clip(i: Inputs) -> tuple[Tensor, ...]:
    return ours(i, config=CLIP, old_logprobs=i.old)


def clip_nothing(i: Inputs) -> tuple[Tensor, ...]:
    return ours(i, config=CLIP, old_logprobs=i.logprobs)


def adapted(i: Inputs) -> None:
    """Freezes the head and adds an adapter of rank 16, whose gradients take the place of the weight's."""
    freeze(i)
    i.a, i.b = ((i.random(*sizes) / 16).requires_grad_() for sizes in ((16, i.shape.hidden), (i.shape.vocabulary, 16)))
    i.leaves = i.hidden, i.a, i.b


def adapter(i: Inputs) -> tuple[Tensor, ...]:
    return ours(i, head=gk.LMHead(i.weight, lora=(i.a, i.b, 0.5)))


def freeze(i: Inputs) -> None:
    """Freezes the head, as LoRA on the layers below leaves it."""
    i.weight.requires_grad_(False)
    i.leaves = (i.hidden,)


def added(i: Inputs) -> None:
    """Adds the head's gradient to a float32 buffer of the trainer."""
    i.leaves = (i.hidden,)
    i.weight_grad = torch.zeros_like(i.weight, dtype=torch.float32)


def merged(i: Inputs) -> tuple[Tensor, ...]:
    return ours(i, head=i.weight + 0.5 * i.b @ i.a)


def some(i: Inputs) -> None:
    """Adds advantages of which half are 0, and one row in 16."""
    rows = torch.arange(len(i.ones), device=i.ones.device)
    i.half, i.sixteenth = (rows % 2).float(), rows[::16].contiguous()


ALL_ROWS = Provider("all rows", ours, agrees=False)


def cases(shape: Shape) -> list[Case]:
    is_cpu = shape.device == "cpu"
    products = 1.3 if shape is HALVES else 1.15 if is_cpu else 1.2
    bars = (
        Bar("cost at most", products, "three bare products"),
        *(Bar("ratio at least", 1, p.name) for p in PEERS if shape.device in p.devices),
        Bar("memory below", 0.5 if shape is HALVES else 0.15, "naive autograd"),
    )
    peers = {"providers": (*PEERS, Provider("three bare products", bare_products, agrees=False)), "bars": bars}
    quick = ("naive autograd",) if shape is SMALL else ()
    whole = case(OP, shape, "", ours, shape.floor(3), **({} if shape in OTHERS else peers), quick=quick)
    if shape in (HALVES, *OTHERS, *COMMON[2:]):
        return [whole]
    # the metrics need the logits of all rows; with half the advantages 0, the other two products are for half of them
    some_rows = [
        case(OP, shape, name, call, floor, some, providers=(ALL_ROWS,), bars=(bar,))
        for name, call, floor, bar in (
            (
                ", one row in 16",
                lambda i: ours(i, positions=i.sixteenth),
                shape.floor(3 / 16),
                Bar("ratio at least", 10, "all rows"),
            ),
            (
                ", half the advantages 0",
                lambda i: ours(i, advantages=i.half),
                shape.floor(2),
                Bar("ratio at least", 1.4, "all rows"),
            ),
        )
    ]
    merge = {"providers": (Provider("merged weight", merged),), "bars": (Bar("ratio at least", 1.2, "merged weight"),)}
    some_rows.append(case(OP, shape, ", an adapter of rank 16", adapter, shape.floor(2), adapted, **merge))
    if is_cpu:
        return [whole, *some_rows, *(clipped(shape, share) for share in (0.0, 0.05, 0.3, 0.5))]
    return [
        whole,
        *some_rows,
        case(OP, shape, ", a frozen weight", ours, shape.floor(2), freeze),
        case(OP, shape, ", weight_grad", lambda i: ours(i, weight_grad=i.weight_grad), shape.floor(3), added),
    ]


def clipped(shape: Shape, share: float) -> Case:
    """A batch whose ratios are 1, except for a share of tokens that PPO clips, which get no gradient."""

    def add(i: Inputs) -> None:
        i.logprobs = gk.linear_logprobs(i.hidden.detach(), i.weight.detach(), i.targets).logprobs
        i.old = i.logprobs - 0.5 * (torch.rand(len(i.logprobs), **i.options) < share)

    bars = (
        Bar("ratio at least", 1.3 if share == 0.5 else 0.9, "nothing clipped"),
        Bar("memory below", 0.4, "the logits"),  # 15 % of naive autograd's, 2.7 times the logits
    )
    options = {"providers": (Provider("nothing clipped", clip_nothing, agrees=False),), "bars": bars}
    options["arrays"] = {"the logits": lambda i: 4 * len(i.hidden) * len(i.weight)}
    return case(OP, shape, f", PPO with {share:.0%} clipped", clip, shape.floor(1 + 2 * (1 - share)), add, **options)


CASES = [one for shape in (*ON_CPU, HALVES, *COMMON, *OTHERS) for one in cases(shape)]
SWEEPS = [sweep(OP, ours, TINY.floor(3))]
