"""linear_logprobs over a support, forward and backward, beside the full head and torch's index_select.

Lower bound on the bytes, with K ids a row, N rows, a head of H columns and V ids: the forward reads K rows of the
weight and one of the hidden states for each row; so does the backward, which writes one of the hidden states' gradient
and the gradient of the weight, V H numbers, once. Only kept rows of the weight take part, so a row costs K H, not V H.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

import grpo_kernels as gk
from benchmarks.case import Bar, Case, Floor, Provider
from benchmarks.head_peers import ON_CPU, QWEN_8B, QWEN_SMALL, TINY, Inputs, Shape, case, sweep

OP = "sampled_support"
# top-k of one id, the mean of a nucleus of 0.95 as measured in prime-rl#2979, and two wider ones
KEPT = (1, 8, 32, 100)


def keep(kept: int, i: Inputs) -> None:
    """Adds rows that keep so many ids, frequent ones more often: rank r of the vocabulary has a share of 1 / r."""
    rows, columns, i.kept = i.shape.rows, i.shape.vocabulary, kept
    # ids of a row differ: the first is drawn, and a step between them, too
    first = (columns ** torch.rand(rows, **i.options) - 1).long()
    step = 1 + torch.randint(columns // kept, (rows,), **i.options)
    ids = (first[:, None] + step[:, None] * torch.arange(kept, device=first.device)) % columns
    i.targets = ids[:, 0].contiguous()
    i.support = ids.sort(1).values.flatten(), kept * torch.arange(rows + 1, device=ids.device)


def ours(i: Inputs) -> tuple[Tensor, ...]:
    return i.gradients(-gk.linear_logprobs(i.hidden, i.weight, i.targets, support=i.support).logprobs.mean())


def full_head(i: Inputs) -> tuple[Tensor, ...]:
    return i.gradients(-gk.linear_logprobs(i.hidden, i.weight, i.targets).logprobs.mean())


def index_select(i: Inputs) -> tuple[Tensor, ...]:
    """Rows of one size, which torch can hold in one tensor; a ragged support would have to be padded."""
    rows, width = i.hidden.shape
    kept = i.weight.index_select(0, i.support[0]).view(rows, i.kept, width)
    logits = torch.bmm(kept, i.hidden[:, :, None])[:, :, 0].float()
    is_target = i.support[0].view(rows, i.kept) == i.targets[:, None]
    logprobs = logits.log_softmax(1).masked_fill(~is_target, 0).sum(1)
    return i.gradients(-logprobs.mean())


def floor(shape: Shape, kept: int) -> Floor:
    size = torch.empty(0, dtype=shape.dtype).element_size()
    gathers = 0 if kept == 1 else shape.rows * (2 * kept + 3)
    return Floor(bytes=size * shape.hidden * (gathers + shape.vocabulary))


def of_ids(shape: Shape, kept: int) -> Case:
    providers = Provider("index_select", index_select), Provider("full head", full_head, agrees=False)
    bars = (Bar("ratio at least", 20, "full head"),) if kept == 8 and shape.device == "cpu" else ()
    add = functools.partial(keep, kept)
    return case(OP, shape, f", {kept} ids", ours, floor(shape, kept), add, providers=providers, bars=bars)


CASES = [of_ids(shape, kept) for shape in (*ON_CPU, QWEN_8B, QWEN_SMALL) for kept in KEPT]
SWEEPS = [sweep(OP, ours, floor(TINY._replace(vocabulary=0), 8), functools.partial(keep, 8), ", 8 ids")]
