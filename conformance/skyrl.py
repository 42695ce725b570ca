"""SkyRL: its advantages, its losses with the counts of its trainer and its workers, and its log-probs."""

from __future__ import annotations

import collections
import sys
import typing
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.nn.functional as F
from cutter import Source
from grpo_conformance import PAD_GROUP, Batch, NotOffered
from grpo_conformance.adapters import refuse
from torch import Tensor

sys.modules.setdefault("loguru", SimpleNamespace(logger=MagicMock()))  # which functions of it import
SOURCE = Source("skyrl", "0.3.0")
TRAIN = "skyrl/backends/skyrl_train"
PPO, TORCH, WORKER = f"{TRAIN}/utils/ppo_utils.py", f"{TRAIN}/utils/torch_utils.py", f"{TRAIN}/workers/worker.py"
TRAINER = "skyrl/train/trainer.py"
scope: dict[str, Any] = vars(typing) | {"torch": torch, "np": np, "defaultdict": collections.defaultdict}
scope |= {"Float": collections.defaultdict(lambda: None), "logger": MagicMock()}
numbers = SOURCE.cut(
    TORCH,
    "masked_mean",
    "safe_exp_delta",
    "logprobs_from_logits",
    "logprobs_from_logits_v2",
    F=F,
    FLASH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE=False,
    **scope,
)
scope |= {"masked_mean": numbers.masked_mean, "safe_exp_delta": numbers.safe_exp_delta}
ppo = SOURCE.cut(
    PPO,
    *("compute_approx_kl", "masked_var", "masked_whiten", "reduce_loss", "ppo_critic_loss"),
    *("ppo_policy_loss", "gspo_policy_loss", "apply_loss_reduction_to_advantages_minibatch"),
    *("compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage", "compute_gae_advantage_return"),
    apply_off_policy_correction=lambda loss, old, rollout, mask, config: (loss, mask, {}),
    **scope,
)
ESTIMATORS = {
    "grpo": ppo.compute_grpo_outcome_advantage,
    "rloo": ppo.compute_rloo_outcome_advantage,
    "gae": ppo.compute_gae_advantage_return,
}
registry = SimpleNamespace(
    compute_advantages_and_returns=lambda adv_estimator, config, **options: ESTIMATORS[adv_estimator](**options)
)
credit = SOURCE.statements(
    TRAINER,
    "compute_advantages_and_returns",
    "token_level_rewards = ",
    "data['advantages'] = ",
    "self, data",
    "data",
    ppo_utils=registry,
    **scope,
)
trainer = SOURCE.cut(
    TRAINER,
    "RayPPOTrainer._normalize_advantages",
    apply_loss_reduction_to_advantages_minibatch=ppo.apply_loss_reduction_to_advantages_minibatch,
    **scope,
)
weight_of = SOURCE.statements(
    WORKER,
    "forward_backward",
    "microbatch_weight = ",
    "microbatch_weight = ",
    "microbatch, data, micro_batch_size",
    "microbatch_weight",
)
whole_loss = SOURCE.statements(
    WORKER,
    "_forward_backward_micro",
    "with torch.set_grad_enabled",
    "loss = policy_loss *",
    "self, output, num_actions, action_log_probs, base_action_log_probs, loss_mask, policy_loss, microbatch_weight",
    "loss",
    compute_approx_kl=ppo.compute_approx_kl,
    **scope,
)
REDUCTIONS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", None: "token_mean"}


class Data(dict[str, Any]):
    """A batch, whose slices have the rows of all its tensors."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return Data({name: value[key] for name, value in self.items()})
        return super().__getitem__(key)


class SkyRL:
    name = f"SkyRL {SOURCE.version}"
    lacks = ("packed rows", "slices of the context")
    where: ClassVar = {
        "advantages": SOURCE.where(TRAINER, "last_step_advantages[traj_ids]"),
        "token_advantages": SOURCE.where(PPO, "delta = token_level_rewards"),
        "loss": SOURCE.where(PPO, "def apply_loss_reduction_to_advantages_minibatch"),
        "rollout-mean": SOURCE.where(PPO, "advantages / (batch_size * loss_mask.sum(dim=-1"),
        "rollout-in-parts": SOURCE.where(PPO, "advantages / (batch_size * loss_mask.sum(dim=-1"),
        **dict.fromkeys(("kl-token-mean", "kl-share"), SOURCE.where(WORKER, "kl_loss = masked_mean(kl_loss")),
        **dict.fromkeys(
            ("entropy-share", "entropy-of-ranks", "entropy-seq-mean-token-mean"),
            SOURCE.where(WORKER, "entropy = masked_mean(entropy_BS, loss_mask)"),
        ),
    }

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator == "leave-one-out-std":
            raise NotOffered("no deviation of the others")
        keys = [(group == PAD_GROUP, group, rollout) for group, rollout in zip(*_ids(batch), strict=True)]
        order = torch.tensor(sorted(range(len(keys)), key=lambda row: (*keys[row], row)))
        ids = [keys[row] if not keys[row][0] else row for row in order.tolist()]
        settings = {"grpo_norm_by_std": batch.estimator != "mean"}
        settings["advantage_estimator"] = "rloo" if batch.estimator == "leave-one-out" else "grpo"
        result = self._credit(batch, F.pad(batch.rewards[order][:, None], (batch.mask.shape[1] - 1, 0)), ids, settings)
        return result["advantages"][:, 0][order.argsort()]

    def token_advantages(self, batch: Batch) -> Tensor:
        if batch.has_rollouts:
            raise NotOffered("no GAE in steps")
        settings = {"advantage_estimator": "gae", "gamma": batch.gamma, "lambd": batch.lam, "grpo_norm_by_std": True}
        result = self._credit(batch, batch.token_rewards, list(range(len(batch.mask))), settings)
        return result["advantages"] if batch.whiten else result["returns"] - batch.values

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "teacher_coef", "auxiliary_coef", "mask_truncated")
        if batch.aggregation not in REDUCTIONS:
            raise NotOffered("a mean of sums only over a length")
        config = SimpleNamespace(
            policy_loss_type="regular",
            eps_clip_low=batch.clip,
            eps_clip_high=batch.clip,
            loss_reduction=REDUCTIONS[batch.aggregation],
            off_policy_correction=None,
            use_entropy_loss=batch.entropy_coef > 0,
            entropy_loss_coef=batch.entropy_coef,
            use_kl_loss=batch.kl_coef > 0,
            kl_loss_coef=batch.kl_coef,
            kl_estimator_type=batch.kl or "k3",
            advantage_batch_normalize=False,
            max_seq_len=None,
            value_clip=None,
        )
        total, mask = batch.total, batch.mask.double()
        everything = Data(advantages=total.advantages[:, None].expand(total.mask.shape), loss_mask=total.mask.double())
        everything["response_mask"] = everything["loss_mask"]
        rows = int((total.groups != PAD_GROUP).sum())  # the trainer pads after this
        cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=config, micro_train_batch_size_per_gpu=len(batch.mask)))
        arguments = [SimpleNamespace(cfg=cfg), everything, [(0, rows)], None]  # the last is not in 0.2.0
        arguments = arguments[: trainer._normalize_advantages.__code__.co_argcount]
        scaled = trainer._normalize_advantages(*arguments)["advantages"]
        function = ppo.gspo_policy_loss if batch.ratio == "sequence" else ppo.ppo_policy_loss
        policy_loss = function(batch.logprobs, batch.old_logprobs, batch.of_total(scaled), config, mask)[0]
        data = range(len(total.mask) // batch.ranks if batch.whole is not None else len(batch.mask))
        weight = weight_of(range(len(batch.mask)), data, len(batch.mask))
        me = SimpleNamespace(cfg=SimpleNamespace(algorithm=config), mesh_rank=SimpleNamespace(dp_size=batch.ranks))
        output, width = {"entropy": F.pad(batch.entropy, (1, 1))}, batch.mask.shape[1]
        loss = whole_loss(me, output, width, batch.logprobs, batch.ref_logprobs, mask, policy_loss, weight)
        if batch.value_coef:  # the critic's worker multiplies by the same weight
            critic = ppo.ppo_critic_loss(batch.values, batch.values, batch.returns, config, mask)[0]
            loss = loss + batch.value_coef * critic * weight
        return loss / batch.ranks  # gradients are averaged over ranks

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        rolled = torch.roll(tokens, shifts=-1, dims=1)  # as HFModelWrapper.forward
        return numbers.logprobs_from_logits(logits / temperature, rolled)[:, :-1]

    def _credit(self, batch: Batch, rewards: Tensor, ids: list[Any], settings: dict[str, Any]) -> Data:
        ends = [row + 1 == len(ids) or ids[row + 1] != ids[row] for row in range(len(ids))]
        data = Data(rewards=rewards, response_mask=torch.ones_like(rewards), values=batch.values)
        if settings["advantage_estimator"] == "gae":
            data["response_mask"] = batch.mask.double()
        uids = [str(name[1]) if isinstance(name, tuple) else f"pad{name}" for name in ids]
        data.metadata = {"uids": np.array(uids), "is_last_step": ends}  # type: ignore[attr-defined]
        algorithm = SimpleNamespace(**({"gamma": 1.0, "lambd": 1.0} | settings))
        generator = SimpleNamespace(step_wise_trajectories=batch.has_rollouts)
        return credit(
            SimpleNamespace(cfg=SimpleNamespace(generator=generator, trainer=SimpleNamespace(algorithm=algorithm))),
            data,
        )


def _ids(batch: Batch) -> tuple[list[int], list[int]]:
    return batch.groups.tolist(), batch.rollouts.tolist()


adapter = SkyRL()
