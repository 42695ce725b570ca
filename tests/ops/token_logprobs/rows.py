"""Rows of logits for the tests of token_logprobs, and comparison of results with the float64 reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.token_logprobs.registration import SUPPORTS
from tests.harness import assert_within_budget, device_of, runnable_backends

NAN, INF = float("nan"), float("inf")
BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
# Triton's interpreter and the emulated CUDA are 10 to 1000 times slower.
FAST = ("cpu", "reference") if not torch.cuda.is_available() else tuple(BACKENDS)


class Results(NamedTuple):
    logprobs: Tensor
    entropy: Tensor | None
    gradient: Tensor | None


def rows_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, spread: float = 4.0) -> tuple[Tensor, Tensor]:
    """Logits like a model's, far from 0, and targets; every third target is the likeliest token."""
    logits = (torch.randn(shape) * spread + 25).to(dtype)
    targets = torch.randint(shape[-1], shape[:-1])
    likeliest = torch.arange(targets.numel()).view(targets.shape) % 3 == 0
    return logits, torch.where(likeliest, logits.argmax(-1), targets)


def run(
    logits: Tensor,
    targets: Tensor,
    backend: str,
    upstream: tuple[Tensor | None, Tensor | None] | None = None,
    **options: Any,
) -> Results:
    """Runs the op on the backend's device; `upstream` holds the gradients of log-probability and entropy."""
    device = device_of(backend)
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    if upstream is not None:
        options["return_entropy"] = upstream[1] is not None
    leaf = logits.detach().to(device).requires_grad_(upstream is not None)
    result = gk.token_logprobs(leaf, targets.to(device), backend=backend, **options)
    if upstream is None:
        return Results(*result, None)
    pairs = [(r, u.to(device, r.dtype)) for r, u in zip(result, upstream, strict=True) if u is not None]
    (gradient,) = torch.autograd.grad([r for r, _ in pairs], leaf, [u for _, u in pairs])
    assert gradient.dtype == logits.dtype and gradient.shape == logits.shape
    return Results(*(None if r is None else r.detach() for r in result), gradient)


def upstream_of(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Upstream gradients of both results, 0 for some rows."""
    subset = torch.rand(targets.shape) > 0.2
    return torch.randn(targets.shape) * subset, torch.randn(targets.shape) * (torch.rand(targets.shape) > 0.2)


def assert_matches(
    logits: Tensor,
    targets: Tensor,
    backend: str,
    upstream: tuple[Tensor | None, Tensor | None] | None = None,
    **options: Any,
) -> Results:
    """Checks values and gradients against float64; the error budget comes from the reference on the same logits."""
    upstream = upstream_of(targets) if upstream is None else upstream
    got = run(logits, targets, backend, upstream, **options)
    working = run(logits, targets, "reference", upstream, **options)
    exact = {k: v.double() if isinstance(v, Tensor) else v for k, v in options.items()}
    gold = run(logits.double(), targets, "reference", upstream, **exact)
    for name in Results._fields:
        field = getattr(got, name)
        if field is not None:
            assert_within_budget(field, getattr(working, name), getattr(gold, name), name)
    wide = torch.promote_types(logits.dtype, torch.float32)
    assert got.logprobs.dtype == wide and got.logprobs.shape == targets.shape
    assert not (got.logprobs > 0).any()
    if got.entropy is not None:
        assert got.entropy.dtype == wide and not (got.entropy < 0).any()
    return got


def assert_same(got: Results, expected: Results, what: str = "") -> None:
    for name in Results._fields:
        one, other = getattr(got, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            same = torch.equal(one.nan_to_num(7e7), other.nan_to_num(7e7)) and torch.equal(one.isnan(), other.isnan())
            assert same, f"{what} {name}: {one} instead of {other}"
