"""Common parts of supervised and reinforcement phases: steps, data order, optimizer, evaluations, checkpoints.

All randomness of a step (data order, sampling, dropout) follows from the seed and the step's number, so a run resumed
from a checkpoint repeats the uninterrupted run.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_trainer import checkpoint, distributed, interruption
from grpo_trainer.algorithm import Plan
from grpo_trainer.log import Log
from grpo_trainer.policy import Policy
from grpo_trainer.recipe import Optimizer, Recipe, Reward, Rl, Sft
from grpo_trainer.rewards import RewardFunction
from grpo_trainer.tasks.base import Item

SHOWN = (  # in the progress bar
    ("loss", "train/loss"),
    ("reward", "rewards/mean"),
    ("KL", "train/kl_mean"),
    ("tokens/s", "speed/tokens_per_second"),
)


class PhaseContext(Protocol):
    """The parts of a trainer that its phases use."""

    recipe: Recipe
    policy: Policy
    accelerator: Any
    log: Log
    resumed: checkpoint.State | None
    reference: Any  # model of the KL term that the caller gave
    embedders: dict[str, str]
    seconds: dict[str, float]

    def items(self, split: str) -> list[Item]: ...

    def rewards_of(self, phase: int) -> tuple[list[Reward], list[RewardFunction]]: ...

    def evaluate(self, split: str, phase: int, step: int) -> dict[str, float]: ...

    def seed_of(self, *parts: object) -> int: ...


class PhaseRun:
    """One phase of a run.

    Args:
        trainer: the run.
        number: index of the phase.
        settings: its part of the recipe.
        start: steps that are already done, greater than 0 in a resumed phase.
    """

    kind: str  # name in the logs
    split: str  # split of the data
    plan: Plan | None = None
    watched: dict[str, Tensor] | None = None  # weights and gradients of a step whose histograms are logged

    def __init__(self, trainer: PhaseContext, number: int, settings: Sft | Rl, start: int) -> None:
        self.trainer, self.number, self.settings, self.start = trainer, number, settings, start
        self.done = self.saved = start  # last step that is done, and that has a checkpoint
        self.set_up()
        policy, optimizer = trainer.policy, settings.optimizer
        adamw = torch.optim.AdamW(
            parameter_groups(policy, optimizer, self.critic_lr),
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            fused=True,
        )
        if start:
            assert trainer.resumed is not None
            checkpoint.restore_optimizer(trainer.resumed, adamw)
        accelerator = trainer.accelerator
        if distributed.world_size() == 1:
            self.model, self.optimizer = accelerator.prepare(policy, adamw)
        else:  # without accelerate's wrapper: `distributed` sums gradients and shards weights
            self.model = accelerator.prepare_model(policy, evaluation_mode=True)
            self.optimizer = accelerator.prepare_optimizer(adamw)

    @property
    def items_per_step(self) -> int:
        raise NotImplementedError

    @property
    def evaluates_every(self) -> int:
        return 0

    @property
    def critic_lr(self) -> float:
        return 0.0

    def set_up(self) -> None:
        """Creates what the optimizer or the first step needs: a value head, a reference."""

    def on_evaluation(self, step: int) -> None:
        """Writes additional logs after an evaluation."""

    def step(self, items: list[Item], step: int) -> dict[str, float]:
        """Takes a step and returns its metrics."""
        raise NotImplementedError

    def run(self) -> None:
        """Takes all steps. If the run is asked to stop, the last step that is done gets a checkpoint."""
        try:
            self._run()
        except interruption.Stopped:
            self.trainer.log.close_progress()
            if self.done > self.saved:
                self._save(self.done)
            raise

    def _run(self) -> None:
        trainer = self.trainer
        data = trainer.items(self.split)
        self._evaluate_if_due(self.start)
        for step in range(self.start + 1, self.settings.steps + 1):
            # processes hold different rows and need different dropout masks
            rank = [distributed.rank()] if distributed.rank() else []
            torch.manual_seed(trainer.seed_of("step", self.number, step, *rank))
            self._set_lr(step)
            trainer.seconds.clear()
            start = time.perf_counter()
            items = self._items(data, step)
            watch_every = trainer.recipe.logging.watch
            is_watched = watch_every and step % watch_every == 0 and trainer.log.is_main
            self.watched = {} if is_watched else None
            metrics = self.step(items, step)
            metrics["time/step"] = time.perf_counter() - start
            metrics |= {f"time/{name}": seconds for name, seconds in trainer.seconds.items()}
            shown = {name: metrics[key] for name, key in SHOWN if key in metrics}
            with distributed.fail_together():
                trainer.log.metrics(self.kind, self.number, step, metrics)
                if self.watched is not None:
                    trainer.log.histograms(self.number, step, self.watched)
                trainer.log.progress(f"{self.kind} {self.number}", step, self.settings.steps, shown)
            self.done = step
            save_every = trainer.recipe.checkpoints.every
            if (save_every and step % save_every == 0) or step == self.settings.steps:
                self._save(step)
            interruption.stop_if_asked()
            self._evaluate_if_due(step)
        trainer.log.close_progress()

    def _save(self, step: int) -> None:
        trainer = self.trainer
        state = checkpoint.State(
            folder=checkpoint.checkpoint_folder(trainer.recipe, self.number, step),
            phase=self.number,
            step=step,
            threshold=self.plan.threshold.value if self.plan is not None and self.plan.threshold is not None else None,
            threads=torch.get_num_threads(),
            embedders=trainer.embedders,
        )
        checkpoint.save(trainer.recipe, trainer.policy, self.optimizer, state, trainer.log)
        self.saved = step

    def _evaluate_if_due(self, step: int) -> None:
        every = self.evaluates_every
        if step in (0, self.settings.steps) or (every and step % every == 0):
            self.trainer.evaluate("validation", self.number, step)
            self.on_evaluation(step)

    def _items(self, data: list[Item], step: int) -> list[Item]:
        """Data of a step: each epoch visits every item once, in a new order."""
        count = self.items_per_step
        return [
            data[self._order(len(data), i // len(data))[i % len(data)]] for i in range((step - 1) * count, step * count)
        ]

    def _order(self, count: int, epoch: int) -> list[int]:
        if getattr(self, "_cached_order", (None, None))[0] != (count, epoch):
            order = list(range(count))
            random.Random(self.trainer.seed_of("order", self.number, epoch)).shuffle(order)
            self._cached_order = ((count, epoch), order)
        return self._cached_order[1]

    def _set_lr(self, step: int) -> None:
        factor = lr_factor(self.settings.optimizer, step, self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * factor

    def micro_batches(self, rows: Tensor, size: int) -> distributed.MicroBatches:
        return distributed.MicroBatches(rows, size, equal_count=self.trainer.policy.is_sharded)

    def backward(self, loss: Tensor, counts: bool) -> None:
        """Accumulates gradients; with `counts` False, the pass only serves processes that wait for it."""
        self._reset_accumulation()
        self.trainer.accelerator.backward(loss if counts else loss * 0)

    def _reset_accumulation(self) -> None:
        """Resets the accumulation state that accelerate shares among all trainers of a process.

        A trainer stopped mid-accumulation leaves `sync_gradients` False: losses would be scaled and steps skipped.
        """
        self.trainer.accelerator.sync_gradients = True
        self.trainer.accelerator.gradient_accumulation_steps = 1

    def optimizer_step(self) -> float:
        """Updates the weights and returns the gradient norm before clipping; a non-finite gradient ends the run."""
        self._reset_accumulation()
        max_norm = self.settings.optimizer.grad_clip or math.inf
        parameters = list(self.model.parameters())
        distributed.all_reduce_gradients(parameters)
        if self.trainer.policy.is_sharded:
            norm = distributed.clip_sharded_grad_norm(parameters, max_norm)
        else:
            norm = float(self.trainer.accelerator.clip_grad_norm_(parameters, max_norm))
        distributed.assert_identical("the gradient's norm", norm)
        # fp16 gradients are expected to overflow now and then: the scaler skips the step and lowers the loss scale
        if not math.isfinite(norm) and self.trainer.accelerator.scaler is None:
            raise FloatingPointError(
                f"phase {self.number}: the gradient's norm must be finite, got {norm}; lower the learning "
                "rate, or set model.dtype to bfloat16 or float32"
            )
        if self.watched is not None:
            self.watched = _weights_and_gradients(self.trainer.policy)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            self.trainer.log.event("optimizer step skipped: the gradient overflowed", phase=self.number)
        return norm if math.isfinite(norm) else math.nan

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.trainer.seconds[part] += time.perf_counter() - start


def sum_losses(losses: Tensor) -> float:
    """Sum of the micro-batches' losses, in order and in float64."""
    total = 0.0
    for loss in losses.tolist():
        total += loss
    return total


def lr_factor(settings: Optimizer, step: int, steps: int) -> float:
    """Fraction of the learning rate at a step, counted from 1."""
    if step <= settings.warmup:
        return step / (settings.warmup + 1)
    progress = (step - settings.warmup - 1) / max(steps - settings.warmup, 1)
    if settings.schedule == "constant":
        return 1.0
    decay = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.final + (1 - settings.final) * decay


def _weights_and_gradients(policy: Policy) -> dict[str, Tensor]:
    """Trained weights, as they are before an optimizer step, and the gradients that it takes."""
    trained = [(name, weight) for name, weight in policy.named_parameters() if weight.grad is not None]
    weights = {f"weights/{name}": weight.detach().clone() for name, weight in trained}
    return weights | {f"gradients/{name}": weight.grad.clone() for name, weight in trained if weight.grad is not None}


def parameter_groups(policy: Policy, settings: Optimizer, critic_lr: float) -> list[dict[str, Any]]:
    """Optimizer groups: matrices with weight decay, vectors without, and the critic at its own learning rate.

    A value head, which is never sharded, has a group of its own: a fused step takes tensors of one kind.
    """
    groups: dict[str, list[Tensor]] = {"matrices": [], "vectors": [], "critic": [], "value_head": []}
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "matrices" if parameter.dim() > 1 else "vectors"
        if name.startswith(("value_head", "critic")):
            kind = "value_head" if "value_head" in name else "critic"
        groups[kind].append(parameter)
    lr = {"matrices": settings.lr, "vectors": settings.lr}
    decay = {"matrices": settings.weight_decay}
    return [
        {
            "params": parameters,
            "lr": lr.get(kind, critic_lr),
            "full_lr": lr.get(kind, critic_lr),
            "weight_decay": decay.get(kind, 0.0),
        }
        for kind, parameters in groups.items()
        if parameters
    ]
