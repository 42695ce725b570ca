"""The ops of grpo_kernels, called as docs/counting.md says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_conformance.batch import Batch, NotOffered

ESTIMATORS = {"mean": "dr_grpo", "mean-std": "grpo", "leave-one-out": "rloo"}


class Ops:
    name = "grpo_kernels"

    def advantages(self, batch: Batch) -> Tensor:
        valid, config = batch.mask.any(1), ESTIMATORS[batch.estimator]
        result = gk.group_advantages(batch.rewards, batch.groups, rollouts=batch.rollouts, valid=valid, config=config)
        return result.advantages

    def token_advantages(self, batch: Batch) -> Tensor:
        config = gk.TokenAdvantageConfig("gae", gamma=batch.gamma, lam=batch.lam, whiten="none")
        rewards, values, rollouts = batch.token_rewards, batch.values, batch.rollouts
        return gk.token_advantages(rewards, values, mask=batch.mask, rollouts=rollouts, config=config).advantages

    def loss(self, batch: Batch) -> Tensor:
        kl: dict[str, Any] = {"kl": "k3", "kl_coef": batch.kl_coef} if batch.kl_coef else {}
        config = gk.LossConfig(clip_low=batch.clip, clip_high=batch.clip, entropy_coef=batch.entropy_coef, **kl)
        aggregation = batch.aggregation or config.aggregation
        total, logprobs = batch.total, batch.logprobs
        shares = gk.token_shares(total.mask, rollouts=total.rollouts, aggregation=aggregation)
        if batch.ratio == "sequence":
            if batch.kl_coef or batch.whole is not None:
                raise NotOffered("a KL term beside the ratio of rollouts is a second call, and parts need processes")
            logprobs = gk.rollout_logprobs(logprobs, batch.old_logprobs, batch.rollouts, mask=batch.mask)
        tokens: dict[str, Any] = {
            "old_logprobs": batch.old_logprobs,
            "ref_logprobs": batch.ref_logprobs if batch.kl_coef else None,
            "entropy": batch.entropy if batch.entropy_coef else None,
            "weights": batch.of_total(shares),
        }
        layout: dict[str, Any] = {"mask": batch.mask}
        if batch.packed:
            ends = batch.mask.sum(1).cumsum(0)
            tokens = {name: None if value is None else value[batch.mask] for name, value in tokens.items()}
            logprobs, layout = logprobs[batch.mask], {"cu_seqlens": torch.nn.functional.pad(ends, (1, 0))}
        return gk.policy_loss(logprobs, advantages=batch.advantages, config=config, **tokens, **layout).loss
