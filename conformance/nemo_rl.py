"""NeMo-RL: its advantages, its loss, and its means."""

from __future__ import annotations

import enum
import typing
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from cutter import Source
from grpo_conformance import PAD_GROUP, Batch, NotOffered
from grpo_conformance.adapters import refuse
from torch import Tensor

SOURCE = Source("nemo-rl")
FOLDER = "nemo_rl/algorithms"
ESTIMATOR, LOSS = f"{FOLDER}/advantage_estimator.py", f"{FOLDER}/loss/loss_functions.py"
scope: dict[str, Any] = vars(typing) | {"torch": torch, "enum": enum, "Enum": enum.Enum}
names = ("masked_mean", "masked_var", "calculate_kl", "calculate_baseline_and_std_per_prompt")
scope |= vars(SOURCE.cut(f"{FOLDER}/utils.py", *names, **scope))
scope |= vars(SOURCE.cut(f"{FOLDER}/loss/interfaces.py", "LossType", "LossInputType", "MetricNormalizer", **scope))
credit = SOURCE.cut(ESTIMATOR, "GRPOAdvantageEstimator", "GeneralizedAdvantageEstimator", **scope)
losses = SOURCE.cut(
    LOSS,
    "ClippedPGLossConfig",
    "ClippedPGLossFn",
    BaseModel=__import__("pydantic").BaseModel,
    LossFunction=object,
    **scope,
)


class OnCpu(Tensor):
    """Counts of all ranks, which stay where they are."""

    def cuda(self, *arguments: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return self


counting = SimpleNamespace(sum=torch.sum, tensor=lambda values: torch.tensor(values).as_subclass(OnCpu))
counting.distributed = SimpleNamespace(all_reduce=lambda counts, group: None)  # the batch below has all rows
count = SOURCE.statements(
    "nemo_rl/models/automodel/data.py",
    "process_global_batch",
    "local_valid_seqs = ",
    "global_valid_seqs, global_valid_toks = ",
    "batch, dp_group",
    "global_valid_seqs, global_valid_toks",
    torch=counting,
)


class NemoRL:
    name = f"NeMo-RL {SOURCE.version}"
    lacks = ("rollouts of several rows", "rows that pad a batch", "packed rows", "slices of the context")
    where: ClassVar = {
        "advantages": SOURCE.where(ESTIMATOR, "class GRPOAdvantageEstimator"),
        "loo-std-outlier": SOURCE.where(f"{FOLDER}/utils.py", "def calculate_baseline_and_std_per_prompt"),
        "token_advantages": SOURCE.where(ESTIMATOR, "class GeneralizedAdvantageEstimator"),
        "loss": SOURCE.where(LOSS, "class ClippedPGLossFn"),
    }

    documents: ClassVar = dict.fromkeys(
        ("kl-k1", "kl-k2", "kl-k3", "kl-token-mean", "kl-seq-mean-token-mean"),
        "the KL's gradient has the score's term (arXiv 2506.09477, as its comment says)",
    )

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        assert PAD_GROUP not in batch.groups
        is_default, name = batch.estimator is None, batch.estimator or ""
        config = SimpleNamespace(
            use_leave_one_out_baseline=is_default or name.startswith("leave-one-out"),
            normalize_rewards=is_default or name.endswith("std"),
        )
        estimator = credit.GRPOAdvantageEstimator(config, None)
        return estimator.compute_advantage(batch.groups[:, None], batch.rewards, batch.mask.float())[:, 0]

    def token_advantages(self, batch: Batch) -> Tensor:
        config = {"gae_lambda": batch.lam, "gae_gamma": batch.gamma, "normalize_advantages": batch.whiten}
        config |= {"gae_lambda_value": None, "gae_lambda_policy": None, "length_adaptive_alpha": 0}
        kl = SimpleNamespace(use_kl_in_reward=False, reference_policy_kl_penalty=0, reference_policy_kl_type="k3")
        estimator = credit.GeneralizedAdvantageEstimator(config, kl)
        rewards = batch.token_rewards.nan_to_num().sum(1)  # of rows
        return estimator.compute_advantage(None, rewards, batch.mask.double(), batch.values)[0]

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "entropy_coef", "teacher_coef", "value_coef", "auxiliary_coef", "mask_truncated")
        if batch.aggregation == "seq-mean-token-sum":
            raise NotOffered("no sum over tokens")
        if batch.ratio == "sequence" and batch.aggregation == "token-mean":
            raise NotOffered("a ratio of sequences is averaged over rows alone")
        config = losses.ClippedPGLossConfig(
            token_level_loss=batch.aggregation in (None, "token-mean"),
            sequence_level_importance_ratios=batch.ratio == "sequence",
            ratio_clip_min=batch.clip,
            ratio_clip_max=batch.clip,
            reference_policy_kl_penalty=batch.kl_coef,
            **({"reference_policy_kl_type": batch.kl} if batch.kl else {}),
        )
        rows = {
            "token_mask": batch.mask.double(),
            "advantages": batch.advantages[:, None].expand(batch.mask.shape).double(),
            "prev_logprobs": batch.old_logprobs,
            "generation_logprobs": batch.old_logprobs,
            "reference_policy_logprobs": batch.ref_logprobs,
        }
        data = {name: F.pad(values, (1, 0)) for name, values in rows.items()}  # the first position has no loss
        data["sample_mask"] = batch.mask.any(1).double()
        total = {
            "sample_mask": batch.total.mask.any(1).double(),
            "token_mask": F.pad(batch.total.mask.double(), (1, 0)),
        }
        counts = (value.as_subclass(Tensor) for value in count(total, None))
        return losses.ClippedPGLossFn(config)(batch.logprobs, data, *counts)[0]


adapter = NemoRL()
