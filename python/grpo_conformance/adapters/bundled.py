"""The bundled trainer: its assign_credit, and the minibatch of its RL phase with log-probs in place of a model."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from grpo_trainer.algorithm import Credit, Plan, assign_credit
from grpo_trainer.phases.rl import RlRun
from grpo_trainer.recipe import Algorithm
from torch import Tensor

import grpo_kernels as gk
from grpo_conformance.adapters import in_groups, one_row_a_rollout, whole_rows
from grpo_conformance.batch import Batch

ALGORITHMS = {"mean": "dr_grpo", "mean-std": "grpo", "leave-one-out": "rloo"}


class _Responses:
    """Stands for the responses of a rollout, of which the loss reads masks and lengths."""

    def __init__(self, mask: Tensor, places: Tensor) -> None:
        self.mask = self.tokens = mask
        self.places = places

    def rows(self, places: Tensor) -> _Responses:
        return _Responses(self.mask[places], places)


class _MicroBatches:
    """Stands for the trainer's own: the rows of one part alone."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        yield self.rows, True

    def all_gather(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values)


class BundledTrainer:
    name = "grpo_trainer"

    def advantages(self, batch: Batch) -> Tensor:
        order, size = in_groups(batch)
        mask = batch.mask[order]
        plan = Plan.of(Algorithm(ALGORITHMS[batch.estimator]), batch.mask.shape[1])
        rollout: Any = SimpleNamespace(group_size=size, batch=_Responses(mask, order), lengths=mask.sum(1))
        rewards = batch.rewards[order][:, None]
        return assign_credit(plan, rollout, rewards, torch.ones(1), None, None, mask).advantages[order.argsort()]

    def loss(self, batch: Batch) -> Tensor:
        one_row_a_rollout(batch)
        whole_rows(batch)
        total, losses = batch.total, list[Tensor]()
        places = torch.arange(len(total.mask)) if batch.rows is None else batch.rows
        logprobs = total.logprobs.index_copy(0, places, batch.logprobs)

        def model(kind: str, part: _Responses, **kwargs: Any) -> tuple[gk.PolicyLoss, None]:
            names = ("old_logprobs", "advantages", "mask", "ref_logprobs", "normalizer", "config")
            options = {name: kwargs[name] for name in names if name in kwargs}
            return gk.policy_loss(logprobs[part.places], entropy=total.entropy[part.places], **options), None

        run: Any = SimpleNamespace(
            plan=self._plan(batch),
            settings=SimpleNamespace(micro_batch=len(places), share_prompts=True),
            trainer=SimpleNamespace(recipe=SimpleNamespace(model=SimpleNamespace(gradient_checkpointing=False))),
            micro_batches=lambda rows, size: _MicroBatches(rows[torch.isin(rows, places)]),
            model=model,
            backward=lambda objective, counts: losses.append(objective),
        )
        rollout: Any = SimpleNamespace(batch=_Responses(total.mask, places), logprobs=total.old_logprobs)
        credit = Credit(total.advantages)
        in_loss = RlRun._rows_with_signal(run, rollout, credit).nonzero().flatten()
        if not torch.isin(in_loss, places).any():  # the trainer makes no micro-batch of no rows
            return batch.logprobs.nansum() * 0
        reference = total.ref_logprobs if batch.kl_coef else None
        RlRun._minibatch(run, rollout, credit, reference, None, in_loss, 1)
        return losses[0]

    def _plan(self, batch: Batch) -> Plan:
        fields: dict[str, Any] = {"ratio": batch.ratio, "clip_low": batch.clip, "clip_high": batch.clip}
        fields |= {"aggregation": batch.aggregation} if batch.aggregation else {}
        fields |= {"kl_coef": batch.kl_coef} if batch.kl_coef else {"kl": "none"}
        fields |= {"entropy_coef": batch.entropy_coef}
        return Plan.of(Algorithm("grpo", loss=fields, drop_flat=False), batch.total.mask.shape[1])
