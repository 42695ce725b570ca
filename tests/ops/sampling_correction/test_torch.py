"""sampling_correction beside torch: blocks of rows, torch.compile, repeated bits. Its results are in test_spec.py.

The faults: a block that ends within a row or loses a token, and bits that depend on a call or on threads.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.ops.sampling_correction import reference
from grpo_kernels.ops.sampling_correction.config import STATISTICS, WEIGHT_LEVELS
from tests.harness import INDUCTOR, quick
from tests.ops.sampling_correction.batches import DEVICE, NAN, make_batch

EPS = torch.finfo(torch.float64).eps
SHAPES = [(1, 1), (3, 5), (4, 17), (5, 33), (2, 1500), (3, 0), (9, 64)]
EVERYTHING = gk.CorrectionConfig(
    weights="token",
    weight_max=1.1,
    batch_normalize=True,
    rejections=(("token_k1", -0.15, 0.1), ("seq_mean_k3", None, 0.006), ("seq_max_binary_kl", None, 0.2)),
    m2_threshold=0.005,
)


def random_config(choose: random.Random) -> gk.CorrectionConfig:
    weights = choose.choice(WEIGHT_LEVELS)
    fields: dict[str, Any] = {"weights": weights, "log_ratio_bound": choose.choice([20.0, None, 0.1])}
    if weights != "none":
        fields |= {
            "weight_min": choose.choice([None, 0.93]),
            "weight_max": choose.choice([None, 1.07]),
            "outside": choose.choice(["truncate", "mask"]),
            "batch_normalize": choose.random() < 0.5,
        }
    scale = {"k1": 0.1, "k2": 0.01, "k3": 0.01, "binary_kl": 0.02}
    rejections = []
    for statistic in choose.sample(STATISTICS, choose.choice([0, 1, 2, 5, len(STATISTICS)])):
        estimator = next(name for name in scale if statistic.endswith(name))
        high = scale[estimator] * choose.choice([0.5, 1, 2]) * (5 if "sum" in statistic else 1)
        low = -high * 1.1 if estimator == "k1" and choose.random() < 0.7 else None
        rejections.append((statistic, low, high))
    threshold = choose.choice([None, None, 0.004])
    return gk.CorrectionConfig(**fields, rejections=tuple(rejections), m2_threshold=threshold)


def random_arguments(choose: random.Random) -> dict[str, Any]:
    """Float64 values that are exact in float32, with holes, an empty row, tokens without a score and far ones."""
    rows, width = choose.choice(SHAPES)
    batch = make_batch(choose.randrange(2**31), rows, width, spread=0.1, far=choose.choice([0, 0, 0.05]))
    sampling = batch.sampling.masked_fill(torch.rand(rows, width) < choose.choice([0, 0.1]), NAN)
    arguments = {"old_logprobs": batch.old, "sampling_logprobs": sampling}
    if choose.random() < 0.8:
        arguments["mask"] = batch.mask
    if choose.random() < 0.3:
        arguments = {name: value.reshape(-1) for name, value in arguments.items()}
        cuts = sorted(choose.randrange(rows * width + 1) for _ in range(rows))
        arguments["cu_seqlens"] = torch.tensor([0, *cuts])
    return arguments


@pytest.mark.parametrize("seed", range(8))
def test_rows_in_blocks_are_the_whole_batch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, for random settings, padded and packed: rows that fill a block, rows beyond it, and empty ones."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(30):
        config, arguments = random_config(choose), random_arguments(choose)
        whole = gk.sampling_correction(**arguments, config=config)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "_BLOCK", choose.choice((1, 40, 100)))
            got = gk.sampling_correction(**arguments, config=config)
        what = f"case {case}, {config}"
        assert torch.equal(got.mask, whole.mask), what
        torch.testing.assert_close(
            got.weights, whole.weights, rtol=1e-12, atol=0, msg=lambda text, w=what: f"{w}: {text}"
        )
        found, expected = got.metrics.to_dict(), whole.metrics.to_dict()
        for name, value in expected.items():
            # a divergence is a difference of terms of up to 20, and a sum of both signs rounds as its terms do
            size = 20 * max(expected["gap_sum"], expected["tokens"], 1)
            assert found[name] == pytest.approx(value, rel=1e-10, abs=4 * EPS * size), f"{name} of {what}"


def test_a_batch_of_more_tokens_than_a_block() -> None:
    batch = make_batch(4, rows=3, width=1 + reference._BLOCK // 2).to(torch.float64, torch.device("cpu"))

    def metrics(rows: slice) -> gk.CorrectionMetrics:
        old, sampling, mask = (values[rows] for values in batch)
        return gk.sampling_correction(old, sampling, mask=mask).metrics

    whole, parts = metrics(slice(None)), [metrics(slice(row, row + 1)) for row in range(3)]
    torch.testing.assert_close(whole.tensor, parts[0].merged(parts).tensor, rtol=1e-12, atol=0)


def test_packed_tokens_of_no_row_fill_more_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BLOCK", 4)
    old = -torch.ones(9)
    for bounds, tokens in (([0], 0), ([0, 0], 0), ([0, 2], 2), ([0, 2, 9], 9)):
        got = gk.sampling_correction(old, old, cu_seqlens=torch.tensor(bounds))
        assert got.mask.tolist() == [place < tokens for place in range(9)] and float(got.metrics["tokens"]) == tokens


@pytest.mark.parametrize("packed", quick([False, True], False), ids=["padded", "packed"])
def test_compiles_into_one_graph(packed: bool) -> None:
    def correct(old: Tensor, sampling: Tensor, mask: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        options: dict[str, Any] = {"mask": mask, "cu_seqlens": bounds, "config": EVERYTHING}
        result = gk.sampling_correction(2 * old, 2 * sampling, **options)
        return result.weights * 3, result.mask, result.metrics.tensor

    torch._dynamo.reset()
    compiled = torch.compile(correct, fullgraph=True, backend=INDUCTOR, dynamic=True)
    for shape in ((3, 7), (4, 9)):
        batch = make_batch(1, *shape)
        values = [value.to(DEVICE) for value in (batch.old.float(), batch.sampling.float(), batch.mask)]
        bounds = torch.arange(shape[0] + 1, device=DEVICE) * shape[1] if packed else None
        values = [value.flatten() for value in values] if packed else values
        for one, other in zip(*(call(*values, bounds) for call in (correct, compiled)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def same_bits(one: gk.SamplingCorrection, other: gk.SamplingCorrection) -> bool:
    pairs = ((one.weights, other.weights), (one.mask, other.mask), (one.metrics.tensor, other.metrics.tensor))
    return all(torch.equal(a, b) for a, b in pairs)


def test_repeated_calls_agree_to_the_bit() -> None:
    batch = make_batch(2, rows=5, width=333).to(torch.float32, DEVICE)
    first, second = (
        gk.sampling_correction(batch.old, batch.sampling, mask=batch.mask, config=EVERYTHING) for _ in range(2)
    )
    assert same_bits(first, second)


def test_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block with more than one row: torch divides the sum of a single one among its threads."""
    monkeypatch.setattr(reference, "_BLOCK", 2**17)
    batch = make_batch(3, rows=9, width=40_000).to(torch.float32, torch.device("cpu"))
    results, before = [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(gk.sampling_correction(batch.old, batch.sampling, mask=batch.mask, config=EVERYTHING))
    torch.set_num_threads(before)
    assert all(same_bits(other, results[0]) for other in results[1:])
