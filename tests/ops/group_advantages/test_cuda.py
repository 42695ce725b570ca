"""Properties of the CUDA kernels alone: the number of launches per call, and the same bits under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests import emulation
from tests.emulation import launches
from tests.harness import assert_within_budget

pytestmark = emulation.only


# The choice of kernels does not depend on the group sizes.
@pytest.mark.parametrize("name", gk.AdvantageConfig.names())
def test_int_groups_take_one_launch(name: str) -> None:
    config = gk.AdvantageConfig(name)
    rewards = torch.randn(64, 2) if config.combine == "normalize_then_sum" else torch.randn(64)
    more = {"lengths": torch.randint(1, 9, (64,))} if config.needs_lengths else {}
    more |= {"baselines": torch.randn(64)} if config.needs_baselines else {}
    assert launches(lambda: gk.group_advantages(rewards, 8, config=config, backend="cuda", **more)) == 1


# One block takes the step over the batch up to 2,048 rows, the blocks of a second launch beyond.
@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [("grpo", 65536, 1), ("batch_std", 2048, 1), ("batch_std", 2048 + 4, 2), ("batch_std", 65536, 2)],
)
def test_launches(name: str, rows: int, expected: int) -> None:
    rewards = torch.randn(rows)
    assert launches(lambda: gk.group_advantages(rewards, 4, config=name, backend="cuda")) == expected


def test_more_columns_than_kernel_arguments_name_a_way_out() -> None:
    rewards = torch.randn(4, 65)
    with pytest.raises(RuntimeError, match="at most 64 columns in the CUDA kernel, got 65; use backend='reference'"):
        gk.group_advantages(rewards, 2, backend="cuda")
    assert torch.isfinite(gk.group_advantages(rewards, 2, backend="cpu").advantages).all()


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


def assert_like_the_reference(
    rewards: Tensor, groups: int | Tensor, config: str | gk.AdvantageConfig, **more: Any
) -> None:
    options = {"config": config, **more}
    got = gk.group_advantages(rewards, groups, backend="cuda", **options)
    working = gk.group_advantages(rewards, groups, backend="reference", **options)
    gold = gk.group_advantages(rewards.double(), groups, backend="reference", **options)
    for field in ("advantages", "mean", "std"):
        assert_within_budget(getattr(got, field), getattr(working, field), getattr(gold, field), field)
    assert torch.equal(got.size, gold.size) and torch.equal(got.degenerate, gold.degenerate)


# Configs with kernels of their own, with and without a step over the batch.
CONFIGS = ("grpo", "dr_grpo", "batch_std", "trl-rloo-normalized")


# Sizes for one lane, several, a warp, and the whole block. Up to 128 rows are held in registers, and multiples of four
# accessed four at a time.
@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 12, 20, 64, 124, 127, 128, 129, 132, 256, 2048, 2049, 2052])
@pytest.mark.parametrize("config", CONFIGS)
def test_group_sizes_around_each_cut_over(config: str, size: int) -> None:
    count = max(2, 300 // size)
    rewards = torch.randn(count * size)
    rewards[::7] = float("nan")
    rewards[:size] = 0.3  # no learning signal
    assert_like_the_reference(rewards, size, config)
    assert_like_the_reference(rewards, torch.arange(count).repeat_interleave(size), config)


# Views that start behind a multiple of 16 bytes, or of 4 for the mask.
@pytest.mark.parametrize("rewards_shift", range(5))
@pytest.mark.parametrize("mask_shift", [None, 0, 1, 4])
@pytest.mark.parametrize("config", CONFIGS)
def test_misaligned_inputs(config: str, mask_shift: int | None, rewards_shift: int) -> None:
    rewards = torch.randn(96 + 8)[rewards_shift:][:96]
    valid = None if mask_shift is None else (torch.rand(96 + 8) < 0.8)[mask_shift:][:96]
    assert_like_the_reference(rewards, 8, config, valid=valid)


# Around one block, one task of 1,024 rows and the blocks of the second launch; the last quad is whole or not.
@pytest.mark.parametrize("rows", [1020, 1024, 1028, 2044, 2048, 2052, 2070, 5000])
@pytest.mark.parametrize("config", ["batch_std", "trl-rloo-normalized", "gpg"])
def test_rows_around_each_cut_over(config: str, rows: int) -> None:
    rewards = torch.randn(rows).round(decimals=1)
    rewards[5] = float("nan")
    assert_like_the_reference(rewards, 4 if rows % 4 == 0 else 2, config)
    assert_like_the_reference(rewards, torch.randint(0, rows // 8, (rows,)), config)


# Tasks of 256 singletons, one more than kMaxPartials blocks, so that a block takes two.
def test_more_tasks_than_blocks() -> None:
    config = gk.AdvantageConfig(singleton="raw", scale="none", whiten="rows", whiten_eps=1e-8)
    assert_like_the_reference(torch.randn(256 * 1024 + 3), 1, config)


# A group by id begins in the rows of one block and ends in those of others.
@pytest.mark.parametrize("sizes", [[1020, 8, 1100], [1, 1023, 1, 1024], [3000, 1, 1, 3000], [5] * 500])
@pytest.mark.parametrize("config", CONFIGS)
def test_groups_by_id_across_blocks(config: str, sizes: list[int]) -> None:
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    assert_like_the_reference(torch.randn(len(ids)), ids[torch.randperm(len(ids))], config)


@pytest.mark.parametrize("size", [7, 8, 128, 2050])
def test_groups_of_equal_rewards_have_no_advantage_in_a_batch_of_them(size: int) -> None:
    rewards = torch.full((4 * size,), 0.1, dtype=torch.float64)
    for name in ("batch_std", "trl-rloo-normalized"):
        result = gk.group_advantages(rewards, size, config=name, backend="cuda")
        assert not result.advantages.any() and result.degenerate.all() and torch.equal(result.mean, rewards)


# Every live advantage of a batch of singletons is the same number, so that their deviation is exactly 0.
@pytest.mark.parametrize("rows", [3, 1000, 3000])
def test_equal_advantages_have_no_deviation_over_the_batch(rows: int) -> None:
    rewards = torch.full((rows,), 0.1, dtype=torch.float64)
    config = gk.AdvantageConfig(singleton="raw", scale="none", whiten="rows", whiten_eps=1e-8)
    assert not gk.group_advantages(rewards, 1, config=config, backend="cuda").advantages.any()
