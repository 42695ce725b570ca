"""TRL's loss where the policy term of a token depends on the current log-probs or entropies of others."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_kernels.integrations.trl.head import TokenInputs


def needs_logprobs(trainer: Any) -> bool:
    """Whether the loss needs the current log-probs before its terms."""
    filters = trainer.off_policy_mask_threshold is not None or trainer.top_entropy_quantile < 1.0
    return filters or trainer.loss_function is not None or has_bonus_of_batch(trainer)


def has_bonus_of_batch(trainer: Any) -> bool:
    """Whether the entropy bonus is added to the loss, which knows the mean over a micro-batch alone."""
    return bool(trainer.entropy_mean == "batch" and trainer._entropy_bonus_enabled)


def policy_loss(
    trainer: Any,
    logprobs: Tensor,
    entropy: Tensor,
    tokens: TokenInputs,
    sampling_logprobs: Tensor | None,
    batch_share: Tensor | None,
    options: dict[str, Any],
) -> tuple[gk.PolicyLoss, Tensor | None]:
    """The loss of log-probs, and with top_entropy_quantile the sum of the kept tokens' entropies and their number.

    TRL's entropy bonus is the mean over the kept tokens of the micro-batch. `batch_share` is the divisor of the sum in
    its place for entropy_mean="batch": the tokens of a micro-batch, on average over all of the batch.
    """
    config, policy_mask, kept, mean = options["config"], None, None, None
    if trainer.top_entropy_quantile < 1.0:
        floor = entropy_floor(trainer, entropy, tokens.mask) if trainer.accelerator.num_processes > 1 else None
        policy_mask = gk.variants.high_entropy_mask(entropy, tokens.mask, trainer.top_entropy_quantile, floor=floor)
        kept = torch.stack([torch.where(policy_mask, entropy, 0).sum(), policy_mask.sum()])
        mean, kept = kept[0] / kept[1].clamp(min=1), kept.detach()
    if batch_share is not None:
        counts = tokens.mask if tokens.segments is None else tokens.mask & (tokens.segments >= 0)
        mean = torch.where(counts, entropy, 0).sum() / batch_share
    if trainer.off_policy_mask_threshold is not None:
        old = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
        is_near = gk.variants.off_policy_mask(
            logprobs,
            old if sampling_logprobs is None else sampling_logprobs,
            tokens.advantages,
            threshold=trainer.off_policy_mask_threshold,
            mask=tokens.mask,
        )
        policy_mask = is_near if policy_mask is None else policy_mask & is_near
    bonus = config.entropy_coef
    if mean is not None:
        options = options | {"config": dataclasses.replace(config, entropy_coef=0.0)}
    arguments = tokens._asdict() | options | {"policy_mask": policy_mask, "entropy": entropy}
    if tokens.weights is None:  # a function that has no use for them is not asked to accept them
        del arguments["weights"]
    result = (trainer.loss_function or gk.policy_loss)(logprobs, **arguments)
    if not isinstance(result, gk.PolicyLoss):
        raise TypeError(f"FusedGRPOTrainer: loss must return a PolicyLoss, got {type(result).__name__} {result!r}")
    if mean is None or bonus == 0:
        return result, kept
    return result._replace(loss=result.loss - bonus * mean), kept


def entropy_floor(trainer: Any, entropy: Tensor, mask: Tensor) -> Tensor:
    """The entropy reached by the kept share of tokens over all processes."""
    local = entropy.detach()[mask].float()
    padded = trainer.accelerator.pad_across_processes(local, dim=0, pad_index=float("nan"))
    entropies: Tensor = trainer.accelerator.gather(padded)
    if entropies.numel() == 0:
        return entropy.new_full((), float("inf"))
    return entropies.nanquantile(1 - trainer.top_entropy_quantile).to(entropy.dtype)
