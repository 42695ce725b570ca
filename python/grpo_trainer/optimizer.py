"""AdamW with the groups and the learning rates of a recipe."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_trainer import checkpoint
from grpo_trainer.recipe import Optimizer
from grpo_trainer.setup import Run


def make_optimizer(run: Run, settings: Optimizer, critic_lr: float, start: int) -> None:
    """AdamW: matrices with weight decay, vectors without, and the critic at its own learning rate.

    A value head, which is never sharded, has a group of its own: a fused step takes tensors of one kind.
    """
    groups: dict[str, list[Tensor]] = {"matrices": [], "vectors": [], "critic": [], "value_head": []}
    for name, parameter in run.policy.named_parameters():
        if parameter.requires_grad:
            kind = "matrices" if parameter.dim() > 1 else "vectors"
            if name.startswith(("value_head", "critic")):
                kind = "value_head" if "value_head" in name else "critic"
            groups[kind].append(parameter)
    described = []
    for kind, parameters in groups.items():
        lr = settings.lr if kind in ("matrices", "vectors") else critic_lr
        decay = settings.weight_decay if kind == "matrices" else 0.0
        described.append({"params": parameters, "lr": lr, "full_lr": lr, "weight_decay": decay})
    betas = (settings.betas[0], settings.betas[1])
    used = [group for group in described if group["params"]]
    run.optimizer = torch.optim.AdamW(used, betas=betas, eps=settings.eps, fused=True)
    run.scaler = torch.amp.GradScaler(enabled=run.recipe.model.mixed_precision == "fp16")
    if start:
        assert run.resumed is not None
        checkpoint.restore_optimizer(run.recipe, run.resumed, run.optimizer)
        run.scaler.load_state_dict(run.resumed.scaler)
    run.scaler.scale(torch.zeros((), device=run.device))  # a process without a response in a step scales no loss


def set_lr(optimizer: torch.optim.Optimizer, settings: Optimizer, step: int, steps: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["full_lr"] * lr_factor(settings, step, steps)


def lr_factor(settings: Optimizer, step: int, steps: int) -> float:
    """Fraction of the learning rate at a step, counted from 1."""
    if step <= settings.warmup:
        return step / (settings.warmup + 1)
    if settings.schedule == "constant":
        return 1.0
    progress = (step - settings.warmup - 1) / max(steps - settings.warmup, 1)
    decay = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.final + (1 - settings.final) * decay
