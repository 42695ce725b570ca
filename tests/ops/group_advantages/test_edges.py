"""group_advantages without a learning signal or a finite result: exact zeros, empty batches, infinite rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.group_advantages.test_kernels import (
    BACKENDS,
    CENTRED,
    DISTINCT,
    FAST,
    GROUP_ONLY,
    KERNELS,
    NAMES,
    PRESETS,
)
from tests.strategies import NAN


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_scored_gives_zeros(backend: str, name: str) -> None:
    config, device = PRESETS[name], device_of(backend)
    options: dict[str, Any] = {"lengths": torch.ones(6, device=device) if config.needs_lengths else None}
    options["baselines"] = torch.ones(6, device=device) if config.needs_baselines else None
    nothing = torch.zeros(6, dtype=torch.bool, device=device)
    unscored = gk.group_advantages(torch.full((6,), NAN, device=device), 3, config=name, backend=backend, **options)
    rewards = torch.randn(6, device=device)
    invalid = gk.group_advantages(rewards, 3, valid=nothing, config=name, backend=backend, **options)
    for result in (unscored, invalid):
        assert not result.advantages.any() and not result.size.any()
        assert result.degenerate.all() and result.mean.isfinite().all() and result.std.isfinite().all()


@pytest.mark.parametrize("columns", [None, 2], ids=["[N]", "[N,R]"])
@pytest.mark.parametrize("groups", ["int", "ids"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch_gives_empty_results(backend: str, groups: str, columns: int | None) -> None:
    device = device_of(backend)
    shape = (0,) if columns is None else (0, columns)
    none = torch.zeros(0, device=device)
    for name, config in PRESETS.items():
        options = {"lengths": none if config.needs_lengths else None, "config": name, "backend": backend}
        options["baselines"] = none if config.needs_baselines else None
        chosen = 4 if groups == "int" else torch.zeros(0, dtype=torch.int64, device=device)
        result = gk.group_advantages(torch.zeros(shape, device=device), chosen, **options)
        assert [list(field.shape) for field in result] == [[0]] * 5, name


# Sizes and values whose rounded mean differs from the value itself, also after rounding to half precision.
EQUAL = [(8, 0.7), (8, 1000.1), (7, 0.35), (8, 0.1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_rewards_give_exact_zeros_even_beside_other_groups(backend: str, dtype: torch.dtype) -> None:
    device = device_of(backend)
    values = [value for size, value in EQUAL for _ in range(size)]
    names = [10 * i for i, (size, _) in enumerate(EQUAL) for _ in range(size)]
    rewards = torch.tensor([*values, 0.0, 1.0, 0.25, NAN], dtype=dtype, device=device)
    groups = torch.tensor([*names, 2, 2, 2, 10], device=device)
    equal = groups != 2
    lengths = torch.arange(1, len(rewards) + 1, device=device)
    for name in CENTRED if backend in FAST else DISTINCT:
        options = {"lengths": lengths if PRESETS[name].needs_lengths else None, "config": name, "backend": backend}
        result = gk.group_advantages(rewards, groups, **options)
        assert (result.advantages[equal] == 0).all(), name
        assert torch.equal(result.degenerate, equal), name
        assert (result.std[equal] == 0).all() or PRESETS[name].scale == "batch_std", name
        assert result.advantages[~equal].count_nonzero() >= 1, name
        alone = {k: v[equal] if isinstance(v, Tensor) else v for k, v in options.items()}
        assert (gk.group_advantages(rewards[equal], groups[equal], **alone).advantages == 0).all(), name
        columns = torch.stack([rewards, rewards * 3], 1)
        assert (gk.group_advantages(columns, groups, **options).advantages[equal] == 0).all(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_reward_an_ulp_away_is_not_degenerate(backend: str) -> None:
    rewards = torch.full((8,), 0.7, device=device_of(backend))
    rewards[3] = torch.nextafter(rewards[3], rewards[3] + 1)
    result = gk.group_advantages(rewards, 8, config="dr_grpo", backend=backend)
    assert not result.degenerate.any() and result.advantages[3] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_reward_spoils_its_own_group_only(backend: str) -> None:
    device = device_of(backend)
    rewards = torch.tensor([1.0, float("inf"), 2.0, 5.0, 6.0], device=device)
    groups = torch.tensor([0, 0, 0, 1, 1], device=device)
    for name in [n for n in GROUP_ONLY if PRESETS[n].center == "mean"]:
        result = gk.group_advantages(rewards, groups, config=name, backend=backend).advantages
        assert not result[1].isfinite(), name
        expected = gk.group_advantages(rewards[3:], groups[3:], config=name, backend=backend).advantages
        assert torch.equal(result[3:], expected), name


@pytest.mark.parametrize("backend", KERNELS)
def test_infinite_reward_gives_what_the_reference_gives(backend: str) -> None:
    rewards = torch.tensor([1.0, float("inf"), 2.0, 5.0, 6.0, 7.0, 8.0, 7.0], device=device_of(backend))
    floors = [gk.AdvantageConfig(std_floor=0.5), gk.AdvantageConfig("batch_std", std_floor=0.5)]
    for config in [PRESETS[n] for n in NAMES if not (PRESETS[n].needs_lengths or PRESETS[n].needs_baselines)] + floors:
        got, expected = (gk.group_advantages(rewards, 4, config=config, backend=b) for b in (backend, "reference"))
        assert torch.equal(got.advantages.isnan(), expected.advantages.isnan()), config
        assert torch.equal(got.advantages.isinf(), expected.advantages.isinf()), config
        assert torch.equal(got.std.isnan(), expected.std.isnan()), config
        assert torch.equal(got.degenerate, expected.degenerate), config


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_without_spread_gives_zeros_whatever_a_single_row_gets(backend: str) -> None:
    config = gk.AdvantageConfig("batch_std", center="none", singleton="raw")
    rewards = torch.full((6,), 3.0, device=device_of(backend))
    for groups in (1, 3):
        assert torch.equal(gk.group_advantages(rewards, groups, config=config, backend=backend).advantages, 0 * rewards)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("singleton", ["zero", "raw"])
def test_row_alone_counts_in_leave_one_out_whitening_only_if_its_advantage_is_its_reward(
    backend: str, singleton: str
) -> None:
    config = gk.AdvantageConfig("trl-rloo-normalized", singleton=singleton)
    rewards = torch.tensor([1.0, 0.0, 0.0, 4.0, 4.0, 3.0], device=device_of(backend))
    groups = torch.tensor([0, 0, 0, 1, 1, 2], device=rewards.device)
    raw = torch.tensor([1.0, -0.5, -0.5, 0.0, 0.0] + [3.0] * (singleton == "raw"))
    whitened = (raw - raw.mean()) / (raw.std() + 1e-4)
    whitened[3:5] = 0  # equal rewards give exact zeros and still count
    result = gk.group_advantages(rewards, groups, config=config, backend=backend).advantages.cpu()
    torch.testing.assert_close(result[: len(raw)], whitened, rtol=1e-6, atol=1e-7)
    assert singleton == "raw" or result[5] == 0
