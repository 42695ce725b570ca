"""TRL's own policy losses, made callable on given log-probs without copying any of their code."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import inspect
import textwrap
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return __import__(name, fromlist=["trl"])


@functools.cache
def defaults() -> dict[str, Any]:
    """Default values of the fields of trl.GRPOConfig."""
    config = _module("trl.trainer.grpo_config").GRPOConfig
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config)
    }


class _Accelerator:
    """Stand-in for accelerate.Accelerator with a single process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return value

    def pad_across_processes(self, value: Tensor, dim: int, pad_index: float) -> Tensor:
        return value


class _Trainer:
    """Stand-in for the trainer, with the attributes that the loss reads."""

    def __init__(self, logprobs: Tensor | None, entropy: Tensor | None, options: dict[str, Any]) -> None:
        trainer = _module("trl.trainer.grpo_trainer").GRPOTrainer
        self.get_off_policy_mask = trainer.get_off_policy_mask
        self.get_gamma_weights = trainer.get_gamma_weights
        self.get_high_entropy_mask = functools.partial(trainer.get_high_entropy_mask, self)
        unknown = set(options) - set(defaults())
        assert not unknown, f"no fields of GRPOConfig: {unknown}"
        settings = defaults() | {"steps_per_generation": 1} | options
        self.args = types.SimpleNamespace(**settings)
        for name, value in settings.items():
            setattr(self, name, value)
        self.epsilon_low = settings["epsilon"]
        self.epsilon_high = settings["epsilon"] if settings["epsilon_high"] is None else settings["epsilon_high"]
        self._entropy_bonus_enabled = settings["entropy_coef"] != 0
        self._metrics = {"train": collections.defaultdict(list)}
        self.model = types.SimpleNamespace(training=True)
        self.accelerator = _Accelerator()
        self.aux_loss_enabled = False
        self.current_gradient_accumulation_steps = 1
        self._result = logprobs, entropy, None

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        return self._result

    def metrics(self) -> dict[str, float]:
        assert all(len(values) == 1 for values in self._metrics["train"].values())
        return {name: values[0] for name, values in self._metrics["train"].items()}


class PolicyLoss:
    """The loss of GRPOTrainer (or GMPOTrainer) for one micro-batch; `inputs` uses TRL's names."""

    def __init__(
        self, entropy: Tensor, mask: Tensor, inputs: dict[str, Tensor], gmpo: bool = False, **options: Any
    ) -> None:
        if gmpo:
            self.compute = _module("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer._compute_loss
        else:
            self.compute = _module("trl.trainer.grpo_trainer").GRPOTrainer._compute_loss
        ids = torch.zeros(mask.shape, dtype=torch.long, device=mask.device)
        prompt = torch.ones(len(mask), 1, dtype=torch.long, device=mask.device)
        batch = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": ids, "completion_mask": mask.long()}
        self.batch = batch | {"num_items_in_batch": mask.sum()} | inputs
        self.entropy, self.trainer = entropy, _Trainer(None, entropy, options)

    def __call__(self, logprobs: Tensor) -> Tensor:
        self.trainer._result = logprobs, self.entropy, None
        self.trainer._metrics["train"].clear()
        return self.compute(self.trainer, self.trainer.model, dict(self.batch))


def policy_loss(
    logprobs: Tensor, entropy: Tensor, mask: Tensor, inputs: dict[str, Tensor], gmpo: bool = False, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics of one micro-batch."""
    compute = PolicyLoss(entropy, mask, inputs, gmpo, **options)
    return compute(logprobs), compute.trainer.metrics()


def sampler_ratio(old: Tensor, sampling: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, dict[str, float]]:
    """Importance weights of tokens sampled by vLLM, [B, T] or [B, 1], and their metrics."""
    trainer = _Trainer(None, None, options)
    ratio = _ratio_block()(trainer, old, sampling, mask.long(), "train", old.device, None)
    return ratio, trainer.metrics()


@functools.cache
def _ratio_block() -> Callable[..., Tensor]:
    """Compiles the two blocks of _generate_and_score_completions that compute the weights and their metrics."""
    module = _module("trl.trainer.grpo_trainer")
    source = textwrap.dedent(inspect.getsource(module.GRPOTrainer._generate_and_score_completions))
    condition = "self.use_vllm and self.vllm_importance_sampling_correction"
    blocks = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.If) and ast.unparse(n.test) == condition]
    blocks = [n for n in blocks if any("importance_sampling_ratio" in ast.unparse(line) for line in n.body)]
    make = next(n for n in blocks if "per_token_logps_diff = " in ast.unparse(n))
    measure = next(n for n in blocks if "flat_is_ratio = " in ast.unparse(n))
    code = "def block(self, old_per_token_logps, sampling_per_token_logps, completion_mask, mode, device, tool_mask):\n"
    lines = "\n".join([ast.unparse(make), ast.unparse(measure), "return vllm_importance_sampling_ratio"])
    scope = dict(vars(module))
    exec(compile(code + textwrap.indent(lines, "    "), "<trl>", "exec"), scope)
    return scope["block"]  # type: ignore[no-any-return]
