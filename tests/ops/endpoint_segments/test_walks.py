"""Rows that endpoint_segments kernels walk in tiles: tile borders, sums across tiles, non-finite rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels as gk
from grpo_kernels.ops.endpoint_segments import registration as op
from tests import harness

BACKENDS = [name for name in harness.runnable_backends(op.SUPPORTS) if name == "cuda"]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("backend", BACKENDS)]

# Lengths on both sides of 32, the width of a warp.
LENGTHS = (0, 1, 31, 32, 33, 65, 545, 0)
RULES = [(rule, proxy) for rule in ("bounded", "literal") for proxy in ("coherent", "uncorrelated")]


def row_of(length: int, seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(length, generator=random, dtype=torch.float64)

    logprobs = -3 * uniform()
    mask = uniform() < 0.95
    if length > 40:  # gaps that begin or end at a window's border
        mask[31], mask[32:34], mask[-1] = False, True, False
    if length > 200:
        mask[100:170] = False
    return {
        "rewards": (uniform() < 0.1) * (uniform() - 0.5),
        "logprobs": logprobs,
        "old_logprobs": logprobs + uniform() - 0.5,
        "mask": mask,
        "values": 0.2 * (uniform() - 0.5),
    }


def packed(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    rows = [row_of(length, seed) for seed, length in enumerate(lengths)]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    return batch | {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}


def padded(lengths: tuple[int, ...], width: int) -> dict[str, Tensor]:
    """The rows stacked and padded with values that must not matter."""
    batch: dict[str, Tensor] = {}
    for seed, length in enumerate(lengths):
        for name, values in row_of(length, seed).items():
            nothing = 0 if name == "mask" else torch.nan
            rows = batch.setdefault(name, values.new_full((len(lengths), width), nothing))
            rows[seed, :length] = values
    return batch


def run(batch: dict[str, Tensor], backend: str, critic: bool = True, **more: Any) -> gk.EndpointSegments:
    device = harness.device_of(backend)
    arguments = {name: tensor.to(device) for name, tensor in batch.items() if critic or name != "values"}
    groups = more.pop("groups", None)
    rows = len(batch["cu_seqlens"]) - 1 if "cu_seqlens" in batch else len(batch["rewards"])
    if groups is None and (not critic or more.get("norm") == "prompt"):
        groups = torch.arange(rows) % 3 - 1
    return gk.endpoint_segments(
        arguments.pop("rewards"),
        arguments.pop("logprobs"),
        arguments.pop("old_logprobs"),
        backend=backend,
        config=more,
        groups=None if groups is None else groups.to(device),
        **arguments,
    )


def assert_same(got: gk.EndpointSegments, gold: gk.EndpointSegments, **tolerance: float) -> None:
    for name, a, b in zip(gold._fields, got, gold, strict=True):
        limits = tolerance if a.is_floating_point() and tolerance else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(a.cpu(), b.cpu(), equal_nan=True, msg=lambda m, n=name: f"{n}: {m}", **limits)


def in_rows(result: gk.EndpointSegments, lengths: tuple[int, ...]) -> gk.EndpointSegments:
    """Converts a padded result to the packed layout."""
    flat = [torch.cat([t[row, :length] for row, length in enumerate(lengths)]) for t in result[:4]]
    return gk.EndpointSegments(*flat, *result[4:])


@pytest.mark.parametrize(("rule", "proxy"), RULES)
@pytest.mark.parametrize("critic", [True, False])
def test_rows_and_segments_across_windows(backend: str, rule: str, proxy: str, critic: bool) -> None:
    most = {"bounded": 1000, "literal": 33}[rule] if proxy == "coherent" else 16
    settings = {"rule": rule, "proxy": proxy, "group_max_size": most, "gamma": 0.99, "lam": 0.9, "norm": "prompt"}
    settings |= {"group_variance_threshold": 9.0 if critic else 0.8, "credit": "broadcast" if critic else "endpoint"}
    batch = packed()
    assert_same(
        run(batch, backend, critic, **settings), run(batch, "reference", critic, **settings), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("most", [1, 2, 31, 32, 33, 64, 100, 1000])
def test_equal_advantages_are_cut_by_length_alone(backend: str, most: int) -> None:
    length = 330
    batch = {name: torch.full((1, length), -0.5) for name in ("logprobs", "old_logprobs")}
    batch |= {"rewards": torch.zeros(1, length), "mask": torch.ones(1, length, dtype=torch.bool)}
    batch |= {"values": torch.zeros(1, length)}
    batch["rewards"][0, -1] = 1
    result = run(batch, backend, group_max_size=most, norm="none")
    places = torch.arange(length)
    expected = ((places + 1) % most == 0) | (places == length - 1)
    assert torch.equal(result.endpoint_mask[0].cpu(), expected)
    assert torch.equal(result.segment_ids[0].cpu(), (places // most).int())
    assert torch.equal(result.advantages[0].cpu(), expected.float())
    assert result.num_segments.tolist() == [-(-length // most)]


@pytest.mark.parametrize("begin", [0, 30, 31, 32, 33, 63])
@pytest.mark.parametrize("end", [64, 65, 96, 127])
def test_a_gap_ends_a_segment_wherever_it_lies(backend: str, begin: int, end: int) -> None:
    mask = torch.ones(1, 128, dtype=torch.bool)
    mask[0, begin:end] = False
    batch = {name: torch.full((1, 128), -0.5) for name in ("logprobs", "old_logprobs", "rewards", "values")}
    result = run(batch | {"mask": mask}, backend, group_max_size=1000, group_variance_threshold=10.0, norm="none")
    ids = torch.where(torch.arange(128) < begin, 0, 1 if begin > 0 else 0).masked_fill(~mask[0], -1)
    assert torch.equal(result.segment_ids[0].cpu(), ids.int())
    assert result.endpoint_mask[0].nonzero().flatten().tolist() == ([begin - 1] if begin > 0 else []) + [127]
    gold = run(batch | {"mask": mask}, "reference", group_max_size=1000, group_variance_threshold=10.0, norm="none")
    assert_same(result, gold, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("critic", [True, False])
def test_neither_padding_nor_packing_nor_repetition_changes_a_bit(backend: str, critic: bool) -> None:
    lengths = (5, 0, 260, 33)
    settings = {"gamma": 0.99, "lam": 0.9, "norm": "batch", "group_variance_threshold": 2.0}
    once = run(packed(lengths), backend, critic, **settings)
    assert_same(run(packed(lengths), backend, critic, **settings), once)
    assert_same(in_rows(run(padded(lengths, 300), backend, critic, **settings), lengths), once)


def test_tokens_of_no_row(backend: str) -> None:
    batch, total = packed((40, 33)), 73
    wide = {name: torch.cat([t, t[:50]]) for name, t in batch.items() if name != "cu_seqlens"}
    wide["rewards"][total:] = torch.nan
    result = run(wide | {"cu_seqlens": batch["cu_seqlens"]}, backend, norm="batch")
    own = run(batch, backend, norm="batch")
    for got, expected, nothing in zip(result[:4], own[:4], (0, 0, False, -1), strict=True):
        torch.testing.assert_close(got[:total], expected, rtol=1e-12, atol=1e-12)
        assert (got[total:] == nothing).all()
    assert torch.equal(result.num_segments, own.num_segments)
    none = run(wide | {"cu_seqlens": torch.tensor([0])}, backend, norm="batch")
    for got, nothing in zip(none[:4], (0, 0, False, -1), strict=True):
        assert len(got) == total + 50 and (got == nothing).all()
    assert len(none.num_segments) == 0


@pytest.mark.parametrize("name", ["rewards", "values", "logprobs", "old_logprobs"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("credit", ["endpoint", "broadcast"])
def test_a_row_that_is_not_finite_is_left_out(backend: str, name: str, what: float, credit: str) -> None:
    lengths = (20, 70, 40, 66)
    critic = name != "rewards" or credit == "endpoint"  # without a critic, rows also share their returns
    settings: dict[str, Any] = {"norm": "prompt" if credit == "endpoint" else "batch", "credit": credit, "gamma": 0.9}
    if settings["norm"] == "prompt" or not critic:
        settings["groups"] = torch.tensor([5, 5, -1, 5])
    batch = padded(lengths, 80)
    spoilt = {key: tensor.clone() for key, tensor in batch.items()}
    at = int(batch["mask"][1].nonzero()[25])
    spoilt[name][1, at] = what
    emptied = batch | {"mask": batch["mask"].clone()}
    emptied["mask"][1] = False
    got, without = run(spoilt, backend, critic, **settings), run(emptied, backend, critic, **settings)
    others = torch.tensor([0, 2, 3])
    for a, b in zip(got[:5], without[:5], strict=True):
        assert torch.equal(a[others], b[others]) and (not a.is_floating_point() or a[others].isfinite().all())
    counts = batch["mask"][1].to(got.advantages.device)
    assert got.advantages[1][counts].isnan().all() and got.returns[1][counts].isnan().all()
    assert (got.advantages[1][~counts] == 0).all() and (got.returns[1][~counts] == 0).all()
    ids = got.segment_ids[1]
    assert (ids[~counts] == -1).all() and (ids[counts] >= 0).all() and ids.max() + 1 == got.num_segments[1]
    assert (ids[counts].diff() >= 0).all() and got.endpoint_mask[1].sum() == got.num_segments[1]


def test_what_masked_tokens_hold_does_not_matter(backend: str) -> None:
    batch = padded((20, 70, 40), 80)
    for critic in (True, False):
        zeros = {name: t.nan_to_num(0) if t.is_floating_point() else t for name, t in batch.items()}
        infinite = {name: t.nan_to_num(torch.inf) if t.is_floating_point() else t for name, t in batch.items()}
        holes = {name: t.masked_fill(~batch["mask"], -torch.inf) if name != "mask" else t for name, t in batch.items()}
        expected = run(zeros, backend, critic)
        assert expected.advantages.isfinite().all()
        for other in (batch, infinite, holes):
            assert_same(run(other, backend, critic), expected)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0), (3, 4)])
def test_nothing_to_do(backend: str, shape: tuple[int, int]) -> None:
    empty = {name: torch.full(shape, torch.nan) for name in ("rewards", "logprobs", "old_logprobs", "values")}
    for critic in (True, False):
        for norm in ("none", "batch", "prompt"):
            result = run(empty | {"mask": torch.zeros(shape, dtype=torch.bool)}, backend, critic, norm=norm)
            assert [t.shape for t in result[:4]] == [shape] * 4 and result.num_segments.tolist() == [0] * shape[0]
            assert not result.advantages.any() and not result.returns.any() and not result.endpoint_mask.any()
            assert (result.segment_ids == -1).all()


class NoWaiting(TorchDispatchMode):
    """Raises on any operation that copies a value to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("critic", [True, False])
def test_nothing_waits_for_the_device(backend: str, critic: bool) -> None:
    batch = {name: tensor.to(harness.device_of(backend)) for name, tensor in packed((40, 33)).items()}
    config = gk.SegmentConfig(norm="prompt")
    groups = torch.zeros(2, dtype=torch.int64, device=batch["rewards"].device)
    threshold = torch.ones((), dtype=torch.float64, device=groups.device)
    tokens = [batch[name] for name in ("rewards", "logprobs", "old_logprobs", "mask")]
    values = batch["values"] if critic else None
    with NoWaiting():
        op._cuda(*tokens, values, batch["cu_seqlens"], groups, threshold, config.modes, config.coefficients)
