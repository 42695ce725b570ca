"""Cases of tests/kernel_cases.py over the token ids that sampling kept."""

from __future__ import annotations

from unittest import mock

import torch

import grpo_kernels as gk
from tests.row_cases import Put, Results


def kept(backend: str, put: Put) -> Results:
    """Rows of 1 to 300 ids, an ignored row without any, and widths around a tile; values and all gradients."""
    sizes = torch.tensor([1, 5, 0, 300, 256, 2])
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))
    token_ids = torch.cat([torch.randperm(310)[:size] for size in sizes.tolist()])
    targets = torch.where(sizes > 0, token_ids[(offsets[1:] - 1).clamp(min=0)], -100)
    for width, dtype in ((7, torch.float32), (260, torch.bfloat16)):
        hidden, weight, bias = (put(torch.randn(shape).to(dtype)) for shape in ((6, width), (310, width), (310,)))
        leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
        result = gk.linear_logprobs(
            hidden,
            gk.LMHead(weight, bias, softcap=9.0 if width == 7 else None),
            put(targets),
            temperature=put(torch.rand(6) + 0.5),
            support=(put(token_ids), put(offsets)),
            return_entropy=True,
            backend=backend,
        )
        yield from result
        yield from torch.autograd.grad((result.logprobs + result.entropy).sum(), leaves)


def outside_kept(backend: str, put: Put) -> Results:
    """Invalid supports: a GPU reports them only after the kernels have run, so the assertion is disabled and the
    kernels must not touch memory outside. Only the shape of the results is defined."""
    token_ids = torch.tensor([3, 9, -4, 2**62, 5])
    for bounds in ([0, 2, 5], [0, 9, 3], [2**63 - 1, -(2**63), 4], [5, 5, 5], [0, 0, 0]):
        if backend == "reference":
            yield torch.tensor([2])
            continue
        hidden, weight = put(torch.randn(2, 8)).requires_grad_(), put(torch.randn(7, 8)).requires_grad_()
        support = put(token_ids), put(torch.tensor(bounds))
        with mock.patch("torch._assert_async"), mock.patch("torch.compiler.is_compiling", return_value=True):
            logprobs = gk.linear_logprobs(hidden, weight, put(torch.tensor([3, 6])), support=support, backend=backend)
        torch.autograd.grad(logprobs.logprobs.sum(), (hidden, weight))
        yield torch.tensor(logprobs.logprobs.shape)
