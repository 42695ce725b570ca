"""Rows against the mean and the deviation of the others, as in NeMo-RL, by a loop over the rows."""

from __future__ import annotations

import statistics

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.ops.group_advantages.registration import SUPPORTS
from tests.harness import device_of, runnable_backends

BACKENDS = runnable_backends(SUPPORTS, torch.float64)
GROUPS = [
    [1.0, 0.0, 0.0, 1.0, 0.5],
    [0.0, 0.0, 0.0, 1.0],  # the winner's others are equal
    [2.0, 5.0],
    [0.1, 0.1, 0.1],
    [3.0],
    [0.25 * (k % 7) for k in range(50)],
]


def advantage(row: int, rewards: list[float], floor: float) -> float:
    others = rewards[:row] + rewards[row + 1 :]
    if not others or min(rewards) == max(rewards):
        return 0.0
    std = statistics.stdev(others) if len(others) > 1 else 0.0
    centred = rewards[row] - statistics.fmean(others)
    return centred / (max(std, floor) + 1e-6) if std > 0 else centred


@pytest.mark.parametrize("floor", [0.0, 0.4])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_against_the_others(backend: str, scattered: bool, floor: float) -> None:
    rewards = torch.tensor([x for group in GROUPS for x in group], dtype=torch.float64)
    ids = torch.arange(len(GROUPS)).repeat_interleave(torch.tensor([len(group) for group in GROUPS]))
    want = torch.tensor(
        [advantage(row, group, floor) for group in GROUPS for row in range(len(group))], dtype=torch.float64
    )
    order = (
        torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)) if scattered else torch.arange(len(ids))
    )
    device = device_of(backend)
    config = gk.AdvantageConfig("nemo-grpo", std_floor=floor)
    result = gk.group_advantages(rewards[order].to(device), ids[order].to(device), config=config, backend=backend)
    # the others' squares are a difference, which loses the digits of the group's largest deviation
    torch.testing.assert_close(result.advantages.cpu(), want[order], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_were_not_scored_and_several_rewards(backend: str) -> None:
    device = device_of(backend)
    first, second = [1.0, float("nan"), 0.0, 0.5], [0.0, 0.0, 2.0, 1.0]
    rewards = torch.tensor([first, second], dtype=torch.float64).T.contiguous().to(device)
    config = gk.AdvantageConfig("nemo-grpo", combine="normalize_then_sum", reward_weights=(1.0, 0.5))
    got = gk.group_advantages(rewards, 4, config=config, backend=backend).advantages.tolist()
    scored = [1.0, 0.0, 0.5]
    of_first = [advantage(0, scored, 0.0), 0.0, advantage(1, scored, 0.0), advantage(2, scored, 0.0)]
    want = [a + 0.5 * advantage(row, second, 0.0) for row, a in enumerate(of_first)]
    assert got == pytest.approx(want, rel=1e-12, abs=1e-13)


def test_refused_without_a_leave_one_out_mean() -> None:
    with pytest.raises(ValueError, match="scale must not be 'leave_one_out_std' unless center is 'leave_one_out'"):
        gk.AdvantageConfig(scale="leave_one_out_std")
