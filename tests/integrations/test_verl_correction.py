"""patch_verl's replacement of verl's rollout correction: batch and metrics beside verl's own."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("tensordict")

from tests.ops.sampling_correction.cases import make_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.protocol import DataProto
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import rollout_corr_helper

    from grpo_kernels.integrations.verl import patch_verl, unpatch_verl

NAME = "compute_rollout_correction_and_add_to_batch"


def proto(dtype: torch.dtype = torch.int64) -> DataProto:
    batch = make_batch(2)
    return DataProto.from_dict(
        tensors={
            "old_log_probs": batch.old.float(),
            "rollout_log_probs": batch.sampling.float(),
            "response_mask": batch.mask.to(dtype),
            "responses": torch.arange(batch.mask.numel()).view(batch.mask.shape),
        }
    )


def corrected(data: DataProto, config: Any, patched: bool) -> tuple[DataProto, dict[str, float]]:
    if patched:
        patch_verl(grpo=False, loss=False)
    try:
        return getattr(rollout_corr_helper, NAME)(copy.deepcopy(data), config)
    finally:
        unpatch_verl()


CONFIGS = {
    "defaults": RolloutCorrectionConfig(),
    "a mapping": {"rollout_is": "token", "rollout_is_threshold": "0.9_1.2", "rollout_is_batch_normalize": True},
    "only metrics": {},
    "rejections": RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="token_k1,seq_mean_k2", rollout_rs_threshold="0.9_1.1,0.004"
    ),
    "no weights": RolloutCorrectionConfig.decoupled_geo_rs(),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_verl(config: Any, dtype: torch.dtype) -> None:
    data = proto(dtype)
    (ours, our_metrics), (theirs, their_metrics) = (corrected(data, config, patched) for patched in (True, False))
    assert set(ours.batch.keys()) == set(theirs.batch.keys())
    mask = theirs.batch["response_mask"]
    for name, expected in theirs.batch.items():
        got = ours.batch[name]
        assert got.dtype == expected.dtype and got.shape == expected.shape, name
        if name == "rollout_is_weights":
            torch.testing.assert_close(got, expected * mask, rtol=2e-6, atol=0)
        else:
            assert torch.equal(got, expected), name
    assert our_metrics.keys() == their_metrics.keys()
    # standard deviations are small differences of float32 sums in verl
    for name, value in their_metrics.items():
        assert our_metrics[name] == pytest.approx(value, rel=1e-4, abs=2e-4 if name.endswith("_std") else 2e-6), name


def test_patch_and_unpatch() -> None:
    original = getattr(rollout_corr_helper, NAME)
    patch_verl(grpo=False, loss=False, correction=False)
    assert getattr(rollout_corr_helper, NAME) is original
    patch_verl(grpo=False, loss=False)
    assert getattr(rollout_corr_helper, NAME) is not original
    unpatch_verl()
    assert getattr(rollout_corr_helper, NAME) is original


def test_a_batch_without_tokens_is_refused() -> None:
    data = proto()
    data.batch["response_mask"] = torch.zeros_like(data.batch["response_mask"])
    for patched in (True, False):
        with pytest.raises(ValueError, match="response_mask must"):
            corrected(data, CONFIGS["defaults"], patched)


def test_settings_that_verl_refuses() -> None:
    config = {"rollout_rs": "token_k1"}
    for patched in (True, False):
        with pytest.raises(ValueError, match="rollout_rs_threshold must"):
            corrected(proto(), config, patched)
