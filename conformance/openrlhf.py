"""OpenRLHF: its advantages, a training step of its actor with the counts of its loop, and its log-probs."""

from __future__ import annotations

import itertools
import typing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from cutter import Source
from grpo_conformance import Batch, NotOffered
from grpo_conformance.adapters import in_groups, refuse
from torch import Tensor

SOURCE = Source("openrlhf", "0.11.2")
EXPERIENCE, ACTOR = "openrlhf/trainer/ppo_utils/experience_maker.py", "openrlhf/trainer/ray/ppo_actor.py"
LOSS, UTILS, COUNTS = "openrlhf/models/loss.py", "openrlhf/models/utils.py", "openrlhf/utils/loss_utils.py"
ranks = SimpleNamespace(count=1)
one_process = SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    get_world_size=lambda group: ranks.count,
    ReduceOp=SimpleNamespace(SUM="sum"),
    all_reduce=lambda tensor, op, group: None,  # the windows below have the rows of all ranks
)
scope: dict[str, Any] = vars(typing) | {"torch": torch, "nn": torch.nn, "F": F, "dist": one_process}
NAMES = ("masked_mean", "KL_IS_WEIGHT_CLIP", "compute_approx_kl", "compute_reward")
NAMES += ("_logsumexp_by_chunk", "log_probs_from_logits")
utils = SOURCE.cut(UTILS, *(name for name in NAMES if SOURCE.has(UTILS, name)), **scope)
scope |= {name: getattr(utils, name) for name in ("masked_mean", "compute_approx_kl", "compute_reward")}
has_counts = SOURCE.has(COUNTS, "iter_grad_accum_global_norm")  # not before 0.10.4
losses = SOURCE.cut(LOSS, *(["aggregate_loss"] * has_counts), "PolicyLoss", **scope)
if has_counts:
    scope["aggregate_loss"] = losses.aggregate_loss
    names = "_optimizer_step_loss_norm", "iter_grad_accum_global_norm"
    counts = SOURCE.cut(COUNTS, *names, _get_dp_group=lambda strategy: None, **scope)
maker = SOURCE.cut(
    EXPERIENCE,
    *(f"RemoteExperienceMaker.{name}" for name in ("compute_advantages_and_returns", "get_advantages_and_returns")),
    "RemoteExperienceMaker.get_cumulative_returns",
    itertools=itertools,
    apply_length_penalties=lambda experiences, args: None,
    **scope,
)
step = SOURCE.cut(
    ACTOR,
    "ActorPPOTrainer.training_step",
    **scope,
    fields=lambda kind: (),
    Experience=object,
)
ESTIMATORS = {"mean": "dr_grpo", "mean-std": "group_norm", "leave-one-out": "rloo"}


@dataclass
class Experience:
    action_mask: Tensor
    rewards: Tensor | None = None
    values: Tensor | None = None
    index: Any = None


class OpenRLHF:
    name = f"OpenRLHF {SOURCE.version}"
    lacks = (
        *("rollouts of several rows", "uneven groups", "rows that pad a batch"),
        *("packed rows", "slices of the context", "rewards at masked tokens"),  # whose place it chooses itself
    )
    where: ClassVar = {
        "advantages": SOURCE.where(EXPERIENCE, "1e-9"),
        "token_advantages": SOURCE.where(EXPERIENCE, "values = action_mask * values"),
        "loss": SOURCE.where(LOSS, "def aggregate_loss" if has_counts else "class PolicyLoss"),
        "auxiliary-share": SOURCE.where(ACTOR, "loss += aux_loss"),
        **{
            f"{term}-seq-mean-token-mean": SOURCE.where(ACTOR, text)
            for term, text in (("kl", "kl_loss = "), ("entropy", "entropy_loss = "))
        },
    }

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator not in ESTIMATORS:
            raise NotOffered("no deviation of the others, and a default that is GAE")
        order, size = in_groups(batch)
        experience: Any = Experience(batch.mask[order].long(), batch.rewards[order], index=list(range(len(order))))
        experience.kl, experience.info = torch.zeros(batch.mask.shape), {}
        self._credit(experience, ESTIMATORS[batch.estimator], batch, size)
        first = experience.action_mask.argmax(1, keepdim=True)
        return experience.advantages.gather(1, first)[:, 0][order.argsort()]

    def token_advantages(self, batch: Batch) -> Tensor:
        mask = batch.mask.long()
        found, _ = maker.get_advantages_and_returns(
            None, batch.values, batch.token_rewards, mask, batch.gamma, batch.lam
        )
        if not batch.whiten:
            return found
        experience: Any = Experience(mask, torch.zeros(len(mask)), batch.values, list(range(len(mask))))
        experience.kl, experience.info = torch.zeros(mask.shape), {}
        self._credit(experience, "gae", batch, 1, lambda *arguments: (found, found))
        return experience.advantages

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "teacher_coef", "value_coef", "mask_truncated")
        if batch.aggregation == "seq-mean-token-sum":
            raise NotOffered("no sum over tokens")
        if batch.ratio == "sequence" and batch.aggregation == "token-mean":
            raise NotOffered("GSPO is a mean over rows")
        is_by_token = batch.aggregation != "seq-mean-token-mean"
        kinds = {"policy_loss_type": "gspo" if batch.ratio == "sequence" else "ppo", "token_level_loss": is_by_token}
        policy_loss, caught = losses.PolicyLoss(batch.clip, batch.clip, **kinds), []
        algorithm = {"use_loss": batch.kl_coef > 0, "init_coef": batch.kl_coef}
        algorithm |= {"estimator": batch.kl or "k1", "unbiased_gradient": False}
        entropy = batch.entropy_coef or None
        args = SimpleNamespace(
            train=SimpleNamespace(dynamic_batch_enable=False),
            actor=SimpleNamespace(entropy_coef=entropy, aux_loss_coef=batch.auxiliary_coef),
            algo=SimpleNamespace(kl=SimpleNamespace(**algorithm)),
        )
        output = SimpleNamespace(entropy=batch.entropy, aux_loss=torch.tensor(batch.auxiliary))
        me = MagicMock(args=args, actor_loss_fn=policy_loss, aux_loss=batch.auxiliary_coef > 1e-8)
        me.actor = MagicMock(side_effect=lambda *arguments, **options: (batch.logprobs, output))
        me.strategy.backward = lambda loss, *others: caught.append(loss)
        experience = MagicMock(
            action_mask=batch.mask.long(),
            action_log_probs=batch.old_logprobs,
            base_action_log_probs=batch.ref_logprobs,
            advantages=batch.advantages[:, None],
            info={},
            mm_train_inputs=None,
        )
        step.training_step(me, experience, batch.kl_coef, 0, *([self._counts(batch)] if has_counts else []))
        return caught[0] / batch.ranks / batch.steps  # as DeepSpeed averages gradients, and scales by steps

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        rolled = torch.roll(tokens, shifts=-1, dims=1)  # as Actor.forward
        return utils.log_probs_from_logits(logits.clone(), rolled, temperature)[:, :-1]

    def _counts(self, batch: Batch) -> dict[str, Any]:
        """The normalizers that the loop gives to this part, in a window with the rows of all parts."""
        rest = torch.ones(len(batch.total.mask), dtype=torch.bool)
        rest[torch.arange(len(rest)) if batch.rows is None else batch.rows] = False
        others = list(batch.total.mask[rest].long().tensor_split(max(1, batch.steps - 1)))
        window = [batch.mask.long(), *(others if batch.steps > 1 or len(others[0]) else [])]
        if batch.steps == 1:
            window = [torch.cat(window)]
        ranks.count = batch.ranks
        return next(iter(counts.iter_grad_accum_global_norm(window, None, batch.steps, lambda mask: mask)))[1]

    def _credit(self, experience: Any, estimator: str, batch: Batch, size: int, gae: Any = None) -> None:
        settings = {"estimator": estimator, "gamma": batch.gamma, "lambd": batch.lam, "no_std_norm": False}
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=size),
            algo=SimpleNamespace(advantage=SimpleNamespace(**settings)),
            reward=SimpleNamespace(clip_range=None),
        )
        me = SimpleNamespace(strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=0.0))
        me.advantage_estimator, me.get_advantages_and_returns = estimator, gae
        me.get_cumulative_returns = lambda *arguments: maker.get_cumulative_returns(None, *arguments)
        maker.compute_advantages_and_returns(me, [experience])


adapter = OpenRLHF()
