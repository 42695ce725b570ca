"""The kernels of group_advantages against the float64 reference.

Faults that this is for: a tail of a vector, quad, warp, task or block; a one-pass variance; a wide access to rows that
are not aligned or not four; groups by id that cross blocks, buckets or the two steps of the sort; a team that reads
what another has not written; the step over a batch in one block and in several; a rounded deviation of equal rewards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_kernels as gk
from tests import emulation
from tests.emulation import launches
from tests.harness import cpu_threads, examples, needs_cpu_kernels
from tests.ops.group_advantages import cases
from tests.ops.group_advantages.cases import F64, NAN, PRESETS, assert_like_reference, call
from tests.ops.promises import Inputs

on_kernels = pytest.mark.parametrize("backend", cases.KERNELS)
# rewards whose sums are exact, so that only the last roundings of float64 differ
EXACT = ("binary", "grid", "far", "constant")
# an estimator of each code path
SOME = ("grpo", "dr_grpo", "opo", "grpo_passk", "nemo-grpo", "batch_std", "trl-rloo-normalized", "verl-gdpo")


def check(backend: str, count: int, dtype: torch.dtype, configs: Any) -> None:
    """Compares random batches with the reference; fast backends get more and larger ones."""
    is_fast = backend in cases.FAST
    rows = 200 if is_fast else 60
    batches = cases.batches(rows) if dtype == torch.float32 else cases.batches(30, EXACT, (0, 0, 1))

    def compare(inputs: Inputs, config: gk.AdvantageConfig) -> None:
        assume(cases.takes(inputs, config))
        assert_like_reference(inputs, config, backend, dtype)

    settings(max_examples=examples(count) if is_fast else max(2, examples(count) // 5))(
        given(batches, configs)(compare)
    )()


@pytest.mark.parametrize("name", PRESETS)
@on_kernels
def test_every_estimator(backend: str, name: str) -> None:
    check(backend, 30, torch.float32, st.just(PRESETS[name]))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@on_kernels
def test_any_settings(backend: str, dtype: torch.dtype) -> None:
    check(backend, 400, dtype, cases.configs())


# Sizes


def large(rows: int) -> Inputs:
    batch = {"rewards": torch.randn(rows).double() + 3, "lengths": torch.randint(1, 4000, (rows,))}
    batch["rewards"][::11] = NAN
    return batch | {"baselines": torch.randn(rows).double()}


# For one lane, several, a warp, and a block. Up to 128 rows are held in registers of a GPU, and multiples of four are
# accessed four at a time; on the CPU eight are one vector, and four such groups are computed at once.
@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 8, 9, 12, 20, 64, 124, 127, 128, 129, 132, 256, 2048, 2049, 2052])
@on_kernels
def test_sizes_of_groups(backend: str, size: int) -> None:
    count = max(3, 300 // size)
    inputs = large(count * size)
    inputs["rewards"][:size] = 0.3  # no learning signal
    # equal others of the best, and a tie for the first place
    inputs["rewards"][size : 2 * size] = (torch.arange(size) == size - 1).double()
    inputs["rewards"][2 * size : 3 * size] = (torch.arange(size) > 0).double()
    names = torch.arange(count).repeat_interleave(size)
    for name in SOME[size % 2 :: 2 if size < 2048 else 4]:
        for groups in (size, names[torch.randperm(count * size)] if size % 3 else names):
            assert_like_reference(inputs | {"groups": groups}, name, backend)


# Around one block, one task of 1,024 rows and the blocks of a second launch, with whole quads or not.
@pytest.mark.parametrize("rows", [1020, 1024, 1028, 2044, 2048, 2052, 2070])
@on_kernels
def test_sizes_of_batches(backend: str, rows: int) -> None:
    for name in ("batch_std", "gpg"):
        assert_like_reference(large(rows) | {"groups": 2}, name, backend)


# They begin in the rows of one block, or chunk of 4,096 on the CPU, and end in those of others.
@pytest.mark.parametrize(
    "sizes", [[1020, 8, 1100], [1, 1023, 1, 1024], [3000, 1, 1, 3000], [5] * 500, [1, 4097, 3]], ids=str
)
@on_kernels
def test_groups_by_id_across_blocks(backend: str, sizes: list[int]) -> None:
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    inputs = large(len(ids)) | {"groups": ids[torch.randperm(len(ids))]}
    for name in SOME[1::2]:
        assert_like_reference(inputs, name, backend)


@pytest.mark.skipif("cuda" not in cases.KERNELS, reason="the CUDA kernels do not run here")
def test_more_tasks_than_blocks() -> None:
    """Tasks of 256 singletons, one more than kMaxPartials blocks, so that a block takes two."""
    config = gk.AdvantageConfig(singleton="raw", scale="none", whiten="rows", whiten_eps=1e-8)
    assert_like_reference({"rewards": torch.randn(256 * 1024 + 3).double(), "groups": 1}, config, "cuda")


# Views that start after a multiple of 16 bytes, or of 4 for the mask.
@pytest.mark.parametrize("shift", [(0, None), (1, None), (3, 0), (0, 1), (4, 4), (2, 3)], ids=str)
@on_kernels
def test_misaligned_inputs(backend: str, shift: tuple[int, int | None]) -> None:
    rewards, valid = torch.randint(-8, 9, (104,)).double()[shift[0] :][:96], torch.rand(104) < 0.8
    inputs = {"rewards": rewards, "groups": 8} | ({} if shift[1] is None else {"valid": valid[shift[1] :][:96]})
    for name in ("grpo", "batch_std", "trl-rloo-normalized"):
        assert_like_reference(inputs, name, backend, F64)  # which the batch has already, so that it is not copied


# The CPU

ROWS = 2**18 + 7  # more than one step of the sort takes


def ids_of(kind: str) -> Tensor:
    ids = torch.randint(ROWS // 8, (ROWS,)) - ROWS // 16
    return {
        "dense": ids,
        "gaps": ids * 31,
        "sparse": ids * 0x9E3779B97F4A7C1,
        "one group has most rows": torch.where(torch.rand(ROWS) < 0.9, 17, ids),
        "all but one": (torch.arange(ROWS) != 5).long(),
        "sorted within each task": torch.arange(ROWS) % 2**14 // 8,
    }[kind]


@needs_cpu_kernels
@pytest.mark.parametrize(
    "kind", ["dense", "gaps", "sparse", "one group has most rows", "all but one", "sorted within each task"]
)
def test_many_unsorted_rows_have_the_bits_of_sorted_ones(kind: str) -> None:
    ids = ids_of(kind)
    rewards = torch.randn(ROWS).masked_fill(ids % 5 == 0, 0.7)
    rewards[::11] = NAN
    order = ids.sort(stable=True).indices
    for typed in (rewards, rewards.double()):
        want = call({"rewards": typed[order], "groups": ids[order]}, "cpu")
        for key, value in call({"rewards": typed, "groups": ids}, "cpu").items():
            assert torch.equal(value[order], want[key]), key


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["grpo", "opo", "verl-gdpo", "batch_std"])
def test_the_number_of_threads_changes_no_bit_of_many_rows(name: str) -> None:
    rewards = {"rewards": torch.randn(2**19), "lengths": torch.randint(1, 99, (2**19,))}
    for groups in (torch.randint(3000, (2**19,)), 8, 2**18):
        results = []
        for threads in (1, 2, 3):
            with cpu_threads(threads):
                results.append(call(rewards | {"groups": groups}, "cpu", name))
        for key, value in results[0].items():
            assert all(torch.equal(value, other[key]) for other in results[1:]), key


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "trl-async"])
def test_groups_of_eight_have_the_bits_of_each_alone(name: str) -> None:
    """Four of them are computed at a time, one only where fewer are left."""
    random, chosen = torch.randn(31 * 8), torch.rand(31 * 8) < 0.1
    for rewards in (
        random.view(-1, 8).where(torch.rand(31, 1) < 0.5, 0.7).flatten(),
        torch.where(chosen, -0.0, 0.0),
        random.masked_fill(chosen, NAN),
        torch.where(chosen, random * cases.INF, random).double(),
        random * 1e30,
    ):
        floor = {"std_floor": 1.0} if cases.PRESETS[name].scale.endswith("std") else {}
        for changes in ({}, {"clip": 0.5}, {"eps": 0.0, **floor}):
            config = gk.AdvantageConfig(name, **changes)
            alone = [call({"rewards": group, "groups": 8}, "cpu", config) for group in rewards.split(8)]
            for key, value in call({"rewards": rewards, "groups": 8}, "cpu", config).items():
                want = torch.cat([part[key] for part in alone])
                torch.testing.assert_close(value, want, rtol=0, atol=0, equal_nan=True)
                assert torch.equal(value.signbit(), want.signbit()) or value.isnan().any()


# CUDA


@pytest.mark.skipif("cuda" not in cases.KERNELS, reason="the CUDA kernels do not run here")
def test_more_columns_than_a_kernel_takes() -> None:
    rewards = torch.randn(4, 65)
    rule = "^group_advantages: rewards must have at most 64 columns in the CUDA kernel, got 65; use backend='reference'"
    with pytest.raises(RuntimeError, match=rule):
        gk.group_advantages(rewards, 2, backend="cuda")
    assert gk.group_advantages(rewards, 2).advantages.isfinite().all()


@emulation.only
@pytest.mark.parametrize("name", PRESETS)
def test_launches(name: str) -> None:
    """One for groups of one size; estimators over the batch take a second one above 2,048 rows."""
    config = PRESETS[name]
    is_of_batch = config.scale == "batch_std" or config.whiten != "none" or config.gain != "none"
    for rows in (64, 2048, 2052):
        inputs = large(rows) | {"groups": 4}
        assert launches(lambda: call(inputs, "cuda", config)) == 1 + (is_of_batch and rows > 2048)  # noqa: B023
