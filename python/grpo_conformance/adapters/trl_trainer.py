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
from typing import Any

import torch
from torch import Tensor

from grpo_conformance.adapters import in_groups, one_row_a_rollout, whole_rows
from grpo_conformance.batch import Batch, NotOffered

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

LOSS_TYPES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo"}


def _settings(**changes: Any) -> dict[str, Any]:
    """GRPOConfig's defaults, without making one, which asks for a device and a folder."""
    fields = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    return fields | changes


@functools.cache
def _without_model(kind: type) -> Any:
    """A subclass of a trainer that needs no model: its log-probs and entropies are given."""

    def __init__(self: Any, settings: dict[str, Any], ranks: int, steps: int, tokens: Any) -> None:
        vars(self).update(settings)
        self.args = SimpleNamespace(**settings)
        self.epsilon_low, self.epsilon_high = settings["epsilon"], settings["epsilon_high"] or settings["epsilon"]
        self._entropy_bonus_enabled = settings["entropy_coef"] != 0
        self._metrics = {"train": collections.defaultdict(list)}
        self.model = SimpleNamespace(training=True)
        alone = {"gather": lambda value: value, "reduce": lambda value, reduction: value, "sync_gradients": True}
        self.accelerator = SimpleNamespace(num_processes=ranks, **alone)
        self.aux_loss_enabled, self.current_gradient_accumulation_steps = False, steps
        self.reward_weights, self.reward_funcs = torch.ones(1), [None]
        self.tokens = tokens
        # what FusedGRPOTrainer adds
        self.advantages = self.similarity = self.segments = self.policy_term = self.loss_function = None
        self.kernel_backend, self.head, self.masked_rows = None, "logprobs", "leave_out"

    def logprobs(self: Any, *arguments: Any, **options: Any) -> Any:
        return (*self.tokens, None)

    return type(kind.__name__, (kind,), {"__init__": __init__, "_get_per_token_logps_and_entropies": logprobs})


class Trl:
    name = "trl"
    kind: type = GRPOTrainer

    def advantages(self, batch: Batch) -> Tensor:
        order, size = in_groups(batch)
        return self._advantages(batch, batch.rewards[order][:, None], batch.mask[order], size)[order.argsort()]

    def _advantages(self, batch: Batch, rewards: Tensor, mask: Tensor, size: int) -> Tensor:
        scale = "group" if batch.estimator == "mean-std" else "none"
        changes = {"scale_rewards": scale, "normalize_advantages": False, "reward_clip_range": None, "beta": 0.0}
        kind = RLOOTrainer if batch.estimator == "leave-one-out" else GRPOTrainer
        trainer = _without_model(GRPOTrainer)(_settings(**changes), 1, 1, ())
        return _statements(kind)(trainer, rewards_per_func=rewards, num_generations=size, device="cpu")

    def loss(self, batch: Batch) -> Tensor:
        one_row_a_rollout(batch)
        whole_rows(batch)
        changes: dict[str, Any] = {"importance_sampling_level": batch.ratio, "epsilon": batch.clip}
        if batch.aggregation is not None:
            if batch.aggregation not in LOSS_TYPES:
                raise NotOffered(f"no loss_type is a {batch.aggregation} of clipped tokens")
            changes["loss_type"] = LOSS_TYPES[batch.aggregation]
        changes |= {"beta": batch.kl_coef, "entropy_coef": batch.entropy_coef, "steps_per_generation": batch.steps}
        tokens = batch.logprobs, batch.entropy
        trainer = _without_model(self.kind)(_settings(**changes), batch.ranks, batch.steps, tokens)
        prompts = torch.ones(len(batch.mask), 1, dtype=torch.long)
        inputs = {
            "prompt_ids": prompts,
            "prompt_mask": prompts,
            "completion_ids": torch.zeros_like(batch.mask, dtype=torch.long),
            # tokens outside of the loss are padding on the right, or of tools
            "completion_mask": batch.mask.long(),
            "advantages": batch.advantages,
            "old_per_token_logps": batch.old_logprobs,
            "ref_per_token_logps": batch.ref_logprobs,
            "num_items_in_batch": batch.total.mask.sum(),
        }
        loss: Tensor = trainer._compute_loss(trainer.model, inputs)
        return loss / batch.ranks  # gradients are averaged over ranks


class FusedTrl(Trl):
    name = "fused_trl"

    @property
    def kind(self) -> type:  # type: ignore[override]
        from grpo_kernels.integrations.trl import FusedGRPOTrainer

        return FusedGRPOTrainer

    def _advantages(self, batch: Batch, rewards: Tensor, mask: Tensor, size: int) -> Tensor:
        import grpo_kernels as gk

        settings = _settings(scale_rewards="group" if batch.estimator == "mean-std" else "none")
        trainer = _without_model(self.kind)(settings, 1, 1, ())
        if batch.estimator == "leave-one-out":
            trainer.advantages = gk.AdvantageConfig("trl-rloo")
        trainer._scored = rewards
        result: Tensor = trainer._advantages({"completion_mask": mask.long()}, size, "train")
        return result


@functools.cache
def _statements(trainer: type) -> Callable[..., Tensor]:
    """The installed trainer's own statements from the mask of unscored rows to the advantages."""
    method = trainer._generate_and_score_completions  # type: ignore[attr-defined]
    body = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0].body  # type: ignore[attr-defined]
    lines = [ast.unparse(statement) for statement in body]
    first = next(i for i, line in enumerate(lines) if line.startswith("unscorable_mask = "))
    last = next(i for i in range(first, len(lines)) if lines[i].startswith("advantages = torch.nan_to_num("))
    code = "def advantages(self, *, rewards_per_func, num_generations, device):\n"
    code += textwrap.indent("\n".join([*lines[first : last + 1], "return advantages"]), "    ")
    scope = dict(vars(inspect.getmodule(trainer)))
    exec(compile(code, f"<{trainer.__name__}>", "exec"), scope)
    return scope["advantages"]  # type: ignore[no-any-return]
