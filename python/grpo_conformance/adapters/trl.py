"""TRL: GRPOTrainer and RLOOTrainer, and our FusedGRPOTrainer, with log-probs in place of a model."""

from __future__ import annotations

import ast
import collections
import contextlib
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
from grpo_conformance.adapters import in_groups, refuse, where
from grpo_conformance.batch import Batch, NotOffered, make

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
    from trl.trainer.utils import add_fused_lm_head

    from grpo_kernels.integrations.trl import FusedGRPOTrainer

LOSS_TYPES = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "luspo", None: "dapo"}
_ENTROPY_MEANS = tuple(f"entropy-{name}" for name in LOSS_TYPES)


class WithoutModel(GRPOTrainer):  # type: ignore[misc]
    """A trainer of one generation batch, whose log-probs and entropies are given."""

    def __init__(self, batch: Batch) -> None:
        settings = {
            "scale_rewards": {"mean": "none", "mean-std": "group"}.get(batch.estimator or "", "group"),
            "normalize_advantages": False,  # RLOO's
            "reward_clip_range": None,
            "loss_type": LOSS_TYPES[batch.aggregation],
            "importance_sampling_level": batch.ratio,
            "beta": batch.kl_coef,
            "entropy_coef": batch.entropy_coef,
            "steps_per_generation": batch.steps,
            "router_aux_loss_coef": batch.auxiliary_coef,
            "mask_truncated_completions": batch.mask_truncated,
            **({} if batch.kl is None else {"use_bias_correction_kl": False}),  # which weighs the KL by the ratio
        }
        # the defaults, without making a config, which asks for a device and a folder
        fields = {field.name: field.default for field in dataclasses.fields(GRPOConfig)} | settings
        self.__dict__.update(fields, epsilon_low=batch.clip, epsilon_high=batch.clip)
        self.aux_loss_enabled = batch.auxiliary_coef > 0
        self.current_gradient_accumulation_steps = batch.steps
        self.given: Any = batch.logprobs, batch.entropy, torch.tensor(batch.auxiliary)
        self.args, self.model = SimpleNamespace(**fields), SimpleNamespace(training=True)
        self._entropy_bonus_enabled = batch.entropy_coef != 0
        self._metrics: Any = {"train": collections.defaultdict(list)}
        alone = {"gather": lambda value: value, "reduce": lambda value, reduction: value, "sync_gradients": True}
        alone |= {"autocast": contextlib.nullcontext, "is_main_process": False}
        alone["gather_for_metrics"] = alone["gather"]
        self.accelerator = SimpleNamespace(num_processes=batch.ranks, process_index=0, **alone)
        self.reward_weights, self.reward_funcs, self.rollout_func = torch.ones(1), [None], None

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        if self.given is None:
            return super()._get_per_token_logps_and_entropies(*arguments, **options)  # type: ignore[no-any-return]
        return self.given  # type: ignore[no-any-return]


class OfLogits(torch.nn.Module):
    """A model of these logits, which are its hidden states."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="of_logits"))
        self.head = torch.nn.Linear(logits.shape[2], logits.shape[2], bias=False, dtype=logits.dtype)
        self.head.weight.data = torch.eye(logits.shape[2], dtype=logits.dtype)
        self.logits = logits

    def forward(self, **inputs: Any) -> Tensor:
        return self.logits

    def base_model(self, **inputs: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.logits)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


class Trl:
    name = "trl"
    lacks: tuple[str, ...] = (
        *("rollouts of several rows", "uneven groups", "rows that pad a batch", "packed rows"),
        *("slices of the context", "parts of different sizes"),
    )
    documents: ClassVar[dict[str, str]] = dict.fromkeys(
        ("entropy-share", "entropy-of-ranks", *_ENTROPY_MEANS),
        "the entropy is a mean over the tokens of a micro-batch, whatever the loss divides by",
    )
    where: ClassVar[dict[str, str]] = {
        "advantages": where(GRPOTrainer._generate_and_score_completions),
        "loss": where(GRPOTrainer._compute_loss),
    }
    trainer: Any = WithoutModel

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
        if batch.estimator == "leave-one-out-std":
            raise NotOffered("no leave-one-out with a standard deviation of the group")
        order, size = in_groups(batch)
        kind = RLOOTrainer if batch.estimator == "leave-one-out" else GRPOTrainer
        function = _statements(kind, "unscorable_mask = ", "advantages = torch.nan_to_num(", "advantages", _ADVANTAGES)
        result: Tensor = function(self.trainer(batch), batch.rewards[order][:, None], size, "cpu")
        return result[order.argsort()]

    def loss(self, batch: Batch) -> Tensor:
        refuse(batch, "teacher_coef", "value_coef")
        if batch.kl_coef and batch.kl not in ("k3", None):
            raise NotOffered(f"no KL of form {batch.kl}")
        trainer, prompts = self.trainer(batch), torch.ones(len(batch.mask), 1, dtype=torch.long)
        count = _statements(
            GRPOTrainer, "if self.mask_truncated_completions", "num_items_in_batch = ", _COUNTED, _COUNT
        )
        mask, _ = _masked(count, trainer, batch)
        inputs = {
            "prompt_ids": prompts,
            "prompt_mask": prompts,
            "completion_ids": torch.zeros_like(batch.mask, dtype=torch.long),
            "completion_mask": mask,  # others are padding on the right, or of tools
            "advantages": batch.advantages,
            "old_per_token_logps": batch.old_logprobs,
            "ref_per_token_logps": batch.ref_logprobs,
            "num_items_in_batch": _masked(count, trainer, batch.total)[1],
        }
        loss: Tensor = trainer._compute_loss(trainer.model, inputs | self.of_rollouts(batch, trainer))
        return loss / batch.ranks  # gradients are averaged over ranks

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        trainer, model = self.trainer(make([1])), OfLogits(logits)
        add_fused_lm_head(model, temperature)
        trainer.given = None
        mask = torch.ones_like(tokens)
        scored: Tensor = trainer._get_per_token_logps_and_entropies(model, tokens, mask, tokens.shape[1] - 1)[0]
        return scored

    def of_rollouts(self, batch: Batch, trainer: Any) -> dict[str, Tensor]:
        """Further inputs of the loss where rollouts have several rows."""
        return {}


_ADVANTAGES = "self, rewards_per_func, num_generations, device"
_COUNT, _COUNTED = (
    "self, completion_ids_list, completion_mask, tool_mask, device",
    "completion_mask, num_items_in_batch",
)


def _masked(count: Callable[..., Any], trainer: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mask without truncated completions, if the trainer leaves those out, and its number of tokens."""
    trainer.eos_token_ids, trainer._tokenizer = [1], SimpleNamespace(pad_token_id=0)
    ends = [[2 if is_cut else 1] for is_cut in batch.truncated.tolist()]
    return count(trainer, ends, batch.mask.long(), None, "cpu")  # type: ignore[no-any-return]


@functools.cache
def _statements(trainer: Any, start: str, end: str, result: str, parameters: str) -> Callable[..., Any]:
    """The installed trainer's own statements between two that begin with these texts, as a function."""
    source: Any = ast.parse(textwrap.dedent(inspect.getsource(trainer._generate_and_score_completions)))
    lines = [ast.unparse(statement) for statement in source.body[0].body]
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    last = next(i for i in range(first, len(lines)) if lines[i].startswith(end))
    code = textwrap.indent("\n".join([*lines[first : last + 1], f"return {result}"]), "    ")
    scope = dict(vars(inspect.getmodule(trainer)))
    exec(f"def statements({parameters}):\n{code}", scope)
    return scope["statements"]  # type: ignore[no-any-return]


class _Trainer(FusedGRPOTrainer, WithoutModel): ...


class FusedTrl(Trl):
    name = "fused_trl"
    options: ClassVar[dict[str, Any]] = {"entropy_mean": "batch"}
    lacks = (
        *("uneven groups", "rows that pad a batch", "packed rows"),
        *("slices of the context", "parts of different sizes"),
    )
    documents: ClassVar[dict[str, str]] = dict.fromkeys(
        _ENTROPY_MEANS, "the entropy is a mean over tokens, as in TRL, whatever the loss divides by"
    )

    def trainer(self, batch: Batch) -> Any:
        names = {"leave-one-out": "trl-rloo", "leave-one-out-std": "nemo-grpo"}
        config = gk.AdvantageConfig(names[batch.estimator]) if batch.estimator in names else None
        return _Trainer(batch, advantages=config, **self.options)

    def advantages(self, batch: Batch) -> Tensor:
        refuse(batch, "filter_groups")
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
