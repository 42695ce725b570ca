"""AReaL: its advantages, the losses of its actor and critic with the weights of its engine, and its log-probs."""

from __future__ import annotations

import functools
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

SOURCE = Source("areal", "1.0.4")
DATA, FUNCTIONAL, VOCABULARY = (
    "areal/utils/data.py",
    "areal/utils/functional/functional.py",
    "areal/utils/functional/vocab_parallel.py",
)
ACTOR, CRITIC, ENGINE = "areal/trainer/ppo/actor.py", "areal/trainer/ppo/critic.py", "areal/engine/fsdp_engine.py"
one_process = SimpleNamespace(all_reduce=lambda tensor, group: None, is_initialized=lambda: False)
scope: dict[str, Any] = vars(typing) | {"torch": torch, "np": np, "dist": one_process, "functools": functools}
scope |= {"stats_tracker": MagicMock(), "infer_token_denominator": lambda data, mask: mask}
data = SOURCE.cut(DATA, "Normalization", "KLEstimator", **scope)
functional = SOURCE.cut(
    FUNCTIONAL,
    *("_compute_sequence_level_ratio_and_advantages", "ppo_actor_loss_fn"),
    *("_mse_loss", "ppo_critic_loss_fn"),
    **scope,
)
actor = SOURCE.cut(
    ACTOR,
    *("PPOActor._compute_advantages", "_resolve_proximal_logp", "grpo_loss_fn"),
    ppo_actor_loss_fn=functional.ppo_actor_loss_fn,
    _log_proximal_approximation_stats=lambda **options: None,
    **{f"PROX_LOGP_METHOD_{name}": name.lower() for name in ("RECOMPUTE", "LOGLINEAR", "METRICS")},
    **scope,
)
critic = SOURCE.cut(CRITIC, "ppo_loss_fn", ppo_critic_loss_fn=functional.ppo_critic_loss_fn, **scope)
engine = SOURCE.cut(ENGINE, "FSDPEngine._compute_logprobs_and_loss", **scope)
total_weight = SOURCE.cut("areal/engine/core/train_engine.py", "compute_total_loss_weight", **scope)
vocabulary = SOURCE.cut(
    VOCABULARY, "_gather_logprobs", "_chunked_apply", "_chunked_gather_logprobs", "gather_logprobs", **scope
)
WHITEN = SimpleNamespace(mean_level="batch", mean_leave1out=False, std_level="batch", std_unbiased=True, eps=1e-5)
WHITEN.group_size = 1


class AReaL:
    name = f"AReaL {SOURCE.version}"
    lacks = (
        *("rollouts of several rows", "uneven groups", "rows that pad a batch"),
        *("packed rows", "slices of the context"),
    )
    where: ClassVar = {
        "advantages": SOURCE.where(ACTOR, "reward_score = self.reward_norm(reward_score)"),
        "token_advantages": SOURCE.where(ACTOR, "rewards[batch_indices, indices] += reward_score"),
        "loss": SOURCE.where(FUNCTIONAL, "pg_loss = torch.where(loss_mask, pg_loss, 0).sum()"),
    }

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator in ("leave-one-out-std", None):
            raise NotOffered("no deviation of the others, and no normalisation by default")
        order, size = in_groups(batch)
        config = SimpleNamespace(
            mean_level="group",
            mean_leave1out=batch.estimator == "leave-one-out",
            std_level="group" if batch.estimator == "mean-std" else None,
            std_unbiased=True,
            group_size=size,
            eps=1e-5,
        )
        mask = batch.mask[order]
        places = torch.arange(1, mask.shape[1] + 1)
        lengths = (mask * places).amax(1).clamp(min=1)
        norm = data.Normalization(config)
        result = self._credit(batch.replace(mask=mask), batch.rewards[order], lengths, reward_norm=norm)
        return result.gather(1, mask.long().argmax(1, keepdim=True))[:, 0][order.argsort()]

    def token_advantages(self, batch: Batch) -> Tensor:
        """Rewards of rows, at their ends: the last token that counts or has a reward."""
        rewards = batch.token_rewards.nan_to_num()
        places = torch.arange(1, batch.mask.shape[1] + 1)
        lengths = ((batch.mask | (rewards != 0)) * places).amax(1)
        return self._credit(batch, rewards.sum(1).float(), lengths, values=F.pad(batch.values, (0, 2)).float())

    def loss(self, batch: Batch) -> Tensor:
        """A mean over tokens, whatever is asked for."""
        refuse(batch, "kl_coef", "entropy_coef", "auxiliary_coef", "mask_truncated")
        if batch.aggregation not in ("token-mean", None):
            raise NotOffered("a mean over tokens alone")
        inputs = {
            "logprobs": batch.old_logprobs,
            "prox_logp": batch.old_logprobs,
            "advantages": batch.advantages[:, None].expand(batch.mask.shape),
            "loss_mask": batch.mask,
            "values": batch.values,
            "returns": batch.returns,
        }
        if batch.teacher_coef:
            inputs |= {"teacher_logp": batch.teacher_logprobs, "distill_loss_weight": batch.teacher_coef}
        options = {"eps_clip": batch.clip, "eps_clip_higher": None, "c_clip": None, "current_version": None}
        options |= {"importance_sampling_level": batch.ratio, "use_decoupled_loss": False}
        loss = self._scaled(batch, inputs, functools.partial(actor.grpo_loss_fn, **options), is_critic=False)
        if batch.value_coef:
            value_loss = functools.partial(critic.ppo_loss_fn, eps_clip=0.5)
            loss = loss + batch.value_coef * self._scaled(batch, inputs, value_loss, is_critic=True)
        return loss / batch.ranks  # gradients are averaged over ranks

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        rolled = torch.roll(tokens, shifts=-1, dims=-1)  # as the engine makes labels of packed rows
        rows = [vocabulary.gather_logprobs(*pair, temperature) for pair in zip(logits, rolled, strict=True)]
        return torch.stack(rows)[:, :-1]

    def _scaled(self, batch: Batch, inputs: dict[str, Any], loss: Any, is_critic: bool) -> Tensor:
        """The loss as the engine scales it, by the weights of all micro-batches and ranks."""
        weigh = lambda micro_batch: micro_batch["loss_mask"].count_nonzero()  # noqa: E731 (as in _ppo_update)
        total = total_weight.compute_total_loss_weight(
            SimpleNamespace(mbs=[{"loss_mask": batch.total.mask}]), weigh, None
        )
        me = MagicMock(enable_tree_training=False, config=SimpleNamespace(is_critic=is_critic))
        me._compute_logprobs_entropy = lambda logits, *others: (logits, batch.entropy)
        me._get_vocab_min_max_logits = lambda *others: (None, None)
        me._compute_values = lambda values, *others: values
        context = SimpleNamespace(mb_input=inputs, model_inputs=None, ulysses_pad_size=0, pad_length=0)
        first = batch.values[:, :, None, None] if is_critic else batch.logprobs
        return engine._compute_logprobs_and_loss(me, first, context, loss, weigh, total, batch.ranks)

    def _credit(
        self, batch: Batch, rewards: Tensor, lengths: Tensor, values: Any = None, reward_norm: Any = None
    ) -> Tensor:
        """The advantages of rows with a prompt of one token and a token after their end."""
        count, width = batch.mask.shape
        config = SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=True, recompute_logprob=True)
        me = SimpleNamespace(config=config, reward_bias=0.0, reward_scaling=1.0, reward_clip=1e9, kl_ctl=0.0)
        me.reward_norm, me.kl_estimator = reward_norm, data.KLEstimator("k1")
        me.adv_norm = data.Normalization(WHITEN) if batch.whiten else None
        me.mask_no_eos_with_zero, me.discount, me.gae_lambda = False, batch.gamma, batch.lam
        rows = {name: torch.zeros(count, width + 2) for name in ("input_ids", "logprobs", "prox_logp")}
        rows |= {"rewards": rewards, "loss_mask": F.pad(batch.mask.long(), (1, 1))}
        rows["attention_mask"] = (torch.arange(width + 2) < (lengths + 1)[:, None]).long()
        rows |= {} if values is None else {"values": values}
        return actor._compute_advantages(me, rows)["advantages"][:, :width]


adapter = AReaL()
