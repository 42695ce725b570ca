"""ms-swift: its advantages, the loss of its GRPOTrainer with the tokens that it counts, and its log-probs."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
from cutter import Source
from grpo_conformance import Batch, NotOffered
from grpo_conformance.adapters import in_groups, refuse
from torch import Tensor

SOURCE = Source("ms-swift", "4.6.0")
ADVANTAGE, TRAINER = "swift/rl_core/advantage.py", "swift/rlhf_trainers/grpo_trainer.py"
METHODS = (
    *("_compute_loss", "_compute_loss_single", "_compute_loss_and_metrics", "_compute_loss_chunked"),
    *("_undo_gradient_accumulation_scaling", "_get_logps_via_local_forward"),
)
METHODS = tuple(name for name in METHODS if SOURCE.has(TRAINER, f"GRPOTrainer.{name}"))
scope: dict[str, Any] = vars(typing) | {"torch": torch, "dataclass": dataclasses.dataclass}
advantage = SOURCE.cut(ADVANTAGE, "compute_advantages", "compute_advantages_dynamic", nanstd=None, **scope)
trainer = SOURCE.cut(
    TRAINER,
    *(["WINDOW_NORMALIZED_LOSS_TYPES"] if SOURCE.has(TRAINER, "WINDOW_NORMALIZED_LOSS_TYPES") else []),
    *(f"GRPOTrainer.{name}" for name in METHODS),
    **scope,
    **{name: lambda values: values for name in ("gather", "gather_object")},
    nanmax=torch.max,
    nanmin=torch.min,
    logger=MagicMock(),
    selective_log_softmax=lambda logits, ids: logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0],  # TRL's
)
count_items = SOURCE.statements(
    TRAINER,
    "_prepare_batch_inputs",
    "local_lengths = ",
    "num_items_in_batch = ",
    "self, ga_batch_encoded_inputs, device",
    "num_items_in_batch",
    **scope,
)


class MsSwift:
    name = f"ms-swift {SOURCE.version}"
    lacks: tuple[str, ...] = (
        *("uneven groups", "rows that pad a batch", "packed rows"),
        *("slices of the context", "parts of different sizes"),
    )
    kinds: ClassVar = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", None: "grpo"}
    where: ClassVar = {
        "advantages": SOURCE.where(ADVANTAGE, "advantages = rewards - group_mean"),
        "loss": SOURCE.where(TRAINER, "def _compute_loss_and_metrics"),
        "truncated-denominator": SOURCE.where(TRAINER, "num_items_in_batch = "),
        **dict.fromkeys(
            ("parts-sizes", "ranks-sizes", "rollout-mean", "rollout-in-parts"),
            SOURCE.where(TRAINER, "completion_mask.sum(-1).clamp(min=1.0)).mean()"),
        ),
    }
    chunk: int | None = None  # rows of one pass with dynamic numbers of samples; None: all

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator == "leave-one-out-std":
            raise NotOffered("no deviation of the others")
        kinds = {"advantage_estimator": "rloo" if batch.estimator == "leave-one-out" else "grpo"}
        kinds |= {} if batch.estimator is None else {"scale_rewards": "none"}
        kinds |= {"scale_rewards": "group"} if batch.estimator == "mean-std" else {}
        order, size = in_groups(batch)
        rewards = batch.rewards[order][:, None], torch.ones(1)
        if batch.has_rollouts:
            ids = ([str(name) for name in of[order].tolist()] for of in (batch.groups, batch.rollouts))
            result = advantage.compute_advantages_dynamic(*rewards, *ids, **kinds)[0]
        else:
            result = advantage.compute_advantages(*rewards, size, **kinds)[0]
        return result[order.argsort()]

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "entropy_coef", "teacher_coef", "value_coef", "auxiliary_coef")
        if batch.aggregation not in self.kinds:
            raise NotOffered("no mean of sums")
        if batch.kl_coef and batch.kl not in ("k3", None):
            raise NotOffered(f"no KL of form {batch.kl}")
        me = self._trainer(batch)
        everything = [{"grpo_batch": SimpleNamespace(completion_mask=batch.total.mask)}]
        rows = SimpleNamespace(
            completion_mask=batch.mask,
            truncated_mask=batch.truncated,
            seq_lengths=batch.mask.sum(1),
            old_per_token_logps=batch.old_logprobs,
            ref_per_token_logps=batch.ref_logprobs,
            rollout_per_token_logps=None,
            teacher_per_token_logps=None,
            advantages=batch.advantages[:, None].expand(batch.mask.shape),
            num_items_in_batch=count_items(me, everything, "cpu"),
        )
        loss = me._compute_loss(me.model, {"input_ids": batch.mask, "logps": batch.logprobs}, rows)
        return loss / batch.steps / batch.ranks  # as transformers' Trainer and DistributedDataParallel do

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        me = SimpleNamespace(model_kwarg_keys=(), temperature=temperature, template=SimpleNamespace(padding_free=False))
        model = lambda **inputs: SimpleNamespace(logits=logits.clone())  # noqa: E731
        return trainer._get_logps_via_local_forward(me, model, {}, tokens.shape[1] - 1, tokens)[0]

    def _trainer(self, batch: Batch) -> Any:
        fields = {
            "beta": batch.kl_coef,
            "loss_type": self.kinds[batch.aggregation],
            "importance_sampling_level": batch.ratio,
            "overlong_filter": batch.mask_truncated,
            "current_gradient_accumulation_steps": batch.steps,
            "dynamic_num_samples": batch.has_rollouts or self.chunk is not None,
            "accelerator": SimpleNamespace(num_processes=batch.ranks, gather_for_metrics=lambda value: value),
            "sdar_loss_coef": 0,
            **dict.fromkeys(("epsilon_low", "epsilon_high"), batch.clip),
            **dict.fromkeys(("compute_entropy", "kl_in_reward", "_has_teacher", "log_rollout_offpolicy_metrics")),
            **dict.fromkeys(("rollout_importance_sampling_mode", "off_policy_sequence_mask_delta")),
            **dict.fromkeys(("chord_sft_iterator", "model_accepts_loss_kwargs", "compute_loss_func")),
        }
        size = self.chunk or len(batch.mask)
        me = type("Trainer", (), {name: getattr(trainer, name) for name in METHODS})()
        vars(me).update(fields, disable_rollout_importance_sampling=True, _metrics=MagicMock())
        me.model, me.template = SimpleNamespace(training=True), SimpleNamespace(padding_free=False)
        me.args = SimpleNamespace(per_device_train_batch_size=size, delta=None, gradient_accumulation_steps=batch.steps)
        me._update_metrics = me._aggregate_and_update_metrics = lambda *arguments: None
        me._get_per_token_logps_and_entropies = lambda model, inputs, rows, **options: (inputs["logps"], None)
        me._gather_and_flatten = lambda rows, **options: torch.tensor([*itertools.chain(*rows)])
        me.get_chunked_inputs = _sliced
        return me


def _sliced(inputs: dict[str, Tensor], rows: Any, start: int, end: int, origin: Any) -> tuple[Any, Any]:
    """Rows of a batch, of which `num_items_in_batch` is that of all."""
    cut = {
        name: value[start:end] if torch.is_tensor(value) and value.dim() else value
        for name, value in vars(rows).items()
    }
    return {name: value[start:end] for name, value in inputs.items()}, SimpleNamespace(**cut)


adapter = MsSwift()
