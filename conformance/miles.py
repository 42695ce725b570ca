"""miles: its advantages, and its loss, in Megatron's place."""

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

SOURCE = Source("miles")
HUB = "miles/backends/training_utils"
MATH, LOSSES, LOSS = f"{HUB}/loss_hub/math_utils.py", f"{HUB}/loss_hub/losses.py", f"{HUB}/loss.py"
CONVERSION = "miles/ray/rollout/train_data_conversion.py"
parallel = SimpleNamespace(
    cp=SimpleNamespace(size=1, rank=0),
    intra_dp=SimpleNamespace(size=1),
    intra_dp_cp=SimpleNamespace(size=1),
    is_ulysses_cp=False,
)
scope: dict[str, Any] = vars(typing) | {"torch": torch, "F": torch.nn.functional}
scope |= {"get_parallel_state": lambda: parallel, "is_multi_lora_enabled": lambda args: False}
NAMES = (
    "_LOG_RATIO_EXP_CLAMP",
    "_safe_clamp_log_ratio",
    "_safe_exp_neg_ppo_kl",
    "compute_approx_kl",
    "compute_gspo_kl",
)
NAMES += ("compute_policy_loss", "vanilla_gae", "chunked_gae", "get_advantages_and_returns_batch")
NAMES = tuple(name for name in NAMES if SOURCE.has(MATH, name))
math_utils = SOURCE.cut(MATH, *NAMES, **scope)
scope |= {name: getattr(math_utils, name) for name in NAMES if name.startswith("compute_")}
sums = SOURCE.cut(f"{HUB}/cp_utils.py", "get_sum_of_sample_mean", **scope)
scope["get_sum_of_sample_mean"] = sums.get_sum_of_sample_mean
policy = SOURCE.cut(
    LOSSES,
    "policy_loss_function",
    compute_ess_ratio_contribution=lambda **options: torch.tensor(0.0),
    get_log_probs_and_entropy=lambda logits, **options: vars(logits),
    all_gather_with_cp=lambda values, *others, **options: values,
    get_local_response_loss_masks=lambda totals, responses, masks, *others: masks,
    **scope,
)
whole = SOURCE.cut(LOSS, "loss_function", get_loss_function=lambda args: policy.policy_loss_function, **scope)
NAMES = ("_trainable_token_count", "_reward_group_segments", "_normalize_rewards_by_rollout", "_post_process_rewards")
NAMES = tuple(name for name in NAMES if SOURCE.has(CONVERSION, name))
conversion = SOURCE.cut(CONVERSION, *NAMES, **scope)


class Miles:
    name = f"miles {SOURCE.version}"
    lacks = ("rows that pad a batch", "packed rows", "slices of the context")
    where: ClassVar = {
        "advantages": SOURCE.where(CONVERSION, f"def {NAMES[-2]}" if len(NAMES) > 1 else "group norm"),
        "token_advantages": SOURCE.where(MATH, "def get_advantages_and_returns_batch"),
        "loss": SOURCE.where(LOSS, "def loss_function"),
    }

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator not in ("mean", "mean-std", None) or PAD_GROUP in batch.groups:
            raise NotOffered("no mean of the others")
        order = batch.groups.argsort(stable=True)
        args = SimpleNamespace(advantage_estimator="grpo", rewards_normalization=True, n_samples_per_prompt=1)
        args.grpo_std_normalization = batch.estimator != "mean"
        fields = zip(*(values[order].tolist() for values in (batch.rewards, batch.rollouts, batch.groups)), strict=True)
        samples = []
        for row, (reward, rollout, group) in enumerate(fields):
            sample = SimpleNamespace(index=row, group_index=group, rollout_id=rollout, remove_sample=False)
            sample.effective_response_length, sample.get_reward_value = 1, lambda args, own=reward: own
            samples.append(sample)
        sizes = [int((batch.groups == group).sum()) for group in batch.groups[order].unique_consecutive()]
        return torch.tensor(conversion._post_process_rewards(args, samples, None, sizes)[1])[order.argsort()]

    def token_advantages(self, batch: Batch) -> Tensor:
        """Rewards of rows, which have no KL."""
        refuse(batch, "whiten")
        if batch.has_rollouts:
            raise NotOffered("GAE is by row")
        count, width = batch.mask.shape
        rewards = batch.token_rewards.nan_to_num().sum(1).tolist()
        rows = [width + 1] * count, [width] * count, list(batch.values), [torch.zeros(width).double()] * count, rewards
        function = math_utils.get_advantages_and_returns_batch
        takes_masks = "loss_masks" in function.__code__.co_varnames[: function.__code__.co_argcount]
        masks = [list(batch.mask.long())] if takes_masks else []  # not before #1827
        made = function(*rows, "thd", None, *masks, batch.gamma, batch.lam)
        return torch.stack(made[0])

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "teacher_coef", "value_coef", "auxiliary_coef", "mask_truncated")
        if batch.aggregation == "seq-mean-token-sum":
            raise NotOffered("no sum over tokens")
        is_by_token, (count, width) = batch.aggregation == "token-mean", batch.mask.shape
        off = ("use_rollout_logprobs", "use_opsm", "get_mismatch_metrics", "use_tis", "use_unbiased_kl", "allgather_cp")
        off += ("recompute_loss_function", "observe_training_entropy", "skip_actor_forward_only", "true_on_policy_mode")
        settings = dict.fromkeys(off, False) | {"eps_clip": batch.clip, "eps_clip_high": batch.clip}
        settings |= dict.fromkeys(("eps_clip_c", "dump_details", "custom_pg_loss_reducer_function_path"))
        settings |= {"advantage_estimator": "gspo" if batch.ratio == "sequence" else "grpo", "qkv_format": "thd"}
        settings |= {"use_kl_loss": batch.kl_coef > 0, "kl_loss_coef": batch.kl_coef, "kl_loss_type": batch.kl or "k3"}
        settings |= {"entropy_coef": batch.entropy_coef, "calculate_per_token_loss": is_by_token}
        totals: dict[int, Any] = {}  # as its conversion sums the masks of a rollout
        for rollout, tokens in zip(batch.total.rollouts.tolist(), batch.total.mask.sum(1), strict=True):
            totals[rollout] = totals.get(rollout, 0) + tokens
        rows = {
            "advantages": [advantage.expand(width) for advantage in batch.advantages],
            "log_probs": list(batch.old_logprobs),
            "ref_log_probs": list(batch.ref_logprobs),
            "response_lengths": [width] * count,
            "total_lengths": [width + 1] * count,
            "unconcat_tokens": None,
            "loss_masks": list(batch.mask.long()),
            "rollout_mask_sums": [totals[rollout] for rollout in batch.rollouts.tolist()],
        }
        parallel.intra_dp.size = parallel.intra_dp_cp.size = batch.ranks
        logits = _Logits(log_probs=list(batch.logprobs), entropy=list(batch.entropy))
        args = MagicMock(**settings, log_probs_chunk_size=-1)
        loss = whole.loss_function(args, rows, batch.steps, logits, True, len(totals))[0]
        if is_by_token:  # Megatron divides by the tokens that loss_function returns for all parts
            return loss / sum(mask.sum().clamp(min=1) for mask in batch.total.mask)
        return loss / batch.steps / batch.ranks  # and by micro-batches, and averages over ranks


class _Logits:
    device = "cpu"

    def __init__(self, **scores: Any) -> None:
        vars(self).update(scores)


adapter = Miles()
