"""verl: the functions of its v1 trainer, and ours in their place, as that calls them."""

from __future__ import annotations

import logging
import warnings
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from grpo_conformance.adapters import whole_rows
from grpo_conformance.batch import PAD_GROUP, Batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.getLogger("verl").setLevel(logging.ERROR)
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1 import utils as v1
    from verl.utils import tensordict_utils
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils import losses

PAD_UID = f"pad{0x5EED:032x}"  # as verl's v1 trainer names the rows that make a batch divisible


class Verl:
    name = "verl"
    estimators: ClassVar = {"mean": "grpo", "mean-std": "grpo", "leave-one-out": "rloo"}

    def advantages(self, batch: Batch) -> Tensor:
        scaled = batch.estimator == "mean-std"
        data = self._data(batch, torch.nn.functional.pad(batch.rewards[:, None], (batch.mask.shape[1] - 1, 0)))
        result = self._advantages(data, batch, self.estimators[batch.estimator], norm_adv_by_std_in_grpo=scaled)
        last = batch.mask.long().cumsum(1).argmax(1)
        advantages: Tensor = result.batch["advantages"]
        return advantages[torch.arange(len(last)), last]

    def token_advantages(self, batch: Batch) -> Tensor:
        """Returns minus values, since verl whitens the advantages themselves."""
        data = self._data(batch, batch.token_rewards)
        data.batch["values"] = batch.values
        result = self._advantages(data, batch, "gae", gamma=batch.gamma, lam=batch.lam)
        returns: Tensor = result.batch["returns"]
        return returns - batch.values

    def loss(self, batch: Batch) -> Tensor:
        whole_rows(batch)
        total = batch.total
        settings = {
            "dp_size": batch.ranks,
            "batch_num_tokens": int(total.mask.sum()),
            "global_batch_size": len(total.mask),  # of the mini-batch, as the trainers give it
        }
        count, width = batch.mask.shape
        columns = {
            "prompts": torch.ones(count, 1, dtype=torch.long),
            "responses": torch.ones(count, width, dtype=torch.long),
            "attention_mask": torch.ones(count, width + 1, dtype=torch.long),
            "response_mask": batch.mask,
            "old_log_probs": batch.old_logprobs,
            "ref_log_prob": batch.ref_logprobs,
            "advantages": batch.advantages[:, None].expand(count, width).contiguous(),
        } | self._of_sessions(batch)
        data = tensordict_utils.get_tensordict(columns, settings)
        # each position holds the value of the next token, so the last has none
        output = {"log_probs": torch.nn.functional.pad(batch.logprobs, (0, 1)).flatten()}
        if batch.entropy_coef:
            output["entropy"] = torch.nn.functional.pad(batch.entropy, (0, 1)).flatten()
        loss, _ = self._ppo_loss()(self._config(batch), output, data)
        loss_of_rank: Tensor = loss / batch.ranks  # gradients are averaged over ranks
        return loss_of_rank

    def _data(self, batch: Batch, token_rewards: Tensor) -> Any:
        uids = [PAD_UID if group == PAD_GROUP else f"prompt{group}" for group in batch.groups.tolist()]
        prompts = torch.ones(len(uids), 1, dtype=torch.long)
        tensors = {"token_level_rewards": token_rewards, "response_mask": batch.mask.long(), "prompts": prompts}
        tensors["attention_mask"] = torch.ones(len(uids), 1 + batch.mask.shape[1], dtype=torch.long)
        return DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object)})

    def _advantages(self, data: Any, batch: Batch, estimator: str, **options: Any) -> Any:
        keys, seen = [], dict[int, int]()
        for uid, rollout in zip(data.non_tensor_batch["uid"], batch.rollouts.tolist(), strict=True):
            keys.append(f"{uid}_{rollout}_{seen.setdefault(rollout, 0)}")
            seen[rollout] += 1
        return v1.compute_advantage_for_multi_trajectories(data, keys, estimator, config={}, **options)

    def _of_sessions(self, batch: Batch) -> dict[str, Tensor]:
        """Further columns of the batch that the actor gets."""
        return {}

    def _ppo_loss(self) -> Any:
        return losses.ppo_loss

    def _config(self, batch: Batch) -> Any:
        fields = {"loss_agg_mode": batch.aggregation} if batch.aggregation else {}
        kl = {"use_kl_loss": True, "kl_loss_coef": batch.kl_coef} if batch.kl_coef else {}
        mode = {"token": "vanilla", "sequence": "gspo"}[batch.ratio]
        return FSDPActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(loss_mode=mode),
            clip_ratio=batch.clip,
            clip_ratio_low=batch.clip,
            clip_ratio_high=batch.clip,
            entropy_coeff=batch.entropy_coef,
            **kl,
            **fields,
        )


class FusedVerl(Verl):
    name = "fused_verl"
    estimators: ClassVar = {"mean": "fused_dr_grpo", "mean-std": "fused_grpo", "leave-one-out": "fused_rloo"}

    def _advantages(self, data: Any, batch: Batch, estimator: str, **options: Any) -> Any:
        from grpo_kernels.integrations.verl import patch_verl, unpatch_verl

        patch_verl(loss=False)
        try:
            return super()._advantages(data, batch, estimator, **options)
        finally:
            unpatch_verl()

    def _of_sessions(self, batch: Batch) -> dict[str, Tensor]:
        """Columns that the patched trainer puts into the queue beside the advantages of the whole batch."""
        data = self._data(batch.total, torch.zeros_like(batch.total.logprobs))
        known = {*data.batch.keys(), "advantages", "returns"}
        columns = self._advantages(data, batch.total, "fused_grpo").batch
        return {name: batch.of_total(column) for name, column in columns.items() if name not in known}

    def _ppo_loss(self) -> Any:
        from grpo_kernels.integrations.verl import fused_ppo_loss

        return fused_ppo_loss
