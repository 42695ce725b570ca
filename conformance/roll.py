"""ROLL: its advantages, and the loss of its actor."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.nn.functional as F
from cutter import Source
from grpo_conformance import Batch, NotOffered
from grpo_conformance.adapters import in_groups, refuse
from torch import Tensor

SOURCE = Source("roll")
FUNCTIONALS, WORKER = "roll/utils/functionals.py", "roll/pipeline/rlvr/actor_worker.py"
scope: dict[str, Any] = vars(typing) | {"torch": torch, "F": F, "np": np}
NAMES = ("compute_approx_kl", "agg_loss", "masked_mean", "masked_sum")
functionals = SOURCE.cut(FUNCTIONALS, *NAMES, "reward_norm", "compute_gae_advantage_return", **scope)
scope |= {name: getattr(functionals, name) for name in NAMES}
worker = SOURCE.cut(WORKER, "ActorWorker.loss_func", **scope)


class Roll:
    name = f"ROLL {SOURCE.version}"
    lacks = (
        *("rollouts of several rows", "uneven groups", "rows that pad a batch"),
        *("packed rows", "slices of the context"),
    )
    where: ClassVar = {
        "advantages": SOURCE.where(FUNCTIONALS, "def reward_norm"),
        "token_advantages": SOURCE.where(FUNCTIONALS, "def compute_gae_advantage_return"),
        "loss": SOURCE.where(WORKER, "def loss_func"),
        "filter-mask": SOURCE.where(FUNCTIONALS, "def agg_loss"),
    }

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator not in ("mean", "mean-std"):
            raise NotOffered("no mean of the others, and no default")
        order, size = in_groups(batch)
        std = "group" if batch.estimator == "mean-std" else None
        return functionals.reward_norm(batch.rewards[order], size, {}, "group", std)[order.argsort()]

    def token_advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "whiten")
        rewards = batch.token_rewards * batch.mask  # as compute_advantage
        return functionals.compute_gae_advantage_return(rewards, batch.values, batch.gamma, batch.lam)[0] * batch.mask

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "teacher_coef", "value_coef", "auxiliary_coef", "mask_truncated")
        if batch.kl_coef and batch.kl not in ("k3", None):
            raise NotOffered(f"no KL of form {batch.kl} in the loss")
        mask = F.pad(batch.mask.long(), (1, 0))
        correction = MagicMock(is_weight=SimpleNamespace(enabled=False))
        config = MagicMock(
            loss_agg_mode=batch.aggregation or "seq-mean-token-mean",
            importance_sampling="seq" if batch.ratio == "sequence" else "token",
            pg_clip=batch.clip,
            use_kl_loss=batch.kl_coef > 0,
            kl_loss_coef=batch.kl_coef,
            entropy_loss_coef=batch.entropy_coef,
            rl_loss_coef=1.0,
            enable_old_logprobs_recompute=True,
            train_infer_correction=correction,
            **dict.fromkeys(("use_pg_clip_range", "dual_clip_loss"), False),
        )
        strategy = SimpleNamespace(
            op_compute_log_probs=lambda **options: batch.logprobs,
            op_compute_entropy=lambda logits, attention_mask: batch.entropy * attention_mask[:, 1:],
        )
        me = SimpleNamespace(pipeline_config=config, strategy=strategy)
        me.get_old_log_probs_with_cache = lambda data, logprobs: batch.old_logprobs
        me.compute_sample_weights = lambda data, mask: torch.ones(len(batch.mask))
        counts = {"batch_num_tokens": {"response_mask": batch.total.mask.sum()}}  # as its strategy counts them
        counts["global_valid_samples"] = {"response_mask": batch.total.mask.any(1).sum()}
        rows = {"response_mask": mask, "ref_log_probs": batch.ref_logprobs, "input_ids": None}
        rows |= {"advantages": batch.advantages[:, None] * batch.mask, "train_infer_is_weight": None}
        data = SimpleNamespace(batch=rows, meta_info=counts, non_tensor_batch={})
        return worker.loss_func(me, data, batch.logprobs)[0]


adapter = Roll()
