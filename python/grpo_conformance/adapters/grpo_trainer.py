"""The bundled trainer: its credit, its rows and counts of a minibatch, its losses of log-probs, and its log-probs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from grpo_trainer.algorithm import Credit, Plan, assign_credit, minibatch_counts, rows_in_loss
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Algorithm, Critic, Rl, Rollout
from grpo_trainer.train import value_error
from torch import Tensor

import grpo_kernels as gk
from grpo_conformance.adapters import ESTIMATORS, in_groups, loss_fields, loss_tokens, refuse
from grpo_conformance.batch import Batch


class BundledTrainer:
    name = "grpo_trainer"
    lacks = (
        *("rollouts of several rows", "uneven groups", "rows that pad a batch"),
        *("packed rows", "slices of the context"),
    )

    def advantages(self, batch: Batch) -> Tensor:
        order, size = in_groups(batch)
        mask, rewards = batch.mask[order], batch.rewards[order][:, None]
        estimator = {"name": "grpo", "advantage": {"estimator": ESTIMATORS[batch.estimator]}}
        plan = _plan(mask.shape[1], **estimator if batch.estimator else {}, drop_flat=batch.filter_groups)
        rollout: Any = SimpleNamespace(group_size=size, batch=SimpleNamespace(mask=mask), lengths=mask.sum(1))
        credit = assign_credit(plan, rollout, rewards, torch.ones(1), None, None, mask)
        advantages = credit.advantages
        if batch.filter_groups:
            advantages = advantages.where(rows_in_loss(plan, credit, mask, size), torch.nan)
        return advantages[order.argsort()]

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "teacher_coef", "auxiliary_coef")
        total = batch.total
        counted = total.mask
        if batch.mask_truncated:  # rollout.truncated: leave_out
            counted = counted & ~total.truncated[:, None]
        fields = loss_fields(batch) | {"ratio": batch.ratio}
        coefficients = {"beta": fields.pop("kl_coef", 0.0), "epsilon": fields.pop("clip_low")}
        del fields["clip_high"]  # the same
        plan = _plan(1, loss=fields, drop_flat=False, **coefficients)
        rows = rows_in_loss(plan, Credit(total.advantages), counted, len(counted))
        rows_of_part = {"advantages": batch.advantages, "mask": batch.of_total(counted)} | loss_tokens(batch)
        counts = minibatch_counts(counted[rows])
        loss = gk.policy_loss(batch.logprobs, normalizer=counts, config=plan.loss, **rows_of_part).loss
        if batch.value_coef:
            error = value_error(batch.values, batch.values, batch.returns, Critic())
            loss = loss + batch.value_coef * (error * batch.mask).sum() / counts["tokens"]
        return loss

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """Those of the policy, whose model gives these logits after a prompt of one token."""
        policy: Any = SimpleNamespace(temperature=temperature, backend=None, has_plain_head=False, is_seq2seq=False)
        policy._without_banned = lambda scores: scores
        policy._logits = lambda ids, *others: (logits[:, : ids.shape[1]],) * 2
        policy._states = lambda batch, share: Policy._states(policy, batch, share)
        everything = torch.ones_like(tokens, dtype=torch.bool)
        fields: dict[str, Any] = {
            "prompts": tokens[:, :1],
            "tokens": tokens[:, 1:],
            "prompt_of": torch.arange(len(tokens)),
        }
        fields |= {"prompt_mask": everything[:, :1], "mask": everything[:, 1:], "support": None}
        batch: Any = SimpleNamespace(**fields)
        return Policy._logprobs(policy, batch, share=False)


def _plan(max_completion_length: int, **settings: Any) -> Plan:
    rollout = Rollout(max_completion_length=max_completion_length)
    return Plan.of(Rl(algorithm=Algorithm(**settings), rollout=rollout))
