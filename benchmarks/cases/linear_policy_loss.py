"""linear_policy_loss against its three bare matrix products and the installed peers, forward and backward.

Floor: 6 N H V flops in three products. Our kernels read the logits once, and read and write them once: 12 bytes each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Call, Case, Floor, Provider, Sweep
from benchmarks.head_peers import COMMON, HALVES, ON_CPU, OTHERS, SMALL, Inputs, Shape, bare_products, peers, same

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
    make = lambda device, seed: Inputs(shape, device, seed)  # noqa: E731
    common: dict[str, Any] = {
        "dtype": str(shape.dtype).removeprefix("torch."),
        "devices": (shape.device,),
        "pairs": 5,
        "same": same(shape),
        "returned": lambda i: i.gradient_bytes,
    }
    products = 1.3 if shape is HALVES else 1.15 if shape.device == "cpu" else 1.2
    whole = Case(
        OP,
        str(shape),
        shape.model,
        Floor(flops=3 * shape.products),
        make,
        ours,
        (*PEERS, Provider("three bare products", bare_products, agrees=False)),
        (
            Bar("cost at most", products, "three bare products"),
            *(Bar("ratio at least", 1, p.name) for p in PEERS if shape.device in p.devices),
            Bar("memory below", 0.5 if shape is HALVES else 0.15, "naive autograd"),
        ),
        quick=("naive autograd",) if shape is SMALL else (),
        **common,
    )
    if shape in OTHERS:
        return [replace(whole, providers=(), bars=())]
    if shape in (HALVES, *COMMON[2:]):
        return [whole]
    sparse = Case(
        OP,
        f"{shape}, one row in 16",
        shape.model,
        Floor(flops=3 * shape.products / 16),
        make,
        lambda i: ours(i, positions=i.sixteenth),
        (ALL_ROWS,),
        (Bar("ratio at least", 10, "all rows"),),
        **common,
    )
    # the metrics need the logits of all rows; the other two products are for half of them
    half = Case(
        OP,
        f"{shape}, half the advantages 0",
        shape.model,
        Floor(flops=2 * shape.products),
        make,
        lambda i: ours(i, advantages=i.half),
        (ALL_ROWS,),
        (Bar("ratio at least", 1.4, "all rows"),),
        **common,
    )
    return [
        whole,
        sparse,
        half,
        adapted(shape, common),
        *(trained(shape, *way, common) for way in TRAINED if shape.device == "cuda"),
        *(clipped(shape, share, common) for share in CLIP_RATES if shape.device == "cpu"),
    ]


def adapted(shape: Shape, common: dict[str, Any]) -> Case:
    return Case(
        OP,
        f"{shape}, an adapter of rank 16",
        shape.model,
        Floor(flops=2 * shape.products),
        lambda device, seed: AdaptedInputs(shape, device, seed),
        adapter,
        (Provider("merged weight", merged),),
        (Bar("ratio at least", 1.2, "merged weight"),),
        **common,
    )


# how the weight is trained, with the number of products
TRAINED = (
    ("a frozen weight", FrozenInputs, ours, 2),
    ("weight_grad", AddedInputs, lambda i: ours(i, weight_grad=i.weight_grad), 3),
)


def trained(shape: Shape, name: str, kind: type[Inputs], call: Call, products: int, common: dict[str, Any]) -> Case:
    floor, make = Floor(flops=products * shape.products), lambda device, seed: kind(shape, device, seed)
    return Case(OP, f"{shape}, {name}", shape.model, floor, make, call, **common)


CLIP_RATES = (0.0, 0.05, 0.3, 0.5)


def clipped(shape: Shape, share: float, common: dict[str, Any]) -> Case:
    return Case(
        OP,
        f"{shape}, PPO with {share:.0%} clipped",
        shape.model,
        Floor(flops=(1 + 2 * (1 - share)) * shape.products),
        lambda device, seed: ClippedInputs(shape, share, device, seed),
        clip,
        (Provider("nothing clipped", clip_nothing, agrees=False),),
        (
            Bar("ratio at least", 1.3 if share == 0.5 else 0.9, "nothing clipped"),
            Bar("memory below", 0.4, "the logits"),  # 15 % of naive autograd's, 2.7 times the logits
        ),
        arrays={"the logits": lambda i: 4 * len(i.hidden) * len(i.weight)},
        **common,
    )


CASES = [case for shape in (*ON_CPU, HALVES, *COMMON, *OTHERS) for case in cases(shape)]
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
