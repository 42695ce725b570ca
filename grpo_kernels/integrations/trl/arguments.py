"""Configs that FusedGRPOTrainer takes beside GRPOConfig, which must not decide on the same."""

from __future__ import annotations

import dataclasses

import grpo_kernels as gk

# Fields of a LossConfig that describe its policy term. GRPOConfig has the others.
POLICY_TERM = (
    *("loss", "ratio", "clip_low", "clip_high", "dual_clip", "delta", "ratio_cap", "sapo_temperatures", "vespo_shape"),
    *("dro_beta", "log_ratio_clamp"),
)


def check_loss(loss: gk.LossConfig) -> None:
    """Refuses what TRL decides on, and what needs inputs that are not there."""
    if loss.loss == "geo_mean":
        raise ValueError("FusedGRPOTrainer: loss.loss must not be 'geo_mean', whose mean is not one of loss_type's")
    if loss.ratio in ("segment", "segment_mean"):
        raise ValueError(
            f"FusedGRPOTrainer: loss.ratio must not be {loss.ratio!r}, as the completions have no segments; pass "
            "segments=SegmentConfig(...) in the place of loss for those of GROUP-PPO"
        )
    for field in dataclasses.fields(gk.LossConfig):
        if field.init and field.name not in POLICY_TERM and getattr(loss, field.name) != field.default:
            raise ValueError(
                f"FusedGRPOTrainer: loss.{field.name} must be left out, as GRPOConfig decides on it, got "
                f"{getattr(loss, field.name)!r}"
            )


def check_advantages(advantages: gk.AdvantageConfig | None, similarity: gk.SimilarityConfig | None) -> None:
    """Refuses what TRL decides on, and what needs inputs that are not there."""
    if advantages is None:
        return
    if advantages.reward_weights is not None:
        raise ValueError(
            "FusedGRPOTrainer: advantages.reward_weights must be left out, as GRPOConfig has them, got "
            f"{advantages.reward_weights}"
        )
    if advantages.needs_baselines:
        raise ValueError(
            "FusedGRPOTrainer: advantages must not need baselines, which TRL does not have, got estimator "
            f"{advantages.estimator!r}"
        )
    if advantages.needs_parent and similarity is None:
        raise ValueError(
            "FusedGRPOTrainer: similarity and embedder must be given for advantages with shrinkage or "
            f"singleton='parent', got shrinkage={advantages.shrinkage!r}, singleton={advantages.singleton!r}"
        )
