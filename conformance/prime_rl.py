"""prime-rl: its advantages and its loss, with the tokens that its loop counts."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from cutter import Source
from grpo_conformance import PAD_GROUP, Batch, NotOffered
from grpo_conformance.adapters import refuse
from torch import Tensor

SOURCE = Source("prime-rl")
LOSS, LOOP = "src/prime_rl/trainer/rl/loss.py", "src/prime_rl/trainer/rl/train.py"
ALGORITHM = "src/prime_rl/orchestrator/algo"
losses = SOURCE.cut(
    LOSS,
    *("LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl"),
    *("default_loss_fn", "compute_loss"),
    torch=torch,
    dataclass=dataclasses.dataclass,
    field=dataclasses.field,
)
traces = SOURCE.cut(f"{ALGORITHM}/base.py", "iter_trainable_traces")
routing = SOURCE.cut(f"{ALGORITHM}/routing.py", "assign_advantages")
grpo = SOURCE.cut(f"{ALGORITHM}/grpo.py", "GRPOAlgorithm.score_group", torch=torch, **vars(traces), **vars(routing))
tokens = SimpleNamespace(of_all_ranks=0)
on_cpu = SimpleNamespace(tensor=lambda values, dtype, device: torch.tensor(values), int64=torch.int64)
dist = SimpleNamespace(ReduceOp=SimpleNamespace(SUM=0))
dist.all_reduce = lambda counts, **options: counts.copy_(torch.tensor([tokens.of_all_ranks, 0, 0]))
scales_of = SOURCE.statements(
    LOOP,
    "train",
    "local_rl_scale = ",
    "rl_scale, ce_scale, ref_kl_scale = ",
    "micro_batches, parallel_dims",
    "rl_scale, ce_scale, ref_kl_scale",
    torch=on_cpu,
    dist=dist,
)
CONFIG = SimpleNamespace(dppo_mask_high=1e9, dppo_mask_low=1e9, adv_tau=1.0, kl_tau=0.0)


class PrimeRL:
    """Its loss has no clip and no mean over rows."""

    name = f"prime-rl {SOURCE.version}"
    lacks = ("rows that pad a batch", "packed rows", "slices of the context")
    where: ClassVar = {
        "advantages": SOURCE.where(f"{ALGORITHM}/grpo.py", "advantages = rewards - rewards.mean()"),
        "loss": SOURCE.where(LOSS, "def compute_loss"),
        **dict.fromkeys(("clip", "clip-low"), SOURCE.where(LOSS, "def default_loss_fn")),
    }
    documents: ClassVar = dict.fromkeys(("clip", "clip-low"), "DPPO masks tokens, and clips none")

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator not in ("mean", None) or PAD_GROUP in batch.groups:
            raise NotOffered("the mean alone")
        result = torch.zeros(len(batch.groups))
        for group in {*batch.groups.tolist()}:
            rollouts: dict[int, Any] = {}  # traces, whose branches are rows
            for row in (batch.groups == group).nonzero().flatten().tolist():
                reward = batch.rewards[row]
                trace = SimpleNamespace(reward=reward.item(), has_error=bool(reward.isnan()), nodes=[], rows=[])
                trace.agent, trace.id = SimpleNamespace(trainable=True), int(batch.rollouts[row])
                trace = rollouts.setdefault(trace.id, trace)
                trace.nodes.append(SimpleNamespace(mask=batch.mask[row].tolist(), token_ids=[0] * batch.mask.shape[1]))
                trace.nodes[-1].advantages = None
                trace.rows.append(row)
            episodes = [SimpleNamespace(traces=[trace]) for trace in rollouts.values()]
            asyncio.run(grpo.score_group(SimpleNamespace(length_penalty=None), episodes))
            for trace in rollouts.values():
                for row, node in zip(trace.rows, trace.nodes, strict=True):
                    result[row] = node.advantages[0] if node.advantages else 0
        return result

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "kl_coef", "entropy_coef", "teacher_coef", "value_coef", "auxiliary_coef", "mask_truncated")
        if batch.ratio == "sequence" or batch.aggregation not in ("token-mean", None):
            raise NotOffered("ratios of tokens and their mean alone")
        advantages = [advantage.expand(batch.mask.shape[1]) for advantage in batch.advantages]
        rows = list(batch.logprobs), list(batch.old_logprobs), None, advantages, list(batch.mask)
        micro_batch = {"loss_mask": batch.mask, **dict.fromkeys(("rl_weights", "ce_weights", "ref_kl_weights"))}
        tokens.of_all_ranks = int(batch.total.mask.sum())
        mesh = SimpleNamespace(get_mesh=lambda name: SimpleNamespace(get_group=lambda: None))
        scales = scales_of([micro_batch], mesh)
        rl_loss = lambda one: losses.default_loss_fn(one, CONFIG)  # noqa: E731
        return losses.compute_loss(*rows, None, None, None, rl_loss, *scales)[0]  # its loop undoes FSDP's average


adapter = PrimeRL()
