"""verl: the functions of its v1 trainer, as that calls them, and ours in their place."""

from __future__ import annotations

import logging
import warnings
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_conformance.adapters import ESTIMATORS
from grpo_conformance.batch import PAD_GROUP, Batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.getLogger("verl").setLevel(logging.ERROR)
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1 import utils as v1
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils import losses

    from grpo_kernels.integrations.verl import fused_ppo_loss, patch_verl, unpatch_verl

PAD_UID = f"pad{0x5EED:032x}"  # as verl's v1 trainer names the rows that make a batch divisible


class Verl:
    name = "verl"
    lacks = ("packed rows", "slices of the context")
    estimators: ClassVar = {"mean": "grpo", "mean-std": "grpo", "leave-one-out": "rloo"}
    modes: ClassVar = {"token": "vanilla", "sequence": "gspo"}
    ppo_loss = staticmethod(losses.ppo_loss)

    def advantages(self, batch: Batch) -> Tensor:
        at_end = F.pad(batch.rewards[:, None], (batch.mask.shape[1] - 1, 0))
        options = {"norm_adv_by_std_in_grpo": batch.estimator == "mean-std"}
        advantages = self.with_advantages(batch, at_end, self.estimators[batch.estimator], **options)["advantages"]
        return advantages.gather(1, batch.mask.long().cumsum(1).argmax(1, keepdim=True))[:, 0]

    def token_advantages(self, batch: Batch) -> Tensor:
        """Returns minus values, since verl whitens the advantages themselves."""
        options = {"gamma": batch.gamma, "lam": batch.lam}
        return self.with_advantages(batch, batch.token_rewards, "gae", **options)["returns"] - batch.values

    def loss(self, batch: Batch) -> Tensor:
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
        data = tensordict_utils.get_tensordict(columns, {"dp_size": batch.ranks} | counts)
        tokens = {"log_probs": batch.logprobs} | ({"entropy": batch.entropy} if batch.entropy_coef else {})
        # each position holds the value of the next token, so the last has none
        output = {name: F.pad(value, (0, 1)).flatten() for name, value in tokens.items()}
        loss: Tensor = self.ppo_loss(self.config(batch), output, data)[0]
        return loss / batch.ranks  # gradients are averaged over ranks

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
        fields |= {"loss_agg_mode": batch.aggregation} if batch.aggregation else {}
        return FSDPActorConfig(policy_loss=PolicyLossConfig(loss_mode=self.modes[batch.ratio]), **needed, **fields)


class FusedVerl(Verl):
    name = "fused_verl"
    options: ClassVar = {"carry_rewards": True, "session_outputs": "joined"}  # of advantages of tokens
    estimators: ClassVar = {name: f"fused_{of}" for name, of in ESTIMATORS.items()}
    modes: ClassVar = {"token": "vanilla", "sequence": "fused_session_gspo"}
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
        columns = self.with_advantages(batch.total, batch.total.token_rewards, "fused_grpo")
        return {name: batch.of_total(column) for name, column in columns.items() if column.dim() == 1}
