"""The ops of grpo_kernels, called as docs/counting.md says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_conformance.adapters import ESTIMATORS, loss_fields, loss_tokens
from grpo_conformance.batch import Batch, NotOffered


class Ops:
    name = "grpo_kernels"

    def advantages(self, batch: Batch) -> Tensor:
        rows: dict[str, Any] = {"rollouts": batch.rollouts, "valid": batch.mask.any(1)}
        return gk.group_advantages(batch.rewards, batch.groups, config=ESTIMATORS[batch.estimator], **rows).advantages

    def token_advantages(self, batch: Batch) -> Tensor:
        config = gk.TokenAdvantageConfig("gae", gamma=batch.gamma, lam=batch.lam, whiten="none")
        tokens: dict[str, Any] = {"mask": batch.mask, "rollouts": batch.rollouts}
        return gk.token_advantages(batch.token_rewards, batch.values, config=config, **tokens).advantages

    def loss(self, batch: Batch) -> Tensor:
        config, total = gk.LossConfig(**loss_fields(batch)), batch.total
        rollouts = total.rollouts if config.aggregation.startswith("seq-mean") else None
        shares = gk.token_shares(total.mask, rollouts=rollouts, aggregation=config.aggregation)
        logprobs = batch.logprobs
        if batch.ratio == "sequence":
            if batch.kl_coef or batch.whole is not None:
                raise NotOffered("a KL term beside the ratio of rollouts is a second call, and parts need processes")
            logprobs = gk.rollout_logprobs(logprobs, batch.old_logprobs, batch.rollouts, mask=batch.mask)
        tokens, layout = loss_tokens(batch) | {"weights": batch.of_total(shares)}, {"mask": batch.mask}
        if batch.packed:
            tokens = {name: value[batch.mask] for name, value in tokens.items()}
            ends = batch.mask.sum(1).cumsum(0)
            logprobs, layout = logprobs[batch.mask], {"cu_seqlens": torch.nn.functional.pad(ends, (1, 0))}
        return gk.policy_loss(logprobs, advantages=batch.advantages, config=config, **(tokens | layout)).loss
