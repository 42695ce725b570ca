"""segment_metrics against its definitions, counted row by row in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk

G = "group/"


def made(
    lengths: list[list[int]], advantages: list[float] | None = None, threshold: float = 1.0
) -> gk.EndpointSegments:
    """Padded rows with segments of these lengths; advantages default to 1, 2, 3, ..."""
    width = max((sum(row) for row in lengths), default=0) + 1
    ids = torch.full((len(lengths), width), -1, dtype=torch.int32)
    ends = torch.zeros(ids.shape, dtype=torch.bool)
    worth = torch.zeros(ids.shape)
    values = iter(advantages if advantages is not None else range(1, 10_000))
    for b, row in enumerate(lengths):
        at = 0
        for number, length in enumerate(row):
            ids[b, at : at + length] = number
            at += length
            ends[b, at - 1] = True
            worth[b, at - 1] = next(values)
    counts = torch.tensor([len(row) for row in lengths], dtype=torch.int32)
    return gk.EndpointSegments(
        worth, torch.zeros_like(worth), ends, ids, counts, torch.tensor(threshold, dtype=torch.float64)
    )


def by_hand(result: gk.EndpointSegments, uids: list[int]) -> dict[str, float]:
    """The metrics of the original implementation, in NumPy as there."""
    ids, worth = result.segment_ids.numpy(), result.advantages.numpy().astype(float)
    tokens = np.array([(row >= 0).sum() for row in ids], dtype=float)
    ends = np.array([len(set(row[row >= 0])) for row in ids], dtype=float)
    total, count = tokens.sum(), ends.sum()
    c = 1 - count / max(total, 1)
    nonzero = worth[(worth != 0) & (ids >= 0)]
    rows_of = {uid: [i for i, u in enumerate(uids) if u == uid] for uid in uids}
    sizes = np.array([len(rows) for rows in rows_of.values()], dtype=float)
    several = [ends[rows] for rows in rows_of.values() if len(rows) > 1]
    agree = [max(0.0, 1 - e.std() / e.mean()) if e.mean() > 0 else 1.0 for e in several]
    per_row = 1 - ends / np.maximum(tokens, 1)
    results = {
        "compression_ratio": c,
        "kpi_compression": c,
        "efficiency_gain": 1 / (1 - c + 1e-8),
        "kpi_efficiency": 1 / (1 - c + 1e-8),
        "algorithm_effectiveness": max(0, c - 0.1) / 0.9,
        "kpi_health": max(0, c - 0.1) / 0.9,
        "memory_saved_ratio_est": c,
        "memory_savings_est": 0.8 * c,
        "compute_savings_est": (total - count) / total,
        "speedup_factor_est": 1 / (1 - 0.7 * c),
        "total_tokens": total,
        "total_endpoints": count,
        "total_sequences": len(ids),
        "total_groups": len(rows_of),
        "avg_group_size": len(ids) / len(rows_of),
        "avg_endpoints_per_sequence": count / len(ids),
        "avg_tokens_per_sequence": total / len(ids),
        "endpoint_count_p25": np.percentile(ends, 25),
        "endpoint_count_p50": np.percentile(ends, 50),
        "endpoint_count_p75": np.percentile(ends, 75),
        "advantage_sparsity": 1 - len(nonzero) / total,
        "advantage_mean": nonzero.mean(),
        "advantage_std": nonzero.std(ddof=1),
        "advantage_abs_mean": np.abs(nonzero).mean(),
        "advantage_positive_ratio": (nonzero > 0).mean(),
        "advantage_negative_ratio": (nonzero < 0).mean(),
        "group_balance_score": 1 - sizes.std() / sizes.mean(),
        "single_endpoint_ratio": (ends == 1).mean(),
        "grouping_consistency": np.mean(agree) if agree else 1.0,
        "threshold": float(result.threshold),
    }
    for name, values in (("endpoint_count", ends), ("compression_ratio", per_row), ("group_size", sizes)):
        results |= {f"{name}_mean": values.mean(), f"{name}_std": values.std()}
        results |= {f"{name}_min": values.min(), f"{name}_max": values.max()}
    for number, rows in enumerate(list(rows_of.values())[:5]):
        of_prompt = 1 - ends[rows].sum() / max(tokens[rows].sum(), 1)
        results |= {f"group_{number}_size": len(rows), f"group_{number}_compression": of_prompt}
        results |= {f"group_{number}_tokens": tokens[rows].sum(), f"group_{number}_endpoints": ends[rows].sum()}
    return {G + name: float(value) for name, value in results.items()}


def assert_same(got: dict[str, float], expected: dict[str, float]) -> None:
    assert all(type(value) is float for value in got.values())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-12, abs=1e-12, nan_ok=True), name


def test_a_batch_made_by_hand() -> None:
    result = made([[4, 2], [1], [], [3, 3, 3, 1]], [2.0, -1.0, 0.0, 4.0, 1.0, -2.0, 1.0])
    got = gk.segment_metrics(result, torch.tensor([9, 9, -2, -2]))
    assert_same(got, by_hand(result, [9, 9, -2, -2]))
    # literal values for some of them, in case both implementations share a mistake
    assert got[G + "compression_ratio"] == pytest.approx(10 / 17)
    assert got[G + "efficiency_gain"] == pytest.approx(17 / 7)
    assert got[G + "advantage_sparsity"] == pytest.approx(11 / 17)
    assert got[G + "endpoint_count_std"] == pytest.approx(math.sqrt(2.1875))
    assert got[G + "single_endpoint_ratio"] == 0.25
    assert got[G + "grouping_consistency"] == pytest.approx((1 - 0.5 / 1.5 + 0) / 2)
    assert got[G + "group_0_endpoints"] == 3 and got[G + "group_1_tokens"] == 10


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("credit", ["endpoint", "broadcast"])
def test_random_batches(seed: int, credit: str) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows, width = 24, 50
    rewards = torch.randn(rows, width, generator=rng)
    now = -torch.rand(rows, width, generator=rng)
    old = now + 0.1 * torch.randn(rows, width, generator=rng)
    mask = torch.rand(rows, width, generator=rng) < 0.8
    mask[3] = False
    uids = torch.randint(-4, 4, (rows,), generator=rng)
    result = gk.endpoint_segments(rewards, now, old, mask, groups=uids, config={"credit": credit, "gamma": 0.9})
    assert_same(gk.segment_metrics(result, uids), by_hand(result, uids.tolist()))


def test_packed_tokens_have_the_figures_of_padded_ones() -> None:
    padded = made([[4, 2], [1], [], [3, 3, 3, 1]])
    lengths = [6, 1, 0, 10]
    # a masked token inside the second row, and tokens after the last row
    ids: list[int] = []
    worth: list[float] = []
    bounds = [0]
    for b, length in enumerate(lengths):
        ids += padded.segment_ids[b, :length].tolist() + ([-1] if b == 1 else [])
        worth += padded.advantages[b, :length].tolist() + ([0.0] if b == 1 else [])
        bounds.append(len(ids))
    packed = padded._replace(
        segment_ids=torch.tensor([*ids, -1, -1], dtype=torch.int32),
        advantages=torch.tensor([*worth, 0.0, 0.0]),
    )
    expected = gk.segment_metrics(padded, 2)
    assert_same(gk.segment_metrics(packed, 2, cu_seqlens=torch.tensor(bounds)), expected)
    assert_same(gk.segment_metrics(packed, 2, cu_seqlens=torch.tensor(bounds, dtype=torch.int32)), expected)


def test_without_groups_there_are_no_figures_of_prompts() -> None:
    result = made([[4, 2], [1]])
    expected = by_hand(result, [0, 1])
    of_prompts = [n for n in expected if n.startswith(G + "group")] + [G + "total_groups", G + "avg_group_size"]
    got = gk.segment_metrics(result)
    assert_same(got, {name: value for name, value in expected.items() if name not in of_prompts})


def test_only_five_prompts_have_figures_of_their_own() -> None:
    got = gk.segment_metrics(made([[1, 1]] * 14), 2)
    assert got[G + "total_groups"] == 7
    assert G + "group_4_size" in got and G + "group_5_size" not in got


def test_of_nothing_nothing_is_made_up() -> None:
    for result in (made([]), made([[], []])):
        got = gk.segment_metrics(result, 1)
        assert got[G + "total_tokens"] == 0
        for name in ("advantage_mean", "advantage_std", "advantage_sparsity", "compute_savings_est"):
            assert math.isnan(got[G + name]), name
    assert math.isnan(gk.segment_metrics(made([[3]]))[G + "advantage_std"])  # of a single number


def test_measured_figures_are_those_that_were_measured() -> None:
    result = made([[4]])
    names = {G + name for name in ("speedup_factor", "compute_savings", "memory_saved_ratio")}
    assert not names & gk.segment_metrics(result).keys()
    got = gk.segment_metrics(result, seconds=(3.0, 2.0), peak_bytes=(1000, 900))
    assert got[G + "speedup_factor"] == 1.5
    assert got[G + "compute_savings"] == pytest.approx(1 / 3)
    assert got[G + "memory_saved_ratio"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, r"segment_metrics: groups must divide the number of rows, 2, got 3"),
        ({"groups": 1.0}, r"segment_metrics: groups must be an int or an integer tensor, got float 1.0"),
        ({"groups": torch.zeros(3, dtype=torch.int64)}, r"segment_metrics: groups must have shape \[2\].*got \[3\]"),
        ({"cu_seqlens": torch.tensor([0, 1, 2])}, r"segment_metrics: cu_seqlens must be given for packed"),
        ({"seconds": 1.0}, r"segment_metrics: seconds must be two numbers.*got 1.0"),
        ({"seconds": (1.0, 0.0)}, r"segment_metrics: seconds must be positive and finite, got \(1.0, 0.0\)"),
        ({"peak_bytes": (math.inf, 1)}, r"segment_metrics: peak_bytes must be positive and finite, got \(inf, 1\)"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        gk.segment_metrics(made([[2], [1]]), **arguments)


def test_bad_bounds_and_results() -> None:
    result = made([[2], [1]])
    flat = result._replace(segment_ids=result.segment_ids[0], advantages=result.advantages[0])
    with pytest.raises(ValueError, match=r"segment_metrics: cu_seqlens must be given for packed tokens .* got None"):
        gk.segment_metrics(flat)
    with pytest.raises(ValueError, match=r"segment_metrics: cu_seqlens must have shape \[3\], got \[2\]"):
        gk.segment_metrics(flat, cu_seqlens=torch.tensor([0, 1]))
    nothing: Any = tuple(result)
    with pytest.raises(TypeError, match="segment_metrics: result must be EndpointSegments, got tuple"):
        gk.segment_metrics(nothing)


def test_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All counts travel to the host in one tensor, and nothing waits for the device before that."""
    result = made([[2], [1]])
    moved: list[Tensor] = []
    move = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: moved.append(self) or move(self))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        original = getattr(Tensor, name)

        def asked(self: Tensor, original: Any = original, name: str = name) -> Any:
            assert moved, f"{name} waits for the device"
            return original(self)

        monkeypatch.setattr(Tensor, name, asked)
    gk.segment_metrics(result, 1)
    assert len(moved) == 1
