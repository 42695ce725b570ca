"""Every documented error of sampling_correction, CorrectionConfig and their metrics.

What test_promises.py and test_packed_bounds.py check of every tensor is not here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_raises

SHAPE = (3, 4)
OLD = -torch.ones(SHAPE)
NOT_A_NUMBER = torch.where(torch.arange(12).view(SHAPE) == 6, torch.nan, OLD)
BOUNDS = torch.tensor([0, 3])
Row = tuple[type[Exception], dict[str, Any], list[str]]


def correct(**changes: Any) -> gk.SamplingCorrection:
    return gk.sampling_correction(**{"old_logprobs": OLD, "sampling_logprobs": OLD} | changes)


def packed(**changes: Any) -> gk.SamplingCorrection:
    return correct(**{"old_logprobs": -torch.ones(7), "sampling_logprobs": -torch.ones(7)} | changes)


OP: list[Row] = [
    (TypeError, {"sampling_logprobs": OLD.long()}, ["sampling_logprobs must be of dtype", "int64"]),
    (ValueError, {"sampling_logprobs": OLD[:2]}, ["sampling_logprobs", "of old_logprobs, [3, 4]", "[2, 4]"]),
    (ValueError, {"old_logprobs": OLD[0]}, ["old_logprobs must have shape [B, T]", "[4]"]),
    (ValueError, {"cu_seqlens": BOUNDS}, ["old_logprobs must have shape [M]", "[3, 4]"]),
    (ValueError, {"mask": torch.ones(3, 1)}, ["mask", "[3, 4]", "[3, 1]"]),
    (TypeError, {"config": "verl"}, ["config must be a CorrectionConfig, got str", "(weights='token', weight_max"]),
    (ValueError, {"old_logprobs": NOT_A_NUMBER}, ["old_logprobs must not be NaN", "got nan at [1, 2]"]),
    (ValueError, {"backend": "gpu"}, ["backend must be one of", "'gpu'"]),
    (RuntimeError, {"backend": "kernel"}, ["'kernel' cannot run here: the op is plain", "backend='reference'"]),
]
PACKED: list[Row] = [
    (ValueError, {"cu_seqlens": BOUNDS[:0]}, ["cu_seqlens must have shape [B + 1]", "[0]"]),
]
CONFIG: list[Row] = [
    (ValueError, {"weights": "tokens"}, ["weights must be one of none, token", "did you mean 'token'?"]),
    (ValueError, {"weights": "token", "weight_min": 2.0, "weight_max": 1.0}, ["at most weight_max", "2.0 and 1.0"]),
    (ValueError, {"weights": "token", "weight_min": -1.0}, ["weight_min", "at least 0", "-1.0"]),
    (ValueError, {"weight_max": 1.0}, ["weights must be chosen for weight_min", "'none'"]),
    (ValueError, {"weight_min": 1.0}, ["weights must be chosen for weight_min", "'none'"]),
    (ValueError, {"batch_normalize": True}, ["weights must be chosen"]),
    (ValueError, {"log_ratio_bound": 0.0}, ["log_ratio_bound", "above 0"]),
    (ValueError, {"m2_threshold": 0.0}, ["m2_threshold", "above 0"]),
    (TypeError, {"rejections": "token_k1"}, ["rejections must be a tuple", "'token_k1'"]),
    (ValueError, {"rejections": (("token_k1", 1.0),)}, ["(statistic, low, high)", "('token_k1', 1.0)"]),
    (ValueError, {"rejections": (("seq_max_k4", None, 1.0),)}, ["rejections must be one of", "did you mean"]),
    (ValueError, {"rejections": (("token_k1", None, 1.0),) * 2}, ["each statistic once", "'token_k1' twice"]),
    (ValueError, {"rejections": (("token_k1", None, None),)}, ["bounds of token_k1 must hold a number"]),
    (ValueError, {"rejections": (("token_k1", 2.0, 1.0),)}, ["bounds of token_k1 must ascend, got 2.0 and 1.0"]),
    (ValueError, {"rejections": (("seq_sum_k2", 0.1, 1.0),)}, ["low must be None for seq_sum_k2", "0.1"]),
    (TypeError, {"rejections": (("token_k2", None, "1"),)}, ["bounds of token_k2 must be a number", "'1'"]),
    (ValueError, {"rejections": (("token_k2", None, float("nan")),)}, ["bounds of token_k2 must be a finite"]),
]
VERL: list[Row] = [
    (ValueError, {"rollout_is": "geometric"}, ["rollout_is must be one of token, sequence, got 'geometric'"]),
    (ValueError, {"rollout_is_threshold": "2_1"}, ["rollout_is_threshold must be a positive number", "'2_1'"]),
    (ValueError, {"rollout_is_threshold": -1}, ["rollout_is_threshold must be", "got -1"]),
    (ValueError, {"rollout_is_threshold": True}, ["rollout_is_threshold must be", "got True"]),
    (TypeError, {"rollout_rs": 1}, ["rollout_rs must be a str, got 1"]),
    (ValueError, {"rollout_rs": " , "}, ["rollout_rs must name at least one"]),
    (ValueError, {"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, ["rollout_rs must be one of token_k1"]),
    (ValueError, {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, ["one number, got '0.1_0.2'"]),
    (ValueError, {"rollout_rs": "token_k1"}, ["rollout_rs_threshold must hold one value"]),
    (ValueError, {"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"}, ["got '1,2'"]),
    (ValueError, {"bypass_mode": True}, ["bypass_mode must be False, got True"]),
    (ValueError, {"rollout_iss": "token"}, ["did you mean 'rollout_is'?"]),
]
TRL: list[Row] = [
    (ValueError, {"vllm_importance_sampling_mode": "geometric_mask"}, ["_sampling_mode must be one of token_truncate"])
]
TABLES: dict[str, tuple[Callable[..., Any], list[Row]]] = {
    "sampling_correction: ": (correct, OP),
    "sampling_correction: packed": (packed, PACKED),
    "CorrectionConfig: ": (gk.CorrectionConfig, CONFIG),
    "CorrectionConfig.verl: ": (gk.CorrectionConfig.verl, VERL),
    "CorrectionConfig.trl: ": (gk.CorrectionConfig.trl, TRL),
}


@pytest.mark.parametrize("start", TABLES)
def test_errors(start: str) -> None:
    call, rows = TABLES[start]
    for error, changes, parts in rows:
        assert_raises(error, start.removesuffix("packed"), parts, functools.partial(call, **changes))


def test_what_takes_no_part_may_be_nan() -> None:
    masked = correct(old_logprobs=NOT_A_NUMBER, mask=~NOT_A_NUMBER.isnan())
    after = packed(old_logprobs=NOT_A_NUMBER[1], sampling_logprobs=OLD[1], cu_seqlens=torch.tensor([0, 2]))
    assert masked.weights.sum() == 11 and after.weights.tolist() == [1, 1, 0, 0]
    without = gk.CorrectionConfig.trl(vllm_importance_sampling_correction=False)
    assert without == gk.CorrectionConfig(log_ratio_bound=None)


def test_names_of_metrics() -> None:
    metrics = correct().metrics
    assert_raises(KeyError, "\"CorrectionMetrics: 'token' is none of rows", [], lambda: metrics["token"])
    of_peer = "CorrectionMetrics: names must be one of verl, trl, got 'vrl'"
    assert_raises(ValueError, of_peer, [], lambda: metrics.to_dict("vrl"))
    rows = "CorrectionMetrics.merged: rows must be a list of metrics"
    assert_raises(ValueError, rows, ["[2]"], lambda: metrics.merged(torch.ones(2)))
    assert float(metrics["tokens"]) == 12 and "tokens" in repr(metrics)
