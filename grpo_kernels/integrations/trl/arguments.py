"""Configs that FusedGRPOTrainer takes beside GRPOConfig, which must not decide on the same."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from trl import GRPOConfig

import grpo_kernels as gk
from grpo_kernels import checks
from grpo_kernels.integrations.trl.head import HEADS

logger = logging.getLogger(__name__)
# Fields of a LossConfig that describe its policy term. GRPOConfig has the others.
POLICY_TERM = (
    *("loss", "ratio", "clip_low", "clip_high", "dual_clip", "delta", "ratio_cap", "sapo_temperatures", "vespo_shape"),
    *("dro_beta", "log_ratio_clamp"),
)
_CHOICES = {
    "head": HEADS,
    "masked_rows": ("leave_out", "vote"),
    "flat_groups": ("keep", "leave_out"),
    "entropy_mean": ("micro_batch", "batch"),
    "batching": ("trl", "by_length"),
}
# Inputs of TRL's forward beside ids and masks.
IMAGES = (
    *("pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles"),
    *("image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"),
)
# Fields of GRPOConfig that describe the policy term of loss_type.
_REPLACED = (
    *("epsilon", "epsilon_high", "delta", "importance_sampling_level", "sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
# Fields of GRPOConfig that describe the advantages.
_SCALING = ("scale_rewards", "multi_objective_aggregation")


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


def check_choices(**chosen: str | None) -> None:
    for name, choice in chosen.items():
        if choice not in _CHOICES[name] and not (name == "head" and choice is None):
            raise checks.unknown("FusedGRPOTrainer", name, choice, _CHOICES[name])


def check_settings(trainer: Any) -> None:
    """Refuses settings of a trainer that contradict each other, and says where a default differs from TRL's."""
    check_replaced(trainer)
    check_policy_term(trainer)
    warn_of_masked_rows(trainer)


def check_replaced(trainer: Any) -> None:
    """Refuses fields of GRPOConfig that a LossConfig or an AdvantageConfig makes void."""
    replaced = []
    if trainer.policy_term is not None:
        replaced += [(name, "a LossConfig, which replaces the policy term that it belongs to") for name in _REPLACED]
    if trainer.advantages is not None:
        replaced += [(name, "an AdvantageConfig, which replaces it") for name in _SCALING]
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    for name, config in replaced:
        if (value := getattr(trainer.args, name)) != defaults[name]:
            raise ValueError(f"FusedGRPOTrainer: {name} must be left out with {config}, got {value!r}")


def check_policy_term(trainer: Any) -> None:
    """Refuses settings of a trainer that a LossConfig does not go with."""
    loss, args = trainer.policy_term, trainer.args
    if loss is None:
        return
    is_of_tokens = args.vllm_importance_sampling_mode in ("token_truncate", "token_mask")
    if loss.loss == "vespo" and _corrects(trainer) and not is_of_tokens:
        raise ValueError(
            "FusedGRPOTrainer: vllm_importance_sampling_mode must be 'token_truncate' or 'token_mask' with "
            f"LossConfig('vespo'), got {args.vllm_importance_sampling_mode!r}"
        )
    if loss.ratio == "sequence_token" and trainer.beta != 0.0 and args.use_bias_correction_kl:
        raise ValueError(
            "FusedGRPOTrainer: use_bias_correction_kl must be False with LossConfig(ratio='sequence_token') and beta, "
            "as it weighs a token's KL by the ratio, got True"
        )


def warn_of_masked_rows(trainer: Any) -> None:
    differs = trainer.masked_rows == "leave_out" and trainer.mask_truncated_completions
    if differs and trainer.accelerator.is_main_process:
        logger.warning(
            "FusedGRPOTrainer: completions that mask_truncated_completions empties are not compared with their group, "
            "unlike in TRL; masked_rows='vote' compares them"
        )


def _corrects(trainer: Any) -> bool:
    """Whether vLLM's importance weights enter the loss."""
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


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


# Settings of a trainer that have one value with segments, and why.
_WITH_SEGMENTS = {
    "masked_rows": ("leave_out", "which need tokens to take part"),
    "flat_groups": ("keep", "whose advantages differ within a completion"),
    "scale_rewards": ("none", "whose config scales"),
    "multi_objective_aggregation": ("sum_then_normalize", "which take the sum of the rewards"),
    "importance_sampling_level": ("token", "whose ratio is of the segment"),
    "top_entropy_quantile": (1.0, "whose term stands for tokens of any entropy"),
}


def check_segments(trainer: Any) -> None:
    """Refuses settings of a trainer with segments that segments do not go with."""
    for name, (only, why) in _WITH_SEGMENTS.items():
        if (value := getattr(trainer, name)) != only:
            raise ValueError(f"FusedGRPOTrainer: {name} must be {only!r} with segments, {why}, got {value!r}")
    args = trainer.args
    rules = [
        ("loss_type", trainer.loss_type, trainer.loss_type != "vespo", "must not be 'vespo' with segments"),
        (
            "vllm_importance_sampling_mode",
            args.vllm_importance_sampling_mode,
            not _corrects(trainer) or args.vllm_importance_sampling_mode.startswith("sequence"),
            "must be 'sequence_mask' or 'sequence_truncate' with segments, whose term reads the weight of one token",
        ),
        (
            "use_bias_correction_kl",
            args.use_bias_correction_kl,
            trainer.beta == 0.0 or not args.use_bias_correction_kl,
            "must be False with segments and beta, as it weighs a token's KL by the token's ratio",
        ),
    ]
    for name, value, holds, rule in rules:
        if not holds:
            raise ValueError(f"FusedGRPOTrainer: {name} {rule}, got {value!r}")


def check_batching(trainer: Any, batching: str, micro_batch_tokens: int | None) -> None:
    """Refuses settings that read rows of one micro-batch together, where rows are dealt by length."""
    if micro_batch_tokens is not None:
        if checks.integer("FusedGRPOTrainer", "micro_batch_tokens", micro_batch_tokens) < 1:
            raise ValueError(f"FusedGRPOTrainer: micro_batch_tokens must be at least 1, got {micro_batch_tokens}")
        if batching == "trl":
            raise ValueError(
                f"FusedGRPOTrainer: micro_batch_tokens must be None with batching='trl', got {micro_batch_tokens}; "
                "batching='by_length' takes it"
            )
    if batching == "trl":
        return
    bonus = trainer._entropy_bonus_enabled and trainer.entropy_mean == "micro_batch"
    rules = [
        ("segments", trainer.segments, trainer.segments is None, "must be None"),
        ("loss", trainer.loss_function, trainer.loss_function is None, "must not be a function"),
        ("top_entropy_quantile", trainer.top_entropy_quantile, trainer.top_entropy_quantile == 1.0, "must be 1.0"),
        ("entropy_mean", trainer.entropy_mean, not bonus, "must be 'batch' for an entropy bonus"),
        ("router_aux_loss_coef", trainer.router_aux_loss_coef, not trainer.aux_loss_enabled, "must be 0"),
    ]
    for name, value, holds, rule in rules:
        if not holds:
            raise ValueError(
                f"FusedGRPOTrainer: {name} {rule} with batching='by_length', whose micro-batches hold other rows than "
                f"TRL's, got {value!r}"
            )
