"""Properties of the CUDA kernels alone: how they split rows, their launches, and the same bits under every schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests import emulation
from tests.emulation import launches
from tests.harness import needs_cpu_kernels
from tests.ops.endpoint_segments.batches import (
    CREDITS,
    PROXIES,
    RULES,
    TIE,
    assert_gold,
    assert_same,
    batch_of,
    config_of,
    plan,
)

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


# How rows are split: a thread has 8 tokens, a tile 256 of them or, from a mean length of 512 on, 2,048, and the threads
# that cut it take chunks of 32.

WIDTHS = [7, 8, 9, 31, 33, 255, 256, 257, 511, 512, 513, 2047, 2048, 2049, 4099]


@pytest.mark.parametrize("values", [True, False], ids=["critic", "prompts"])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_every_length(width: int, values: bool) -> None:
    batch = batch_of(width, 2, width, values=values, gaps=0.02, empty=0.0)
    batch = dataclasses.replace(batch, mask=batch.mask | (torch.arange(2) == 0)[:, None])
    config = config_of(gamma=0.99, lam=0.95, norm="batch")
    gold = batch.gold(config)
    assert gold.margin > TIE
    assert_gold(batch.run(config, "cuda"), gold)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mean", [300, 900], ids=["short rows", "long rows"])
def test_packed_rows_around_a_tile(mean: int, dtype: torch.dtype) -> None:
    """Rows shorter and longer than a tile, from none to several, at every offset from an aligned address."""
    lengths = torch.tensor([0, 1, mean, 2 * mean + 1, 5, 2600, 8, 0, mean - 1, 32, 257, 2048, 3])
    width = int(lengths.max())
    batch = batch_of(0, len(lengths), width, gaps=0.05).to(dtype)
    mask = batch.mask | (torch.arange(width) % 7 != 0)
    batch = dataclasses.replace(batch, mask=mask & (torch.arange(width) < lengths[:, None]))
    assert (lengths.sum() >= 512 * len(lengths)) == (mean == 900)
    for credit in CREDITS:
        config = config_of(norm="batch", credit=credit, lam=0.9)
        packed = batch.packed(behind=21)
        gold = packed.gold(config)
        assert gold.margin > TIE
        assert_gold(packed.run(config, "cuda"), gold)


def shifted(x: Tensor, offset: int) -> Tensor:
    """A contiguous copy whose first element lies `offset` elements behind an aligned address."""
    storage = torch.empty(x.numel() + 16, dtype=x.dtype)
    start = (-(storage.data_ptr() // x.element_size()) % (16 // x.element_size()) + offset) if offset else 0
    moved = storage[start : start + x.numel()].view(x.shape)
    return moved.copy_(x)


@pytest.mark.parametrize("name", ["rewards", "values", "logprobs", "old_logprobs", "mask", "all"])
@pytest.mark.parametrize("width", [64, 72, 1032, 61, 2600])
def test_alignment_changes_no_bit(width: int, name: str) -> None:
    batch = batch_of(1, 3, width, gaps=0.1, empty=0.0).to(torch.float32)
    config = config_of(norm="batch", lam=0.9)
    wanted = batch.run(config, "cuda")
    for offset in (1, 2, 3) if name == "all" else (1,):
        moved = (
            batch.map(lambda x: shifted(x, offset))  # noqa: B023
            if name == "all"
            else dataclasses.replace(batch, **{name: shifted(getattr(batch, name), offset)})
        )
        assert_same(moved.run(config, "cuda"), wanted)


@pytest.mark.parametrize("width", [200, 2200])
def test_masks_of_numbers_above_one(width: int) -> None:
    """A mask is read a byte a token; any byte other than 0 counts."""
    batch = batch_of(1, 2, width, gaps=0.2)
    numbers = batch.mask.to(torch.uint8) * (torch.arange(width) % 255 + 1).to(torch.uint8)
    assert_same(batch.run(config_of(), "cuda", mask=numbers), batch.run(config_of(), "cuda"))


# Ends of segments: the threads walk along their chunks more than once, until all agree.


@needs_cpu_kernels
@pytest.mark.parametrize("size", [1, 2, 5, 16, 31, 32, 33, 64, 1000, 10**15])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("proxy", PROXIES)
def test_ties_are_cut_as_on_the_cpu(proxy: str, rule: str, size: int) -> None:
    """Equal advantages in a row make the variances equal but for roundings, which depend on the order of the sums.

    Weights are exactly 1, and squares of advantages have exact sums, so that all else has the same bits on both.
    """
    for width, first in ((300, 45), (2500, 13)):
        random = torch.Generator().manual_seed(width)
        rewards = torch.tensor([[0.25], [0.75], [-1.25]]).expand(3, width)
        mask = torch.arange(width).expand(3, -1) >= torch.tensor([[0], [first], [first // 2]])
        mask = mask & (torch.rand(3, width, generator=random) > 0.003)
        batch = plan(rewards, mask=mask)
        certain = torch.full_like(batch.logprobs, -50.0)
        batch = dataclasses.replace(batch, logprobs=certain, old_logprobs=certain)
        for tau in (1.0, 1.0 + 2**-51):
            config = config_of(
                rule=rule, proxy=proxy, group_max_size=size, group_variance_threshold=tau, group_epsilon=1e-300, lam=0.0
            )
            ids, wanted = (batch.run(config, backend).segment_ids for backend in ("cuda", "cpu"))
            assert torch.equal(ids, wanted), f"{width}, {tau}: {int((ids != wanted).sum())} ids differ"


@pytest.mark.full
@pytest.mark.parametrize("size", [3, 16, 40, 5000])
@pytest.mark.parametrize("rule", RULES)
def test_segments_of_every_length(rule: str, size: int) -> None:
    """Advantages that drift, so that some segments end within a chunk and others span several chunks and tiles."""
    random = torch.Generator().manual_seed(size)
    drift = torch.randn(2, 4400, generator=random, dtype=torch.float64).cumsum(1) * 0.03
    batch = plan(drift, weights=torch.rand(2, 4400, generator=random, dtype=torch.float64) * 0.9 + 0.05)
    for tau in (1.2, 4.0, 1e6):
        config = config_of(rule=rule, group_max_size=size, group_variance_threshold=tau, lam=0.0)
        gold = batch.gold(config)
        assert gold.margin > TIE
        assert_gold(batch.run(config, "cuda"), gold)


@pytest.mark.parametrize("width", [300, 2300])
def test_a_row_that_is_not_finite_ends(width: int) -> None:
    """NaN differs from itself, but two walks along a row with NaN must agree."""
    batch = batch_of(4, 3, width, gaps=0.0, empty=0.0)
    batch.rewards[1, width // 2] = float("nan")
    batch.logprobs[2, 3] = float("inf")
    mask = torch.ones_like(batch.mask)
    got = dataclasses.replace(batch, mask=mask).run(config_of(norm="batch", group_max_size=16), "cuda")
    assert got.advantages[1:].isnan().all() and got.returns[1:].isnan().all()
    alone = dataclasses.replace(batch.rows(torch.arange(1)), mask=mask[:1])
    one = alone.run(config_of(norm="batch", group_max_size=16), "cuda")
    torch.testing.assert_close(got.advantages[:1], one.advantages, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [600, 2100])
def test_every_schedule_gives_the_same_bits_in_long_rows(width: int) -> None:
    batch = batch_of(7, 2, width, gaps=0.01, empty=0.0)
    results = []
    for seed in range(3):
        emulation.set_schedule(seed)
        results.append(batch.run(config_of(norm="batch", lam=0.9), "cuda"))
    for other in results[1:]:
        assert_same(other, results[0])
