"""Refusals of FusedGRPOTrainer and patch_trl, before anything is computed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

import trl

import grpo_kernels as gk
from grpo_kernels.integrations.trl import patch_trl
from tests.integrations.test_trl_parts import letters, made


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"similarity": gk.SimilarityConfig()}, {}, "similarity and embedder go together, got no embedder"),
        ({"embedder": letters}, {}, "similarity and embedder go together, got no similarity"),
        ({"similarity": gk.SimilarityConfig(), "embedder": letters, "segments": gk.SegmentConfig()}, {}, "exclude"),
        ({"segments": gk.SegmentConfig(), "advantages": gk.AdvantageConfig()}, {}, "advantages and segments exclude"),
        ({"segments": gk.SegmentConfig(), "loss": gk.LossConfig()}, {}, "loss and segments exclude"),
        ({"loss": gk.LossConfig(aggregation="token-sum")}, {}, "loss.aggregation must be left out, .* got 'token-sum'"),
        (
            {"loss": gk.LossConfig(ratio="segment")},
            {},
            "loss.ratio must not be 'segment', .* have no segments; pass segm",
        ),
        ({"loss": gk.LossConfig(ratio="segment_mean")}, {}, "loss.ratio must not be 'segment_mean'"),
        (
            {"loss": gk.LossConfig(loss="geo_mean", aggregation="seq-mean-token-sum")},
            {},
            "loss.loss must not be 'geo_mean', whose mean is not one of loss_type's",
        ),
        ({"advantages": gk.AdvantageConfig(reward_weights=(1.0, 2.0))}, {}, "reward_weights must be left out"),
        (
            {"advantages": gk.AdvantageConfig("remax")},
            {},
            "must not need baselines, .* got estimator 'remax'",
        ),
        ({"advantages": gk.AdvantageConfig(shrinkage=4.0)}, {}, "similarity and embedder must be given for advantages"),
        ({"segments": gk.SegmentConfig()}, {}, "scale_rewards must be 'none' with segments, got 'group'"),
        (
            {"segments": gk.SegmentConfig()},
            {"scale_rewards": "none", "importance_sampling_level": "sequence"},
            "importance_sampling_level must be 'token'",
        ),
        ({"segments": gk.SegmentConfig()}, {"scale_rewards": "none", "loss_type": "vespo"}, "loss_type must not be"),
        ({"segments": gk.SegmentConfig()}, {"scale_rewards": "none"}, "use_bias_correction_kl must be False"),
        (
            {"segments": gk.SegmentConfig(), "masked_rows": "vote"},
            {"scale_rewards": "none"},
            "masked_rows must be 'leave_out' with segments, which need tokens to take part, got 'vote'",
        ),
        (
            {"segments": gk.SegmentConfig()},
            {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation must be 'sum_then_normalize'",
        ),
    ],
)
def test_refused_at_construction(tmp_path: Path, options: Any, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"FusedGRPOTrainer: .*{message}"):
        made(tmp_path, changes=changes, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantages": "rloo"}, r"advantages must be of AdvantageConfig, .*; AdvantageConfig\.of\('rloo'\)"),
        ({"loss": "topr"}, r"loss must be of LossConfig, got str 'topr'; LossConfig\('topr'\) is one$"),
        ({"loss": "no"}, r"loss must be of LossConfig, got str 'no'$"),
        ({"heads": "fused"}, r"keywords must be one of similarity, .*got 'heads' \(did you mean 'head'\?\)$"),
        ({"similarity": "average", "embedder": letters}, "similarity must be of SimilarityConfig, got str 'average'"),
        ({"segments": 3}, "segments must be of SegmentConfig, got int 3$"),
        ({"embedder": "minilm", "similarity": gk.SimilarityConfig()}, "embedder must be a function .* str 'minilm'"),
        ({"backend": "gpu"}, "backend must be one of kernel, reference, got 'gpu'"),
        ({"masked_rows": "leave-out"}, r"masked_rows must be one of leave_out, vote, got 'leave-out' \(did you mean"),
    ],
)
def test_arguments_of_another_type(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^FusedGRPOTrainer: {message}"):
        made(tmp_path, **options)
    with pytest.raises(TypeError, match=r"^patch_trl: head must be a bool, got str 'no'"):
        patch_trl(head="no")  # type: ignore[arg-type]


def test_other_versions_and_unsloth_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(trl, "__version__", "1.15.2")
        with pytest.raises(ImportError, match=r"FusedGRPOTrainer: needs TRL 1\.16 or later, got 1\.15\.2"):
            made(tmp_path)
    monkeypatch.setitem(sys.modules, "unsloth", sys)
    for call in (patch_trl, lambda: made(tmp_path)):
        with pytest.raises(RuntimeError, match="Unsloth has rewritten"):
            call()
