"""The ops of grpo_kernels, called as docs/counting.md says."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_conformance.adapters import ESTIMATORS, loss_fields, loss_tokens, refuse
from grpo_conformance.batch import Batch, NotOffered


class Ops:
    name = "grpo_kernels"

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        rows: dict[str, Any] = {"rollouts": batch.rollouts, "valid": batch.mask.any(1)}
        return gk.group_advantages(batch.rewards, batch.groups, config=ESTIMATORS[batch.estimator], **rows).advantages

    def token_advantages(self, batch: Batch) -> Tensor:
        whiten = "tokens" if batch.whiten else "none"
        config = gk.TokenAdvantageConfig("gae", gamma=batch.gamma, lam=batch.lam, whiten=whiten)
        tokens: dict[str, Any] = {"mask": batch.mask, "rollouts": batch.rollouts}
        return gk.token_advantages(batch.token_rewards, batch.values, config=config, **tokens).advantages

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "value_coef", "auxiliary_coef", "mask_truncated")
        if batch.lengths is not None:
            return self._packed(batch)
        config, total = gk.LossConfig(**loss_fields(batch)), batch.total
        rollouts = total.rollouts if config.aggregation.startswith("seq-mean") else None
        shares = gk.token_shares(total.mask, rollouts=rollouts, aggregation=config.aggregation)
        rows: dict[str, Any] = {"weights": batch.of_total(shares), "mask": batch.mask}
        logprobs = batch.logprobs
        if batch.ratio == "sequence":
            if batch.kl_coef or batch.whole is not None:
                raise NotOffered("a KL term beside the ratio of rollouts is a second call, and parts need processes")
            logprobs = gk.rollout_logprobs(logprobs, batch.old_logprobs, batch.rollouts, mask=batch.mask)
        loss = gk.policy_loss(logprobs, advantages=batch.advantages, config=config, **loss_tokens(batch), **rows).loss
        if not batch.teacher_coef:
            return loss
        distance = dataclasses.replace(config, kl="k3", kl_coef=batch.teacher_coef, entropy_coef=0.0)
        nothing, teacher = torch.zeros_like(batch.advantages), batch.teacher_logprobs
        return loss + gk.policy_loss(batch.logprobs, None, nothing, ref_logprobs=teacher, config=distance, **rows).loss

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        return gk.token_logprobs(logits[:, :-1], tokens[:, 1:], temperature=temperature).logprobs

    def _packed(self, batch: Batch) -> Tensor:
        """The loss of packed rows, without the tokens that do not count."""
        assert batch.lengths is not None
        rows = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)[batch.mask[0]]
        ends = torch.bincount(rows, minlength=len(batch.lengths)).cumsum(0)
        tokens: dict[str, Any] = {name: value[batch.mask] for name, value in loss_tokens(batch).items()}
        rows_of: dict[str, Any] = {"advantages": batch.advantages, "cu_seqlens": torch.nn.functional.pad(ends, (1, 0))}
        config = gk.LossConfig(**loss_fields(batch), ratio=batch.ratio)
        return gk.policy_loss(batch.logprobs[batch.mask], config=config, **tokens, **rows_of).loss
