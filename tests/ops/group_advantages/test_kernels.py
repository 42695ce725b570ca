"""group_advantages on every backend: values against float64, exact zeros, invariances, torch integration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.group_advantages.registration import FORWARD, SUPPORTS
from tests.harness import (
    INDUCTOR,
    assert_within_budget,
    cpu_threads,
    device_of,
    examples,
    needs_cpu_kernels,
    quick,
    runnable_backends,
)
from tests.strategies import NAN, Batch, batches, laid_out

BACKENDS = runnable_backends(SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
NAMES = gk.AdvantageConfig.names()
PRESETS = {name: gk.AdvantageConfig(name) for name in NAMES}
# Estimators whose rows depend on rows of other groups.
BATCH_STAGE = [n for n, c in PRESETS.items() if c.scale == "batch_std" or c.whiten != "none" or c.gain != "none"]
GROUP_ONLY = [name for name in NAMES if name not in BATCH_STAGE]
CENTRED = [n for n, c in PRESETS.items() if c.center in ("mean", "leave_one_out", "length", "runner_up")]
# One name for each code path.
DISTINCT = ("grpo", "rloo", "opo", "maxrl", "gdpo", "grpo_passk", "reinforce_plus_plus_baseline", "batch_std", "gpg")

# The emulated CUDA is 10 to 1000 times slower.
FAST = ("cpu", "reference") if not torch.cuda.is_available() else tuple(BACKENDS)


def for_all(backend: str, check: Callable[[Batch], None], count: int = 40, columns: tuple[int, ...] = (1,)) -> None:
    """Runs the check on random batches; fast backends get more and larger ones."""
    fast = backend in FAST
    rows = 200 if fast else 60
    batch = st.sampled_from(columns).flatmap(lambda c: batches(max_rows=rows, columns=c))
    settings(max_examples=examples(count) if fast else max(2, count // 10))(given(batch)(check))()


def run(
    batch: Batch,
    config: str | gk.AdvantageConfig,
    backend: str,
    *,
    dtype: torch.dtype = torch.float32,
    subgroups: bool = False,
    rows: Tensor | None = None,
    **changes: Any,
) -> gk.GroupAdvantages:
    """Runs the op on `rows` of the batch, by default on all of them."""
    settings_ = gk.AdvantageConfig.of(config)
    device = device_of(backend)
    arguments: dict[str, Any] = {"rewards": batch.rewards.to(device, dtype), "groups": batch.groups.to(device)}
    arguments |= batch.options(settings_, device, subgroups) | changes
    if rows is not None:
        arguments = {k: v[rows.to(v.device)] if isinstance(v, Tensor) else v for k, v in arguments.items()}
    return gk.group_advantages(
        arguments.pop("rewards"), arguments.pop("groups"), config=settings_, backend=backend, **arguments
    )


def wide_reference(batch: Batch, config: str | gk.AdvantageConfig, **options: Any) -> gk.GroupAdvantages:
    return run(batch, config, "reference", dtype=torch.float64, **options)


def assert_values(batch: Batch, config: str | gk.AdvantageConfig, backend: str, subgroups: bool = False) -> None:
    gold = wide_reference(batch, config, subgroups=subgroups)
    working = run(batch, config, "reference", subgroups=subgroups)
    got = run(batch, config, backend, subgroups=subgroups)
    for field in ("advantages", "mean", "std"):
        assert getattr(got, field).dtype == torch.float32
        assert_within_budget(getattr(got, field), getattr(working, field), getattr(gold, field), field)
    assert torch.equal(got.size.cpu(), gold.size.cpu()) and got.size.dtype == torch.int32
    assert torch.equal(got.degenerate.cpu(), gold.degenerate.cpu())
    scored = (batch.valid & (~batch.rewards.isnan()).view(len(batch.rewards), -1).any(1)).to(got.size.device)
    assert not got.advantages[got.degenerate | ~scored].any()


def assert_same(got: gk.GroupAdvantages, expected: gk.GroupAdvantages, what: str = "") -> None:
    for field in got._fields:
        one, other = getattr(got, field), getattr(expected, field)
        assert torch.equal(one, other), f"{what} {field}: {one.tolist()} instead of {other.tolist()}"


# Values


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", KERNELS)
def test_values_of_every_estimator_match_float64_reference(backend: str, name: str) -> None:
    for_all(backend, lambda batch: assert_values(batch, name, backend), columns=(1, 1, 2, 3))


# Settings that no preset uses, or only one with a batch stage.
SETTINGS = [
    gk.AdvantageConfig(center="none"),
    gk.AdvantageConfig(center="none", scale="mean"),
    gk.AdvantageConfig(center="baseline", scale="std", clip=2.0),
    gk.AdvantageConfig(center="length", scale="batch_std", singleton="parent"),
    gk.AdvantageConfig(center="leave_one_out", singleton="parent", ddof=0),
    gk.AdvantageConfig(singleton="parent", shrinkage=3.0),
    gk.AdvantageConfig(singleton="raw", shrinkage=0.5, scale="none"),
    gk.AdvantageConfig(std_floor=0.3, eps=0.0, clip=1.0),
    gk.AdvantageConfig(singleton="parent", whiten="tokens", whiten_eps=1e-3),
    gk.AdvantageConfig(singleton="parent", combine="normalize_then_sum", whiten="rows", whiten_eps=1e-3, shrinkage=2.0),
    gk.AdvantageConfig("gpg", singleton="parent", ddof=0),
]


@pytest.mark.parametrize("config", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("backend", KERNELS)
def test_values_with_subgroups_and_rare_settings_match_float64_reference(
    backend: str, config: gk.AdvantageConfig
) -> None:
    for_all(backend, lambda batch: assert_values(batch, config, backend, subgroups=True), columns=(1, 2))


# A group of 5000 rows needs several blocks; the second size leaves the last block ragged.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "opo", "grpo_passk", "trl-batch", "verl-gdpo"])
@pytest.mark.parametrize("sizes", [[5000], [1, 4097, 3]], ids=str)
@pytest.mark.parametrize("backend", quick(KERNELS, "cpu", "cuda"))
def test_values_of_large_groups_match_float64_reference(backend: str, sizes: list[int], name: str) -> None:
    n = sum(sizes)
    batch = Batch(
        rewards=torch.randn(n) + 3,
        groups=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[torch.randperm(n)],
        subgroups=torch.zeros(n, dtype=torch.int64),
        valid=torch.rand(n) > 0.1,
        lengths=torch.randint(1, 4000, (n,)),
        baselines=torch.randn(n),
    )
    assert_values(batch, name, backend)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", KERNELS)
def test_one_large_group_given_as_int_matches_float64_reference(backend: str, name: str) -> None:
    config, device = PRESETS[name], device_of(backend)
    rewards = torch.randn(5000, device=device) + 3
    rewards[::7] = NAN
    lengths = torch.randint(1, 4000, (5000,), device=device) if config.needs_lengths else None
    baselines = torch.randn(5000, device=device) if config.needs_baselines else None
    options = {"lengths": lengths, "baselines": baselines, "config": config}
    got = gk.group_advantages(rewards, 5000, backend=backend, **options)
    working = gk.group_advantages(rewards, 5000, backend="reference", **options)
    gold = gk.group_advantages(rewards.double(), 5000, backend="reference", **options)
    for field in ("advantages", "mean", "std"):
        assert_within_budget(getattr(got, field), getattr(working, field), getattr(gold, field), field)
    assert torch.equal(got.size, gold.size) and torch.equal(got.degenerate, gold.degenerate)


# float64 results differ by the summation order alone: n ulps of the largest reward, over the deviation.
@pytest.mark.parametrize(("offset", "tolerance"), [(0.0, 1e-13), (1000.0, 1e-11)])
@pytest.mark.parametrize("backend", KERNELS)
def test_float64_rewards_give_float64_results(backend: str, offset: float, tolerance: float) -> None:
    for name in NAMES:
        config, device = PRESETS[name], device_of(backend)
        rewards = torch.randn(90, dtype=torch.float64, device=device) + offset
        groups = (torch.arange(90, device=device) // 9) * (torch.arange(90, device=device) % 9 > 0)
        groups[-1] = -1  # sizes 10, 8, 7 and 1
        lengths = torch.randint(1, 40, (90,), device=device) if config.needs_lengths else None
        options = {"lengths": lengths, "baselines": rewards.roll(1) if config.needs_baselines else None}
        got = gk.group_advantages(rewards, groups, config=name, backend=backend, **options)
        gold = gk.group_advantages(rewards, groups, config=name, backend="reference", **options)
        for field in ("advantages", "mean", "std"):
            one, other = getattr(got, field), getattr(gold, field)
            assert one.dtype == torch.float64
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_rewards_are_computed_in_float32(backend: str, dtype: torch.dtype) -> None:
    half = torch.randn(24, device=device_of(backend)).to(dtype)
    got = gk.group_advantages(half, 8, backend=backend)
    assert got.advantages.dtype == got.mean.dtype == got.std.dtype == torch.float32
    assert_same(got, gk.group_advantages(half.float(), 8, backend=backend))


# Unscored rows


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", KERNELS)
def test_unscored_rows_count_for_nothing_whatever_they_hold(backend: str, name: str) -> None:
    def check(batch: Batch) -> None:
        scored = batch.valid & ~batch.rewards.isnan()
        rewards = torch.where(batch.valid, batch.rewards, float("inf"))
        result = run(batch, name, backend, rewards=rewards.to(device_of(backend)))
        kept = scored.nonzero()[:, 0]
        if len(kept):
            assert_same(
                gk.GroupAdvantages(*(f[kept.to(f.device)] for f in result)), run(batch, name, backend, rows=kept)
            )
        assert not result.advantages[(~scored).to(result.size.device)].any()

    if name in BATCH_STAGE:  # sums over the batch have a different order: equal up to the last bits
        rewards = torch.randn(20, device=device_of(backend))
        rewards[3] = rewards[11] = NAN
        batch = Batch(
            rewards, *(torch.arange(20) // 5,) * 2, torch.arange(20) != 7, torch.arange(1, 21), torch.ones(20)
        )
        kept = torch.tensor([i for i in range(20) if i not in (3, 7, 11)])
        whole, part = run(batch, name, backend), run(batch, name, backend, rows=kept)
        torch.testing.assert_close(whole.advantages[kept.to(rewards.device)], part.advantages, rtol=1e-6, atol=1e-6)
    else:
        for_all(backend, check, count=20)


# Invariances. The kernels must match bit for bit; the reference sums in an order that torch chooses.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", KERNELS)
def test_shuffling_the_rows_permutes_the_result(backend: str, name: str) -> None:
    def check(batch: Batch) -> None:
        order = torch.randperm(len(batch.groups))
        whole, shuffled = run(batch, name, backend), run(batch, name, backend, rows=order)
        expected = gk.GroupAdvantages(*(field[order.to(field.device)] for field in whole))
        if name in GROUP_ONLY:
            assert_same(shuffled, expected, name)
        else:  # a batch statistic can differ in its last bit, which shows in whitened values close to 0
            scale = float(expected.advantages.abs().amax()) + 1e-6
            assert torch.allclose(shuffled.advantages, expected.advantages, rtol=1e-6, atol=1e-6 * scale)
            assert torch.equal(shuffled.degenerate, expected.degenerate)

    for_all(backend, check, count=20)


@pytest.mark.parametrize("name", GROUP_ONLY)
@pytest.mark.parametrize("backend", KERNELS)
def test_a_group_does_not_change_with_its_neighbours(backend: str, name: str) -> None:
    def check(batch: Batch) -> None:
        whole = run(batch, name, backend)
        for group in batch.groups.unique()[:3]:
            own = (batch.groups == group).nonzero()[:, 0]
            expected = gk.GroupAdvantages(*(field[own.to(field.device)] for field in whole))
            assert_same(run(batch, name, backend, rows=own), expected, f"{name} group {group}")

    for_all(backend, check, count=20)


# 7 is no power of two, 64 fills warps, 300 needs more than one block of threads.
@pytest.mark.parametrize(("count", "size"), [(9, 1), (11, 7), (3, 64), (2, 300)])
@pytest.mark.parametrize("backend", KERNELS)
def test_int_groups_equal_ids_equal_renamed_and_interleaved_ids(backend: str, count: int, size: int) -> None:
    n, device = count * size, device_of(backend)
    batch = Batch(
        rewards=torch.randn(n),
        groups=torch.arange(count).repeat_interleave(size),
        subgroups=torch.zeros(n, dtype=torch.int64),
        valid=torch.rand(n) > 0.2,
        lengths=torch.randint(1, 99, (n,)),
        baselines=torch.randn(n),
    )
    names = torch.randint(-(2**62), 2**62, (count,))
    by_row = torch.arange(n).view(count, size).t().flatten()  # groups interleaved, the order in each group kept
    for name in (*DISTINCT, "remax") if backend in FAST else ("opo", "reinforce_plus_plus_baseline"):
        expected = run(batch, name, backend, groups=size)
        assert_same(run(batch, name, backend), expected, f"{name} ids")
        renamed = run(batch, name, backend, groups=names[batch.groups].to(device))
        mixed = run(batch, name, backend, rows=by_row)
        if name in BATCH_STAGE:
            torch.testing.assert_close(renamed.advantages, expected.advantages, rtol=1e-6, atol=1e-6)
        else:
            assert_same(renamed, expected, f"{name} renamed")
            back = by_row.argsort().to(device)
            assert_same(gk.GroupAdvantages(*(f[back] for f in mixed)), expected, f"{name} interleaved")


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_calls_agree_to_the_bit(backend: str) -> None:
    def check(batch: Batch) -> None:
        for name in ("grpo", "verl-gdpo", "trl-rloo-normalized", "gpg", "batch_std"):
            assert_same(run(batch, name, backend), run(batch, name, backend), name)

    for_all(backend, check, count=20, columns=(1, 3))


@needs_cpu_kernels
def test_number_of_threads_changes_no_bit() -> None:
    rewards, groups = torch.randn(40_000), torch.randint(0, 3000, (40_000,))
    for name in [n for n in NAMES if not PRESETS[n].needs_baselines]:
        lengths = torch.randint(1, 99, (40_000,)) if PRESETS[name].needs_lengths else None
        for chosen in (groups, 8, 20_000):
            results = []
            for threads in (1, 2, 5):
                with cpu_threads(threads):
                    results.append(gk.group_advantages(rewards, chosen, lengths=lengths, config=name, backend="cpu"))
            assert_same(results[0], results[1], name)
            assert_same(results[0], results[2], name)


@pytest.mark.parametrize("layout", ["every_other", "column"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_of_every_argument_change_nothing(backend: str, layout: str) -> None:
    device = device_of(backend)
    rewards = torch.randn(30, 3, device=device)
    groups = torch.arange(30, device=device) % 7
    options = {
        "subgroups": torch.arange(30, device=device) % 3 - 1,
        "valid": torch.arange(30, device=device) % 5 != 2,
        "lengths": torch.arange(1, 31, device=device),
    }
    expected = gk.group_advantages(rewards, groups, config="verl-gdpo", backend=backend, **options)
    options = {name: laid_out(value, layout) for name, value in options.items()}
    strided = laid_out(rewards, layout), laid_out(groups, layout)
    assert_same(gk.group_advantages(*strided, config="verl-gdpo", backend=backend, **options), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_integer_ids_equal_int64_ids(backend: str, dtype: torch.dtype) -> None:
    device = device_of(backend)
    rewards, groups = torch.randn(30, device=device), torch.arange(30, device=device) % 7
    options = {"config": "grpo", "backend": backend}
    expected = gk.group_advantages(rewards, groups, subgroups=groups % 3, **options)
    assert_same(gk.group_advantages(rewards, groups.to(dtype), subgroups=(groups % 3).to(dtype), **options), expected)


# Extremes of int64; ids with equal low or high halves; subgroup labels that overlap those of the next group.
LABELS = [
    [-(2**63), 2**63 - 1, 0, -1],
    [i << 32 for i in range(-2, 2)],
    [2**40, 2**40 + 1, 2**40 + 2**32, -(2**40)],
    [0, 1, 10, 100],
]


@pytest.mark.parametrize("labels", LABELS, ids=["ends", "low_bits", "high_bits", "decimal"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_group_ids_and_subgroup_labels_of_any_size_stay_apart(backend: str, labels: list[int]) -> None:
    device = device_of(backend)
    rewards, names = torch.randn(64, device=device), torch.tensor(labels, device=device)
    rows = torch.randperm(64, device=device)
    groups, subgroups = rows % 4, rows // 4 % 4
    options = {"config": "dr_grpo", "backend": backend}
    expected = gk.group_advantages(rewards, groups, **options)
    assert_same(gk.group_advantages(rewards, names[groups], **options), expected)
    kept = names[subgroups] >= 0
    by_hand = gk.group_advantages(rewards, groups * 4 + subgroups, valid=kept, **options).advantages
    split = gk.group_advantages(rewards, names[groups], subgroups=names[subgroups], **options)
    assert torch.equal(split.advantages, by_hand) and by_hand.any()


# torch


def forward_arguments(config: gk.AdvantageConfig, device: torch.device, full: bool, by_id: bool) -> tuple[Any, ...]:
    rewards = torch.randn(12, 2, device=device)
    groups = torch.arange(12, device=device) % 3 if by_id else None
    lengths = torch.ones(12, dtype=torch.float64, device=device) if config.needs_lengths else None
    subgroups = torch.arange(12, device=device) % 2 if full else None
    valid = rewards[:, 0] > -1 if full else None
    baselines = torch.ones(12, device=device) if config.needs_baselines else None
    group_size = 0 if by_id else 4
    lists = config.weight_list, config.modes, config.coefficients
    return rewards, groups, group_size, subgroups, valid, lengths, baselines, *lists


# Every optional tensor present and absent, integer group sizes and ids, one and several result stages.
@pytest.mark.parametrize("name", ["grpo", "verl-gdpo", "remax"])
@pytest.mark.parametrize(("full", "by_id"), [(False, False), (True, True)], ids=["int", "ids"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str, full: bool, by_id: bool, name: str) -> None:
    arguments = forward_arguments(PRESETS[name], device_of(backend), full, by_id)
    torch.library.opcheck(FORWARD[backend], arguments)


@pytest.mark.parametrize("groups", ["int", "ids"])
@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_compiles_into_one_graph(backend: str | None, groups: str) -> None:
    torch.compiler.reset()
    device = device_of(backend or "cuda")
    rewards, lengths = torch.randn(12, device=device), torch.arange(1, 13, device=device)
    chosen = 4 if groups == "int" else torch.arange(12, device=device) % 5
    config = gk.AdvantageConfig("opo", clip=0.5)

    def advantages(rewards: Tensor, groups: int | Tensor, lengths: Tensor) -> Tensor:
        return gk.group_advantages(rewards, groups, lengths=lengths, config=config, backend=backend).advantages * 2

    compiled = torch.compile(advantages, fullgraph=True, backend=INDUCTOR)
    assert torch.equal(compiled(rewards, chosen, lengths), advantages(rewards, chosen, lengths))
    assert advantages(rewards, chosen, lengths).any()
