"""Batches that policy_loss and its installed peers are called with, and the comparison of their results."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from grpo_kernels.ops.policy_loss.registration import SUPPORTS
from tests.harness import device_of, runnable_backends
from tests.ops.policy_loss.cases import F32, F64, NAN
from tests.ops.promises import Inputs

on_dtypes = pytest.mark.parametrize(
    ("backend", "dtype"),
    [(backend, dtype) for dtype in (F64, F32) for backend in runnable_backends(SUPPORTS, dtype)],
    ids=str,
)
on_backends = pytest.mark.parametrize("backend", runnable_backends(SUPPORTS, F64))
LEAVES = ("logprobs", "entropy")


def make_batch(dtype: torch.dtype = F32, repeats: int = 1) -> Inputs:
    """Ragged rows with holes, of log ratios on both sides of the clip bounds, by token and by row; exact in float32."""
    rows, width = 6 * repeats, 11
    noise, chance = (functools.partial(draw, rows, width) for draw in (torch.randn, torch.rand))
    old = -3 * chance() - 0.7
    shift = torch.tensor([0.3, -0.35, 0.05, 0.35, -0.3, -0.05]).repeat(repeats)[:, None]
    logprobs = (old + 0.25 * noise() + shift).clamp(max=-0.02)
    batch = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "ref_logprobs": logprobs + 0.3 * noise(),
        "sampling_logprobs": old + 0.3 * noise(),
        "is_weights": (0.5 * noise()).exp(),
        "entropy": 2 * chance(),
        "advantages": torch.tensor([1.5, -0.7, -1.0, 0.0, -1.2, 0.6]).repeat(repeats),
        "token_advantages": noise() * (chance() > 0.1),
    }
    lengths = torch.tensor([11, 7, 5, 9, 4, 8]).repeat(repeats)
    mask = (torch.arange(width) < lengths[:, None]) & (chance() < 0.9)
    return {name: value.to(dtype) for name, value in batch.items()} | {"mask": mask}


def placed(batch: Inputs, backend: str) -> Inputs:
    """The batch on the backend's device, with NaN where the mask is 0; log-probs and entropy require a gradient."""
    is_out = ~batch["mask"]
    hidden = {k: v.masked_fill(is_out, NAN) if v.shape == is_out.shape and k != "mask" else v for k, v in batch.items()}
    moved = {name: value.to(device_of(backend)) for name, value in hidden.items()}
    return moved | {name: moved[name].detach().requires_grad_() for name in LEAVES}


@dataclasses.dataclass
class Result:
    loss: Tensor
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def result_of(loss: Tensor, batch: Inputs, metrics: dict[str, float]) -> Result:
    gradients = torch.autograd.grad(loss, [batch[name] for name in LEAVES], materialize_grads=True, allow_unused=True)
    return Result(loss.detach().cpu(), {n: g.cpu() for n, g in zip(LEAVES, gradients, strict=True)}, metrics)


def assert_parity(got: Result, want: Result, mask: Tensor, terms: Tensor, share: float, subset: bool = False) -> None:
    """Checks agreement within 64 roundings of the sum of terms, each a few operations in a different order.

    Args:
        terms: sum of the absolute values behind each token's term.
        share: the largest one of a term in the loss.
        subset: whether the peer may have more metrics.
    """
    unit, terms = 64 * torch.finfo(want.loss.dtype).eps, torch.where(mask, terms, 0).double()
    total, most = float(terms.sum()), float(terms.max())
    pairs = [("loss", got.loss, want.loss, total * share)]
    pairs += [
        (
            name,
            got.gradients[name],
            torch.where(mask, want.gradients[name], 0),
            min(total, mask.shape[1] * most) * share,
        )
        for name in LEAVES
    ]
    for name, ours, theirs, size in pairs:
        assert ours.dtype == theirs.dtype and ours.isfinite().all(), f"{name}: {ours}"
        error = float((ours.double() - theirs.double()).abs().max())
        assert error <= unit * size, f"{name}: error {error:.3g}, allowed {unit * size:.3g} (got {ours}, peer {theirs})"
        assert not ours.dim() or not ours[~mask].any(), f"gradient of {name} where the mask is 0"
    assert subset or set(got.metrics) == set(want.metrics)
    for key, value in got.metrics.items():
        # peers count clipped tokens in float32
        rounding = torch.finfo(F32).eps if "clip" in key else unit
        assert value == pytest.approx(want.metrics[key], rel=rounding, abs=rounding * max(1.0, most)), key
