"""Bundled tasks, which generate their data from a seed, so that every recipe runs without a download."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

from grpo_trainer.messages import unknown_key, unknown_name
from grpo_trainer.tasks.base import Sizes, Splits

TASKS = ("arithmetic", "strategies", "gsm8k", "word_problems", "dialogue", "reply")


def make(name: str, seed: int, options: dict[str, Any]) -> Splits:
    """Generates the data of a task; `options` are its `Sizes` and arguments of its module's `make`."""
    if name not in TASKS:
        raise ValueError(unknown_name("data.task", name, TASKS))
    make_splits = importlib.import_module(f"grpo_trainer.tasks.{name}").make
    parameters = inspect.signature(make_splits).parameters
    size_names = [field.name for field in dataclasses.fields(Sizes)]
    known = [*size_names, *(name for name in parameters if name not in ("seed", "sizes"))]
    for option in options:
        if option not in known:
            raise ValueError(unknown_key("data.options", option, known))
    sizes = {name: value for name, value in options.items() if name in size_names}
    others = {name: value for name, value in options.items() if name not in size_names}
    splits: Splits = make_splits(seed=seed, sizes=dataclasses.replace(parameters["sizes"].default, **sizes), **others)
    return splits
