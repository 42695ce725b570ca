"""slime: its advantages, and its loss with the counts of its rollout manager, in Megatron's place."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
from cutter import Source
from grpo_conformance import PAD_GROUP, Batch, NotOffered
from grpo_conformance.adapters import refuse
from torch import Tensor

SOURCE = Source("slime")
PPO, LOSS, ROLLOUT = "slime/utils/ppo_utils.py", "slime/backends/megatron_utils/loss.py", "slime/ray/rollout.py"
mpu = MagicMock()
mpu.get_context_parallel_world_size.return_value = 1
scope: dict[str, Any] = vars(typing) | {"torch": torch, "F": torch.nn.functional, "mpu": mpu}
names = ("compute_approx_kl", "compute_gspo_kl", "compute_policy_loss")
gae = (name for name in ("vanilla_gae", "chunked_discounted_returns", "chunked_gae") if SOURCE.has(PPO, name))
ppo = SOURCE.cut(PPO, *names, *gae, **scope)
scope |= {name: getattr(ppo, name) for name in names}
scope["get_sum_of_sample_mean"] = SOURCE.cut(
    "slime/backends/megatron_utils/cp_utils.py", "get_sum_of_sample_mean", **scope
).get_sum_of_sample_mean
losses = SOURCE.cut(
    LOSS,
    *("policy_loss_function", "loss_function"),
    get_rollout_top_p_logprob_kwargs=lambda *arguments: {},
    _maybe_capture_log_probs=lambda *arguments: None,
    all_gather_with_cp=lambda values, *others: values,
    get_log_probs_and_entropy=lambda logits, **options: (None, vars(logits)),
    **scope,
)
manager = SOURCE.cut(ROLLOUT, "RolloutManager._post_process_rewards", **scope)
has_rollouts = "rollout_mask_sums" in (SOURCE.root / ROLLOUT).read_text()  # not before #1933
if has_rollouts:
    count_masks = SOURCE.statements(
        ROLLOUT,
        "_convert_samples_to_train_data",
        "rollout_id_list = ",
        "train_data['rollout_mask_sums']",
        "train_data, loss_masks",
        "train_data['rollout_mask_sums']",
    )


class Slime:
    name = f"slime {SOURCE.version}"
    lacks: tuple[str, ...] = ("rows that pad a batch", "packed rows", "slices of the context")
    where: ClassVar = {
        "advantages": SOURCE.where(ROLLOUT, "rewards = rewards.view(-1, rewards.shape[-1])"),
        "token_advantages": SOURCE.where(PPO, "def chunked_gae"),
        "loss": SOURCE.where(LOSS, "def loss_function"),
    }

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator not in ("mean", "mean-std", None) or PAD_GROUP in batch.groups:
            raise NotOffered("no mean of the others")
        order = batch.groups.argsort(stable=True)  # samples come group by group
        prompts, rollouts = (
            len({*batch.groups.tolist()}),
            len({*zip(batch.groups.tolist(), batch.rollouts.tolist(), strict=True)}),
        )
        args = SimpleNamespace(advantage_estimator="grpo", rewards_normalization=True, rollout_batch_size=prompts)
        args.grpo_std_normalization, args.n_samples_per_prompt = batch.estimator != "mean", max(rollouts // prompts, 1)
        samples = [SimpleNamespace(get_reward_value=lambda args, own=own: own) for own in batch.rewards[order].tolist()]
        me = SimpleNamespace(custom_reward_post_process_func=None, args=args)
        return torch.tensor(manager._post_process_rewards(me, samples)[1])[order.argsort()]

    def token_advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "whiten")
        if batch.has_rollouts:
            raise NotOffered("GAE is by row")
        return ppo.chunked_gae(batch.token_rewards, batch.values, batch.gamma, batch.lam)[0]

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "teacher_coef", "value_coef", "auxiliary_coef", "mask_truncated")
        if batch.aggregation == "seq-mean-token-sum":
            raise NotOffered("no sum over tokens")
        is_by_token = batch.aggregation == "token-mean"
        args = MagicMock(**self._settings(batch), calculate_per_token_loss=is_by_token, loss_type="policy_loss")
        args.custom_pg_loss_reducer_function_path = None
        loss = self._summed(args, batch)
        if is_by_token:  # Megatron divides by the tokens that loss_function returns for all parts
            return loss / sum(mask.sum().clamp(min=1) for mask in batch.total.mask)
        return loss / batch.steps / batch.ranks  # and by micro-batches, and averages over ranks

    def _settings(self, batch: Batch) -> dict[str, Any]:
        off = ("use_rollout_logprobs", "use_opsm", "get_mismatch_metrics", "use_tis", "use_unbiased_kl", "allgather_cp")
        return {
            **dict.fromkeys((*off, "recompute_loss_function"), False),
            **{"advantage_estimator": "gspo" if batch.ratio == "sequence" else "grpo", "eps_clip_c": None},
            **{"eps_clip": batch.clip, "eps_clip_high": batch.clip, "entropy_coef": batch.entropy_coef},
            **{"use_kl_loss": batch.kl_coef > 0, "kl_loss_coef": batch.kl_coef, "kl_loss_type": batch.kl or "k3"},
        }

    def _rows(self, batch: Batch) -> dict[str, Any]:
        count, width = batch.mask.shape
        ids, sums = batch.total.rollouts.tolist(), [0] * len(batch.total.mask)
        if has_rollouts:
            sums = count_masks({"rollout_ids": ids}, batch.total.mask.long().tolist())
        return {
            "advantages": [advantage.expand(width) for advantage in batch.advantages],
            "log_probs": list(batch.old_logprobs),
            "ref_log_probs": list(batch.ref_logprobs),
            "response_lengths": [width] * count,
            "total_lengths": [width + 1] * count,
            "unconcat_tokens": None,
            "loss_masks": list(batch.mask.long()),
            "rollout_mask_sums": list(batch.of_total(torch.tensor(sums))),
        }

    def _summed(self, args: Any, batch: Batch) -> Tensor:
        mpu.get_data_parallel_world_size.return_value = batch.ranks
        rollouts = len({*batch.total.rollouts.tolist()} if has_rollouts else batch.total.mask)
        scored = _Logits(log_probs=list(batch.logprobs), entropy=list(batch.entropy))
        return losses.loss_function(args, self._rows(batch), batch.steps, rollouts, scored)[0]


class _Logits:
    device = "cpu"

    def __init__(self, **scores: Any) -> None:
        vars(self).update(scores)


adapter = Slime()
