"""Rows longer than what one warp or task takes, against the reference; what lies after the rows; wrong bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.policy_loss import registration as op
from tests import harness

KERNELS = [name for name in harness.runnable_backends(op.SUPPORTS) if name != "reference"]
# More than one task of 1024 tokens, and many warps.
LENGTHS = (1500, 40, 0, 1025)
VARIANTS: dict[str, dict[str, Any]] = {
    "clip": {"kl": "k3", "kl_coef": 0.1, "aggregation": "seq-mean-token-mean", "entropy_coef": 0.01},
    "sequence": {"ratio": "sequence"},
    "segment": {"ratio": "segment_mean"},
    "geo_mean": {"loss": "geo_mean", "aggregation": "token-sum"},
    "vespo": {"loss": "vespo"},
}


def rows_of(length: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def values() -> Tensor:
        return torch.rand(length, generator=random, dtype=torch.float64).to(dtype)

    logprobs = -values()
    segments = (values() < 0.05).cumsum(0).int()
    segments = segments - segments[:1]
    drift = 0.3 * (values() - 0.5)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + drift,
        "mask": values() > 0.2,
        "segments": torch.where(values() < 0.1, -1, segments),
        "ref_logprobs": logprobs + 0.5 * (values() - 0.5),
        "policy_mask": values() > 0.1,
        "entropy": values(),
    }


def batch(dtype: torch.dtype = torch.float32, width: int | None = None) -> dict[str, Tensor]:
    """The rows packed or, given a width, padded to it with values that must not matter."""
    rows = [rows_of(length, seed, dtype) for seed, length in enumerate(LENGTHS)]
    if width is None:
        ends = torch.tensor([0, *LENGTHS]).cumsum(0)
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]} | {"cu_seqlens": ends}
    padded = {}
    for name in rows[0]:
        like = rows[0][name]
        nothing = {torch.bool: False, torch.int32: 7}.get(like.dtype, float("nan"))
        padded[name] = torch.full((len(LENGTHS), width), nothing, dtype=like.dtype)
        for row, length in enumerate(LENGTHS):
            padded[name][row, :length] = rows[row][name]
    return padded


def run(data: dict[str, Tensor], variant: str, backend: str, **more: Any) -> tuple[Tensor, ...]:
    """The loss, its gradients with respect to log-probs and entropy, and the metrics."""
    config, device = gk.LossConfig(**VARIANTS[variant]), harness.device_of(backend)
    # fresh leaves, so that gradients of several runs do not accumulate
    arguments = {name: tensor.detach().clone().to(device) for name, tensor in data.items()}
    if variant != "clip":
        del arguments["ref_logprobs"]
    if variant == "geo_mean":
        del arguments["policy_mask"]
    if not config.ratio.startswith("segment"):
        del arguments["segments"]
    logprobs = arguments.pop("logprobs").detach().requires_grad_()
    arguments["entropy"].requires_grad_()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=logprobs.dtype, device=device)
    result = gk.policy_loss(
        logprobs, arguments.pop("old_logprobs"), advantages, config=config, backend=backend, **arguments, **more
    )
    result.loss.backward()
    by_entropy = arguments["entropy"].grad
    return (
        result.loss.detach(),
        logprobs.grad if logprobs.grad is not None else torch.zeros_like(logprobs),
        by_entropy if by_entropy is not None else torch.zeros_like(logprobs),
        result.metrics.tensor,
    )


def rows_in(gradient: Tensor) -> Tensor:
    """The gradient in the packed layout, from a padded or packed one."""
    if gradient.dim() == 1:
        return gradient[: sum(LENGTHS)]
    return torch.cat([gradient[row, :length] for row, length in enumerate(LENGTHS)])


def assert_equal_bits(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("loss", "gradient", "by entropy", "metrics"), one, other, strict=True):
        if name in ("gradient", "by entropy"):
            a, b = rows_in(a), rows_in(b)
        assert torch.equal(a.nan_to_num(nan=-7.0), b.nan_to_num(nan=-7.0)), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", KERNELS)
def test_rows_of_several_parts_are_those_of_the_reference(backend: str, variant: str) -> None:
    data = batch(torch.float64)
    for got, gold in zip(run(data, variant, backend), run(data, variant, "reference"), strict=True):
        torch.testing.assert_close(got.cpu(), gold.cpu(), rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("variant", ["clip", "segment"])
@pytest.mark.parametrize("backend", KERNELS)
def test_tokens_after_the_last_row_are_of_none(backend: str, variant: str) -> None:
    data = batch()
    tail = {name: torch.cat([tensor, tensor[:1200]]) for name, tensor in data.items() if name != "cu_seqlens"}
    tail["logprobs"][sum(LENGTHS) :] = float("nan")
    result = run(tail | {"cu_seqlens": data["cu_seqlens"]}, variant, backend)
    assert_equal_bits(result, run(data, variant, backend))
    assert (result[1][sum(LENGTHS) :] == 0).all() and (result[2][sum(LENGTHS) :] == 0).all()


@pytest.mark.parametrize("backend", KERNELS)
def test_an_infinite_token_spoils_its_own_segment_only(backend: str) -> None:
    data = batch(width=1500)
    clean = run(data, "segment", backend)[1]
    taken = data["mask"][0] & (data["segments"][0] >= 0)
    at = int(taken.nonzero()[100])
    data["old_logprobs"][0, at] = -float("inf")
    spoilt = run(data, "segment", backend)[1]
    other = data["segments"][0] != data["segments"][0, at]
    assert torch.equal(spoilt[0, other], clean[0, other]) and torch.equal(spoilt[1:], clean[1:])
    assert not torch.equal(spoilt, clean)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a failed assertion on the device ends the process's use of it")
@pytest.mark.parametrize("backend", KERNELS)
def test_wrong_rows_and_segments_are_refused(backend: str) -> None:
    data = batch()
    data["cu_seqlens"] = data["cu_seqlens"].flip(0)
    with pytest.raises(RuntimeError, match="policy_loss: cu_seqlens must ascend"):
        run(data, "clip", backend)
    for wrong in (torch.arange(1500).flip(0), torch.arange(1500) // 700 + 1499):
        data = batch(width=1500)
        data["segments"][0], data["mask"][0, 1000:] = wrong.int(), False
        with pytest.raises(RuntimeError, match="policy_loss: segments must ascend from 0"):
            run(data, "segment", backend)
