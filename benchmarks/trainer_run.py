"""Runs the reinforcement learning of the trainer step by step."""

from __future__ import annotations

import contextlib
import time

import torch
from grpo_trainer import checkpoint
from grpo_trainer import train as training
from grpo_trainer.recipe import Recipe
from grpo_trainer.setup import Run, set_up

import grpo_kernels as gk


def begin(recipe: Recipe) -> Run:
    """A run before its first step of RL."""
    run = set_up(recipe)
    checkpoint.start_run(recipe)
    training.prepare_rl(run, 0)
    return run


def take_step(run: Run, step: int) -> dict[str, float]:
    """Metrics of one step, with its times in seconds."""
    recipe = run.recipe
    with contextlib.nullcontext() if recipe.backend == "auto" else gk.use_backend(recipe.backend):
        torch.manual_seed(recipe.seed_of("step", step))
        run.seconds.clear()
        began = time.perf_counter()
        items = training.items_of_step(recipe, "rl", run.items("train"), run.rl.rollout.prompts, step)
        metrics = training.rl_step(run, items, step)
        metrics["time/step"] = time.perf_counter() - began
    return metrics | {f"time/{part}": seconds for part, seconds in run.seconds.items()}
