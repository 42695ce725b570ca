"""patch_verl's replacement of verl's rollout correction: batch and metrics beside verl's own; sessions, and pads."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("tensordict")

from tests.harness import assert_close_to_rounding
from tests.integrations.tiny_verl import PAD, computed, data_of
from tests.ops.sampling_correction.cases import make_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.protocol import DataProto
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import rollout_corr_helper

    from grpo_kernels.integrations.verl import patch_verl, unpatch_verl
    from grpo_kernels.integrations.verl.queue import QUEUED


def proto(old: Any, sampling: Any, mask: Any, pads: int = 0) -> DataProto:
    """A batch, of whose rows the last ones may be appended."""
    tensors = {"old_log_probs": old.float(), "rollout_log_probs": sampling.float(), "response_mask": mask}
    tensors = {name: torch.cat([value, value.new_zeros(pads, value.shape[1])]) for name, value in tensors.items()}
    uids = np.array(["a"] * len(mask) + [PAD] * pads, dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


def corrected(data: DataProto, config: Any, is_ours: bool = True, keys: Any = None) -> tuple[Any, dict[str, float]]:
    """Tensors of the batch, and metrics; `keys` of rows in the queue of verl's v1 trainer."""
    if is_ours:
        patch_verl(grpo=False, loss=False)
    token = QUEUED.set(None if keys is None else SimpleNamespace(keys=keys))
    try:
        result, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(copy.deepcopy(data), config)
        return result.batch, metrics
    finally:
        QUEUED.reset(token)
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


def weighed(batch: Any, metrics: dict[str, float]) -> dict[str, Any]:
    """The metrics and the weights of tokens, if there are any."""
    weights = batch.get("rollout_is_weights", None)
    return metrics if weights is None else metrics | {"weights": weights * batch["response_mask"]}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_verl(config: Any, dtype: torch.dtype) -> None:
    batch = make_batch(2)
    data = proto(batch.old, batch.sampling, batch.mask.to(dtype))
    (ours, our_metrics), (theirs, their_metrics) = (corrected(data, config, is_ours) for is_ours in (True, False))
    assert set(ours.keys()) == set(theirs.keys())
    for name, expected in theirs.items():
        got = ours[name]
        assert got.dtype == expected.dtype and got.shape == expected.shape, name
        assert name == "rollout_is_weights" or torch.equal(got, expected), name
    want = weighed(theirs, their_metrics)
    again = lambda: weighed(*corrected(data, config, False))  # noqa: E731
    assert_close_to_rounding(weighed(ours, our_metrics), want, again)
    # rows that make a batch divisible are in no metric
    padded, metrics = corrected(proto(batch.old, batch.sampling, batch.mask.to(dtype), pads=3), config)
    assert metrics == our_metrics
    for name, value in ours.items():
        assert torch.equal(padded[name][:-3], value) and not padded[name][-3:].any(), name


@pytest.mark.parametrize(
    ("config", "has_tokens", "message"),
    [
        (CONFIGS["defaults"], False, "response_mask must"),
        ({"rollout_rs": "token_k1"}, True, "rollout_rs_threshold must"),
    ],
)
def test_what_verl_refuses(config: Any, has_tokens: bool, message: str) -> None:
    batch = make_batch(2)
    data = proto(batch.old, batch.sampling, batch.mask.long() * has_tokens)
    for is_ours in (True, False):
        with pytest.raises(ValueError, match=message):
            corrected(data, config, is_ours)


def test_sessions_are_weighed_and_rejected() -> None:
    """Rows whose mean log ratios are 0.8, -0.8 and 0: the first two are one session, whose mean is 0. Pads are none."""
    old = torch.tensor([[0.9, 0.7], [-0.9, -0.7], [0.1, -0.1]])
    data, padded = (proto(old, torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.long), pads) for pads in (0, 2))
    config = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0", "rollout_is": "sequence"}
    keys = ["a_0_0", "a_0_1", "a_1_0"]
    batch, metrics = corrected(data, config, keys=keys)
    assert batch["response_mask"][:, 0].tolist() == [1, 1, 1]
    torch.testing.assert_close(batch["rollout_is_weights"][:, 0], torch.ones(3))
    with_pads, of_more = corrected(padded, config, keys=[*keys, f"{PAD}_0_0", f"{PAD}_1_0"])
    assert of_more == metrics and torch.equal(with_pads["rollout_is_weights"][:3], batch["rollout_is_weights"])
    rows, of_rows = corrected(data, config)
    assert rows["response_mask"][:, 0].tolist() == [0, 0, 1] and metrics != of_rows
    lone, of_lone = corrected(data, config, keys=["a_0_0", "a_1_0", "a_2_0"])
    assert torch.equal(lone["response_mask"], rows["response_mask"]) and of_lone == of_rows


def test_group_ppo_keeps_the_score_of_a_token_that_is_rejected() -> None:
    """verl's score is at the last token, which may be outside the mask when the advantages are computed."""
    data = data_of([1.0, 1.0, 0.0, 0.0], [6, 3, 6, 5], ["a"] * 4, old_log_probs=torch.zeros(4, 6))
    data.batch["token_level_rewards"][3, 5] = torch.nan  # padding
    patch_verl()
    try:
        result = computed("group_ppo", data, {"grpo_kernels": {"norm": "none"}})
    finally:
        unpatch_verl()
    assert result["advantages"].sum(1).tolist() == [0.5, 0.5, -0.5, -0.5]
