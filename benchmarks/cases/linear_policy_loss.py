"""linear_policy_loss against its three bare matrix products and the installed peers, forward and backward.

Floor: 6 N H V flops in three products. Our kernels read the logits once, and read and write them once: 12 bytes each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Case, Floor, Provider, Sweep
from benchmarks.head_peers import COMMON, HALVES, ON_CPU, OTHERS, SMALL, Inputs, Shape, bare_products, case, peers

OP = "linear_policy_loss"
CONFIG = gk.LossConfig(loss="reinforce", aggregation="token-mean")


CLIP = gk.LossConfig(aggregation="token-mean")


def ours(i: Inputs, **options: Any) -> tuple[Tensor, ...]:
    kwargs = {"old_logprobs": None, "advantages": i.ones, "cu_seqlens": i.cu_seqlens, "config": CONFIG} | options
    head = kwargs.pop("head", i.weight)
    return i.gradients(gk.linear_policy_loss(i.hidden, head, i.targets, **kwargs).loss)


PEERS = peers(lambda i: ours(i, return_entropy=True))


class ClippedInputs(Inputs):
    """A batch whose ratios are 1, except for a share of tokens that PPO clips, which get no gradient."""

    def __init__(self, shape: Shape, share: float, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, device, seed)
        self.logprobs = gk.linear_logprobs(self.hidden.detach(), self.weight.detach(), self.targets).logprobs
        generator = torch.Generator(device).manual_seed(seed)
        chosen = torch.rand(len(self.logprobs), generator=generator, device=device) < share
        self.old = self.logprobs - 0.5 * chosen


def clip(i: ClippedInputs) -> tuple[Tensor, ...]:
    return ours(i, config=CLIP, old_logprobs=i.old)


def clip_nothing(i: ClippedInputs) -> tuple[Tensor, ...]:
    return ours(i, config=CLIP, old_logprobs=i.logprobs)


class AdaptedInputs(Inputs):
    """A frozen head with an adapter of rank 16, whose gradients take the place of the weight's."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, device, seed)
        generator = torch.Generator(device).manual_seed(seed + 1)
        for name, size in (("a", (16, shape.hidden)), ("b", (shape.vocabulary, 16))):
            factor = torch.randn(*size, generator=generator, device=device) / 16
            setattr(self, name, factor.to(shape.dtype).requires_grad_())
        self.weight.requires_grad_(False)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden, self.a, self.b))

    @property
    def gradient_bytes(self) -> int:
        return self.hidden.element_size() * (self.hidden.numel() + self.a.numel() + self.b.numel())


def adapter(i: AdaptedInputs) -> tuple[Tensor, ...]:
    return ours(i, head=gk.LMHead(i.weight, lora=(i.a, i.b, 0.5)))


class FrozenInputs(Inputs):
    """A frozen head, as LoRA on the layers below leaves it."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, device, seed)
        self.weight.requires_grad_(False)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden,))

    @property
    def gradient_bytes(self) -> int:
        return self.hidden.element_size() * self.hidden.numel()


class AddedInputs(FrozenInputs):
    """A head whose gradient is added to a float32 buffer of the trainer."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, device, seed)
        self.weight.requires_grad_()
        self.weight_grad = torch.zeros(self.weight.shape, device=device)


def merged(i: AdaptedInputs) -> tuple[Tensor, ...]:
    weight = i.weight + 0.5 * i.b @ i.a
    arguments = {"old_logprobs": None, "advantages": i.ones, "cu_seqlens": i.cu_seqlens, "config": CONFIG}
    return i.gradients(gk.linear_policy_loss(i.hidden, weight, i.targets, **arguments).loss)


ALL_ROWS = Provider("all rows", ours, agrees=False)


def cases(shape: Shape) -> list[Case]:
    is_cpu, floor = shape.device == "cpu", lambda products: Floor(flops=products * shape.products)
    products = 1.3 if shape is HALVES else 1.15 if is_cpu else 1.2
    bars = (
        Bar("cost at most", products, "three bare products"),
        *(Bar("ratio at least", 1, p.name) for p in PEERS if shape.device in p.devices),
        Bar("memory below", 0.5 if shape is HALVES else 0.15, "naive autograd"),
    )
    peers = {"providers": (*PEERS, Provider("three bare products", bare_products, agrees=False)), "bars": bars}
    quick = ("naive autograd",) if shape is SMALL else ()
    whole = case(OP, shape, "", ours, floor(3), **({} if shape in OTHERS else peers), quick=quick)
    if shape in (HALVES, *OTHERS, *COMMON[2:]):
        return [whole]
    # the metrics need the logits of all rows; with half the advantages 0, the other two products are for half of them
    half, sixteenth, lora = ", half the advantages 0", ", one row in 16", ", an adapter of rank 16"
    some_rows = [
        case(OP, shape, name, call, floor(n), providers=(ALL_ROWS,), bars=(Bar("ratio at least", limit, "all rows"),))
        for name, call, n, limit in (
            (sixteenth, lambda i: ours(i, positions=i.sixteenth), 3 / 16, 10),
            (half, lambda i: ours(i, advantages=i.half), 2, 1.4),
        )
    ]
    merge = {"providers": (Provider("merged weight", merged),), "bars": (Bar("ratio at least", 1.2, "merged weight"),)}
    adapted = case(OP, shape, lora, adapter, floor(2), AdaptedInputs, **merge)
    if is_cpu:
        return [whole, *some_rows, adapted, *(clipped(shape, share) for share in CLIP_RATES)]
    frozen = case(OP, shape, ", a frozen weight", ours, floor(2), FrozenInputs)
    added = case(OP, shape, ", weight_grad", lambda i: ours(i, weight_grad=i.weight_grad), floor(3), AddedInputs)
    return [whole, *some_rows, adapted, frozen, added]


CLIP_RATES = (0.0, 0.05, 0.3, 0.5)


def clipped(shape: Shape, share: float) -> Case:
    bars = (
        Bar("ratio at least", 1.3 if share == 0.5 else 0.9, "nothing clipped"),
        Bar("memory below", 0.4, "the logits"),  # 15 % of naive autograd's, 2.7 times the logits
    )
    options = {"providers": (Provider("nothing clipped", clip_nothing, agrees=False),), "bars": bars}
    options["arrays"] = {"the logits": lambda i: 4 * len(i.hidden) * len(i.weight)}
    floor = Floor(flops=(1 + 2 * (1 - share)) * shape.products)
    return case(OP, shape, f", PPO with {share:.0%} clipped", clip, floor, ClippedInputs, share, **options)


CASES = [one for shape in (*ON_CPU, HALVES, *COMMON, *OTHERS) for one in cases(shape)]
TINY = Shape(0, 64, 1024, "", "", torch.float32)
SWEEPS = [
    Sweep(
        OP,
        "forward and backward, H = 64, V = 1,024",
        "rows",
        tuple(8 * 10**e for e in range(5)),
        lambda device, size: Inputs(TINY._replace(rows=size), device),
        ours,
        Floor(flops=3 * TINY._replace(rows=1).products),
        fit_from=800,
        batch=10_000,
    )
]
