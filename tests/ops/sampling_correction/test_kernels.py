"""sampling_correction on every backend: random settings against the float64 reference, torch integration, bits."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels import registry
from grpo_kernels.ops.sampling_correction import registration as op
from grpo_kernels.ops.sampling_correction.config import STATISTICS, WEIGHT_LEVELS
from tests.harness import (
    INDUCTOR,
    assert_within_budget,
    cpu_threads,
    device_of,
    needs_cpu_kernels,
    quick,
    runnable_backends,
)
from tests.ops.sampling_correction.batches import NAN, make_batch

BACKENDS = runnable_backends(op.SUPPORTS)
KERNELS = [name for name in BACKENDS if name != "reference"]
# Triton's interpreter is 1000 times slower.
CASES = {name: 3 if name == "triton" and not torch.cuda.is_available() else 30 for name in KERNELS}
EPS = torch.finfo(torch.float64).eps
SHAPES = [(1, 1), (3, 5), (4, 17), (5, 33), (2, 1500), (3, 0), (9, 64)]


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


def run(
    config: gk.CorrectionConfig, arguments: dict[str, Any], backend: str, dtype: torch.dtype = torch.float64
) -> gk.SamplingCorrection:
    device = device_of(backend)
    moved = {
        name: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for name, value in arguments.items()
    }
    return gk.sampling_correction(**moved, config=config, backend=backend)


@pytest.mark.parametrize("seed", quick(range(20), *range(8)))
@pytest.mark.parametrize("backend", KERNELS)
def test_any_settings_equal_the_reference_in_float64(backend: str, seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    for case in range(CASES[backend]):
        config, arguments = random_config(choose), random_arguments(choose)
        got, gold = (run(config, arguments, name) for name in (backend, "reference"))
        what = f"case {case}, {config}"
        assert torch.equal(got.mask.cpu(), gold.mask.cpu()), what
        torch.testing.assert_close(
            got.weights.cpu(), gold.weights.cpu(), rtol=1e-12, atol=0, msg=lambda text, w=what: f"{w}: {text}"
        )
        found, expected = got.metrics.to_dict(), gold.metrics.to_dict()
        for name, value in expected.items():
            # a divergence is a difference of terms of up to 20, and a sum of both signs rounds as its terms do
            size = 20 * max(expected["gap_sum"], expected["tokens"], 1)
            assert found[name] == pytest.approx(value, rel=1e-10, abs=4 * EPS * size), f"{name} of {what}"


@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.parametrize("backend", KERNELS)
def test_float32_loses_no_more_than_torch_does(backend: str, seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    compared = 0
    for _ in range(CASES[backend]):
        config, arguments = random_config(choose), random_arguments(choose)
        gold = run(config, arguments, "reference")
        got, working = (run(config, arguments, name, torch.float32) for name in (backend, "reference"))
        assert got.weights.dtype == torch.float32
        # a value at a bound can fall on either side of it in float32
        if not torch.equal(working.mask, gold.mask) or not torch.equal(working.weights == 0, gold.weights == 0):
            continue
        compared += 1
        assert torch.equal(got.mask.cpu(), gold.mask.cpu()), config
        finite = gold.weights < 1e30  # more than float32 holds
        assert_within_budget(
            got.weights.where(finite.to(got.weights.device), 0),
            working.weights.where(finite, 0),
            gold.weights.where(finite, 0),
            f"weights of {config}",
        )
    assert compared > CASES[backend] // 3


EVERYTHING = gk.CorrectionConfig(
    weights="token",
    weight_max=1.1,
    batch_normalize=True,
    rejections=(("token_k1", -0.15, 0.1), ("seq_mean_k3", None, 0.006), ("seq_max_binary_kl", None, 0.2)),
    m2_threshold=0.005,
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", KERNELS)
def test_opcheck(backend: str, packed: bool) -> None:
    device = device_of(backend)
    batch = make_batch(1, rows=3, width=7)
    values: list[Any] = [batch.old.float().to(device), batch.sampling.float().to(device), batch.mask.to(device)]
    if packed:
        values = [value.reshape(-1) for value in values]
    cu_seqlens = torch.tensor([0, 7, 14, 21], device=device) if packed else None
    ceiling = torch.tensor(0.02, device=device)
    config = EVERYTHING
    torch.library.opcheck(
        registry.overload("sampling_correction", backend),
        (*values, cu_seqlens, ceiling, config.statistics, config.bounds, config.modes, config.coefficients),
    )


@pytest.mark.parametrize("backend", quick([None, *BACKENDS], None, "cuda"))
def test_compiles_into_one_graph(backend: str | None) -> None:
    device = device_of(backend or "cpu")

    def correct(old: Tensor, sampling: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        result = gk.sampling_correction(2 * old, 2 * sampling, mask=mask, config=EVERYTHING, backend=backend)
        return result.weights * 3, result.mask, result.metrics.tensor

    torch._dynamo.reset()
    compiled = torch.compile(correct, fullgraph=True, backend=INDUCTOR, dynamic=True)
    for shape in ((3, 7), (4, 9)):
        batch = make_batch(1, *shape)
        values = [value.float().to(device) for value in batch[:2]]
        for one, other in zip(*(call(*values, batch.mask.to(device)) for call in (correct, compiled)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", KERNELS)
def test_repeated_calls_agree_to_the_bit(backend: str) -> None:
    batch = make_batch(2, rows=5, width=333)._asdict()
    arguments = {"old_logprobs": batch["old"], "sampling_logprobs": batch["sampling"], "mask": batch["mask"]}
    first, second = (run(EVERYTHING, arguments, backend, torch.float32) for _ in range(2))
    assert torch.equal(first.weights, second.weights) and torch.equal(first.mask, second.mask)
    assert torch.equal(first.metrics.tensor, second.metrics.tensor)


@needs_cpu_kernels
@pytest.mark.skipif("cpu" not in KERNELS, reason="not implemented")
def test_number_of_threads_changes_no_bit() -> None:
    batch = make_batch(3, rows=9, width=3000)
    results = []
    for count in (1, 2, 3):
        with cpu_threads(count):
            results.append(
                gk.sampling_correction(
                    batch.old.float(), batch.sampling.float(), mask=batch.mask, config=EVERYTHING, backend="cpu"
                )
            )
    for other in results[1:]:
        assert torch.equal(other.weights, results[0].weights) and torch.equal(other.mask, results[0].mask)
        assert torch.equal(other.metrics.tensor, results[0].metrics.tensor)


@pytest.mark.parametrize("backend", KERNELS)
def test_rows_do_not_depend_on_their_neighbours(backend: str) -> None:
    batch = make_batch(4, rows=6, width=40)
    config = gk.CorrectionConfig(weights="sequence", rejections=(("seq_sum_k2", None, 0.1), ("token_k3", None, 0.01)))
    order = torch.tensor([3, 0, 5, 1, 4, 2])

    def arguments(index: Tensor) -> dict[str, Tensor]:
        return {
            "old_logprobs": batch.old[index],
            "sampling_logprobs": batch.sampling[index],
            "mask": batch.mask[index],
        }

    straight = run(config, arguments(torch.arange(6)), backend, torch.float32)
    mixed = run(config, arguments(order), backend, torch.float32)
    order = order.to(straight.mask.device)
    assert torch.equal(mixed.weights, straight.weights[order]) and torch.equal(mixed.mask, straight.mask[order])
