"""Refusals of FusedGRPOTrainer and patch_trl, before anything is computed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

import trl

import grpo_kernels as gk
from grpo_kernels.integrations.trl import head as _head
from grpo_kernels.integrations.trl import patch_trl
from grpo_kernels.integrations.trl.arguments import check_policy_term, check_segments
from tests.integrations.tiny_trl import letters
from tests.integrations.tiny_trl import trainer as made

SIMILAR = {"similarity": gk.SimilarityConfig(), "embedder": letters}
SEGMENTS = {"segments": gk.SegmentConfig()}
PLAIN: dict[str, Any] = {"scale_rewards": "none", "use_bias_correction_kl": False}
BY_LENGTH = {"batching": "by_length"}
KEPT = {"top_entropy_quantile": 0.5}

# arguments of the trainer, fields of GRPOConfig, and the error after the trainer's name
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"similarity": gk.SimilarityConfig()}, {}, "similarity and embedder go together, got no embedder"),
    ({"embedder": letters}, {}, "similarity and embedder go together, got no similarity"),
    (SIMILAR | SEGMENTS, {}, "similarity and segments exclude each other"),
    (SEGMENTS | {"advantages": gk.AdvantageConfig()}, {}, "advantages and segments exclude"),
    (SEGMENTS | {"loss": gk.LossConfig()}, {}, "loss and segments exclude"),
    ({"loss": gk.LossConfig(aggregation="token-sum")}, {}, "loss.aggregation must be left out, .* got 'token-sum'"),
    ({"loss": gk.LossConfig(ratio="segment")}, {}, "loss.ratio must not be 'segment', .* no segments; pass segm"),
    ({"loss": gk.LossConfig(ratio="segment_mean")}, {}, "loss.ratio must not be 'segment_mean'"),
    (
        {"loss": gk.LossConfig("geo_mean", aggregation="seq-mean-token-sum")},
        {},
        "loss.loss must not be 'geo_mean', who",
    ),
    (
        {"loss": gk.LossConfig()},
        {"epsilon_high": 0.28},
        r"epsilon_high must be left out with a LossConfig, .*got 0\.28",
    ),
    (
        {"loss": gk.LossConfig()},
        {"importance_sampling_level": "sequence"},
        "importance_sampling_level must be left out",
    ),
    ({"loss": gk.LossConfig()}, {"vespo_k_neg": 4.0}, "vespo_k_neg must be left out"),
    (
        {"loss": gk.LossConfig(ratio="sequence_token")},
        {},
        r"use_bias_correction_kl must be False with LossConfig\(ratio='sequence_token'\) and beta",
    ),
    ({"advantages": gk.AdvantageConfig(reward_weights=(1.0, 2.0))}, {}, "advantages.reward_weights must be left out"),
    (
        {"advantages": gk.AdvantageConfig()},
        {"scale_rewards": "batch"},
        "scale_rewards must be left out with an AdvantageConfig, which replaces it, got 'batch'$",
    ),
    (
        {"advantages": gk.AdvantageConfig()},
        {"multi_objective_aggregation": "normalize_then_sum"},
        "multi_objective_aggregation must be left out with an AdvantageConfig",
    ),
    ({"advantages": gk.AdvantageConfig("remax")}, {}, "advantages must not need baselines, .* got estimator 'remax'"),
    ({"advantages": gk.AdvantageConfig(shrinkage=4.0)}, {}, "similarity and embedder must be given for advantages"),
    (SEGMENTS, {}, "scale_rewards must be 'none' with segments, .* got 'group'"),
    (SEGMENTS, PLAIN | {"importance_sampling_level": "sequence"}, "importance_sampling_level must be 'token'"),
    (SEGMENTS, PLAIN | {"loss_type": "vespo"}, "loss_type must not be 'vespo' with segments"),
    (SEGMENTS, PLAIN | KEPT, "top_entropy_quantile must be 1.0 with segments"),
    (SEGMENTS, {"scale_rewards": "none"}, "use_bias_correction_kl must be False"),
    (SEGMENTS | {"masked_rows": "vote"}, PLAIN, "masked_rows must be 'leave_out' with segments, .*, got 'vote'"),
    (SEGMENTS | {"flat_groups": "leave_out"}, PLAIN, "flat_groups must be 'keep' with segments"),
    (SEGMENTS, PLAIN | {"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation must be 's"),
    ({"advantages": "rloo"}, {}, r"advantages must be of AdvantageConfig, .*; AdvantageConfig\.of\('rloo'\)"),
    ({"loss": "topr"}, {}, r"loss must be of LossConfig, got str 'topr'; LossConfig\('topr'\) is one$"),
    ({"loss": "no"}, {}, r"loss must be of LossConfig, got str 'no'$"),
    ({"heads": "fused"}, {}, r"keywords must be one of similarity, .*got 'heads' \(did you mean 'head'\?\)$"),
    ({"similarity": "average", "embedder": letters}, {}, "similarity must be of SimilarityConfig, got str 'average'"),
    ({"segments": 3}, {}, "segments must be of SegmentConfig, got int 3$"),
    (SIMILAR | {"embedder": "minilm"}, {}, "embedder must be a function .* str 'minilm'"),
    ({"backend": "gpu"}, {}, "backend must be one of kernel, reference, got 'gpu'"),
    ({"masked_rows": "leave-out"}, {}, r"masked_rows must be one of leave_out, vote, got 'leave-out' \(did you mean"),
    ({"flat_groups": "leaveout"}, {}, r"flat_groups must be one of keep, leave_out, got 'leaveout' \(did you mean"),
    ({"entropy_mean": "batches"}, {}, "entropy_mean must be one of micro_batch, batch, got 'batches'"),
    ({"head": "fuse"}, {}, "head must be one of logprobs, fused, got 'fuse'"),
    ({"entropy_mean": "batch"}, KEPT, r"entropy_mean must be 'micro_batch' with top_entropy_quantile, .* with 0\.5"),
    ({"batching": "length"}, {}, "batching must be one of trl, by_length, got 'length'"),
    ({"micro_batch_tokens": 100}, {}, "micro_batch_tokens must be None with batching='trl', got 100; batching='by_le"),
    (BY_LENGTH | {"micro_batch_tokens": 0}, {}, "micro_batch_tokens must be at least 1, got 0$"),
    (BY_LENGTH | {"micro_batch_tokens": 1.5}, {}, "micro_batch_tokens must be an int"),
    (BY_LENGTH | SEGMENTS, PLAIN, "segments must be None with batching='by_length', whose micro-batches hold other"),
    (BY_LENGTH | {"loss": gk.policy_loss}, {}, "loss must not be a function with batching='by_length'"),
    (BY_LENGTH, KEPT, r"top_entropy_quantile must be 1\.0 with batching='by_length', .* got 0\.5$"),
    (BY_LENGTH, {"entropy_coef": 0.1}, "entropy_mean must be 'batch' for an entropy bonus with batching='by_length'"),
    ({"head": "fused"}, {"torch_compile": True}, "torch_compile must be False for head='fused', as"),
]


@pytest.mark.parametrize(("options", "changes", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused_at_construction(tmp_path: Path, options: Any, changes: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^FusedGRPOTrainer: {message}"):
        made(tmp_path, changes=changes, **options)


@pytest.mark.parametrize("masked_rows", ["leave_out", "vote"])
def test_a_default_that_is_not_that_of_trl_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, masked_rows: str
) -> None:
    made(tmp_path, changes={"mask_truncated_completions": True}, masked_rows=masked_rows)
    lines = [line for line in caplog.messages if "masked_rows='vote'" in line]
    assert len(lines) == (masked_rows == "leave_out")


def test_weights_of_vllm_that_a_loss_cannot_use(tmp_path: Path) -> None:
    for options, wrong, right in (
        ({"loss": gk.LossConfig("vespo")}, "sequence_mask", "token_mask"),
        (SEGMENTS, "token_truncate", "sequence_truncate"),
    ):
        trainer = made(tmp_path, changes=PLAIN, **options)
        trainer.use_vllm, trainer.args.vllm_importance_sampling_mode = True, wrong
        check = check_segments if options is SEGMENTS else check_policy_term
        with pytest.raises(ValueError, match=rf"^FusedGRPOTrainer: vllm_importance_sampling_mode must .* '{wrong}'$"):
            check(trainer)
        trainer.args.vllm_importance_sampling_mode = right
        check(trainer)


def test_a_fused_head_that_is_in_parts() -> None:
    args = SimpleNamespace(torch_compile=False, fsdp=["full_shard"], top_entropy_quantile=0.5)
    of_one = SimpleNamespace(num_processes=1, is_fsdp2=False)
    trainer = SimpleNamespace(args=args, is_fsdp_enabled=False, top_entropy_quantile=0.5, accelerator=of_one)
    of_fsdp2 = SimpleNamespace(num_processes=1, is_fsdp2=True)
    sharded = SimpleNamespace(**vars(trainer) | {"is_fsdp_enabled": True, "accelerator": of_fsdp2})
    assert _head.obstacle(trainer) is None and _head.obstacle(sharded) is None
    for name, value, message in (
        ("accelerator", SimpleNamespace(num_processes=2), "top_entropy_quantile must be 1 with several .*, got 0.5$"),
        ("is_fsdp_enabled", True, r"fsdp must have fsdp_version 2 for head='fused', .*, got \['full_shard'\]$"),
    ):
        found = _head.obstacle(SimpleNamespace(**vars(trainer) | {name: value}))
        assert found is not None and re.search(message, found)


def test_a_forward_of_trl_that_scores_other_tokens() -> None:
    inputs = _head.HeadInputs(torch.ones(2, 4), gk.LMHead(torch.ones(3, 4)), torch.ones(2).long(), 1.0)
    tokens = _head.TokenInputs(None, torch.ones(1), torch.ones(1, 3).bool(), None, None, None)
    with pytest.raises(RuntimeError, match="needs the hidden states of 3 tokens from TRL's forward, got 2"):
        _head.packed_policy_loss(inputs, tokens, torch.ones(1, 3).bool())


def test_other_versions_and_unsloth_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"^patch_trl: head must be a bool, got str 'no'"):
        patch_trl(head="no")  # type: ignore[arg-type]
    calls = {"FusedGRPOTrainer": lambda: made(tmp_path), "patch_trl": patch_trl}
    for name, call in calls.items():
        with monkeypatch.context() as patched:
            patched.setattr(trl, "__version__", "1.15.2")
            with pytest.raises(ImportError, match=rf"{name}: needs TRL 1\.16 or later, got 1\.15\.2"):
                call()
            patched.undo()
            patched.setitem(sys.modules, "unsloth", sys)
            with pytest.raises(RuntimeError, match="Unsloth has rewritten"):
                call()
