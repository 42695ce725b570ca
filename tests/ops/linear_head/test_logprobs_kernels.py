"""linear_logprobs on every backend against its float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.linear_head.registration import SUPPORTS
from tests.harness import assert_within_budget, device_of, needs_cpu_kernels, runnable_backends

KERNELS = [name for name in runnable_backends(SUPPORTS) if name != "reference"]
F64 = torch.float64


def batch(rows: int = 20, hidden: int = 6, vocabulary: int = 31) -> dict[str, Tensor]:
    """Inputs like those of a model's head: log-probs between nearly 0 and -20."""
    torch.manual_seed(1)
    targets = torch.randint(vocabulary, (rows,))
    targets[3::7] = -100
    states = torch.randn(rows, hidden).double()
    return {
        "hidden": states,
        "weight": 3 * torch.randn(vocabulary, hidden).double(),
        "bias": torch.randn(vocabulary).double(),
        "targets": targets,
    }


def run(
    given: dict[str, Tensor], backend: str, dtype: torch.dtype = F64, entropy: bool = True, **options: Any
) -> dict[str, Tensor]:
    device = device_of(backend)
    arguments = {k: (v.to(device, dtype) if v.is_floating_point() else v.to(device)) for k, v in given.items()}
    leaves = {k: arguments[k].detach().requires_grad_() for k in ("hidden", "weight", "bias") if k in arguments}
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    result = gk.linear_logprobs(**arguments | leaves, return_entropy=entropy, backend=backend, **options)
    torch.manual_seed(2)
    upstream = torch.randn(2, *result.logprobs.shape, dtype=F64).to(result.logprobs)
    upstream[:, ::4] = 0  # rows without a gradient
    total = (result.logprobs * upstream[0]).sum()
    if result.entropy is not None:
        total = total + (result.entropy * upstream[1]).sum()
    total.backward()
    results = {"logprobs": result.logprobs} | ({} if result.entropy is None else {"entropy": result.entropy})
    return {name: value.cpu() for name, value in (results | {n: leaf.grad for n, leaf in leaves.items()}).items()}


@needs_cpu_kernels
@pytest.mark.parametrize("chunk_size", [None, 1, 7, 20, 50])
@pytest.mark.parametrize("entropy", [False, True])
def test_float64_is_the_reference(entropy: bool, chunk_size: int | None) -> None:
    temperature = torch.rand(20, dtype=F64) + 0.5
    for options in ({}, {"temperature": temperature, "softcap": 7.0, "logit_scale": 0.5}):
        got = run(batch(), "cpu", entropy=entropy, chunk_size=chunk_size, **options)
        gold = run(batch(), "reference", entropy=entropy, **options)
        for what in gold:
            torch.testing.assert_close(got[what], gold[what], rtol=1e-10, atol=1e-12, msg=what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("backend", KERNELS)
def test_loses_no_more_than_torch_does(backend: str, dtype: torch.dtype) -> None:
    arguments = {k: v.to(dtype).double() if v.is_floating_point() else v for k, v in batch().items()}
    got, working = run(arguments, backend, dtype), run(arguments, "reference", dtype)
    gold = run(arguments, "reference")
    for what in gold:
        assert_within_budget(got[what], working[what], gold[what], what)
