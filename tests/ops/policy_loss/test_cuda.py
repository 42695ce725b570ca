"""Properties of the CUDA kernels alone: the number of launches per call, and the same bits under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests import emulation
from tests.emulation import launches

pytestmark = emulation.only

CONFIGS = {
    "token": gk.LossConfig.trl(loss_type="dapo", beta=0.1),
    "sequence": gk.LossConfig.trl(loss_type="grpo", importance_sampling_level="sequence", beta=0.1),
    "segment": gk.LossConfig(ratio="segment", kl="k3", kl_coef=0.1),
    "geo_mean": gk.LossConfig.verl(loss_mode="geo_mean", use_kl_loss=True),
    "vespo": gk.LossConfig.trl(loss_type="vespo", beta=0.1),
}
ALL_KNOWN = {"tokens": 40.0, "rows": 5.0, "segments": 9.0}


def batch(rows: int = 5, width: int = 70) -> dict[str, Any]:
    torch.manual_seed(0)
    lp = -torch.rand(rows, width)
    return {
        "logprobs": lp,
        "old_logprobs": lp + 0.1 * torch.randn_like(lp),
        "advantages": torch.randn(rows),
        "ref_logprobs": lp + 0.1 * torch.randn_like(lp),
        "mask": torch.rand(rows, width) > 0.3,
        "segments": torch.arange(width).div(7, rounding_mode="floor").expand(rows, width),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_known_counts_leave_one_launch_and_a_reduction(name: str) -> None:
    options = {"config": CONFIGS[name], "normalizer": ALL_KNOWN, "backend": "cuda"}
    assert launches(lambda: gk.policy_loss(**batch(), **options)) == 2


@pytest.mark.parametrize("name", CONFIGS)
def test_counting_takes_two_launches_more(name: str) -> None:
    assert launches(lambda: gk.policy_loss(**batch(), config=CONFIGS[name], backend="cuda")) == 4


@pytest.mark.parametrize("ratio", ["segment", "segment_mean"])
def test_segments_that_do_not_ascend_are_refused(ratio: str) -> None:
    config = gk.LossConfig(ratio=ratio)
    given = batch() | {"ref_logprobs": None}
    gk.policy_loss(**given, config=config, backend="cuda")
    for wrong in (torch.arange(70).flip(0), torch.arange(70) // 7 + 64):  # one descends, one reaches the row's length
        segments = given["segments"].clone()
        segments[3] = wrong
        with pytest.raises(RuntimeError, match="policy_loss: segments must ascend from 0 along each row"):
            gk.policy_loss(**given | {"segments": segments}, config=config, backend="cuda")
    # ids at masked tokens are ignored
    segments = torch.where(given["mask"], given["segments"], 1000)
    result = gk.policy_loss(**given | {"segments": segments}, config=config, backend="cuda")
    assert torch.equal(result.loss, gk.policy_loss(**given, config=config, backend="cuda").loss)


def test_many_rows_are_reduced_in_two_steps() -> None:
    call = lambda: gk.policy_loss(**batch(1100, 2), config=CONFIGS["token"], normalizer=7.0, backend="cuda")  # noqa: E731
    assert launches(call) == 3


@pytest.mark.parametrize("name", CONFIGS)
def test_every_schedule_gives_the_same_bits(name: str) -> None:
    results = []
    for seed in range(4):
        emulation.set_schedule(seed)
        given = batch()
        leaf = given.pop("logprobs").requires_grad_()
        result = gk.policy_loss(leaf, **given, config=CONFIGS[name], backend="cuda")
        results.append((torch.autograd.grad(result.loss, leaf)[0], result.metrics.tensor.nan_to_num(-1)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(other, results[0], strict=True))
