"""Errors of sampling_correction and CorrectionConfig and the parts of their messages."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import grpo_kernels as gk
from tests.harness import assert_raises

SHAPE = (3, 4)
OLD = -torch.ones(SHAPE)
NOT_A_NUMBER = torch.where(torch.arange(12).view(SHAPE) == 6, torch.nan, OLD)


@pytest.mark.parametrize(
    ("error", "changes", "parts"),
    [
        (TypeError, {"old_logprobs": 1.0}, ["old_logprobs must be a tensor, got float"]),
        (TypeError, {"sampling_logprobs": None}, ["sampling_logprobs must be a tensor, got NoneType"]),
        (TypeError, {"sampling_logprobs": OLD.long()}, ["sampling_logprobs", "int64"]),
        (ValueError, {"sampling_logprobs": OLD[:2]}, ["sampling_logprobs", "of old_logprobs, [3, 4]", "[2, 4]"]),
        (ValueError, {"old_logprobs": OLD[0]}, ["old_logprobs must have shape [B, T]", "[4]"]),
        (ValueError, {"cu_seqlens": torch.tensor([0, 3])}, ["old_logprobs must have shape [M]", "[3, 4]"]),
        (ValueError, {"mask": torch.ones(3, 1)}, ["mask", "[3, 4]", "[3, 1]"]),
        (ValueError, {"mask": torch.ones(SHAPE, device="meta")}, ["mask", "meta"]),
        (TypeError, {"config": "verl"}, ["config must be a CorrectionConfig, got str", "(weights='token', weight_max"]),
        (ValueError, {"old_logprobs": NOT_A_NUMBER}, ["old_logprobs must not be NaN", "got nan at [1, 2]"]),
        (ValueError, {"backend": "gpu"}, ["backend must be one of", "'gpu'"]),
        (RuntimeError, {"backend": "kernel"}, ["'kernel' cannot run here: the op is plain", "backend='reference'"]),
    ],
)
def test_arguments(error: type[Exception], changes: dict[str, Any], parts: list[str]) -> None:
    arguments = {"old_logprobs": OLD, "sampling_logprobs": OLD} | changes
    assert_raises(error, "sampling_correction: ", parts, functools.partial(gk.sampling_correction, **arguments))


def test_what_takes_no_part_may_be_nan() -> None:
    masked = gk.sampling_correction(NOT_A_NUMBER, OLD, mask=~NOT_A_NUMBER.isnan())
    behind = gk.sampling_correction(NOT_A_NUMBER[1], OLD[1], cu_seqlens=torch.tensor([0, 2]))
    assert masked.weights.sum() == 11 and behind.weights.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("bounds", [[0, 5, 3], [0, 3, 9], [1, 2, 3]], ids=str)
def test_bounds_of_packed_rows(bounds: list[int]) -> None:
    old = -torch.ones(7)
    with pytest.raises(RuntimeError, match="sampling_correction: cu_seqlens must ascend from 0"):
        gk.sampling_correction(old, old, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize(
    ("error", "fields", "parts"),
    [
        (ValueError, {"weights": "tokens"}, ["weights must be one of none, token", "did you mean 'token'?"]),
        (ValueError, {"weights": "token", "outside": "drop"}, ["outside must be one of truncate, mask"]),
        (ValueError, {"weights": "token", "weight_min": 2.0, "weight_max": 1.0}, ["at most weight_max", "2.0 and 1.0"]),
        (ValueError, {"weights": "token", "weight_min": -1.0}, ["weight_min", "at least 0", "-1.0"]),
        (ValueError, {"weight_max": 1.0}, ["weights must be chosen for weight_min", "'none'"]),
        (ValueError, {"batch_normalize": True}, ["weights must be chosen"]),
        (TypeError, {"weights": "token", "batch_normalize": 1}, ["batch_normalize must be a bool, got int 1"]),
        (ValueError, {"log_ratio_bound": 0.0}, ["log_ratio_bound", "above 0"]),
        (ValueError, {"m2_threshold": float("nan")}, ["m2_threshold", "nan"]),
        (TypeError, {"m2_threshold": True}, ["m2_threshold must be a number, got bool"]),
        (TypeError, {"rejections": "token_k1"}, ["rejections must be a tuple", "'token_k1'"]),
        (ValueError, {"rejections": (("token_k1", 1.0),)}, ["(statistic, low, high)", "('token_k1', 1.0)"]),
        (ValueError, {"rejections": (("seq_max_k4", None, 1.0),)}, ["rejections must be one of", "did you mean"]),
        (ValueError, {"rejections": (("token_k1", None, 1.0),) * 2}, ["each statistic once", "'token_k1' twice"]),
        (ValueError, {"rejections": (("token_k1", None, None),)}, ["bounds of token_k1 must hold a number"]),
        (ValueError, {"rejections": (("token_k1", 2.0, 1.0),)}, ["bounds of token_k1 must ascend, got 2.0 and 1.0"]),
        (ValueError, {"rejections": (("seq_sum_k2", 0.1, 1.0),)}, ["low must be None for seq_sum_k2", "0.1"]),
        (TypeError, {"rejections": (("token_k2", None, "1"),)}, ["bounds of token_k2 must be a number", "'1'"]),
    ],
)
def test_settings(error: type[Exception], fields: dict[str, Any], parts: list[str]) -> None:
    assert_raises(error, "CorrectionConfig: ", parts, functools.partial(gk.CorrectionConfig, **fields))


def test_names_of_metrics() -> None:
    metrics = gk.sampling_correction(OLD, OLD).metrics
    with pytest.raises(KeyError, match="'token' is none of rows"):
        metrics["token"]
    with pytest.raises(ValueError, match="names must be one of verl, trl, got 'vrl'"):
        metrics.to_dict("vrl")
    assert float(metrics["tokens"]) == 12 and "tokens" in repr(metrics)
