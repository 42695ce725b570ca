"""Runs the reinforcement phase of the trainer step by step."""

from __future__ import annotations

import contextlib
import time

import torch
from grpo_trainer.checkpoint import to_json
from grpo_trainer.phases.rl import RlRun
from grpo_trainer.recipe import Recipe
from grpo_trainer.settings import plain
from grpo_trainer.train import Trainer

import grpo_kernels as gk


def begin(recipe: Recipe) -> tuple[Trainer, RlRun]:
    """Creates a run with one reinforcement phase, before its first step."""
    trainer, rl = Trainer(recipe), recipe.phases[0].rl
    assert rl is not None
    recipe.folder.mkdir(parents=True)
    (recipe.folder / "recipe.json").write_text(to_json(plain(recipe)))
    return trainer, RlRun(trainer, 0, rl, 0)


def take_step(trainer: Trainer, run: RlRun, step: int) -> dict[str, float]:
    """Metrics of one step, with its times in seconds."""
    with contextlib.nullcontext() if trainer.backend is None else gk.use_backend(trainer.backend):
        torch.manual_seed(trainer.seed_of("step", step))
        trainer.seconds.clear()
        began = time.perf_counter()
        metrics = run.step(run._items(trainer.items("train"), step), step)
        metrics["time/step"] = time.perf_counter() - began
    return metrics | {f"time/{part}": seconds for part, seconds in trainer.seconds.items()}
