"""segment_metrics against its definitions in NumPy, and the adaptive threshold.

Faults: a wrong denominator, deviation or prefix; masked or packed tokens that count; an estimate under the name of a
measurement; more than one wait; a threshold that moves inside its band, the wrong way, too far, beyond its bounds, or
differently on every rank.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from tests.communication import on_ranks
from tests.ops.endpoint_segments.cases import batch_of, call, config_of, packed


def by_hand(result: gk.EndpointSegments, names: list[int]) -> dict[str, float]:
    """The metrics of the original implementation, in NumPy as there."""
    ids, worth = result.segment_ids.numpy(), result.advantages.numpy().astype(float)
    tokens = np.array([(row >= 0).sum() for row in ids], dtype=float)
    ends = np.array([len(set(row[row >= 0])) for row in ids], dtype=float)
    total, count = tokens.sum(), ends.sum()
    c = 1 - count / max(total, 1)
    nonzero = worth[(worth != 0) & (ids >= 0)]
    rows_of = {name: [i for i, other in enumerate(names) if other == name] for name in names}
    sizes = np.array([len(rows) for rows in rows_of.values()], dtype=float)
    several = [ends[rows] for rows in rows_of.values() if len(rows) > 1]
    agree = [max(0.0, 1 - e.std() / e.mean()) if e.mean() > 0 else 1.0 for e in several]
    results = {
        **dict.fromkeys(("compression_ratio", "kpi_compression", "memory_saved_ratio_est"), c),
        **dict.fromkeys(("efficiency_gain", "kpi_efficiency"), 1 / (1 - c + 1e-8)),
        **dict.fromkeys(("algorithm_effectiveness", "kpi_health"), max(0, c - 0.1) / 0.9),
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
        **{f"endpoint_count_p{p}": np.percentile(ends, p) for p in (25, 50, 75)},
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
    per_row = 1 - ends / np.maximum(tokens, 1)
    for name, values in (("endpoint_count", ends), ("compression_ratio", per_row), ("group_size", sizes)):
        figures = (values.mean(), values.std(), values.min(), values.max())
        results |= dict(zip((f"{name}_{part}" for part in ("mean", "std", "min", "max")), figures, strict=True))
    for number, rows in enumerate(list(rows_of.values())[:5]):
        of_prompt = (len(rows), 1 - ends[rows].sum() / max(tokens[rows].sum(), 1), tokens[rows].sum(), ends[rows].sum())
        parts = (f"group_{number}_{part}" for part in ("size", "compression", "tokens", "endpoints"))
        results |= dict(zip(parts, of_prompt, strict=True))
    return {f"group/{name}": float(value) for name, value in results.items()}


def result_of(segments: list[int], tokens: int, advantages: tuple[float, ...] = ()) -> gk.EndpointSegments:
    """One row a number of segments, and so many tokens in the first row, the last of which have these advantages."""
    ids = torch.full((len(segments), tokens + 2), -1, dtype=torch.int32)
    ids[:1, :tokens] = 0
    worth = torch.zeros(ids.shape)
    worth[:1, tokens - len(advantages) : tokens] = torch.tensor(advantages)
    one = torch.ones((), dtype=torch.float64)
    return gk.EndpointSegments(worth, 0 * worth, worth > 0, ids, torch.tensor(segments, dtype=torch.int32), one)


@pytest.mark.parametrize("credit", ["endpoint", "broadcast"])
def test_metrics_are_their_definitions(credit: str) -> None:
    for seed in range(4):
        batch = batch_of(seed, 24, 40, critic=False, prompts=5)
        ids = batch["groups"] = torch.randint(-4, 4, (24,), generator=torch.Generator().manual_seed(seed))
        config = config_of(credit=credit, norm="batch", gamma=0.9)
        result = gk.EndpointSegments(**call(batch, config, "reference"))
        want = by_hand(result, ids.tolist())
        got = gk.segment_metrics(result, ids)
        assert got == pytest.approx(want, rel=1e-12, abs=1e-12) and all(type(value) is float for value in got.values())
        flat, _ = packed(batch)
        of_flat = gk.EndpointSegments(**call(flat, config, "reference"))
        for bounds in (flat["cu_seqlens"], flat["cu_seqlens"].int()):
            assert gk.segment_metrics(of_flat, ids, cu_seqlens=bounds) == pytest.approx(want, rel=1e-9, abs=1e-9)
        of_prompts = {f"group/{name}" for name in ("total_groups", "avg_group_size", "grouping_consistency")}
        others = {name: x for name, x in want.items() if not (name in of_prompts or name.startswith("group/group_"))}
        assert gk.segment_metrics(result) == pytest.approx(others, rel=1e-12, abs=1e-12)


def test_metrics_without_a_value() -> None:
    for rows in (0, 2):
        got = gk.segment_metrics(result_of([0] * rows, 0), 1)
        assert got["group/total_tokens"] == 0 and got["group/total_groups"] == rows
        for name in ("advantage_mean", "advantage_std", "advantage_sparsity", "compute_savings_est"):
            assert math.isnan(got[f"group/{name}"]), name
    assert math.isnan(gk.segment_metrics(result_of([1], 3, (1.0,)))["group/advantage_std"])  # of a single number
    result = result_of([2], 4, (1.0, 2.0))
    measured = gk.segment_metrics(result, seconds=(3.0, 2.0), peak_bytes=(1000, 900))
    want = {"group/speedup_factor": 1.5, "group/compute_savings": 1 / 3, "group/memory_saved_ratio": 0.1}
    assert {name: measured.pop(name) for name in want} == pytest.approx(want)
    assert measured == gk.segment_metrics(result)


def test_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All counts travel to the host in one tensor, and nothing waits for the device before that."""
    result, moved, move = result_of([1, 0], 3, (1.0, 2.0)), [], Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: moved.append(self) or move(self))
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        original = getattr(Tensor, name)

        def asked(self: Tensor, original: Any = original, name: str = name) -> Any:
            assert moved, f"{name} waits for the device"
            return original(self)

        monkeypatch.setattr(Tensor, name, asked)
    gk.segment_metrics(result, 1)
    assert len(moved) == 1


# The adaptive threshold


def adapting(**fields: Any) -> gk.SegmentThreshold:
    return gk.SegmentThreshold({"group_variance_threshold": 1.5, "threshold_lr": 0.2} | fields)


@pytest.mark.parametrize("rule", ["bounded", "literal"])
def test_the_threshold_moves_outside_of_the_band(rule: str) -> None:
    """By its error, relative to the middle of the band, in a direction that depends on the rule."""
    sign = 1 if rule == "bounded" else -1
    errors = {0: -1.0, 10: -0.92, 49: -0.608, 201: 0.608, 220: 0.76, 250: 1.0, 1000: 1.0}
    for segments, error in (errors | dict.fromkeys((50, 125, 200), 0.0)).items():
        threshold = adapting(rule=rule)
        moved = threshold.update(result_of([segments - segments // 3, segments // 3], 1000))
        assert moved == threshold.value == pytest.approx(1.5 * math.exp(sign * 0.2 * error), rel=1e-14), segments
    assert adapting(rule=rule).update(result_of([0, 0], 0)) == 1.5
    assert adapting(adaptive_threshold=False).update(result_of([900, 0], 1000)) == 1.5
    ends = {"min_threshold": 1.4, "max_threshold": 1.6, "rule": rule}
    assert {adapting(**ends).update(result_of([n, 0], 1000)) for n in (1, 900)} == {1.4, 1.6}


@pytest.mark.parametrize("rule", ["bounded", "literal"])
@pytest.mark.parametrize("start", [0.1, 10.0])
def test_adaptation_brings_the_share_of_endpoints_into_the_band(rule: str, start: float) -> None:
    """Neighbours are alike, by a moving average, so that the band is reachable from both sides, and stays reached."""
    random = torch.Generator().manual_seed(5)
    noise = torch.randn(1, 1024 + 31, generator=random, dtype=torch.float64)
    batch = batch_of(0, 1, 1024, gaps=0.0, empty=-1.0) | {"mask": torch.ones(1, 1024, dtype=torch.bool)}
    rewards = (0.5 * noise.unfold(1, 32, 1).mean(2) * 32**0.5).exp()
    batch |= {"rewards": rewards, "values": torch.zeros_like(rewards)}
    bounds = {"min_threshold": 0.01, "max_threshold": 100.0, "group_variance_threshold": start}
    threshold = adapting(rule=rule, lam=0.0, norm="none", **bounds)
    shares = []
    for _ in range(40):
        result = gk.EndpointSegments(**call(batch, threshold.config, None, threshold=threshold))
        shares.append(float(result.num_segments.sum()) / 1024)
        threshold.update(result)
    outside = [share for share in shares if not 0.05 <= share <= 0.20]
    assert len(outside) < 30 and shares[: len(outside)] == outside


def test_a_fixed_threshold_has_no_bounds() -> None:
    fixed = gk.SegmentConfig(adaptive_threshold=False, min_threshold=0.5, max_threshold=0.6, norm="none")
    batch = batch_of(0, 2, 5)
    for tau in (1e-3, 50.0):
        result = gk.EndpointSegments(**call(batch, fixed, None, threshold=tau))
        assert result.threshold == tau
        threshold = gk.SegmentThreshold(dataclasses.replace(fixed, group_variance_threshold=tau))
        threshold.load_state_dict({"value": tau})
        assert threshold.update(result) == tau


def test_ranks_agree_on_what_their_joined_batch_gives() -> None:
    """All tokens of the first rank are endpoints, 4 of 150 of the second, 44 of 190 together."""
    parts = [result_of([40, 0], 40), result_of([4, 0], 150)]
    group: Any = object()

    def updated(**fields: Any) -> list[float]:
        return on_ranks([lambda part=part: adapting(**fields).update(part, group) for part in parts], group)

    together, alone = updated(), {adapting().update(part) for part in parts}
    assert together == [adapting().update(result_of([44, 0], 190))] * 2 and not alone & {*together}
    assert updated(adaptive_threshold=False) == [1.5, 1.5]


def test_the_state_survives_json() -> None:
    threshold, again = adapting(), adapting()
    threshold.update(result_of([900, 0], 1000))
    again.load_state_dict(json.loads(json.dumps(threshold.state_dict())))
    assert again.value == threshold.value != 1.5
    assert again.update(result_of([900, 0], 1000)) == threshold.update(result_of([900, 0], 1000))
