"""Properties of the CUDA kernels alone: the number of launches per call, and the same bits under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests import emulation
from tests.emulation import launches

pytestmark = emulation.only


def run(critic: bool, norm: str) -> gk.EndpointSegments:
    torch.manual_seed(0)
    logprobs = -torch.rand(6, 70)
    more: dict[str, Any] = {"values": torch.randn(6, 70)} if critic else {}
    if not critic or norm == "prompt":
        more["groups"] = torch.tensor([3, 0, 3, 3, 0, -1])
    return gk.endpoint_segments(
        torch.randn(6, 70),
        logprobs,
        logprobs + 0.1 * torch.randn(6, 70),
        torch.rand(6, 70) > 0.1,
        backend="cuda",
        config={"norm": norm, "group_variance_threshold": 2.0},
        **more,
    )


@pytest.mark.parametrize("norm", ["none", "batch", "prompt"])
@pytest.mark.parametrize("critic", [True, False])
def test_launches(critic: bool, norm: str) -> None:
    # without a critic, returns and baselines are computed first; without a norm, no moments are merged
    assert launches(lambda: run(critic, norm)) == 5 + 2 * (not critic) - (norm == "none")


@pytest.mark.parametrize("norm", ["batch", "prompt"])
@pytest.mark.parametrize("critic", [True, False])
def test_every_schedule_gives_the_same_bits(critic: bool, norm: str) -> None:
    results = []
    for seed in range(4):
        emulation.set_schedule(seed)
        results.append(run(critic, norm))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))
