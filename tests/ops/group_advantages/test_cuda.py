"""Properties of the CUDA kernels alone: the number of launches per call, and the same bits under every schedule."""

from __future__ import annotations

import pytest
import torch

import grpo_kernels as gk
from tests import emulation
from tests.emulation import launches

pytestmark = emulation.only


# 65,536 rows take the emulator seconds; the choice of kernels does not depend on the group sizes.
@pytest.mark.parametrize("name", gk.AdvantageConfig.names())
def test_int_groups_take_one_launch(name: str) -> None:
    config = gk.AdvantageConfig(name)
    rewards = torch.randn(64, 2) if config.combine == "normalize_then_sum" else torch.randn(64)
    more = {"lengths": torch.randint(1, 9, (64,))} if config.needs_lengths else {}
    more |= {"baselines": torch.randn(64)} if config.needs_baselines else {}
    assert launches(lambda: gk.group_advantages(rewards, 8, config=config, backend="cuda", **more)) == 1


@pytest.mark.parametrize(("name", "expected"), [("grpo", 1), ("batch_std", 1)])
def test_one_launch_up_to_65536_rewards(name: str, expected: int) -> None:
    rewards = torch.randn(65536)
    assert launches(lambda: gk.group_advantages(rewards, 256, config=name, backend="cuda")) == expected


def test_larger_batches_take_three_launches_for_a_batch_statistic() -> None:
    rewards = torch.randn(65536 + 256)
    assert launches(lambda: gk.group_advantages(rewards, 256, config="batch_std", backend="cuda")) == 3


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline"])
def test_same_bits_under_every_schedule(name: str) -> None:
    rewards = torch.randn(300, 2)
    groups, subgroups = torch.randint(0, 9, (300,)), torch.randint(-1, 3, (300,))
    more = {"lengths": torch.randint(1, 9, (300,))} if name == "reinforce_plus_plus_baseline" else {}
    results = []
    for seed in range(5):
        emulation.set_schedule(seed)
        results.append(gk.group_advantages(rewards, groups, subgroups=subgroups, config=name, backend="cuda", **more))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
