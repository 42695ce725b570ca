"""Properties of the CPU kernels alone: batches larger than the caches are sorted in two steps."""

from __future__ import annotations

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_within_budget, cpu_threads, needs_cpu_kernels

pytestmark = needs_cpu_kernels

ROWS = 300_001  # above 2^18, the limit of one step


def ids_of(kind: str) -> torch.Tensor:
    ids = torch.randint(ROWS // 8, (ROWS,))
    return {
        "dense": ids,
        "negative": ids - ROWS,
        "gaps": ids * 31,
        "sparse": ids * 0x9E3779B97F4A7C1,
        "one group has most rows": torch.where(torch.rand(ROWS) < 0.9, 17, ids),
        "all but one in one group": (torch.arange(ROWS) != 5).long(),
        "sorted within each task": torch.arange(ROWS) % 2**14 // 8,
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        "negative",
        "gaps",
        "sparse",
        "one group has most rows",
        "all but one in one group",
        "sorted within each task",
    ],
)
@pytest.mark.parametrize("config", ["grpo", "trl-batch"])
def test_many_unsorted_rows_match_float64_reference(kind: str, config: str) -> None:
    rewards, groups = torch.randn(ROWS) + 3, ids_of(kind)
    rewards[::11] = float("nan")
    rewards[groups % 5 == 0] = 0.7
    got = gk.group_advantages(rewards, groups, config=config, backend="cpu")
    working = gk.group_advantages(rewards, groups, config=config, backend="reference")
    gold = gk.group_advantages(rewards.double(), groups, config=config, backend="reference")
    for field in ("advantages", "mean", "std"):
        assert_within_budget(getattr(got, field), getattr(working, field), getattr(gold, field), field)
    assert torch.equal(got.size, gold.size) and torch.equal(got.degenerate, gold.degenerate)


def test_number_of_threads_changes_no_bit_of_many_unsorted_rows() -> None:
    rewards, groups = torch.randn(ROWS), ids_of("dense")
    results = []
    for count in (1, 2, 3):
        with cpu_threads(count):
            results.append(gk.group_advantages(rewards, groups, config="grpo", backend="cpu"))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "flat", "zeros", "missing", "infinite", "huge"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "grpo_passk", "trl-async"])
def test_groups_of_eight_have_the_bits_of_each_alone(name: str, kind: str, dtype: torch.dtype) -> None:
    # four of them are computed at a time, one only where fewer are left
    rewards = torch.randn(31 * 8, dtype=dtype)
    chosen = torch.rand(len(rewards)) < 0.1
    rewards = {
        "random": rewards,
        "flat": rewards.view(-1, 8).where(torch.rand(31, 1) < 0.5, 0.7).reshape(-1),
        "zeros": torch.where(chosen, -0.0, 0.0).to(dtype),
        "missing": rewards.masked_fill(chosen, float("nan")),
        "infinite": torch.where(chosen, rewards * float("inf"), rewards),
        "huge": rewards * 1e30,
    }[kind]
    for changes in ({}, {"clip": 0.5}, {"std_floor": 1.0, "eps": 0.0}):
        config = gk.AdvantageConfig(name, **changes)
        alone = [gk.group_advantages(group, 8, config=config, backend="cpu") for group in rewards.split(8)]
        for groups in (8, torch.arange(31).repeat_interleave(8)):
            got = gk.group_advantages(rewards, groups, config=config, backend="cpu")
            for field, parts in zip(got, zip(*alone, strict=True), strict=True):
                expected = torch.cat(parts)
                assert torch.equal(field.nan_to_num(9.0), expected.nan_to_num(9.0))
                assert torch.equal(field.isnan(), expected.isnan())
                assert torch.equal(field.signbit(), expected.signbit()) or field.isnan().any()
