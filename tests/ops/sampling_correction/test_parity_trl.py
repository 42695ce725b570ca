"""sampling_correction against the statements of the installed TRL's trainer: weights and metrics."""

from __future__ import annotations

import pytest

import grpo_kernels as gk
from grpo_kernels.ops.sampling_correction.trl_fields import TRL_DEFAULTS, TRL_MODES
from tests.ops.sampling_correction.batches import DEVICE, NAN, make_batch

pytest.importorskip("trl")
import torch

from tests import peers_trl


@pytest.mark.parametrize("bounds", [(None, 1.1), (0.9, 1.1), (0.9, None), (0.2, 0.9), (1.05, 2.0)])
@pytest.mark.parametrize("mode", TRL_MODES)
def test_equals_trl(mode: str, bounds: tuple[float | None, float | None]) -> None:
    if mode.endswith("truncate") and bounds == (None, None):
        pytest.skip("torch.clamp wants a bound")
    batch = make_batch(3)
    batch.sampling[0, 4] = batch.sampling[5, 2] = NAN
    options = dict(
        zip(("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"), bounds, strict=True),
        vllm_importance_sampling_mode=mode,
    )
    ratio, metrics = peers_trl.sampler_ratio(batch.old, batch.sampling, batch.mask.int(), use_vllm=True, **options)
    moved = batch.to(torch.float32, DEVICE)
    config = gk.CorrectionConfig.trl(**options)
    got = gk.sampling_correction(moved.old, moved.sampling, mask=moved.mask, config=config)
    assert torch.equal(got.mask, moved.mask)
    torch.testing.assert_close(got.weights.cpu().double(), ratio * batch.mask, rtol=2e-6, atol=0)
    assert got.metrics.to_dict("trl") == pytest.approx(metrics, rel=2e-6, abs=1e-7)


def test_defaults_are_those_of_trl() -> None:
    assert {name: peers_trl.defaults()[name] for name in TRL_DEFAULTS} == TRL_DEFAULTS


def test_without_a_correction_it_only_measures() -> None:
    config = gk.CorrectionConfig.trl(vllm_importance_sampling_correction=False)
    assert config == gk.CorrectionConfig(log_ratio_bound=None)


def test_a_mode_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="vllm_importance_sampling_mode must be one of"):
        gk.CorrectionConfig.trl(vllm_importance_sampling_mode="geometric_mask")
