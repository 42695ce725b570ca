"""verl: the functions of its v1 trainer, as that calls them, and ours in their place."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_conformance.adapters import ESTIMATORS, refuse, where
from grpo_conformance.batch import PAD_GROUP, Batch, NotOffered

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.getLogger("verl").setLevel(logging.ERROR)
    from verl.protocol import DataProto
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1 import utils as v1
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils import tensordict_utils
    from verl.workers.config import CriticConfig, DistillationLossConfig, FSDPActorConfig, PolicyLossConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils import losses

    from grpo_kernels.integrations.verl import fused_ppo_loss, patch_verl, unpatch_verl

PAD_UID = f"pad{0x5EED:032x}"  # as verl's v1 trainer names the rows that make a batch divisible


class Verl:
    name = "verl"
    lacks = ("packed rows", "slices of the context")
    estimators: ClassVar[dict[str | None, str]] = {
        "mean": "grpo",
        "mean-std": "grpo",
        "leave-one-out": "rloo",
        None: "grpo",
    }
    modes: ClassVar = {"token": "vanilla", "sequence": "gspo"}
    ppo_loss = staticmethod(losses.ppo_loss)
    where: ClassVar[dict[str, str]] = {
        "advantages": where(v1.compute_advantage_for_multi_trajectories),
        "token_advantages": where(core_algos.compute_gae_advantage_return),
        "loss": where(core_algos.agg_loss),
        "pad-rows-means": where(PPOTrainer._update_actor),
    }

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator not in self.estimators:
            raise NotOffered(f"no estimator {batch.estimator}")
        at_end = F.pad(batch.rewards[:, None], (batch.mask.shape[1] - 1, 0))
        options = {} if batch.estimator is None else {"norm_adv_by_std_in_grpo": batch.estimator == "mean-std"}
        advantages = self.with_advantages(batch, at_end, self.estimators[batch.estimator], **options)["advantages"]
        return advantages.gather(1, batch.mask.long().cumsum(1).argmax(1, keepdim=True))[:, 0]

    def token_advantages(self, batch: Batch) -> Tensor:
        """The advantages, which verl whitens, or returns minus values."""
        options = {"gamma": batch.gamma, "lam": batch.lam}
        result = self.with_advantages(batch, batch.token_rewards, "gae", **options)
        return result["advantages"] if batch.whiten else result["returns"] - batch.values

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "auxiliary_coef", "mask_truncated")
        counts = {"batch_num_tokens": int(batch.total.mask.sum()), "global_batch_size": len(batch.total.mask)}
        count, width = batch.mask.shape
        columns = {
            "prompts": torch.ones(count, 1, dtype=torch.long),
            "responses": torch.ones(count, width, dtype=torch.long),
            "attention_mask": torch.ones(count, width + 1, dtype=torch.long),
            "response_mask": batch.mask,
            "old_log_probs": batch.old_logprobs,
            "ref_log_prob": batch.ref_logprobs,
            "advantages": batch.advantages[:, None].expand(count, width).contiguous(),
        } | self.of_sessions(batch)
        columns |= {"values": batch.values, "returns": batch.returns}
        teacher = list(F.pad(batch.teacher_logprobs, (0, 1))[:, :, None])
        columns["teacher_logprobs"] = torch.nested.nested_tensor(teacher, layout=torch.jagged)
        data = tensordict_utils.get_tensordict(columns, {"dp_size": batch.ranks} | counts)
        tokens = {"log_probs": batch.logprobs} | ({"entropy": batch.entropy} if batch.entropy_coef else {})
        output = {name: _of_sequences(value) for name, value in tokens.items()}
        config = self.config(batch)
        if batch.teacher_coef:
            options = {"loss_mode": "k3", "use_policy_gradient": False, "distillation_loss_coef": batch.teacher_coef}
            distillation: Any = SimpleNamespace(distillation_loss=DistillationLossConfig(**options))
            loss: Tensor = distillation_ppo_loss(config, distillation, output, data)[0]
        else:
            loss = self.ppo_loss(config, output, data)[0]
        if batch.value_coef:
            critic = CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, loss_agg_mode=config.loss_agg_mode)
            values = {"values": _of_sequences(batch.values)}
            loss = loss + batch.value_coef * losses.value_loss(critic, values, data)[0]
        return loss / batch.ranks  # gradients are averaged over ranks

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        engine = object.__new__(FSDPEngineWithLMHead)
        engine.pad_to_length = engine.use_ulysses_sp = False
        engine._gather_and_unpad_packed = lambda values, pad_size: values
        ids = torch.nested.nested_tensor(list(tokens), layout=torch.jagged)
        micro_batch = tensordict_utils.get_tensordict(
            {"input_ids": ids, "position_ids": ids}, {"temperature": temperature}
        )
        _, arguments = engine.prepare_model_inputs(micro_batch)
        packed: Any = SimpleNamespace(logits=logits.clone().view(1, -1, logits.shape[2]))
        output = engine.prepare_model_outputs(packed, arguments, micro_batch, None)
        return torch.stack(list(output["log_probs"].unbind()))[:, :-1]

    def with_advantages(self, batch: Batch, rewards: Tensor, estimator: str, **options: Any) -> dict[str, Tensor]:
        """The tensors of the trainer's batch after it has computed advantages."""
        uids = [PAD_UID if group == PAD_GROUP else f"prompt{group}" for group in batch.groups.tolist()]
        ids = batch.rollouts.tolist()
        keys = [f"{uid}_{ids[row]}_{ids[:row].count(ids[row])}" for row, uid in enumerate(uids)]
        tensors = {"response_mask": batch.mask.long(), "values": batch.values}
        tensors |= dict.fromkeys(("token_level_scores", "token_level_rewards"), rewards)
        data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object)})
        options = {"config": {}} | options
        return dict(v1.compute_advantage_for_multi_trajectories(data, keys, estimator, **options).batch)

    def of_sessions(self, batch: Batch) -> dict[str, Tensor]:
        """Further columns of the batch that the actor gets."""
        return {}

    def config(self, batch: Batch) -> Any:
        needed: dict[str, Any] = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
        fields: dict[str, Any] = dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), batch.clip)
        fields |= {"use_kl_loss": batch.kl_coef > 0, "kl_loss_coef": batch.kl_coef, "entropy_coeff": batch.entropy_coef}
        if batch.kl:
            fields["kl_loss_type"] = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}[batch.kl]
        fields |= {"loss_agg_mode": batch.aggregation} if batch.aggregation else {}
        return FSDPActorConfig(policy_loss=PolicyLossConfig(loss_mode=self.modes[batch.ratio]), **needed, **fields)


def _of_sequences(values: Tensor) -> Tensor:
    """Values of responses as those of whole sequences, in which each position has that of the next token."""
    return F.pad(values, (0, 1)).flatten()


class FusedVerl(Verl):
    name = "fused_verl"
    options: ClassVar = {"carry_rewards": True, "session_outputs": "joined"}  # of advantages of tokens
    estimators: ClassVar = {name: f"fused_{of}" for name, of in ESTIMATORS.items() if name != "leave-one-out-std"}
    modes: ClassVar = {"token": "vanilla", "sequence": "fused_session_gspo"}
    documents: ClassVar = {
        "pad-rows-means": "means over rows divide by verl's global_batch_size, which has the rows that pad it"
    }
    ppo_loss = staticmethod(fused_ppo_loss)

    def with_advantages(self, batch: Batch, rewards: Tensor, estimator: str, **options: Any) -> dict[str, Tensor]:
        patch_verl(loss=False)
        try:
            config = {"grpo_kernels": self.options} if estimator == "gae" else {}
            return super().with_advantages(batch, rewards, estimator, config=config, **options)
        finally:
            unpatch_verl()

    def of_sessions(self, batch: Batch) -> dict[str, Tensor]:
        """Columns of rows, which the patched trainer puts into the queue beside the advantages of the whole batch."""
        if not batch.has_rollouts and batch.ratio == "token":
            return {}
        columns = self.with_advantages(batch.total, batch.total.token_rewards, "fused_grpo")
        return {name: batch.of_total(column) for name, column in columns.items() if column.dim() == 1}
