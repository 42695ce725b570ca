"""sampling_correction against the installed verl and TRL: weights, mask and every metric by its key.

Faults: a rule of theirs that is translated otherwise, a metric under a wrong name or of other tokens or rows, a default
or a statistic that a new release adds.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from grpo_kernels.ops.sampling_correction.trl_fields import TRL_DEFAULTS, TRL_MODES
from grpo_kernels.ops.sampling_correction.verl_fields import SAFETY_BOUND, VERL_DEFAULTS, VERL_STATISTICS
from tests.ops.sampling_correction.cases import NAN, Batch, by_token, make_batch

pytest.importorskip("trl")
pytest.importorskip("verl")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import rollout_corr_helper as verl

from tests import peers_trl

# verl

# thresholds that some tokens and rows of the batches are beyond, in verl's notation
THRESHOLDS = {
    "token_k1": "0.9_1.05",
    "token_k2": "0.004",
    "token_k3": "0.006",
    "seq_sum_k1": "0.8_1.1",
    "seq_sum_k2": "0.09",
    "seq_sum_k3": "0.1",
    "seq_mean_k1": "1.02",
    "seq_mean_k2": "0.005",
    "seq_mean_k3": "0.005",
    "seq_max_k2": "0.008",
    "seq_max_k3": "0.008",
}
SETS = [*THRESHOLDS, "token_k1,seq_mean_k3", "seq_max_k2,token_k3,seq_sum_k1", None]
WEIGHTS = [(None, 2.0), ("token", 1.05), ("token", "0.9_1.1"), ("sequence", 1.2), ("sequence", "0.8_1.1")]


def fields_of(weights: tuple[str | None, Any], statistics: str | None, normalize: bool = False) -> dict[str, Any]:
    thresholds = None if statistics is None else ",".join(THRESHOLDS[name] for name in statistics.split(","))
    return {
        "rollout_is": weights[0],
        "rollout_is_threshold": weights[1],
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": statistics,
        "rollout_rs_threshold": thresholds,
    }


def theirs(batch: Batch, fields: dict[str, Any]) -> tuple[Any, torch.Tensor, dict[str, float]]:
    return verl.compute_rollout_correction_and_rejection_mask(batch.old, batch.sampling, batch.mask.double(), **fields)


def compare(batch: Batch, fields: dict[str, Any]) -> None:
    weights, mask, metrics = theirs(batch, fields)
    moved = batch.to(torch.float32)
    config = gk.CorrectionConfig.verl(**fields)
    got = gk.sampling_correction(moved.old, moved.sampling, mask=moved.mask, config=config)
    assert torch.equal(got.mask.cpu(), mask.bool())
    expected = mask.bool().double() if weights is None else weights.batch["rollout_is_weights"] * mask
    # a row's sum of n log ratios of size |d| is off by n |d| eps, and its exponential by as much
    torch.testing.assert_close(by_token(got).cpu().double(), expected, rtol=4e-6, atol=0)
    found = got.metrics.verl()
    assert found.keys() == metrics.keys()
    if (batch.old - batch.sampling).abs().max() > SAFETY_BOUND:  # verl leaves this one without its bound
        assert found["rollout_corr/k3_kl"] < metrics.pop("rollout_corr/k3_kl")
    for name, value in metrics.items():
        if name.endswith("_std"):  # verl's counts are 1e-8 too large, which its difference of squares multiplies
            largest = max(abs(metrics[name.removesuffix("std") + end]) for end in ("min", "max"))
            assert found[name] ** 2 == pytest.approx(value**2, rel=1e-5, abs=1e-6 * largest**2), name
            continue
        assert found[name] == pytest.approx(value, rel=1e-5, abs=2e-7), name


@pytest.mark.parametrize("far", [0.0, 0.05])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("statistics", SETS)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_equals_verl(weights: Any, statistics: str | None, normalize: bool, far: float) -> None:
    if weights[0] is None and normalize:
        pytest.skip("nothing to normalize")
    compare(make_batch(far=far), fields_of(weights, statistics, normalize))


def test_one_row_and_one_token() -> None:
    batch = make_batch(rows=1, width=1, holes=False)
    compare(batch, fields_of(("token", 1.05), "token_k1,seq_sum_k2"))


def test_defaults_and_statistics_are_those_of_verl() -> None:
    assert set(VERL_STATISTICS) == set(THRESHOLDS) == verl.SUPPORTED_ROLLOUT_RS_OPTIONS
    defaults = {field.name: field.default for field in dataclasses.fields(RolloutCorrectionConfig)}
    assert {name: value for name, value in defaults.items() if not name.startswith("_")} == VERL_DEFAULTS


# TRL


@pytest.mark.parametrize("bounds", [(None, 1.1), (0.9, 1.1), (0.9, None), (0.2, 0.9), (1.05, 2.0)])
@pytest.mark.parametrize("mode", TRL_MODES)
def test_equals_trl(mode: str, bounds: tuple[float | None, float | None]) -> None:
    batch = make_batch(3)
    batch.sampling[0, 4] = batch.sampling[5, 2] = NAN
    options = dict(
        zip(("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"), bounds, strict=True),
        vllm_importance_sampling_mode=mode,
    )
    ratio, metrics = peers_trl.sampler_ratio(batch.old, batch.sampling, batch.mask.int(), use_vllm=True, **options)
    moved = batch.to(torch.float32)
    config = gk.CorrectionConfig.trl(**options)
    got = gk.sampling_correction(moved.old, moved.sampling, mask=moved.mask, config=config)
    assert torch.equal(got.mask, moved.mask)
    assert got.weights.shape == ratio.shape
    torch.testing.assert_close(by_token(got).cpu().double(), ratio * batch.mask, rtol=2e-6, atol=0)
    assert got.metrics.trl() == pytest.approx(metrics, rel=2e-6, abs=1e-7)


def test_defaults_are_those_of_trl() -> None:
    without = gk.CorrectionConfig.trl(vllm_importance_sampling_correction=False)
    assert without == gk.CorrectionConfig(log_ratio_bound=None)
    assert {name: peers_trl.defaults()[name] for name in TRL_DEFAULTS} == TRL_DEFAULTS
