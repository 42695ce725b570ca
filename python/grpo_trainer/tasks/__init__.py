"""Bundled tasks, which generate their data from a seed, so that every recipe runs without a download."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from grpo_trainer.settings import unknown_key
from grpo_trainer.tasks.base import Splits

TASKS = ("arithmetic", "strategies", "gsm8k", "dialogue", "reply")


def make(name: str, seed: int, options: dict[str, Any]) -> Splits:
    """Generates the data of a task; `options` are arguments of its module's `make`."""
    if name not in TASKS:
        raise ValueError(unknown_key("data.task", name, list(TASKS)))
    make_splits = importlib.import_module(f"grpo_trainer.tasks.{name}").make
    known = [parameter for parameter in inspect.signature(make_splits).parameters if parameter != "seed"]
    for option in options:
        if option not in known:
            raise ValueError(unknown_key("data.options", option, known))
    splits: Splits = make_splits(seed=seed, **options)
    return splits
