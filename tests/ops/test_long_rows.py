"""Rows of thousands of tokens: sums and means of 200,000 in float32, against float64, and counts.

Faults that this is for: a count that overflows; a sum over a row that is accumulated in float32. The log ratio of every
token is 0.7, which such a sum rounds in the same direction each time, in all by a tenth of a percent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import variants
from tests.harness import device_of, needs_cpu_kernels
from tests.ops.policy_loss.cases import KERNELS

TOKENS = 200_000
ROW: dict[str, Any] = {"cu_seqlens": torch.tensor([0, TOKENS])}
ONE = torch.zeros(1, dtype=torch.int64)
LOSSES = {
    ratio: gk.LossConfig(ratio=ratio, clip_low=None, clip_high=None, log_ratio_clamp=None)
    for ratio in ("sequence", "sequence_token", "segment_mean")
} | {
    "token": gk.LossConfig(kl="k2", kl_coef=0.1),
    "vespo": gk.LossConfig(loss="vespo"),
    "geo_mean": gk.LossConfig(loss="geo_mean", clip_low=None, clip_high=2.0, aggregation="token-sum"),
}
CORRECTIONS = {level: gk.CorrectionConfig(weights=level, weight_max=9.0) for level in ("token", "geometric")}
Call = Callable[[Tensor, Tensor], dict[str, Tensor]]


def loss_of(name: str, backend: str) -> Call:
    config, device = LOSSES[name], device_of(backend)

    def call(lp: Tensor, old: Tensor) -> dict[str, Tensor]:
        given = {"logprobs": lp, "old_logprobs": old, "advantages": torch.ones(1, dtype=lp.dtype), **ROW}
        if config.ratio.startswith("segment"):
            given["segments"] = torch.zeros(TOKENS, dtype=torch.int64)
        if config.kl != "none":
            given["ref_logprobs"] = lp.detach() - 1
        placed = {key: value.to(device) for key, value in given.items()}
        loss, metrics = gk.policy_loss(**placed, config=config, backend=backend)
        (gradient,) = torch.autograd.grad(loss, lp)
        return {"loss": loss.cpu(), "gradient": gradient, "metrics": metrics.tensor.cpu()}

    return call


def of_losses(lp: Tensor, old: Tensor) -> dict[str, Tensor]:
    one, two = torch.ones(1, dtype=lp.dtype), torch.ones(1, dtype=lp.dtype)
    return {
        "gvpo": variants.gvpo_loss(lp, old, one, 1, beta=1e-5, **ROW),
        "flowrl": variants.flowrl_loss(lp, old, old, one, two, clip="geometric", clip_high=9.0, **ROW),
    }


CALLS: dict[str, Call] = {
    f"policy_loss {name} {backend}": loss_of(name, backend) for name in LOSSES for backend in KERNELS
}
CALLS |= {
    "rollout_logprobs": lambda lp, old: {"": gk.rollout_logprobs(lp, old, ONE, **ROW)},
    "average_logprobs": lambda lp, old: {"": variants.average_logprobs(lp, old, **ROW)},
    "geometric_average_logprobs": lambda lp, old: {"": variants.geometric_average_logprobs(lp, old, **ROW)},
    "losses of rows": of_losses,
    "token_advantages": lambda lp, old: gk.token_advantages(lp - old, config="reinforce", **ROW)._asdict(),
    "token_shares": lambda lp, old: {"": gk.token_shares(lp < 0, **ROW)},
}
for level, correction in CORRECTIONS.items():

    def corrected(lp: Tensor, old: Tensor, config: gk.CorrectionConfig = correction) -> dict[str, Tensor]:
        weights, *_, metrics = gk.sampling_correction(lp.detach(), old, config=config, **ROW)
        return {"weights": weights, "metrics": metrics.tensor}

    CALLS[f"sampling_correction {level}"] = corrected


@needs_cpu_kernels
@pytest.mark.parametrize("name", CALLS)
def test_sums_over_a_long_row(name: str) -> None:
    lp = torch.full((TOKENS,), -0.3)
    old = lp - torch.tensor(0.7)
    got, want = (CALLS[name](lp.to(dtype).requires_grad_(), old.to(dtype)) for dtype in (torch.float32, torch.float64))
    for key, value in want.items():
        torch.testing.assert_close(got[key].double(), value.double(), rtol=1e-5, atol=0, equal_nan=True)


@needs_cpu_kernels
@pytest.mark.parametrize("backend", KERNELS)
def test_thousands_of_neighbouring_tokens_are_counted(backend: str) -> None:
    """Kernels count flags in bytes, of which a lane holds at most 255."""
    device = device_of(backend)
    lp, mask = -torch.rand(3, 9000, device=device), torch.ones(3, 9000, dtype=torch.bool, device=device)
    mask[1, 17] = mask[2, 4100:] = False
    few = mask.clone()
    few[:, ::3] = False
    metrics = gk.policy_loss(
        lp, lp, lp[:, 0], mask=mask, policy_mask=few, config=gk.LossConfig(), backend=backend
    ).metrics
    assert metrics["tokens"] == 9000 + 8999 + 4100
    assert metrics["kept_tokens"] == int(few.sum())
