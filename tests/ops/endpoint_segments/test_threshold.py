"""The effect of every segment setting, and the adaptive threshold."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import grpo_kernels as gk
from tests.harness import device_of
from tests.ops.endpoint_segments.batches import (
    BACKENDS,
    F64,
    FAST,
    NAN,
    Batch,
    assert_same,
    batch_of,
    config_of,
    on_backends,
    plan,
    rules,
    width_for,
)

# Every setting matters: on this batch, each one changes the result.

FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "group_variance_threshold": ({}, {"group_variance_threshold": 3.0}),
    "group_max_size": ({}, {"group_max_size": 4}),
    "group_epsilon": ({}, {"group_epsilon": 1.0}),
    "gamma": ({}, {"gamma": 0.9}),
    "lam": ({}, {"lam": 0.5}),
    "rule": ({}, {"rule": "literal"}),
    "proxy": ({}, {"proxy": "uncorrelated"}),
    "credit": ({}, {"credit": "broadcast"}),
    "norm, batch": ({}, {"norm": "batch"}),
    "norm, prompt": ({"norm": "batch"}, {"norm": "prompt"}),
    "group_epsilon of the norm": (
        {"norm": "batch", "group_max_size": 1},
        {"norm": "batch", "group_max_size": 1, "group_epsilon": 0.1},
    ),
}


@pytest.mark.parametrize("field", FIELDS)
@on_backends
def test_every_field_of_the_config_matters(backend: str, field: str) -> None:
    batch = batch_of(13, 5, width_for(backend, 40), empty=0.0)
    one, other = (batch.run(config_of(**fields), backend) for fields in FIELDS[field])
    assert not torch.equal(one.advantages, other.advantages)
    cuts = ("group_variance_threshold", "group_max_size", "group_epsilon", "gamma", "lam", "rule", "proxy")
    assert torch.equal(one.segment_ids, other.segment_ids) == (field not in cuts)
    assert torch.equal(one.returns, other.returns) == (field not in ("gamma", "lam"))


@on_backends
def test_every_field_of_adaptation_matters(backend: str) -> None:
    """Checks tau after one update. Alternating signs are cut into singletons, so tau rises under the bounded rule."""
    fields = {"lam": 0.0, "threshold_lr": 0.5, "min_threshold": 0.1, "max_threshold": 10.0}
    low = plan(torch.tensor([1.0, -1.0]).repeat(20))
    high = plan([1.0] * 40)

    def after(batch: Batch, **changes: Any) -> float:
        config = config_of(**fields | changes)
        threshold = gk.SegmentThreshold(config)
        return threshold.update(batch.run(config, backend, threshold=threshold))

    rises = 2.718281828459045**0.5
    assert after(low) == pytest.approx(rises, rel=1e-15)
    assert after(low, threshold_lr=0.1) == pytest.approx(2.718281828459045**0.1, rel=1e-15)
    assert after(low, threshold_lr=0.0) == 1.0 and after(low, adaptive_threshold=False) == 1.0
    assert after(low, max_threshold=1.25) == 1.25
    assert after(low, rule="literal", group_max_size=1) == pytest.approx(1 / rises, rel=1e-15)
    assert after(low, rule="literal", group_max_size=1, min_threshold=0.9) == 0.9
    # one segment of 40 tokens is a share of 2.5 %, an error of (0.025 - 0.125) / 0.125
    falls = 2.718281828459045 ** (-0.5 * 0.8)
    assert after(high, group_max_size=40) == pytest.approx(falls, rel=1e-12)
    assert after(high, group_max_size=40, min_threshold=0.9) == 0.9
    assert after(high, group_max_size=40, group_variance_threshold=0.9) == 0.9 * rises, "singletons"


# The adaptive threshold


def result_of(segments: list[int], tokens: int) -> gk.EndpointSegments:
    """A result with these numbers of segments per row and this many tokens in total."""
    ids = torch.full((2, tokens + 3), -1, dtype=torch.int32)
    ids.view(-1)[:tokens] = 0
    zeros = torch.zeros(ids.shape)
    counts = torch.tensor(segments, dtype=torch.int32)
    return gk.EndpointSegments(zeros, zeros, zeros > 0, ids, counts, torch.tensor(1.0, dtype=F64))


@pytest.mark.parametrize("segments", [[50, 0], [30, 21], [125, 0], [100, 99], [200, 0]], ids=str)
@rules
def test_threshold_stays_within_the_band(rule: str, segments: list[int]) -> None:
    threshold = gk.SegmentThreshold(config_of(rule=rule, group_variance_threshold=1.5))
    for _ in range(3):
        assert threshold.update(result_of(segments, 1000)) == threshold.value == 1.5


@pytest.mark.parametrize(
    ("segments", "error"),
    [(0, -1.0), (10, -0.92), (49, -0.608), (201, 0.608), (220, 0.76), (250, 1.0), (400, 1.0), (1000, 1.0)],
)
@rules
def test_threshold_moves_by_the_error_outside_of_it(rule: str, segments: int, error: float) -> None:
    threshold = gk.SegmentThreshold(config_of(rule=rule, group_variance_threshold=1.5, threshold_lr=0.2))
    sign = 1 if rule == "bounded" else -1
    moved = threshold.update(result_of([segments - segments // 3, segments // 3], 1000))
    assert moved == threshold.value == pytest.approx(1.5 * 2.718281828459045 ** (sign * 0.2 * error), rel=1e-14)


@rules
def test_threshold_ends_at_its_bounds(rule: str) -> None:
    config = config_of(rule=rule, threshold_lr=0.3, min_threshold=0.5, max_threshold=2.0)
    threshold = gk.SegmentThreshold(config)
    seen = [threshold.update(result_of([900], 1000)) for _ in range(9)]
    assert seen[-1] == (2.0 if rule == "bounded" else 0.5)
    seen = [threshold.update(result_of([1], 1000)) for _ in range(9)]
    assert seen[-1] == (0.5 if rule == "bounded" else 2.0)


def test_no_tokens_move_no_threshold() -> None:
    threshold = gk.SegmentThreshold(config_of(group_variance_threshold=1.5))
    assert threshold.update(result_of([0, 0], 0)) == 1.5
    nothing = torch.zeros(0, 4)
    got = gk.endpoint_segments(nothing, nothing, nothing, values=nothing, config=threshold.config, threshold=threshold)
    assert threshold.update(got) == 1.5


def correlated(backend: str) -> Batch:
    """Positive, slowly varying advantages: a moving average over 32 tokens, so ratios are between 1 and 9."""
    random = torch.Generator().manual_seed(5)
    noise = torch.randn(2, 2048 + 31, generator=random, dtype=F64)
    smooth = noise.unfold(1, 32, 1).mean(2) * 32**0.5
    return plan((0.5 * smooth).exp(), weights=torch.rand(2, 2048, generator=random, dtype=F64) * 0.9 + 0.05)


@pytest.mark.parametrize("start", [0.1, 10.0])
@rules
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in FAST])
def test_adaptation_brings_the_share_of_endpoints_into_the_band(backend: str, rule: str, start: float) -> None:
    """The band is reachable because neighbours are alike: bounded segments of 5 to 16 tokens need a tau just above 1;
    literal ones, which end where n tau reaches ratios around 1, need a tau of 1/16 to 1/5.
    """
    batch = correlated(backend)
    config = config_of(
        rule=rule,
        group_max_size=16,
        threshold_lr=0.2,
        min_threshold=0.01,
        max_threshold=100.0,
        lam=0.0,
        group_variance_threshold=start,
    )
    threshold = gk.SegmentThreshold(config)
    shares = []
    for _ in range(40):
        got = batch.run(config, backend, threshold=threshold)
        shares.append(float(got.num_segments.sum()) / batch.mask.numel())
        threshold.update(got)
    outside = [share for share in shares if not 0.05 <= share <= 0.20]
    assert len(outside) < 30 and shares[: len(outside)] == outside, "once in, it stays"
    before = threshold.value
    threshold.update(batch.run(config, backend, threshold=threshold))
    assert threshold.value == before


def test_state_survives_json() -> None:
    threshold = gk.SegmentThreshold({"threshold_lr": 0.1})
    threshold.update(result_of([900], 1000))
    state = json.loads(json.dumps(threshold.state_dict()))
    again = gk.SegmentThreshold({"threshold_lr": 0.1})
    assert again.value == 1.0 != threshold.value
    again.load_state_dict(state)
    assert again.value == threshold.value
    assert again.update(result_of([900], 1000)) == threshold.update(result_of([900], 1000))


@pytest.mark.parametrize(
    ("state", "error", "part"),
    [
        ({}, ValueError, "value"),
        ({"tau": 1.0}, ValueError, "tau"),
        ({"value": 1.0, "step": 3}, ValueError, "step"),
        ({"value": "1.0"}, TypeError, "str"),
        ({"value": None}, TypeError, "NoneType"),
        ({"value": True}, TypeError, "bool"),
        ({"value": 0.09}, ValueError, "0.09"),
        ({"value": 10.1}, ValueError, "10.1"),
        ({"value": NAN}, ValueError, "nan"),
    ],
    ids=str,
)
def test_wrong_state_is_refused(state: dict[str, Any], error: type[Exception], part: str) -> None:
    threshold = gk.SegmentThreshold()
    with pytest.raises(error, match=r"^SegmentThreshold\.load_state_dict: ") as caught:
        threshold.load_state_dict(state)
    assert part in str(caught.value) and threshold.value == 1.0


# Ranks

RANKS = 2


def batch_of_rank(rank: int | None) -> Batch:
    """Batches of different sizes: all 40 tokens of rank 0 are endpoints, 4 of 150 on rank 1, 44 of 190 together."""
    above, below = plan(torch.tensor([1.0, -1.0]).repeat(20)), plan([1.0] * 150)
    if rank is not None:
        return above if rank == 0 else below
    mask = torch.zeros(2, 150, dtype=torch.bool)
    mask[0, :40] = mask[1] = True
    rewards = torch.cat((torch.nn.functional.pad(above.rewards, (0, 110)), below.rewards))
    return plan(rewards, mask=mask)


SETTINGS = {"lam": 0.0, "threshold_lr": 0.25, "group_max_size": 40}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    where, limit = f"file://{folder}/meeting", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS, timeout=limit)
    adapting = (True, True, False)
    configs = [config_of(**SETTINGS, adaptive_threshold=adapts) for adapts in adapting]
    together, alone, still = map(gk.SegmentThreshold, configs)
    result: dict[str, list[float]] = {"together": [], "alone": [], "still": []}
    for _ in range(3):
        got = batch_of_rank(rank).run(together.config, "reference", threshold=together)
        result["together"].append(together.update(got, process_group=dist.group.WORLD))
        result["alone"].append(alone.update(got))
        result["still"].append(still.update(got, process_group=dist.group.WORLD))
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
def test_ranks_agree_on_what_their_joined_batch_gives(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=RANKS)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    joined = gk.SegmentThreshold(config_of(**SETTINGS))
    wanted = []
    for _ in range(3):
        wanted.append(joined.update(batch_of_rank(None).run(joined.config, "reference", threshold=joined)))
    assert ranks[0]["together"] == ranks[1]["together"] == wanted
    assert ranks[0]["alone"] != ranks[1]["alone"] and wanted not in (ranks[0]["alone"], ranks[1]["alone"])
    assert ranks[0]["still"] == ranks[1]["still"] == [1.0] * 3 and wanted[-1] != 1.0


@on_backends
def test_results_are_on_the_device_of_the_tokens(backend: str) -> None:
    batch = batch_of(0, 2, 5)
    got = batch.run(config_of(), backend)
    assert all(field.device.type == device_of(backend).type for field in got)
    assert_same(got, batch.run(config_of(), backend))
