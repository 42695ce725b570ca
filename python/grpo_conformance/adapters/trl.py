"""TRL: GRPOTrainer and RLOOTrainer, and our FusedGRPOTrainer, with log-probs in place of a model."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import inspect
import textwrap
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

import grpo_kernels as gk
from grpo_conformance.adapters import in_groups
from grpo_conformance.batch import Batch, NotOffered

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

LOSS_TYPES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "luspo", None: "dapo"}


class WithoutModel(GRPOTrainer):  # type: ignore[misc]
    """A trainer of one generation batch, whose log-probs and entropies are given."""

    def __init__(self, batch: Batch) -> None:
        settings = {
            "scale_rewards": "none" if batch.estimator == "mean" else "group",
            "normalize_advantages": False,  # RLOO's
            "reward_clip_range": None,
            "loss_type": LOSS_TYPES[batch.aggregation],
            "importance_sampling_level": batch.ratio,
            "beta": batch.kl_coef,
            "entropy_coef": batch.entropy_coef,
            "steps_per_generation": batch.steps,
        }
        # the defaults, without making a config, which asks for a device and a folder
        fields = {field.name: field.default for field in dataclasses.fields(GRPOConfig)} | settings
        self.__dict__.update(fields, epsilon_low=batch.clip, epsilon_high=batch.clip, aux_loss_enabled=False)
        self.current_gradient_accumulation_steps, self.given = batch.steps, (batch.logprobs, batch.entropy, None)
        self.args, self.model = SimpleNamespace(**fields), SimpleNamespace(training=True)
        self._entropy_bonus_enabled = batch.entropy_coef != 0
        self._metrics: Any = {"train": collections.defaultdict(list)}
        alone = {"gather": lambda value: value, "reduce": lambda value, reduction: value, "sync_gradients": True}
        self.accelerator = SimpleNamespace(num_processes=batch.ranks, process_index=0, **alone)
        self.reward_weights, self.reward_funcs, self.rollout_func = torch.ones(1), [None], None

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        return self.given


class Trl:
    name = "trl"
    lacks: tuple[str, ...] = (
        *("rollouts of several rows", "uneven groups", "packed rows", "slices of the context"),
        "parts of different sizes",
    )
    trainer: Any = WithoutModel

    def advantages(self, batch: Batch) -> Tensor:
        order, size = in_groups(batch)
        function = _statements(RLOOTrainer if batch.estimator == "leave-one-out" else GRPOTrainer)
        return function(self.trainer(batch), batch.rewards[order][:, None], size, "cpu")[order.argsort()]

    def loss(self, batch: Batch) -> Tensor:
        trainer, prompts = self.trainer(batch), torch.ones(len(batch.mask), 1, dtype=torch.long)
        inputs = {
            "prompt_ids": prompts,
            "prompt_mask": prompts,
            "completion_ids": torch.zeros_like(batch.mask, dtype=torch.long),
            "completion_mask": batch.mask.long(),  # others are padding on the right, or of tools
            "advantages": batch.advantages,
            "old_per_token_logps": batch.old_logprobs,
            "ref_per_token_logps": batch.ref_logprobs,
            "num_items_in_batch": batch.total.mask.sum(),
        }
        loss: Tensor = trainer._compute_loss(trainer.model, inputs | self.of_rollouts(batch, trainer))
        return loss / batch.ranks  # gradients are averaged over ranks

    def of_rollouts(self, batch: Batch, trainer: Any) -> dict[str, Tensor]:
        """Further inputs of the loss where rollouts have several rows."""
        return {}


@functools.cache
def _statements(trainer: Any) -> Callable[..., Tensor]:
    """The installed trainer's own statements from the mask of unscored rows to the advantages."""
    source: Any = ast.parse(textwrap.dedent(inspect.getsource(trainer._generate_and_score_completions)))
    lines = [ast.unparse(statement) for statement in source.body[0].body]
    first = next(i for i, line in enumerate(lines) if line.startswith("unscorable_mask = "))
    last = next(i for i in range(first, len(lines)) if lines[i].startswith("advantages = torch.nan_to_num("))
    code = textwrap.indent("\n".join([*lines[first : last + 1], "return advantages"]), "    ")
    scope = dict(vars(inspect.getmodule(trainer)))
    exec(f"def advantages(self, rewards_per_func, num_generations, device):\n{code}", scope)
    return scope["advantages"]  # type: ignore[no-any-return]


class _Trainer(FusedGRPOTrainer, WithoutModel): ...


class FusedTrl(Trl):
    name = "fused_trl"
    options: ClassVar[dict[str, Any]] = {"entropy_mean": "batch"}
    lacks = ("uneven groups", "packed rows", "slices of the context", "parts of different sizes")

    def trainer(self, batch: Batch) -> Any:
        estimator = gk.AdvantageConfig("trl-rloo") if batch.estimator == "leave-one-out" else None
        return _Trainer(batch, advantages=estimator, **self.options)

    def advantages(self, batch: Batch) -> Tensor:
        order, size = in_groups(batch)
        return self.counted(batch, order, size, self.trainer(batch))["advantages"][order.argsort()]

    def of_rollouts(self, batch: Batch, trainer: Any) -> dict[str, Tensor]:
        if not batch.has_rollouts:
            return {}
        if batch.ratio == "sequence":
            raise NotOffered("rows of one answer have no common ratio")
        total = batch.total
        output = self.counted(total, torch.arange(len(total.mask)), len(total.mask), trainer)
        return {name: batch.of_total(value) for name, value in output.items() if name == "loss_weights"}

    def counted(self, batch: Batch, order: Tensor, size: int, trainer: Any) -> dict[str, Tensor]:
        """A generation batch, which has advantages now, and weights if rollouts have several rows."""
        output = {"completion_mask": batch.mask[order].long()}
        ids = gk.group_ids(batch.rollouts[order].tolist()) if batch.has_rollouts else None
        trainer.add_advantages(output, batch.rewards[order][:, None], size, ids)
        return output
