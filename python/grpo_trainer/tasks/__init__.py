"""Bundled tasks: each makes its own data, the same for the same seed, so that every recipe runs without a download."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from grpo_trainer.settings import unknown
from grpo_trainer.tasks.base import Splits

TASKS = ("arithmetic", "strategies", "gsm8k", "dialogue", "reply")


def make(name: str, seed: int, options: dict[str, Any]) -> Splits:
    """The data of a task; its options are the arguments of its module's `make`."""
    if name not in TASKS:
        raise ValueError(unknown("data.task", name, list(TASKS)))
    maker = importlib.import_module(f"grpo_trainer.tasks.{name}").make
    known = [parameter for parameter in inspect.signature(maker).parameters if parameter != "seed"]
    for option in options:
        if option not in known:
            raise ValueError(unknown("data.options", option, known))
    found: Splits = maker(seed=seed, **options)
    return found
