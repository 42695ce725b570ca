"""The bundled trainer: its credit, its rows and counts of a minibatch, and its loss of log-probs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from grpo_trainer.algorithm import Credit, Plan, assign_credit, minibatch_counts, rows_in_loss
from grpo_trainer.recipe import Algorithm, Rl, Rollout
from torch import Tensor

import grpo_kernels as gk
from grpo_conformance.adapters import ESTIMATORS, in_groups, loss_fields, loss_tokens
from grpo_conformance.batch import Batch


class BundledTrainer:
    name = "grpo_trainer"
    lacks = ("rollouts of several rows", "uneven groups", "packed rows", "slices of the context")

    def advantages(self, batch: Batch) -> Tensor:
        order, size = in_groups(batch)
        mask, rewards = batch.mask[order], batch.rewards[order][:, None]
        plan = _plan(mask.shape[1], name=ESTIMATORS[batch.estimator])
        rollout: Any = SimpleNamespace(group_size=size, batch=SimpleNamespace(mask=mask), lengths=mask.sum(1))
        return assign_credit(plan, rollout, rewards, torch.ones(1), None, None, mask).advantages[order.argsort()]

    def loss(self, batch: Batch) -> Tensor:
        total = batch.total
        fields = loss_fields(batch) | {"ratio": batch.ratio}
        coefficients = {"beta": fields.pop("kl_coef", 0.0), "epsilon": fields.pop("clip_low")}
        del fields["clip_high"]  # the same
        plan = _plan(1, loss=fields, drop_flat=False, **coefficients)
        rows = rows_in_loss(plan, Credit(total.advantages), total.mask, len(total.mask))
        rows_of_part = {"advantages": batch.advantages, "mask": batch.mask} | loss_tokens(batch)
        counts = minibatch_counts(total.mask[rows])
        return gk.policy_loss(batch.logprobs, normalizer=counts, config=plan.loss, **rows_of_part).loss


def _plan(max_completion_length: int, **settings: Any) -> Plan:
    rollout = Rollout(max_completion_length=max_completion_length)
    return Plan.of(Rl(algorithm=Algorithm(**settings), rollout=rollout))
