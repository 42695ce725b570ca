"""What supervised and reinforcement phases have in common: steps, their order, the optimizer, checkpoints.

Everything random in a step follows from the seed and the step's number: data order, sampling, dropout. So a run that
goes on from a checkpoint is the run that was never stopped.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_trainer import checkpoint, processes
from grpo_trainer.algorithm import Plan
from grpo_trainer.model import Policy
from grpo_trainer.recipe import Optimizer, Rl, Sft
from grpo_trainer.tasks.base import Item

if TYPE_CHECKING:
    from grpo_trainer.train import Trainer

SHOWN = (("loss", "train/loss"), ("reward", "rewards/mean"), ("KL", "train/kl_mean"))


class PhaseRun:
    """One phase: its optimizer, its steps, its evaluations and checkpoints."""

    kind: str  # as it is logged
    split: str  # of the data
    plan: Plan | None = None

    def __init__(self, trainer: Trainer, number: int, settings: Sft | Rl, start: int) -> None:
        self.t, self.number, self.settings, self.start = trainer, number, settings, start
        self.set_up()
        policy, optimizer = trainer.policy, settings.optimizer
        unwrapped = torch.optim.AdamW(
            parameter_groups(policy, optimizer, self.critic_lr), betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps, fused=True,
        )  # fmt: skip
        if start:
            checkpoint.load_optimizer(trainer.resumed, unwrapped)
        accelerator = trainer.accelerator
        if processes.world() == 1:
            self.model, self.optimizer = accelerator.prepare(policy, unwrapped)
        else:  # without accelerate's wrapper, as gradients are summed, and weights shared out, in processes
            self.model = accelerator.prepare_model(policy, evaluation_mode=True)
            self.optimizer = accelerator.prepare_optimizer(unwrapped)

    @property
    def items_a_step(self) -> int:
        raise NotImplementedError

    @property
    def evaluates_every(self) -> int:
        return 0

    @property
    def critic_lr(self) -> float:
        return 0.0

    def set_up(self) -> None:
        """What has to be there before the optimizer: a value head, a reference."""

    def on_evaluation(self, step: int) -> None:
        """What is written down besides, where the policy is evaluated."""

    def step(self, items: list[Item], step: int) -> dict[str, float]:
        """Takes the step, and gives its figures."""
        raise NotImplementedError

    def run(self) -> None:
        t = self.t
        data = t.items(self.split)
        if not data:
            raise ValueError(f"data: phase {self.number} ({self.kind}) has no usable line")
        self._evaluate_if_due(self.start)
        for step in range(self.start + 1, self.settings.steps + 1):
            # dropout of another process is of other rows
            torch.manual_seed(t.seed_of("step", self.number, step, *([processes.rank()] if processes.rank() else [])))
            self._set_lr(step)
            t.seconds.clear()
            began = time.perf_counter()
            items = self._items(data, step)
            metrics = self.step(items, step)
            spent = time.perf_counter() - began
            metrics |= {"time/step": spent} | {f"time/{name}": seconds for name, seconds in t.seconds.items()}
            shown = {name: metrics[key] for name, key in SHOWN if key in metrics}
            with processes.together():
                t.log.metrics(self.kind, self.number, step, metrics)
                t.log.progress(f"{self.kind} {self.number}", step, self.settings.steps, shown)
            saves = t.recipe.checkpoints.every
            if (saves and step % saves == 0) or step == self.settings.steps:
                checkpoint.save(t, self.number, step, self.optimizer, self.plan)
            self._evaluate_if_due(step)
        t.log.close_progress()

    def _evaluate_if_due(self, step: int) -> None:
        every = self.evaluates_every
        if step in (0, self.settings.steps) or (every and step % every == 0):
            self.t.evaluate("validation", self.number, step)
            self.on_evaluation(step)

    def _items(self, data: list[Item], step: int) -> list[Item]:
        """The step's share of the data: every epoch walks over all of it, in an order of its own."""
        count = self.items_a_step
        return [
            data[self._order(len(data), at // len(data))[at % len(data)]]
            for at in range((step - 1) * count, step * count)
        ]

    def _order(self, count: int, epoch: int) -> list[int]:
        if getattr(self, "_known_order", (None, None))[0] != (count, epoch):
            order = list(range(count))
            random.Random(self.t.seed_of("order", self.number, epoch)).shuffle(order)
            self._known_order = ((count, epoch), order)
        return self._known_order[1]

    def _set_lr(self, step: int) -> None:
        factor = lr_factor(self.settings.optimizer, step, self.settings.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * factor

    def pieces(self, rows: Tensor, size: int) -> processes.Pieces:
        return processes.Pieces(rows, size, in_step=self.t.policy.is_sharded)

    def backward(self, loss: Tensor, counts: bool) -> None:
        """counts  False: the pass is for the sake of processes that wait for it"""
        self._own_accumulation()
        self.t.accelerator.backward(loss if counts else loss * 0)

    def _own_accumulation(self) -> None:
        """accelerate shares one state among the trainers of a process: one that broke off between two micro-batches
        leaves word to scale losses and to leave steps out, which the prepared optimizer would do without one."""
        self.t.accelerator.sync_gradients = True
        self.t.accelerator.gradient_accumulation_steps = 1

    def optimizer_step(self) -> float:
        """The norm of the gradient before it was clipped. A gradient that is not finite ends the run."""
        self._own_accumulation()
        most = self.settings.optimizer.grad_clip or math.inf
        parameters = list(self.model.parameters())
        processes.sum_gradients(parameters)
        if self.t.policy.is_sharded:
            norm = processes.clip_sharded(parameters, most)
        else:
            norm = float(self.t.accelerator.clip_grad_norm_(parameters, most))
        processes.agree("the gradient's norm", norm)
        # with fp16 a gradient that overflows is expected: the step is left out, and the loss is scaled by less
        if not math.isfinite(norm) and self.t.accelerator.scaler is None:
            raise FloatingPointError(f"phase {self.number}: the gradient's norm must be finite, got {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            self.t.log.event("optimizer step skipped: the gradient overflowed", phase=self.number)
        return norm if math.isfinite(norm) else math.nan

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.t.seconds[what] += time.perf_counter() - began


def summed(losses: Tensor) -> float:
    """Of micro-batches, one after the other in float64."""
    found = 0.0
    for loss in losses.tolist():
        found += loss
    return found


def lr_factor(settings: Optimizer, step: int, steps: int) -> float:
    """Of the full learning rate, at a step counted from 1."""
    if step <= settings.warmup:
        return step / (settings.warmup + 1)
    done = (step - settings.warmup - 1) / max(steps - settings.warmup, 1)
    if settings.schedule == "constant":
        return 1.0
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.final + (1 - settings.final) * left


def parameter_groups(policy: Policy, settings: Optimizer, critic_lr: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, and the critic has a learning rate of its own."""
    groups: dict[str, list[Tensor]] = {"matrices": [], "vectors": [], "critic": []}
    for name, parameter in policy.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = (
            "critic" if name.startswith(("value_head", "critic")) else "matrices" if parameter.dim() > 1 else "vectors"
        )
        groups[kind].append(parameter)
    lr = {"matrices": settings.lr, "vectors": settings.lr, "critic": critic_lr}
    decay = {"matrices": settings.weight_decay, "vectors": 0.0, "critic": 0.0}
    return [
        {"params": some, "lr": lr[kind], "full_lr": lr[kind], "weight_decay": decay[kind]}
        for kind, some in groups.items()
        if some
    ]
