"""linear_logprobs over a support, forward and backward, beside the full head and torch's index_select.

Lower bound on the bytes, with K ids a row, N rows, a head of H columns and V ids: the forward reads K rows of the
weight and one of the hidden states for each row; so does the backward, which writes one of the hidden states' gradient
and the gradient of the weight, V H numbers, once. Only kept rows of the weight take part, so a row costs K H, not V H.
"""

from __future__ import annotations

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks import head_peers
from benchmarks.case import Bar, Case, Floor, Provider, Sweep
from benchmarks.head_peers import ON_CPU, QWEN_8B, QWEN_SMALL, Shape, case

OP = "sampled_support"
# top-k of one id, the mean of a nucleus of 0.95 as measured in prime-rl#2979, and two wider ones
KEPT = (1, 8, 32, 100)


class Inputs(head_peers.Inputs):
    """Rows that keep so many ids, frequent ones more often: rank r of the vocabulary has a share of 1 / r."""

    def __init__(self, shape: Shape, kept: int, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, device, seed)
        generator = torch.Generator(device).manual_seed(seed + 1)
        rows, columns, self.kept = shape.rows, shape.vocabulary, kept
        # ids of a row differ: the first is drawn, and a step between them, too
        share = torch.rand(rows, generator=generator, device=device)
        first = (columns**share - 1).long()
        step = 1 + torch.randint(columns // kept, (rows,), generator=generator, device=device)
        ids = (first[:, None] + step[:, None] * torch.arange(kept, device=device)) % columns
        self.targets = ids[:, 0].contiguous()
        self.token_ids = ids.sort(1).values.flatten()
        self.offsets = kept * torch.arange(rows + 1, device=device)

    @property
    def support(self) -> tuple[Tensor, Tensor]:
        return self.token_ids, self.offsets


def ours(i: Inputs) -> tuple[Tensor, ...]:
    return i.gradients(-gk.linear_logprobs(i.hidden, i.weight, i.targets, support=i.support).logprobs.mean())


def full_head(i: Inputs) -> tuple[Tensor, ...]:
    return i.gradients(-gk.linear_logprobs(i.hidden, i.weight, i.targets).logprobs.mean())


def index_select(i: Inputs) -> tuple[Tensor, ...]:
    """Rows of one size, which torch can hold in one tensor; a ragged support would have to be padded."""
    rows, width = i.hidden.shape
    kept = i.weight.index_select(0, i.token_ids).view(rows, i.kept, width)
    logits = torch.bmm(kept, i.hidden[:, :, None])[:, :, 0].float()
    is_target = i.token_ids.view(rows, i.kept) == i.targets[:, None]
    logprobs = logits.log_softmax(1).masked_fill(~is_target, 0).sum(1)
    return i.gradients(-logprobs.mean())


def floor(shape: Shape, kept: int) -> Floor:
    size = torch.empty(0, dtype=shape.dtype).element_size()
    gathers = 0 if kept == 1 else shape.rows * (2 * kept + 3)
    return Floor(bytes=size * shape.hidden * (gathers + shape.vocabulary))


def of_ids(shape: Shape, kept: int) -> Case:
    providers = Provider("index_select", index_select), Provider("full head", full_head, agrees=False)
    bars = (Bar("ratio at least", 20, "full head"),) if kept == 8 and shape.device == "cpu" else ()
    return case(OP, shape, f", {kept} ids", ours, floor(shape, kept), Inputs, kept, providers=providers, bars=bars)


CASES = [of_ids(shape, kept) for shape in (*ON_CPU, QWEN_8B, QWEN_SMALL) for kept in KEPT]
TINY = Shape(0, 64, 1024, "", "", torch.float32)
SWEEPS = [
    Sweep(
        OP,
        "forward and backward, H = 64, V = 1,024, 8 ids",
        "rows",
        tuple(8 * 10**e for e in range(5)),
        lambda device, size: Inputs(TINY._replace(rows=size), 8, device),
        ours,
        floor(TINY._replace(rows=1, vocabulary=0), 8),
        fit_from=800,
        batch=10_000,
    )
]
